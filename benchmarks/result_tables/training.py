"""What does a joint stage bring?"""

from __future__ import annotations

from result_tables.writing import Cells, Json, over, ratio, results, table


def medusa2_answer() -> str:
    """Finished heads, then heads of half an epoch."""
    rows = results("medusa2_smollm2")["finished_heads"]["rows"]
    values = [row["over (32)"][0] for row in rows.values() if row["over (32)"]]
    return (
        f"Little on SmolLM2. After heads of two epochs a joint stage makes {min(values):.2f} to"
        f" {max(values):.2f} of their tokens per step, and the most with cross-entropy, which changes"
        " the model. On equal tokens of looping text, after half an epoch, it brings more."
    )


def medusa2_short() -> str:
    """The same for the list of results."""
    rows = results("medusa2_smollm2")["finished_heads"]["rows"]
    values = [row["over (32)"][0] for row in rows.values() if row["over (32)"]]
    return (
        f"Little on SmolLM2: {min(values):.2f} to {max(values):.2f} of finished heads' tokens per"
        " step, and the most with cross-entropy, which changes answers."
    )


def medusa2_table() -> str:
    """Finished heads, heads of half an epoch, and the tiny target model."""
    content = results("medusa2_smollm2")
    rows = [
        *_finished_heads(content),
        *_heads_of_half_an_epoch(content),
        *_tiny_target_model(content),
    ]
    head = ("model, heads, date", "LM loss", "lambda0:", "over Medusa-1:", "without loops:")
    return table((*head, "loops:", "held-out perplexity:"), rows)


def _finished_heads(content: Json) -> list[Cells]:
    """Three settings of a joint stage after heads of two epochs."""
    finished = content["finished_heads"]["rows"]
    base = finished["Medusa-1, mtbench:5"]["without loops"]
    rows: list[Cells] = []
    for name, loss, weight in (
        ("KL, lambda0 0.015 along a sine, mtbench:5", "KL", "0.015, sine"),
        ("KL, lambda0 0.15, mtbench:5", "KL", "0.15"),
        ("cross-entropy, lambda0 0.2, mtbench:5", "cross-entropy", "0.2"),
    ):
        row = finished[name]
        change = row["perplexity after"] / row["perplexity before"] - 1
        rows.append(
            [
                "SmolLM2, heads of two epochs, 2026-11-25",
                loss,
                weight,
                over(row["over (32)"]),
                f"{row['without loops'] / base:.2f}",
                f"{row['loops']}/80",
                f"{change:+.1%}",
            ]
        )
    return rows


def _heads_of_half_an_epoch(content: Json) -> list[Cells]:
    """Three settings of a joint stage after heads of half an epoch."""
    counts = content["smollm2_counts_40_questions"]
    base = counts["medusa1"]["trees"]["32"]["without_loops"]
    rows: list[Cells] = []
    for name, loss, weight in (
        ("medusa2-lambda0", "KL", "0.05"),
        ("medusa2", "KL", "0.15"),
        ("medusa2-ce", "cross-entropy", "0.15"),
    ):
        tree = counts[name]["trees"]["32"]
        change = content["smollm2_training"][name]["quality"]["held-out answers"]["change"]
        rows.append(
            [
                "SmolLM2, heads of half an epoch, 2026-11-23",
                loss,
                weight,
                over(tree["over"]),
                f"{tree['without_loops'] / base:.2f}",
                f"{counts[name]['loops']['32']}/80",
                f"{change:+.1%}",
            ]
        )
    return rows


def _tiny_target_model(content: Json) -> list[Cells]:
    """Two settings on the built-in target model, on equal tokens."""
    cases = {case["name"]: case for case in content["tiny"]["cases"]}
    rows: list[Cells] = []
    for name, loss in (("m2", "KL"), ("m2-ce", "cross-entropy")):
        compared = content["tiny"]["comparisons"][f"{name}/equal"]
        held_out = cases[name]["quality"]["held-out answers"]
        change = held_out["perplexity_after"] / held_out["perplexity_before"] - 1
        shown = ratio(compared["ratio"], compared["ratio_interval"])
        rows.append(["tiny, 2026-11-20", loss, "0.15", shown, "-", "-", f"{change:+.1%}"])
    return rows
