"""Compare finished evaluations: read their report.json files, and write tables, compare.html and
compare.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from medusa_train.errors import CheckpointError
from medusa_train.evaluation.find_reports import find_reports
from medusa_train.evaluation.report import equal_cell
from medusa_train.evaluation.report_page import speedup_chart
from medusa_train.inference.decoding_mode import describe_mode, mode_of
from medusa_train.io import parse_json
from medusa_train.pages.page import Section, Table, number, render_page, write_files

#: Keys of `meta` that must be equal for speeds to be comparable, with their labels.
CONDITIONS = {
    "bench": "bench",
    "max_new_tokens": "max_new_tokens",
    "chat_template": "chat_template",
    "dtype": "dtype",
    "base_model": "model",
    "bench_file": "question file",
    "questions": "number of questions",
    "chat_template_kwargs": "variables of the chat template (chat_template_kwargs)",
    "compiled": "compile",
    "cuda_graphs": "CUDA graphs",
    "packed": "weight prepacking",
    "attention": "attention implementation",
    "backbone": "form of the backbone (quantization, adapter)",
    "torch": "version of torch",
    "transformers": "version of transformers",
    "device": "device",
    "threads": "number of threads",
}

#: Figures that say what a tree brings.
TREE_FIGURES = (
    "acceleration_rate",
    "overhead",
    "speedup",
    "speedup_over_generate",
    "speedup_over_fastest",
    "speedup_without_loops",
    "tokens_per_s",
)


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: its title in the comparison, and the content of its report.json."""

    name: str
    report: Mapping[str, Any]


def load_reports(names: Sequence[str], bench: str | None) -> list[Evaluated]:
    """Read the reports of runs, directories or report.json files; `bench`: which one of a run,
    default the newest.
    """
    reports = [_read(path) for path in find_reports(names, bench)]

    # 1. speeds in different modes cannot be compared
    modes = [describe_mode(mode_of(report["meta"])) for report in reports]
    if len(set(modes)) > 1:
        measured = [f"{name}: {mode}" for name, mode in zip(names, modes, strict=True)]
        raise CheckpointError(
            f"--compare: the evaluations decode in different modes ({', '.join(measured)}).\n"
            "Name reports of one mode, as RUN/eval/BENCH or by --bench."
        )

    # 2. titles, with the bench where there are several
    several_benches = len({str(report["meta"]["bench"]) for report in reports}) > 1
    evaluated = []
    for name, report in zip(names, reports, strict=True):
        title = name.rstrip("/")
        if several_benches:
            title += f" ({report['meta']['bench']})"
        evaluated.append(Evaluated(title, report))
    return evaluated


