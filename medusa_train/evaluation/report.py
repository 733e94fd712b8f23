"""Turn an evaluation's records into its report: figures, tables, summary, and the files of the report directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from medusa_train.data.conversation import is_looping
from medusa_train.evaluation.html_report.page import html_page, meta_rows
from medusa_train.evaluation.judge import model_answers
from medusa_train.evaluation.metrics import Figures, by_category, node_acceptance, summarize
from medusa_train.evaluation.records import SkippedTurn, TurnRecord
from medusa_train.io import replace_text
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class Report:
    """A finished evaluation.

    Attributes:
        meta: what was run, on what and with what; plain JSON values.
        overall: figures of the whole bench.
        categories: figures per category.
        extra: further parts of report.json: `judge` (grades; None if nothing was judged), `joint` (perplexity of the
            backbone before and after joint training), `tree` (its paths and each path's acceptance) and `calibration`
            (how the tree was chosen, from tree.json).
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
        """Compute the figures of `records`."""
        parts: dict[str, Any] = {"judge": None}
        if tree is not None and tree.size:
            shares = node_acceptance([record.trace for record in records if record.trace is not None], tree)
            parts["tree"] = {"medusa_choices": [list(path) for path in tree.paths], "accepted": shares}
        return cls(meta, summarize(records), by_category(records), {**parts, **(extra or {})})

    def as_json(self) -> dict[str, Any]:
        """Return the content of report.json; `baselines` also stand at the top level."""
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


def write_report(
    report: Report, records: Sequence[TurnRecord], skipped: Sequence[SkippedTurn], directory: Path
) -> list[Path]:
    """Write report.json, report.md, report.html, answers.jsonl and FastChat's model_answer/MODEL.jsonl.

    `directory` is created if it does not exist. Returns the paths of the files.
    """
    answers = [_answer_line(record) for record in records]
    answers += [
        {"question_id": turn.question_id, "turn": turn.turn, "prompt_tokens": turn.prompt_tokens, "skipped": True}
        for turn in skipped
    ]
    name = model_id(report.meta)
    contents = {
        "report.json": json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n",
        "report.md": markdown(report),
        "report.html": html_page(report.as_json(), answers, table_rows(report, terminal=False), notes(report)),
        "answers.jsonl": _json_lines(answers),
        f"model_answer/{name}.jsonl": _json_lines(model_answers(records, name)),
    }
    for file, content in contents.items():
        replace_text(directory / file, content)
    return [directory / file for file in contents]


def model_id(meta: Mapping[str, Any]) -> str:
    """Return a short name of the model for file names and other tools."""
    return Path(meta["model"] or meta["base_model"]).name


def _json_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _answer_line(record: TurnRecord) -> dict[str, Any]:
    answer = record.answer
    return {
        "question_id": record.question_id,
        "category": record.category,
        "turn": record.turn,
        "asked": record.asked,
        "text": record.text,
        "pieces": list(record.pieces),
        "prompt_tokens": len(record.prompt_ids),
        "tokens": len(answer.tokens),
        "steps": answer.steps,
        "accepted": list(answer.accepted),
        "loops": is_looping(answer.tokens),
        "seconds": {
            "tree": None if record.tree is None else record.tree.seconds,
            **{name: baseline.seconds for name, baseline in record.baselines.items()},
        },
        "exact": {dtype: verdict.value for dtype, verdict in record.exact.items()},
    }


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


def _equal_cell(figures: Figures) -> str:
    """Format equal answers in float32 out of all, with ties as "+n"."""
    equal, ties = figures["equal_answers"], figures["tie_answers"]
    if equal is None:
        return "-"
    return f"{equal}+{ties}/{figures['answers']}" if ties else f"{equal}/{figures['answers']}"


def _equal_bfloat16_cell(figures: Figures) -> str:
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
    _Column("equal fp32", _equal_cell),
    _Column("equal bf16", _equal_bfloat16_cell),
    _Column("loops", _number("looping_answers", 0), needs_tree=False, in_terminal=False),
)


