"""A calibration on one page: searches for a tree over its size, like the paper's Figure 6. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from medusa_train.evaluation.html_report.charts import Bar, Curve, bars, curves, tree_drawing
from medusa_train.evaluation.html_report.page import document, figure, figures_table

NAMES = {"joint": "joint rank paths", "independent": "independent heads", "dense": "dense", "chain": "top-1 chain"}


def calibration_page(found: Mapping[str, Any], title: str) -> str:
    """The page of calibration.json."""
    about = found["calibration"]
    rests = (
        f"{about['tokens']:,} greedy tokens in {about['answers']} answers of {about['conversations']} conversations; "
        "every rate is of conversations that the tree was not fitted to."
    )
    cards = [
        figure(
            "Acceleration rate over tree size",
            _curves(found, "tokens_per_step"),
            "Expected tokens per step. Ringed: where each search has its most tokens per second.",
        ),
        figure(
            "Speed over tree size",
            _curves(found, "tokens_per_s"),
            "Expected tokens per second: tokens per step over the measured latency of a step of that size.",
        ),
        figure("Step latency", _latency(found), "Measured milliseconds of a decoding step over the number of nodes."),
        figure(
            "Side by side",
            bars(
                [(NAMES.get(one["name"], one["name"]), [Bar(one["tokens_per_s"])]) for one in found["candidates"]],
                "tokens per second of each search's best tree",
                digits=0,
                width=400,
            ),
            "Each search's best tree, timed in turns; prefill left out.",
        ),
        figure(
            "The tree that was chosen",
            tree_drawing(found["medusa_choices"], found["accepted"]),
            f"{found['nodes']} nodes, {found['tokens_per_step']:.2f} tokens per step expected; per node, the share of "
            "the steps in which it was accepted.",
            wide=True,
        ),
    ]
    rows = [_row(one) for one in found["candidates"]]
    titles = ["search", "nodes", "tokens per step", "ms per step", "tokens /s"]
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f"<p class=soft>{escape(rests)}</p>",
            f"<div class='cards two'>{''.join(cards)}</div>",
            figures_table(titles, rows, overall=False),
        ],
    )


def _row(one: Mapping[str, Any]) -> list[str]:
    figures = (f"{one['tokens_per_step']:.3f}", f"{one['step_ms']:.2f}", f"{one['tokens_per_s']:.1f}")
    return [NAMES.get(one["name"], one["name"]), str(one["nodes"]), *figures]


def _curves(found: Mapping[str, Any], key: str) -> str:
    best = {one["name"]: float(one["nodes"]) for one in found["candidates"]}
    drawn = [
        Curve(NAMES.get(name, name), [(size["nodes"], size[key]) for size in sizes], [best[name]])
        for name, sizes in found["searches"].items()
    ]
    return curves(drawn, key.replace("_", " "), "nodes", from_zero=False, width=520, height=320)


def _latency(found: Mapping[str, Any]) -> str:
    points = [(int(nodes), ms) for nodes, ms in found["latency_ms"].items()]
    return curves([Curve("ms", points)], "step latency", "nodes", y_text=lambda y: f"{y:g} ms")
