"""Render calibration.html: the tree searches compared over tree size (like Medusa, Figure 6), and the chosen tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_train.pages.charts import Bar, Curve, bars, curves, tree_drawing
from medusa_train.pages.page import Figure, Section, render_page
from medusa_train.pages.table import Table, number

#: Labels of the searches.
NAMES = {
    "joint": "joint rank paths",
    "independent": "independent heads",
    "dense": "dense",
    "chain": "top-1 chain",
    "named": "given tree",
}
BY_CONSTRUCTION = (
    "The joint search also considers the independent tree of each size and keeps the better one on the answers that it "
    "is fitted to. That the joint curve lies at or above the independent one is therefore partly by construction."
)


def calibration_page(calibration: Mapping[str, Any], title: str) -> str:
    """Render the page of one calibration.

    Args:
        calibration: content of calibration.json.
        title: title of the page.
    """
    data = calibration["calibration"]
    basis = (
        f"Simulated on {data['tokens']:,} greedy tokens in {data['answers']} answers of {data['conversations']} "
        "conversations, with trees fitted to other conversations. Tokens per step measured on a bench differ."
    )
    cards = [
        Figure(
            "Acceleration rate over tree size",
            _search_curves(calibration, "tokens_per_step"),
            "Simulated tokens per step. Rings mark the size of each search's tree in the table below.",
        ),
        Figure(
            "Speed over tree size",
            _search_curves(calibration, "tokens_per_s"),
            "Simulated tokens per step over the measured latency of a step with a tree of that size.",
        ),
        Figure("Step latency", _latency_curve(calibration), "Measured latency of a decoding step by number of nodes."),
        Figure(
            "Best tree of each search",
            _candidate_bars(calibration),
            "Tokens per second: simulated tokens per step over the latency measured with this very tree, without "
            "prefill.",
        ),
        Figure(
            "The chosen tree",
            tree_drawing(calibration["medusa_choices"], calibration["accepted"]),
            f"{calibration['nodes']} nodes, {calibration['tokens_per_step']:.2f} tokens per step (simulated). Below "
            "each node: the share of steps in which it was accepted.",
            wide=True,
        ),
    ]
    section = Section(figures=cards, tables=[candidates_table(calibration)], remarks=[BY_CONSTRUCTION])
    return render_page(title, basis, [section])


def candidates_table(calibration: Mapping[str, Any]) -> Table:
    """Return every search's best tree, the chosen one first."""
    candidates = calibration["candidates"]
    columns = {
        "search": [NAMES.get(one["name"], one["name"]) for one in candidates],
        "nodes": [str(one["nodes"]) for one in candidates],
        "tokens per step": [number(one["tokens_per_step"], 3) for one in candidates],
        "ms per step": [number(one["step_ms"]) for one in candidates],
        "tokens /s": [number(one["tokens_per_s"], 1) for one in candidates],
    }
    return Table.of_columns(columns)


def _search_curves(calibration: Mapping[str, Any], key: str) -> str:
    best = {candidate["name"]: float(candidate["nodes"]) for candidate in calibration["candidates"]}
    series = [
        Curve(NAMES.get(name, name), [(size["nodes"], size[key]) for size in sizes], [best[name]])
        for name, sizes in calibration["searches"].items()
    ]
    return curves(series, key.replace("_", " "), "nodes", from_zero=False, width=520, height=320)


def _candidate_bars(calibration: Mapping[str, Any]) -> str:
    groups = [(NAMES.get(one["name"], one["name"]), [Bar(one["tokens_per_s"])]) for one in calibration["candidates"]]
    return bars(groups, "tokens per second of each search's best tree", digits=0, width=400)


def _latency_curve(calibration: Mapping[str, Any]) -> str:
    points = [(int(nodes), ms) for nodes, ms in calibration["latency_ms"].items()]
    return curves([Curve("latency", points)], "step latency", "nodes", y_text=lambda y: f"{y:g} ms")
