"""A finished evaluation: its figures, its table, and what it comes to in words. Writes nothing; knows no model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from medusa_train.evaluation.html_report.page import html_page
from medusa_train.evaluation.judge import model_answers
from medusa_train.evaluation.metrics import Figures, by_category, is_looping, node_acceptance, summarize
from medusa_train.evaluation.records import SkippedTurn, TurnRecord
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class Report:
    """A finished evaluation: what was run (`meta`, plain JSON values), and its figures overall and per category.

    `extra` are further parts of report.json: `judge` (grades, None where nothing was judged), `joint` (what joint
    training did to the backbone), `tree` (its paths, and the share of steps that accepted each) and `calibration` (how
    it was chosen, from tree.json).
    """

    meta: dict[str, Any]
    overall: Figures
    categories: dict[str, Figures]
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_records(
        cls,
        records: Sequence[TurnRecord],
        meta: dict[str, Any],
        tree: Tree | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Report:
        """Compute the figures of the records."""
        parts: dict[str, Any] = {"judge": None}
        if tree is not None and tree.size:
            shares = node_acceptance([record.trace for record in records if record.trace is not None], tree)
            parts["tree"] = {"medusa_choices": [list(path) for path in tree.paths], "accepted": shares}
        return cls(meta, summarize(records), by_category(records), {**parts, **(extra or {})})

    def as_json(self) -> dict[str, Any]:
        """The content of report.json; `baselines` once more by name, since they stand for the whole bench."""
        return {
            "meta": self.meta,
            "overall": self.overall,
            "categories": self.categories,
            "baselines": self.overall["baselines"],
            **self.extra,
        }

    @property
    def has_tree(self) -> bool:
        """False for a baseline-only run."""
        return self.overall["tokens_per_s"] is not None


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[Figures], str]
    needs_tree: bool = True
    in_terminal: bool = True


def _number(key: str, digits: int, suffix: str = "") -> Callable[[Figures], str]:
    def cell(figures: Figures) -> str:
        value = figures[key]
        return "-" if value is None else f"{value:.{digits}f}{suffix}"

    return cell


def _float32_cell(figures: Figures) -> str:
    """Equal answers of all, ties as "+n"."""
    equal, ties = figures["equal_answers"], figures["tie_answers"]
    if equal is None:
        return "-"
    return f"{equal}+{ties}/{figures['answers']}" if ties else f"{equal}/{figures['answers']}"


def _bfloat16_cell(figures: Figures) -> str:
    equal = figures["equal_answers_bf16"]
    return "-" if equal is None else f"{equal}/{figures['answers']}"


COLUMNS = (
    _Column("answers", _number("answers", 0), needs_tree=False, in_terminal=False),
    _Column("tokens per step", _number("acceleration_rate", 2)),
    _Column("overhead", _number("overhead", 2)),
    _Column("speedup", _number("speedup", 2, "x")),
    _Column("over generate", _number("speedup_over_generate", 2, "x")),
    _Column("tokens /s", _number("tokens_per_s", 0)),
    _Column("plain /s", _number("baseline_tokens_per_s", 0), needs_tree=False),
    _Column("generate /s", _number("generate_tokens_per_s", 0), needs_tree=False),
    _Column("equal fp32", _float32_cell),
    _Column("equal bf16", _bfloat16_cell),
    _Column("loops", _number("looping_answers", 0), needs_tree=False, in_terminal=False),
)


def rows_of(report: Report, *, terminal: bool) -> tuple[list[str], list[list[str]]]:
    """Titles, and one row of cells per category with the overall row last.

    A terminal may be 80 columns wide, so what the caption says is left out there.
    """
    columns = [
        column
        for column in COLUMNS
        if (report.has_tree or not column.needs_tree) and (column.in_terminal or not terminal)
    ]
    named = [*report.categories.items(), ("overall", report.overall)]
    rows = [[name, *(column.cell(figures) for column in columns)] for name, figures in named]
    return ["category", *(column.title for column in columns)], rows


def terminal_table(report: Report) -> Group:
    """Title, the table per category and overall, and what it comes to in one sentence."""
    titles, rows = rows_of(report, terminal=True)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title.replace(" ", "\n"), justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    return Group(Text(title_of(report), style="bold"), table, Text(summary_of(report)))


def model_id(meta: dict[str, Any]) -> str:
    """How the model is called where a file or another tool needs a short name."""
    return Path(meta["model"] or meta["base_model"]).name


def title_of(report: Report) -> str:
    """Bench, model and dtype."""
    meta = report.meta
    return f"{meta['bench']}: {meta['model'] or meta['base_model']} in {meta['dtype']}"


def summary_of(report: Report) -> str:
    """What it comes to, a sentence a line."""
    overall, meta = report.overall, report.meta
    counted = f"{overall['answers']} answers, {overall['looping_answers']} of them loop."
    if not report.has_tree:
        return f"Baselines only: no draft heads were given. {counted}\n{_quality(report)}"
    fastest = overall["speedup_over_fastest"]
    shown = "-" if fastest is None else f"{fastest:.2f}x{_between(overall, 'speedup_over_fastest')}"
    lines = [
        f"{shown} the speed of the faster baseline (total tokens per second, prefill included); "
        f"tree of {meta['tree_nodes']} nodes, {meta['heads']} heads; {counted}"
    ]
    if overall["looping_answers"] and overall["speedup_without_loops"] is not None:
        lines.append(f"Speedup without the answers that loop: {overall['speedup_without_loops']:.2f}x.")
    for name, compared in overall["baselines"].items():
        if name not in ("plain", "generate") and compared["speedup"] is not None:
            lines.append(
                f"{compared['speedup']:.2f}x the speed of {name.replace('_', ' ')} "
                f"({compared['tokens_per_s']:.0f} tokens/s; {compared['equal_to_plain']}/{overall['answers']} answers "
                "equal to plain ones)."
            )
    lines.append(_quality(report))
    return "\n".join(lines)


def _quality(report: Report) -> str:
    """What is known of the answers' quality, and of the backbone's where joint training changed it."""
    said = []
    if (joint := report.extra.get("joint")) is not None:
        change = joint["perplexity_after"] / joint["perplexity_before"] - 1
        said.append(
            f"perplexity {joint['perplexity_after']:.3f} after joint training, {joint['perplexity_before']:.3f} before "
            f"({change:+.1%}), KL {joint['kl']:.4f} nats per token"
        )
    judged = report.extra.get("judge")
    if judged is None:
        said.append("not judged")
    elif judged["score"] is None:
        said.append(f"{judged['model']} graded none of the answers ({judged.get('reason', 'no grade in its replies')})")
    else:
        missing = judged["without_grade"] + judged["failed"]
        counted = f"{judged['graded']} answers" + (f", {missing} without a grade" if missing else "")
        said.append(f"{judged['score']:.2f} of 10 by {judged['model']} ({counted})")
    return f"Quality: {'; '.join(said)}."


def _between(figures: Figures, key: str) -> str:
    found = figures["intervals"].get(key)
    return "" if found is None else f" ({found[0]:.2f}-{found[1]:.2f})"


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


def _answer_line(record: TurnRecord) -> dict[str, Any]:
    timed = record.answer
    return {
        "question_id": record.question_id,
        "category": record.category,
        "turn": record.turn,
        "asked": record.asked,
        "text": record.text,
        "pieces": list(record.pieces),
        "prompt_tokens": len(record.prompt_ids),
        "tokens": len(timed.tokens),
        "steps": timed.steps,
        "accepted": list(timed.accepted),
        "loops": is_looping(timed.tokens),
        "seconds": {
            "tree": None if record.tree is None else record.tree.seconds,
            **{name: answer.seconds for name, answer in record.baselines.items()},
        },
        "exact": {dtype: verdict.value for dtype, verdict in record.exact.items()},
    }


def write_report(
    report: Report, records: Sequence[TurnRecord], skipped: Sequence[SkippedTurn], directory: Path
) -> list[Path]:
    """Write report.json, report.md, report.html, answers.jsonl and FastChat's model_answer/MODEL.jsonl.

    `directory` is made if absent. Returns the files' paths.
    """
    answers = [_answer_line(record) for record in records]
    answers += [
        {"question_id": turn.question_id, "turn": turn.turn, "prompt_tokens": turn.prompt_tokens, "skipped": True}
        for turn in skipped
    ]
    contents = {
        "report.json": json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n",
        "report.md": markdown(report),
        "report.html": html_page(report.as_json(), answers, rows_of(report, terminal=False)),
        "answers.jsonl": "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers),
    }
    name = model_id(report.meta)
    contents[f"model_answer/{name}.jsonl"] = "".join(
        json.dumps(line, ensure_ascii=False) + "\n" for line in model_answers(records, name)
    )
    (directory / "model_answer").mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        _replace(directory / name, content)
    return [directory / name for name in contents]


def _replace(path: Path, content: str) -> None:
    """Write a file so that an interruption leaves the old one or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)
