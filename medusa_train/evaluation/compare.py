"""Compare finished evaluations: read their report.json files, and write tables, compare.html and compare.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from medusa_train.config.paths import resolve_path
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.evaluation.decoding_mode import describe_settings, settings_of
from medusa_train.evaluation.html_report.page import compare_page
from medusa_train.io import replace_text

#: Keys of `meta` that must be equal for speeds to be comparable, with their labels.
CONDITIONS = {
    "bench": "bench",
    "questions": "number of questions",
    "max_new_tokens": "max_new_tokens",
    "chat_template_kwargs": "variables of the chat template (chat_template_kwargs)",
    "dtype": "dtype",
    "compiled": "compile",
    "packed": "weight prepacking",
    "attention": "attention implementation",
    "backbone": "form of the backbone (quantization, adapter)",
    "torch": "version of torch",
    "transformers": "version of transformers",
    "device": "device",
    "threads": "number of threads",
}


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: its title in the comparison, and the content of its report.json."""

    name: str
    report: Mapping[str, Any]


def load_reports(names: Sequence[str], bench: str | None) -> list[Evaluated]:
    """Read the reports of runs.

    Args:
        names: run directories, directories with a report.json, or report.json files.
        bench: which report of a run to read; None: the newest.

    Raises:
        ConfigError: fewer than two names.
        CheckpointError: one of them has no such report, or they decoded in different modes.
    """
    if len(names) < 2:
        raise ConfigError("--compare needs two runs or more: medusa-eval --compare runs/a runs/b")
    reports = [_read(_find(name, bench)) for name in names]
    modes = [describe_settings(settings_of(report["meta"])) for report in reports]
    if len(set(modes)) > 1:
        measured = ", ".join(f"{name}: {mode}" for name, mode in zip(names, modes, strict=True))
        raise CheckpointError(
            f"--compare: the evaluations decode in different modes ({measured}).\n"
            "Name reports of one mode, as RUN/eval/BENCH or by --bench."
        )
    benches = {report["meta"]["bench"] for report in reports}
    titles = []
    for name, report in zip(names, reports, strict=True):
        title = name.rstrip("/")
        titles.append(title if len(benches) == 1 else f"{title} ({report['meta']['bench']})")
    return [Evaluated(title, report) for title, report in zip(titles, reports, strict=True)]


def _find(name: str, bench: str | None) -> Path:
    path = resolve_path(name)
    if path is None:
        raise CheckpointError(f"{name}: no such run or report")
    if path.is_file():
        return path
    if (path / "report.json").is_file():
        return path / "report.json"
    reports = sorted(path.glob("eval/*/report.json"), key=lambda file: file.stat().st_mtime)
    if bench is not None:
        reports = [file for file in reports if file.parent.name == bench]
    if not reports:
        on_bench = "" if bench is None else f" on bench {bench}"
        raise CheckpointError(f"{name}: holds no evaluation{on_bench} yet; run medusa-eval --model {name} first")
    return reports[-1]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        report["meta"]["bench"], report["overall"]["answers"], report["categories"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: not a report of medusa-eval") from None
    return report


def differences(evaluated: Sequence[Evaluated]) -> list[str]:
    """List the conditions in which the evaluations differ, one line each; then their speeds are not comparable."""
    lines = []
    for key, label in CONDITIONS.items():
        values = [str(one.report["meta"].get(key)) for one in evaluated]
        if len(set(values)) > 1:
            lines.append(f"different {label}: {', '.join(values)}")
    return lines


def rows(evaluated: Sequence[Evaluated]) -> tuple[list[str], list[list[str]]]:
    """Return titles, and one row of figures per evaluation; with grades and correct answers where there are any."""
    titles = ["run", "heads", "nodes", "tokens per step", "overhead", "speedup", "over generate", "tokens /s"]
    titles += ["equal fp32", "loops"]
    lines = [_row(one) for one in evaluated]
    grades = [(one.report.get("judge") or {}).get("score") for one in evaluated]
    if any(grade is not None for grade in grades):
        titles.append("grade")
        for line, grade in zip(lines, grades, strict=True):
            line.append("not judged" if grade is None else f"{grade:.2f}")
    scores = [one.report["overall"].get("scores") for one in evaluated]
    if any(scores):
        titles.append("correct")
        for line, score in zip(lines, scores, strict=True):
            line.append(_correct(score))
    return titles, lines


def _row(one: Evaluated) -> list[str]:
    meta, overall = one.report["meta"], one.report["overall"]
    intervals = overall.get("intervals", {})

    def cell(key: str, digits: int = 2, suffix: str = "") -> str:
        value = overall.get(key)
        if value is None:
            return "-"
        bounds = intervals.get(key)
        interval = f" ({bounds[0]:.{digits}f}-{bounds[1]:.{digits}f})" if bounds else ""
        return f"{value:.{digits}f}{suffix}{interval}"

    equal = overall.get("equal_answers")
    ties = f"+{overall['tie_answers']}" if overall.get("tie_answers") else ""
    return [
        one.name,
        str(meta.get("heads") or "-"),
        str(meta["tree_nodes"]) if meta.get("tree_nodes") is not None else "-",
        cell("acceleration_rate"),
        cell("overhead"),
        cell("speedup", suffix="x"),
        cell("speedup_over_generate", suffix="x"),
        cell("tokens_per_s", 0),
        "-" if equal is None else f"{equal}{ties}/{overall['answers']}",
        f"{overall['looping_answers']}/{overall['answers']}",
    ]


def _correct(scores: Mapping[str, Any] | None) -> str:
    """Format the share of correct answers with its interval; "-" where answers are not scored."""
    if scores is None:
        return "-"
    score = scores.get("tree", scores["plain"])
    low, high = score["interval"]
    return f"{score['rate']:.1%} ({low:.1%}-{high:.1%})"


def category_rows(evaluated: Sequence[Evaluated]) -> tuple[list[str], list[list[str]]]:
    """Return titles, and one row of speedups for each category of any evaluation."""
    categories: dict[str, None] = {}
    for one in evaluated:
        categories.update(dict.fromkeys(one.report["categories"]))
    lines = []
    for category in categories:
        line = [category]
        for one in evaluated:
            speedup = one.report["categories"].get(category, {}).get("speedup")
            line.append("-" if speedup is None else f"{speedup:.2f}x")
        lines.append(line)
    return ["speedup", *(one.name for one in evaluated)], lines


def show(evaluated: Sequence[Evaluated]) -> Group:
    """Return both tables for the terminal, and the conditions that differ."""
    parts: list[Table | Text] = []
    for titles, lines in (rows(evaluated), category_rows(evaluated)):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for index, title in enumerate(titles):
            table.add_column(title, justify="left" if index == 0 else "right", overflow="fold")
        for line in lines:
            table.add_row(line[0], *(cell.replace(" (", "\n(") for cell in line[1:]))  # intervals below their values
        parts.append(table)
    parts += [Text(line, style="yellow") for line in differences(evaluated)]
    return Group(*parts)


def write(evaluated: Sequence[Evaluated], directory: Path) -> list[Path]:
    """Write compare.html and compare.json to `directory`, created if it does not exist; returns their paths."""
    page, data = directory / "compare.html", directory / "compare.json"
    reports = {one.name: one.report for one in evaluated}
    replace_text(page, compare_page(reports, rows(evaluated), category_rows(evaluated), differences(evaluated)))
    replace_text(data, json.dumps(reports, indent=2, ensure_ascii=False) + "\n")
    return [page, data]
