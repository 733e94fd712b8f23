"""Experiments of `papers.py`: the schema of their YAML files (see benchmarks/README.md), and the
page, JSON file and picture that they produce.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from page import draw
from pydantic import BaseModel, ConfigDict
from shared import rounded, table, target_model_note, write_page

from medusa_train.errors import DataError
from medusa_train.evaluation.answer_scores import LEAST_QUESTIONS
from medusa_train.evaluation.metrics import (
    Counts,
    Interval,
    interval,
    pair_rows,
    ratio_of_rates,
    resample,
)
from medusa_train.io import replace_text

Record = dict[str, Any]
PAIRED_RESAMPLES = 10_000


class Spec(BaseModel):
    """A mapping in a YAML file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class Run(Spec):
    """A draft to train and measure; without `config`, only the target model is measured."""

    title: str
    config: str | None = None
    set: list[str] = []
    after: str | None = None
    share: float = 1.0
    shown: bool = True
    eval: Record = {}


class Evaluation(Spec):
    """An evaluation of every run, or only of `runs`. The lists in one entry of `sweep` are zipped,
    and the entries are combined with each other.
    """

    title: str = ""
    keys: Record
    sweep: list[dict[str, list[Any]]] = []
    runs: list[str] | None = None
    count: bool = False


class Column(Spec):
    """A column: a figure at the swept values `where`, or the mean of other columns."""

    title: str
    figure: str = ""
    where: Record = {}
    mean_of: list[str] = []
    digits: int = 2
    unit: str = ""


class Chart(Spec):
    """A chart of column `y`: one bar per row. With `x`, curves: rows whose titles differ only in
    the last part form one curve.
    """

    y: str
    x: str | None = None


class Published(Spec):
    """What the paper reports: model and hardware (`where`), figures by row and column, and claims
    in sentences.
    """

    where: str = ""
    rows: dict[str, dict[str, float | str]] = {}
    claims: list[str] = []


class Experiment(Spec):
    """A table or figure of a paper, or another comparison of drafts."""

    name: str
    title: str
    source: str = ""
    notes: list[str] = []
    set: list[str] = []
    epochs_of: str | None = None
    runs: dict[str, Run]
    evaluations: list[Evaluation]
    columns: list[Column]
    chart: Chart
    published: Published = Published()


@dataclass(frozen=True)
class Point:
    """A point to measure: a run, the number of an evaluation, the swept values, and all keys of the
    evaluation.
    """

    run: str
    evaluation: int
    swept: Record
    keys: Record


def keys_of_columns(experiment: Experiment) -> set[str]:
    """Return the swept keys that distinguish columns; all others distinguish rows."""
    return {name for column in experiment.columns for name in column.where}


def row_title(experiment: Experiment, point: Point, several: bool) -> str:
    """Return the title of a point's row: the run (if there are several), the evaluation, and the
    swept values that no column fixes.
    """
    evaluation = experiment.evaluations[point.evaluation]
    fixed = keys_of_columns(experiment)
    leading = [next(iter(entry)) for entry in evaluation.sweep]
    parts = [experiment.runs[point.run].title] if several or not evaluation.title else []
    parts += [evaluation.title] if evaluation.title else []
    for name in leading:
        if name not in fixed:
            parts.append(
                str(point.swept[name])
                if name in ("tree", "bench")
                else f"{name} {point.swept[name]}"
            )
    return ", ".join(parts)


def look_up(record: Record, path: str) -> Any:
    """Return a figure by its dotted path, in which list indices begin at 1; with its interval if it
    has one, as [value, low, high].
    """
    value: Any = record
    for part in path.split("."):
        if isinstance(value, list) and part.isdigit():
            value = value[int(part) - 1] if int(part) <= len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    ends = (record.get("intervals") or {}).get(path)
    return [value, *ends] if ends and value is not None else value


def first_of(cell: Any) -> Any:
    """Return a cell's value without its interval."""
    return cell[0] if isinstance(cell, list) else cell


def pivot(experiment: Experiment, figures: Sequence[tuple[Point, Record]]) -> dict[str, Record]:
    """Return the cells by row and column title."""
    rows: dict[str, Record] = {}
    several = (
        len({point.run for point, _ in figures}) > 1
        or sum(run.shown for run in experiment.runs.values()) > 1
    )
    reference = {
        (point.evaluation, str(point.swept)): record for point, record in reversed(figures)
    }
    for point, record in figures:
        first = reference[point.evaluation, str(point.swept)]
        cells = rows.setdefault(row_title(experiment, point, several), {})
        for column in experiment.columns:
            if column.figure and all(
                point.swept.get(key) == value for key, value in column.where.items()
            ):
                over = column.figure == "over"
                cells[column.title] = (
                    ratio(first, record) if over else look_up(record, column.figure)
                )
    for cells in rows.values():
        for column in experiment.columns:
            values = [first_of(cells.get(title)) for title in column.mean_of]
            if values and None not in values:
                cells[column.title] = sum(values) / len(values)
    return rows


def ratio(first: Record, second: Record) -> list[float] | None:
    """Return the second draft's tokens per step divided by the first's, with a paired bootstrap
    interval; None if they cannot be compared.
    """
    if first is second or "questions" not in first:
        return None
    pair = [
        {name: Counts(*sums) for name, sums in part["questions"].items()}
        for part in (first, second)
    ]
    try:
        value, ends = compare_rates(pair[0], pair[1])
    except DataError:
        return None  # too few questions
    return [value, *ends]