def table_rows(report: Report, *, terminal: bool) -> tuple[list[str], list[list[str]]]:
    """Return column titles and one row of cells per category, the overall row last.

    With `terminal`, columns that the summary repeats are left out, so that the table fits 80 characters.
    """
    columns = [
        column
        for column in COLUMNS
        if (report.has_tree or not column.needs_tree) and (column.in_terminal or not terminal)
    ]
    groups = [*report.categories.items(), ("overall", report.overall)]
    rows = [[name, *(column.cell(figures) for column in columns)] for name, figures in groups]
    return ["category", *(column.title for column in columns)], rows


def terminal_table(report: Report) -> Group:
    """Return title, table and summary for the terminal."""
    titles, rows = table_rows(report, terminal=True)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title.replace(" ", "\n"), justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    return Group(Text(title_of(report), style="bold"), table, Text(summary_of(report)))


def markdown(report: Report) -> str:
    """Return the content of report.md."""
    titles, rows = table_rows(report, terminal=False)
    table = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    table += ["| " + " | ".join(row) + " |" for row in rows[:-1]]
    table.append("| " + " | ".join(f"**{cell}**" for cell in rows[-1]) + " |")
    run = [f"- {label}: {value}" for label, value in meta_rows(report.meta)]
    blocks = [
        [f"# {title_of(report)}"],
        [summary_of(report).replace("\n", "\n\n")],
        table,
        _further_figures(report),
        _definitions(report),
    ]
    blocks += [["## Run"], run]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def title_of(report: Report) -> str:
    """Return bench, model and dtype as a title."""
    meta = report.meta
    return f"{meta['bench']}: {meta['model'] or meta['base_model']} in {meta['dtype']}"


def summary_of(report: Report) -> str:
    """Summarize the report in words, one sentence per line."""
    overall, meta = report.overall, report.meta
    answers = f"{overall['answers']} answers, {overall['looping_answers']} of them with loops."
    if not report.has_tree:
        return f"Baselines only: no draft heads were given. {answers}\n{_quality(report)}"
    ratio = overall["speedup_over_fastest"]
    speedup = "-" if ratio is None else f"{ratio:.2f}x{_interval(overall, 'speedup_over_fastest')}"
    lines = [
        f"{speedup} the speed of the faster baseline (total tokens per second, prefill included); "
        f"tree of {_count(meta['tree_nodes'], 'node')}, {_count(meta['heads'], 'head')}; {answers}"
    ]
    if overall["looping_answers"] and overall["speedup_without_loops"] is not None:
        lines.append(f"Speedup without the answers with loops: {overall['speedup_without_loops']:.2f}x.")
    for name, baseline in overall["baselines"].items():
        if name not in ("plain", "generate") and baseline["speedup"] is not None:
            lines.append(
                f"{baseline['speedup']:.2f}x the speed of {name.replace('_', ' ')} "
                f"({baseline['tokens_per_s']:.0f} tokens/s; {baseline['equal_to_plain']}/{overall['answers']} answers "
                "equal to plain ones)."
            )
    return "\n".join([*lines, *notes(report), _quality(report)])


def notes(report: Report) -> list[str]:
    """Say in which dtype the output equals plain decoding's, and what "tokens per step" means here; empty without tree.

    Every form of the report shows these sentences beside its figures.
    """
    if not report.has_tree:
        return []
    return [_output_note(report), _tokens_per_step_note(report)]


def _output_note(report: Report) -> str:
    overall, outcomes = report.overall, report.meta.get("exactness") or {}
    equal, ties, count = overall["equal_answers"], overall["tie_answers"] or 0, overall["answers"]
    if equal is None:
        float32 = f"float32: {_not_compared(outcomes.get('float32'))}"
    else:
        float32 = f"float32: {equal} of {count} answers equal plain decoding's token for token"
        if ties:
            float32 += f", {ties} first differ at a tie (logits within 1e-4)"
        if different := count - equal - ties:
            float32 += f", {different} differ without a tie"
    equal = overall["equal_answers_bf16"]
    if equal is None:
        bfloat16 = f"bfloat16: {_not_compared(outcomes.get('bfloat16'))}"
    else:
        bfloat16 = f"bfloat16: {equal} of {count}"
        if equal < count:
            bfloat16 += ", since its rounding changes which of two nearly equal logits is larger"
    return f"Output: {float32}; {bfloat16}. Speed was measured in {report.meta['dtype']}."


