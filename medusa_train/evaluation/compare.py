"""Compare finished evaluations: read their report.json files, and write tables, compare.html and
compare.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from medusa_train.errors import CheckpointError
from medusa_train.evaluation.find_reports import find_reports
from medusa_train.evaluation.metrics import TREE_RATIOS
from medusa_train.evaluation.report import cells
from medusa_train.evaluation.report_page import category_names, speedup_chart
from medusa_train.inference.decoding_mode import describe_mode, mode_of
from medusa_train.io import parse_json
from medusa_train.pages.page import PageSection, Table, number, render_page, write_files

#: Keys of `meta` that must be equal for speeds to be comparable, and their labels.
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
    "backbone": "form of the target model (quantization, adapter)",
    "torch": "version of torch",
    "transformers": "version of transformers",
    "device": "device",
    "threads": "number of threads",
}

#: Columns of `report.cells` that runs are compared by.
COMPARED = ("tokens per step", "overhead", "speedup", "over generate", "tokens /s", "equal fp32")

Json = Mapping[str, Any]


def load_reports(names: Sequence[str], bench: str | None) -> dict[str, Json]:
    """Read the reports of runs, directories or report.json files; return them by their titles in
    the comparison.

    Args:
        bench: which evaluation of a run to read; default: the newest.
    """
    paths = find_reports(names, bench)
    reports = {name: _read(path) for name, path in zip(names, paths, strict=True)}

    # 1. speeds in different decoding modes cannot be compared
    modes = {name: describe_mode(mode_of(report["meta"])) for name, report in reports.items()}
    if len(set(modes.values())) > 1:
        measured = ", ".join(f"{name}: {mode}" for name, mode in modes.items())
        raise CheckpointError(
            f"--compare: the evaluations decode in different modes ({measured}).\n"
            "Name reports of one mode, as RUN/eval/BENCH or by --bench."
        )

    # 2. titles, with the evaluation if there are several: its draft and tree are part of the name
    evaluations = {}
    for name, path in zip(names, paths, strict=True):
        in_run = path.parent.parent.name == "eval"
        evaluations[name] = path.parent.name if in_run else str(reports[name]["meta"]["bench"])
    several = len(set(evaluations.values())) > 1
    return {
        name.rstrip("/") + (f" ({evaluations[name]})" if several else ""): report
        for name, report in reports.items()
    }


def _read(path: Path) -> Json:
    try:
        report: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        if _lacks_tree(report["meta"]):
            # reports of earlier versions have metrics of an empty tree, which are noise: both sides
            # of a ratio are the same decoding loop
            tree_metrics = (*TREE_RATIOS, "speedup_without_loops")
            for group in (report["overall"], *report["categories"].values()):
                group.update({**dict.fromkeys(tree_metrics), "intervals": {}})
        # build everything that is shown later: a damaged report fails here, where its path is known
        _sections({str(report["meta"]["bench"]): report})
        describe_mode(mode_of(report["meta"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        raise CheckpointError(f"{path}: not a report of medusa-eval, or damaged") from None
    return report


def _lacks_tree(meta: Json) -> bool:
    """Return whether nothing was drafted: the heads' tree is empty and there is no other draft."""
    return meta.get("tree_nodes") == 0 and not meta.get("draft") and not meta.get("dynamic_trees")


def differences(reports: Mapping[str, Json]) -> list[str]:
    """List the conditions in which the evaluations differ, one per line. If there are any, their
    speeds are not comparable.
    """
    lines = []
    for key, label in CONDITIONS.items():
        # older reports lack some keys; a missing key and None in a newer report are the same
        if len({str(report["meta"].get(key)) for report in reports.values()}) > 1:
            values = [str(report["meta"].get(key, "not recorded")) for report in reports.values()]
            lines.append(f"different {label}: {', '.join(values)}")
    judges = [report["judge"]["model"] for report in reports.values() if report.get("judge")]
    if len(set(judges)) > 1:
        lines.append(f"different judge: {', '.join(judges)}")
    return lines


def runs_table(reports: Mapping[str, Json]) -> Table:
    """Return one row of metrics per evaluation. Metrics may be missing in older reports."""
    return Table.of_rows([_row(name, report) for name, report in reports.items()])


def _row(name: str, report: Json) -> dict[str, str]:
    meta, overall = report["meta"], report["overall"]
    shown = cells(overall, overall.get("intervals"))
    nodes = meta.get("tree_nodes")
    return {
        "run": name,
        "heads": str(meta.get("heads") or "-"),
        "nodes": "no tree used" if _lacks_tree(meta) else "-" if nodes is None else str(nodes),
        **{title: shown[title] for title in COMPARED},
        "loops": f"{overall['looping_answers']}/{overall['answers']}",
        "grade": number((report.get("judge") or {}).get("score")),
        "correct": _correct(overall.get("scores")),
    }


def _correct(scores: Json | None) -> str:
    """Format the share of correct answers with its interval; "-" if answers are not scored."""
    if scores is None:
        return "-"
    score = scores.get("tree", scores["plain"])
    cell = f"{score['rate']:.1%}"
    if score["interval"] is not None:
        cell += " ({:.1%}-{:.1%})".format(*score["interval"])
    return cell


def categories_table(reports: Mapping[str, Json]) -> Table:
    """Return one row of speedups for each category that any evaluation has."""
    rows = []
    for name in category_names(reports):
        groups = [report["categories"].get(name, {}) for report in reports.values()]
        rows.append([name, *[number(group.get("speedup"), 2, "x") for group in groups]])
    return Table(["speedup", *reports], rows)


def show(reports: Mapping[str, Json]) -> Group:
    """Return both tables and the conditions that differ, for the terminal."""
    runs = runs_table(reports)
    # transposed: one column per run, since a run has many metrics
    titles, *rows = zip(runs.titles, *runs.rows, strict=True)
    tables = [Table(titles, rows), categories_table(reports)]
    warnings = [Text(line, style="yellow") for line in differences(reports)]
    return Group(*tables, *warnings)


def write(reports: Mapping[str, Json], directory: Path) -> list[Path]:
    """Write compare.html and compare.json to `directory`, which is created if it does not exist;
    return their paths.
    """
    page = render_page("Comparison of runs", f"{len(reports)} evaluations", _sections(reports))
    return write_files(directory, {"compare.html": page, "compare.json": reports})


def _sections(reports: Mapping[str, Json]) -> list[PageSection]:
    return [
        PageSection(lines=[f"Not comparable as they are: {line}" for line in differences(reports)]),
        PageSection(legend=list(reports), tables=[runs_table(reports)]),
        PageSection("Speed", figures=[speedup_chart(reports)]),
        PageSection(tables=[categories_table(reports)]),
    ]