def compare_rates(
    first: Mapping[str, Counts], second: Mapping[str, Counts]
) -> tuple[float, Interval]:
    """Return the second run's rate (tokens over cost) divided by the first run's, with its 95 %
    interval.

    The interval is a paired percentile bootstrap over questions. A question that is easy to draft
    is easy for both runs, and resampling pairs removes this variance (Efron and Tibshirani, "An
    Introduction to the Bootstrap"). A rate is a ratio of sums over the drawn questions. The turns
    of a question are not independent, so they form one unit.

    Raises:
        DataError: the questions differ, or both runs have steps in fewer than `LEAST_QUESTIONS`
            questions.
    """
    if set(first) != set(second):
        unpaired = sorted(set(first) ^ set(second))[:5]
        raise DataError(
            f"only one of the two runs answered {', '.join(unpaired)}: measure both on the same"
            " questions"
        )
    pairs = []
    for name in sorted(first):
        if first[name].cost and second[name].cost:
            pairs.append((first[name], second[name]))
    if len(pairs) < LEAST_QUESTIONS:
        raise DataError(f"comparing two runs needs {LEAST_QUESTIONS} or more questions")
    rows = pair_rows(pairs)
    ratio = ratio_of_rates(rows.sum(dim=0))
    drawn_ratios = ratio_of_rates(resample(rows, PAIRED_RESAMPLES))  # [R]
    bounds = interval(drawn_ratios)
    assert bounds is not None  # every question has steps
    return float(ratio), bounds


def cell_text(cell: Any, column: Column) -> str:
    """Format a cell: [value, low, high], a number or text."""
    if isinstance(cell, list):
        value, low, high = (f"{one:.{column.digits}f}" for one in cell)
        return f"{value}{column.unit} [{low}, {high}]"
    if isinstance(cell, float):
        return f"{cell:.{column.digits}f}{column.unit}"
    return "-" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)


def chart_of(experiment: Experiment, rows: Mapping[str, Record]) -> Record:
    """Return the picture's description for `page.draw`."""
    chart, published = experiment.chart, experiment.published.rows
    title = f"{experiment.title}: {chart.y}"
    if chart.x is None:
        theirs = {
            name: one[chart.y]
            for name, one in published.items()
            if isinstance(one.get(chart.y), float)
        }
        ours = {
            name: cells[chart.y] for name, cells in rows.items() if cells.get(chart.y) is not None
        }
        values = {
            name: cell if isinstance(cell := ours.get(name), list) else [cell]
            for name in {**ours, **theirs}
        }
        return {"title": title, "values": values, "published": theirs}
    series: dict[str, list[list[float]]] = {}
    for name, cells in rows.items():
        point = [first_of(cells.get(chart.x)), first_of(cells.get(chart.y))]
        if None not in point:
            series.setdefault(name.rpartition(", ")[0] or name, []).append(point)
    return {
        "title": title,
        "x": chart.x,
        "curves": {name: sorted(points) for name, points in series.items()},
    }


def write_experiment(
    args: argparse.Namespace,
    experiment: Experiment,
    record: Record,
    commands: Sequence[Sequence[str]],
    figures: Sequence[tuple[Point, Record]],
) -> None:
    """Write NAME.md, NAME.json and NAME.svg with everything measured so far. In the table, the
    published figures are below ours.
    """
    rows, name, published = (
        pivot(experiment, figures),
        args.name or experiment.name,
        experiment.published,
    )
    lines = []
    for title in dict.fromkeys([*rows, *published.rows]):
        if title in rows:
            lines.append(
                [title, *(cell_text(rows[title].get(one.title), one) for one in experiment.columns)]
            )
        if theirs := published.rows.get(title):
            lines.append(
                [
                    f"*{title}, published*",
                    *(str(theirs.get(one.title, "-")) for one in experiment.columns),
                ]
            )
    chart = rounded(chart_of(experiment, rows))
    parts = (
        ["**Made with --quick: the drafts are not trained. It shows that everything runs.**"]
        if args.quick
        else []
    )
    parts += [
        experiment.source,
        (
            f"Target model: `{record['base_model']}`. Brackets: 95 %."
            f" {target_model_note(record['base_model'])}"
        ),
        "Speedups are over the same loop without a draft.",
    ]
    drawn = " In the picture ours are blue." if chart.get("published") else ""
    parts += [f"*published*: {published.where}.{drawn}"] if published.where else []
    parts.append(table(["", *(column.title for column in experiment.columns)], lines))
    args.out.mkdir(parents=True, exist_ok=True)
    if chart.get("values") or chart.get("curves"):
        parts.append(f"![{chart['title']}]({name}.svg)")
        replace_text(args.out / f"{name}.svg", draw(chart))
    parts.append("\n".join(f"- {text}" for text in [*published.claims, *experiment.notes]))
    parts.append("\n".join(f"- `medusa-train {shlex.join(words)}`" for words in commands))
    record = {**record, "rows": rounded(rows), "published": published.model_dump(), "chart": chart}
    write_page(args.out, name, experiment.title, record, parts)
