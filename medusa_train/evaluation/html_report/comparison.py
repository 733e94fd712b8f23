"""Several evaluations on one page. A pure function of their report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from medusa_train.evaluation.html_report.charts import PALETTE, Bar, Curve, bars, curves
from medusa_train.evaluation.html_report.page import document, figure, figures_table

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def compare_page(reports: Mapping[str, Any], runs: Table, categories: Table, differing: Sequence[str]) -> str:
    """The page of a comparison.

    Args:
        reports: by name, in the order to show. runs, categories: the tables (titles, rows).
        differing: lines that say which conditions were not the same.
    """
    chips = "".join(
        f"<span class='chip h{number % PALETTE + 1}'>{escape(name)}</span>" for number, name in enumerate(reports)
    )
    cards = [_speed(reports), *_drafts(reports)]
    return document(
        "comparison",
        [
            "<h1>Comparison</h1>",
            f"<p>{chips}</p>",
            "".join(f"<p><b>Mind:</b> {escape(line)}</p>" for line in differing),
            figures_table(*runs, overall=False),
            "<h2>Speed</h2>",
            f"<div class=cards>{''.join(cards)}</div>",
            figures_table(*categories, overall=False),
        ],
    )


def _speed(reports: Mapping[str, Any]) -> str:
    names: dict[str, None] = {}
    for report in reports.values():
        names.update(dict.fromkeys(report["categories"]))
    groups = [(name, [_bar(r["categories"].get(name), n) for n, r in enumerate(reports.values())]) for name in names]
    groups.append(("overall", [_bar(report["overall"], n) for n, report in enumerate(reports.values())]))
    drawing = bars(groups, "speedup per category and run", unit="x", reference=1.0, width=760)
    caption = "Total tokens per second over the loop with the empty tree; whiskers: 95 % bootstrap over questions."
    return figure("Speedup per category", drawing, caption, wide=True)


def _bar(figures: Mapping[str, Any] | None, colour: int) -> Bar:
    if figures is None:
        return Bar(None, colour=colour)
    return Bar(figures.get("speedup"), figures.get("intervals", {}).get("speedup"), colour)


def _drafts(reports: Mapping[str, Any]) -> list[str]:
    """The curves that every run with a draft has, one below the other."""
    shares = {name: report["overall"].get("ctar") or [] for name, report in reports.items()}
    accuracy = {name: report["overall"].get("head_accuracy") or [] for name, report in reports.items()}
    figures = []
    if all(shares.values()):
        drawn = [Curve(name, list(enumerate(values, start=1))) for name, values in shares.items()]
        drawing = curves(drawn, "CTAR of every run", "w", y_text=_percent)
        figures.append(figure("CTAR(w)", drawing, "Share of the steps that accepted at least w draft tokens."))
    if all(accuracy.values()):
        drawn = [Curve(name, [(k, row[0]) for k, row in enumerate(rows, 1)]) for name, rows in accuracy.items()]
        drawing = curves(drawn, "top-1 accuracy of every run", "head", y_text=_percent)
        figures.append(figure("Top-1 accuracy per head", drawing, "Along the answers of the bench."))
    return figures


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