def _not_compared(outcome: str | None) -> str:
    return f"not compared ({outcome})" if outcome not in (None, "not compared", "compared") else "not compared"


def _tokens_per_step_note(report: Report) -> str:
    calibration = report.extra.get("calibration") or {}
    expected = calibration.get("tokens_per_step")
    estimate = "estimate" if expected is None else f"{expected:.2f}"
    return (
        "Tokens per step: measured on this bench with this tree. Training's validation figure is simulated on held-out "
        f"text, and tree.json's {estimate} on the answers of its calibration, so they differ."
    )


def _quality(report: Report) -> str:
    """Say how good the answers are: the judge's grades, and the perplexity where joint training changed it."""
    parts = []
    if (joint := report.extra.get("joint")) is not None:
        change = joint["perplexity_after"] / joint["perplexity_before"] - 1
        parts.append(
            f"perplexity {joint['perplexity_after']:.3f} after joint training, {joint['perplexity_before']:.3f} before "
            f"({change:+.1%}), KL {joint['kl']:.4f} nats per token"
        )
    judged = report.extra.get("judge")
    if judged is None:
        parts.append("not judged")
    elif judged["score"] is None:
        parts.append(
            f"{judged['model']} graded none of the answers ({judged.get('reason', 'no grade in its replies')})"
        )
    else:
        missing = judged["without_grade"] + judged["failed"]
        graded = f"{judged['graded']} answers" + (f", {missing} without a grade" if missing else "")
        parts.append(f"{judged['score']:.2f} of 10 by {judged['model']} ({graded})")
    return f"Quality: {'; '.join(parts)}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _interval(figures: Figures, key: str) -> str:
    bounds = figures["intervals"].get(key)
    return "" if bounds is None else f" ({bounds[0]:.2f}-{bounds[1]:.2f})"


def _further_figures(report: Report) -> list[str]:
    """List the figures of the whole bench that have no column."""
    overall = report.overall
    lines = [
        f"- {name.replace('_', ' ')}: {baseline['tokens_per_s']:.0f} tokens/s"
        + ("" if baseline["speedup"] is None else f", speedup {baseline['speedup']:.2f}x")
        + f", {baseline['equal_to_plain']}/{overall['answers']} answers equal to plain ones"
        for name, baseline in overall["baselines"].items()
        if baseline["tokens_per_s"] is not None
    ]
    for key, label, scale, digits in (
        ("mean_speedup", "mean of the speedups per question", 1, 2),
        ("time_to_first_token_s", "milliseconds to the first token", 1000, 1),
        ("chain_acceleration_rate", "tokens per step with the chain of top-1 guesses (simulated)", 1, 2),
    ):
        if overall[key] is not None:
            lines.append(f"- {label}: {overall[key] * scale:.{digits}f}")
    if shares := overall["ctar"]:
        values = ", ".join(f"{w}: {share:.1%}" for w, share in enumerate(shares, start=1))
        lines.append(f"- CTAR(w), steps that accepted at least w draft tokens: {values}")
    if table := overall["head_accuracy"]:
        values = ", ".join(f"head {k}: {row[0]:.1%} / {row[4]:.1%}" for k, row in enumerate(table, start=1))
        lines.append(f"- top-1 / top-5 accuracy on the answers: {values}")
    return lines


def _definitions(report: Report) -> list[str]:
    lines = ["- **plain**: the same decoding loop with the empty tree. **generate**: transformers' greedy `generate`."]
    if report.has_tree:
        lines += [
            "- **tokens per step** (acceleration rate): over decoding steps; the first token comes from the prefill.",
            "- **overhead**: latency of a step with the tree over that of a plain step, prefill excluded.",
            "- **speedup**: total tokens per second with the tree over plain, prefill included. Intervals in brackets "
            "are 95 % bootstrap intervals over questions.",
            "- **equal fp32, bf16**: answers equal to the plain ones token for token, in float32 and in bfloat16; "
            "+n counts ties, which first differ where the two best logits lie within 1e-4.",
        ]
    lines.append("- **loops**: answers that hold an 8-token sequence three times or more; loops inflate a speedup.")
    return lines
