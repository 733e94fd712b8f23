"""Render compare.html: the figures of several evaluations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from medusa_train.evaluation.html_report.charts import PALETTE, Bar, Curve, bars, curves
from medusa_train.evaluation.html_report.layout import (
    CTAR_CAPTION,
    SPEEDUP_CAPTION,
    document,
    figure,
    figures_table,
    percent,
)

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def compare_page(reports: Mapping[str, Any], runs: Table, categories: Table, differences: Sequence[str]) -> str:
    """Render the page of a comparison.

    Args:
        reports: content of each report.json by run name, in the order to show.
        runs: titles and rows of the table of runs.
        categories: titles and rows of the table of speedups per category.
        differences: lines that name conditions in which the runs differ.
    """
    chips = "".join(
        f"<span class='chip h{number % PALETTE + 1}'>{escape(name)}</span>" for number, name in enumerate(reports)
    )
    cards = [_speedup_figure(reports), *_draft_figures(reports)]
    return document(
        "Comparison of runs",
        [
            "<h1>Comparison of runs</h1>",
            f"<p>{chips}</p>",
            "".join(f"<p><b>Not comparable as they stand:</b> {escape(line)}</p>" for line in differences),
            figures_table(*runs, overall=False),
            "<h2>Speed</h2>",
            f"<div class=cards>{''.join(cards)}</div>",
            figures_table(*categories, overall=False),
        ],
    )


def _speedup_figure(reports: Mapping[str, Any]) -> str:
    categories = dict.fromkeys(category for report in reports.values() for category in report["categories"])
    groups = [
        (category, [_bar(report["categories"].get(category), n) for n, report in enumerate(reports.values())])
        for category in categories
    ]
    groups.append(("overall", [_bar(report["overall"], n) for n, report in enumerate(reports.values())]))
    drawing = bars(groups, "speedup per category and run", unit="x", reference=1.0, width=760)
    return figure("Speedup per category", drawing, SPEEDUP_CAPTION, wide=True)


def _bar(figures: Mapping[str, Any] | None, colour: int) -> Bar:
    if figures is None:
        return Bar(None, colour=colour)
    return Bar(figures.get("speedup"), figures.get("intervals", {}).get("speedup"), colour)


def _draft_figures(reports: Mapping[str, Any]) -> list[str]:
    """Draw CTAR and top-1 accuracy where every run has them."""
    shares = {name: report["overall"].get("ctar") or [] for name, report in reports.items()}
    accuracy = {name: report["overall"].get("head_accuracy") or [] for name, report in reports.items()}
    figures = []
    if all(shares.values()):
        series = [Curve(name, list(enumerate(values, start=1))) for name, values in shares.items()]
        figures.append(figure("CTAR(w)", curves(series, "CTAR of every run", "w", y_text=percent), CTAR_CAPTION))
    if all(accuracy.values()):
        series = [Curve(name, [(k, row[0]) for k, row in enumerate(rows, 1)]) for name, rows in accuracy.items()]
        drawing = curves(series, "top-1 accuracy of every run", "head", y_text=percent)
        figures.append(figure("Top-1 accuracy per head", drawing, "On the answers of the bench."))
    return figures
