"""Which losses, stages and questions train a better draft?"""

from __future__ import annotations

from result_tables.writing import Cells, Json, over, ratio, results, table

#: Draft and loss, part of the JSON, and its run.
_LOSSES = (
    ("Medusa-1, LK", "losses", "medusa1-lk"),
    ("Medusa-1, D-PACE", "losses", "medusa1-dpace"),
    ("Medusa-1, both", "losses", "medusa1-lk-dpace"),
    ("Hydra++, LK", "losses_hydra", "hydra++-lk"),
    ("Hydra++, D-PACE", "losses_hydra", "hydra++-dpace"),
    ("Hydra++, both", "losses_hydra", "hydra++-lk-dpace"),
    ("Hydra++, plain embeddings", "embeddings_hydra", "hydra++-plain"),
    ("Amphista, plain embeddings", "embeddings_amphista", "amphista-plain"),
)


def losses_answer() -> str:
    """Losses change little, the scale of the embeddings more."""
    content = results("losses_smollm2")
    hydra = content["embeddings_hydra"]["t0"]["hydra++-plain"]["trees"]["16"]["over"][0]
    amphista = content["embeddings_amphista"]["t0"]["amphista-plain"]["trees"]["16"]["over"][0]
    low, high = _losses_range(content)
    return (
        f"No. LK, D-PACE and both make {low:.2f} to {high:.2f} of the tokens per step, so they were"
        f" removed. Scaled embeddings help: without them, as published, Hydra++ makes"
        f" {hydra:.2f} and Amphista {amphista:.2f} of its tokens per step."
    )


def losses_short() -> str:
    """The same for the list of results."""
    low, high = _losses_range(results("losses_smollm2"))
    return f"No: LK and D-PACE make {low:.2f} to {high:.2f} of the tokens per step. Removed."


def _losses_range(content: Json) -> tuple[float, float]:
    """Return the least and the greatest ratio of the acceptance-aware losses."""
    values = []
    for _, part, run in _LOSSES[:6]:
        for temperature in ("t0", "t0.7"):
            trees = content[part][temperature][run]["trees"]
            values += [tree["over"][0] for tree in trees.values()]
    return min(values), max(values)


def losses_table() -> str:
    """Ratios to the same draft with its default loss."""
    content = results("losses_smollm2")
    rows = []
    for title, part, run in _LOSSES:
        trees = content[part]["t0"][run]["trees"]
        cells: Cells = [title, *(over(trees[tree]["over"]) for tree in ("chain", "16", "32"))]
        sampled = content[part].get("t0.7", {}).get(run)
        for tree in ("16", "32"):
            cells.append("-" if sampled is None else over(sampled["trees"][tree]["over"]))
        rows.append(cells)
    head = ("draft", "greedy: chain:", "16 nodes:", "32 nodes:", "at 0.7: 16 nodes:", "32 nodes:")
    return table(head, rows)


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
    """Finished heads, heads of half an epoch, and the tiny backbone."""
    content = results("medusa2_smollm2")
    rows = [*_finished_heads(content), *_heads_of_half_an_epoch(content), *_tiny_backbone(content)]
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


def _tiny_backbone(content: Json) -> list[Cells]:
    """Two settings on the built-in backbone, on equal tokens."""
    cases = {case["name"]: case for case in content["tiny"]["cases"]}
    rows: list[Cells] = []
    for name, loss in (("m2", "KL"), ("m2-ce", "cross-entropy")):
        compared = content["tiny"]["comparisons"][f"{name}/equal"]
        held_out = cases[name]["quality"]["held-out answers"]
        change = held_out["perplexity_after"] / held_out["perplexity_before"] - 1
        shown = ratio(compared["ratio"], compared["ratio_interval"])
        rows.append(["tiny, 2026-11-20", loss, "0.15", shown, "-", "-", f"{change:+.1%}"])
    return rows


#: Title, and the part of the JSON.
_PROMPTS = (
    ("MT-Bench", "MT-Bench, 40 questions"),
    ("templates", "templates, 40 questions"),
    ("the model's own", "the model's own, 54 questions"),
)


def prompts_answer() -> str:
    """Text of the model's own questions."""
    content = results("prompts_smollm2")
    own = content["the model's own, 54 questions"]["32 nodes"]["over"]
    return (
        "Yes, on questions of that kind. With half of the text from questions that the model wrote"
        f" itself, Medusa-1 makes {ratio(own[0], own[1], 2)} times the tokens per step on such"
        " questions, and on MT-Bench no more than before."
    )


def prompts_short() -> str:
    """The same for the list of results."""
    own = results("prompts_smollm2")["the model's own, 54 questions"]["32 nodes"]["over"][0]
    return f"Those that the model will be asked: {own:.2f} times the tokens per step on such ones."


def prompts_table() -> str:
    """Two texts of equal size on three kinds of questions."""
    content = results("prompts_smollm2")
    rows = []
    for title, key in _PROMPTS:
        part = content[key]
        cells: Cells = [title, part["answers"]]
        for tree in ("16 nodes", "32 nodes"):
            cells += [f"{part[tree][text]:.3f}" for text in ("templates", "half of each")]
        rows.append([*cells, over(part["32 nodes"]["over"]), f"{part['loops']}/{part['answers']}"])
    head = ("questions asked", "answers:", "16 nodes: templates:", "half of each:")
    return table((*head, "32 nodes: templates:", "half of each:", "over:", "loops:"), rows)