def _read(path: Path) -> Mapping[str, Any]:
    try:
        report = _without_empty_tree(parse_json(path.read_text(encoding="utf-8")))
        # build all that is shown of it later: a damaged report fails here, where its path is known
        alone = [Evaluated(str(report["meta"]["bench"]), report)]
        runs_table(alone)
        categories_table(alone)
        differences(alone)
        speedup_chart({"": report})
        describe_mode(mode_of(report["meta"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        raise CheckpointError(f"{path}: not a report of medusa-eval, or damaged") from None
    return report


def _lacks_tree(meta: Mapping[str, Any]) -> bool:
    """Return whether heads drafted nothing, for their tree is empty, and nothing else did."""
    return meta.get("tree_nodes") == 0 and not meta.get("draft") and not meta.get("dynamic_trees")


def _without_empty_tree(report: dict[str, Any]) -> dict[str, Any]:
    """Drop the figures of a tree without nodes, which reports of earlier versions have.

    Both sides were the same loop then, so their ratio is noise.
    """
    if not _lacks_tree(report["meta"]):
        return report

    nothing: dict[str, Any] = dict.fromkeys(TREE_FIGURES)
    nothing["intervals"] = {}
    categories = {}
    for name, figures in report["categories"].items():
        categories[name] = {**figures, **nothing}
    overall = {**report["overall"], **nothing}
    return {**report, "overall": overall, "categories": categories}


def differences(evaluated: Sequence[Evaluated]) -> list[str]:
    """List the conditions in which the evaluations differ, one line each; then their speeds are not
    comparable.
    """
    lines = []
    for key, label in CONDITIONS.items():
        metas = [run.report["meta"] for run in evaluated]
        # older reports lack keys; where a newer one has no value either, nothing differs
        if len({str(meta.get(key)) for meta in metas}) > 1:
            values = [str(meta.get(key, "not recorded")) for meta in metas]
            lines.append(f"different {label}: {', '.join(values)}")
    judges = [run.report["judge"]["model"] for run in evaluated if run.report.get("judge")]
    if len(set(judges)) > 1:
        lines.append(f"different judge: {', '.join(judges)}")
    return lines


def runs_table(evaluated: Sequence[Evaluated]) -> Table:
    """Return one row of figures per evaluation; older reports lack some."""
    metas = [run.report["meta"] for run in evaluated]
    overall = [run.report["overall"] for run in evaluated]

    def column(key: str, digits: int = 2, suffix: str = "") -> list[str]:
        cells = []
        for figures in overall:
            bounds = figures.get("intervals", {}).get(key)
            cells.append(number(figures.get(key), digits, suffix, bounds))
        return cells

    columns = {
        "run": [run.name for run in evaluated],
        "heads": [str(meta.get("heads") or "-") for meta in metas],
        "nodes": [_nodes(meta) for meta in metas],
        "tokens per step": column("acceleration_rate"),
        "overhead": column("overhead"),
        "speedup": column("speedup", suffix="x"),
        "over generate": column("speedup_over_generate", suffix="x"),
        "tokens /s": column("tokens_per_s", 0),
        "equal fp32": [equal_cell(figures) for figures in overall],
        "loops": [f"{figures['looping_answers']}/{figures['answers']}" for figures in overall],
        "grade": [_grade(run.report.get("judge")) for run in evaluated],
        "correct": [_correct(figures.get("scores")) for figures in overall],
    }
    return Table.of_columns(columns)


def _nodes(meta: Mapping[str, Any]) -> str:
    nodes = meta.get("tree_nodes")
    if nodes is None:
        return "-"
    if _lacks_tree(meta):
        return "no tree used"
    return str(nodes)


def _grade(judged: Mapping[str, Any] | None) -> str:
    """Format a judge's mean grade; "-" where nothing was judged."""
    if not judged:
        return "-"
    return number(judged.get("score"))


def _correct(scores: Mapping[str, Any] | None) -> str:
    """Format the share of correct answers with its interval; "-" where answers are not scored."""
    if scores is None:
        return "-"
    score = scores.get("tree", scores["plain"])
    cell = f"{score['rate']:.1%}"
    if score["interval"] is not None:
        low, high = score["interval"]
        cell += f" ({low:.1%}-{high:.1%})"
    return cell


def categories_table(evaluated: Sequence[Evaluated]) -> Table:
    """Return one row of speedups for each category of any evaluation."""
    names: dict[str, None] = {}  # in the order in which they first appear
    for run in evaluated:
        names.update(dict.fromkeys(run.report["categories"]))
    rows = []
    for name in names:
        row = [name]
        for run in evaluated:
            figures = run.report["categories"].get(name, {})
            row.append(number(figures.get("speedup"), 2, "x"))
        rows.append(row)
    titles = ["speedup", *[run.name for run in evaluated]]
    return Table(titles, rows)


def show(evaluated: Sequence[Evaluated]) -> Group:
    """Return both tables for the terminal, and the conditions that differ."""
    runs = runs_table(evaluated)
    # a run per column, since a run has many figures
    titles, *rows = zip(runs.titles, *runs.rows, strict=True)
    tables = [Table(titles, rows), categories_table(evaluated)]
    shown = [table.terminal() for table in tables]
    warnings = [Text(line, style="yellow") for line in differences(evaluated)]
    return Group(*shown, *warnings)


def write(evaluated: Sequence[Evaluated], directory: Path) -> list[Path]:
    """Write compare.html and compare.json to `directory`, created if it does not exist; returns
    their paths.
    """
    reports = {run.name: run.report for run in evaluated}
    warnings = [f"Not comparable as they stand: {line}" for line in differences(evaluated)]
    sections = [
        Section(lines=warnings),
        Section(legend=list(reports), tables=[runs_table(evaluated)]),
        Section("Speed", figures=[speedup_chart(reports)]),
        Section(tables=[categories_table(evaluated)]),
    ]
    page = render_page("Comparison of runs", f"{len(reports)} evaluations", sections)
    return write_files(directory, {"compare.html": page, "compare.json": reports})
