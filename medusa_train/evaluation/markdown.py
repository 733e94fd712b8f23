"""report.md: a finished evaluation as Markdown. Knows no model and no file."""

from __future__ import annotations

from collections.abc import Mapping

from medusa_train.evaluation.report import Report, rows_of, summary_of, title_of


def markdown(report: Report) -> str:
    """The content of report.md."""
    titles, rows = rows_of(report, terminal=False)
    table = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    table += ["| " + " | ".join(row) + " |" for row in rows[:-1]]
    table.append("| " + " | ".join(f"**{cell}**" for cell in rows[-1]) + " |")
    facts = [f"- {key.replace('_', ' ')}: {_fact(value)}" for key, value in report.meta.items()]
    blocks = [[f"# {title_of(report)}"], [summary_of(report)], table, _further(report), _definitions(report)]
    blocks += [["## Run"], facts]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _further(report: Report) -> list[str]:
    """Figures of the whole bench that have no column."""
    overall = report.overall
    lines = [
        f"- {name.replace('_', ' ')}: {compared['tokens_per_s']:.0f} tokens/s"
        + ("" if compared["speedup"] is None else f", speedup {compared['speedup']:.2f}x")
        + f", {compared['equal_to_plain']}/{overall['answers']} answers equal to plain ones"
        for name, compared in overall["baselines"].items()
        if compared["tokens_per_s"] is not None
    ]
    for key, what, scale, digits in (
        ("mean_speedup", "mean of the questions' own speedups", 1, 2),
        ("time_to_first_token_s", "milliseconds until the first token", 1000, 1),
        ("chain_acceleration_rate", "tokens per step of the chain of first guesses", 1, 2),
    ):
        if overall[key] is not None:
            lines.append(f"- {what}: {overall[key] * scale:.{digits}f}")
    if shares := overall["ctar"]:
        shown = ", ".join(f"{w}: {share:.1%}" for w, share in enumerate(shares, start=1))
        lines.append(f"- CTAR(w), steps that accepted at least w draft tokens: {shown}")
    if table := overall["head_accuracy"]:
        shown = ", ".join(f"head {k}: {row[0]:.1%} / {row[4]:.1%}" for k, row in enumerate(table, start=1))
        lines.append(f"- top-1 / top-5 accuracy along the answers: {shown}")
    return lines


def _fact(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {item}" for key, item in value.items()) or "-"
    return "-" if value is None else str(value)


def _definitions(report: Report) -> list[str]:
    lines = ["- **plain**: our decoding loop with the empty tree. **generate**: greedy `generate` of transformers."]
    if report.has_tree:
        lines += [
            "- **tokens per step** (acceleration rate): over decoding steps; the first token comes from the prefill.",
            "- **overhead**: latency of a step with the tree over that of a plain step, prefill excluded.",
            "- **speedup**: total tokens per second with the tree over plain, prefill included. Intervals in brackets "
            "are 95 % bootstrap intervals over questions.",
            "- **equal fp32, bf16**: answers equal to the plain ones token for token, in float32 and in bfloat16; "
            "+n counts ties, which first differ where the two best logits lie within 1e-4.",
        ]
    lines.append("- **loops**: answers that hold an 8-token sequence three times or more; loops flatter a speedup.")
    return lines
