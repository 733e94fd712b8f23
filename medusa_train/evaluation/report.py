"""Write an evaluation's report: tables for the terminal and report.md, and the files of the report directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from medusa_train.data.conversation import is_looping
from medusa_train.evaluation.html_report.page import html_page, meta_rows
from medusa_train.evaluation.judge import model_answers
from medusa_train.evaluation.metrics import Figures
from medusa_train.evaluation.records import SkippedTurn, TurnRecord
from medusa_train.evaluation.report_text import Report, definitions, further_figures, notes, summary_of, title_of
from medusa_train.io import replace_text


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
        "scores": {name: asdict(score) for name, score in record.scores.items()},
    }


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[Figures], str]
    needs_tree: bool = True
    in_terminal: bool = True
    needs_scores: bool = False
    needs_greedy: bool = False


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


def _correct_cell(figures: Figures) -> str:
    """Format correct answers out of those scored: the tree's, and plain decoding's if their number differs."""
    scores = figures["scores"]
    if scores is None:
        return "-"
    plain = scores["plain"]["correct"]
    correct = scores.get("tree", scores["plain"])["correct"]
    return f"{correct}/{scores['answers']}" + (f" (plain {plain})" if plain != correct else "")


COLUMNS = (
    _Column("answers", _number("answers", 0), needs_tree=False, in_terminal=False),
    _Column("tokens per step", _number("acceleration_rate", 2)),
    _Column("overhead", _number("overhead", 2)),
    _Column("speedup", _number("speedup", 2, "x")),
    _Column("over generate", _number("speedup_over_generate", 2, "x")),
    _Column("tokens /s", _number("tokens_per_s", 0)),
    _Column("plain /s", _number("baseline_tokens_per_s", 0), needs_tree=False),
    _Column("generate /s", _number("generate_tokens_per_s", 0), needs_tree=False),
    _Column("equal fp32", _equal_cell, needs_greedy=True),
    _Column("equal bf16", _equal_bfloat16_cell, needs_greedy=True),
    _Column("correct", _correct_cell, needs_tree=False, in_terminal=False, needs_scores=True),
    _Column("loops", _number("looping_answers", 0), needs_tree=False, in_terminal=False),
)


def table_rows(report: Report, *, terminal: bool) -> tuple[list[str], list[list[str]]]:
    """Return column titles and one row of cells per category, the overall row last.

    With `terminal`, columns that the summary repeats are left out, so that the table fits 80 characters.
    """
    columns = [
        column
        for column in COLUMNS
        if (report.has_tree or not column.needs_tree)
        and (column.in_terminal or not terminal)
        and (report.overall["scores"] is not None or not column.needs_scores)
        and (report.is_greedy or not column.needs_greedy)
    ]
    groups = [*report.categories.items(), ("overall", report.overall)]
    rows = [[name, *(column.cell(figures) for column in columns)] for name, figures in groups]
    return ["category", *(column.title for column in columns)], rows


def terminal_table(report: Report) -> Group:
    """Return title, table and summary for the terminal."""
    titles, rows = table_rows(report, terminal=True)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column(titles[0], overflow="fold")  # gives way to the figures
    for title in titles[1:]:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    return Group(Text(title_of(report), style="bold"), table, Text(summary_of(report)))


def markdown(report: Report) -> str:
    """Return the content of report.md."""
    titles, rows = table_rows(report, terminal=False)
    table = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    table += ["| " + " | ".join([row[0].replace("|", r"\|"), *row[1:]]) + " |" for row in rows[:-1]]
    table.append("| " + " | ".join(f"**{cell}**" for cell in rows[-1]) + " |")
    run = [f"- {label}: {value}" for label, value in meta_rows(report.meta)]
    blocks = [
        [f"# {title_of(report)}"],
        [summary_of(report).replace("\n", "\n\n")],
        table,
        further_figures(report),
        definitions(report),
    ]
    blocks += [["## Run"], run]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"
