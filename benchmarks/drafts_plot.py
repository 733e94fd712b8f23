"""The picture of what `drafts.py` found: a pure function of its results; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from drafts_compare import CHAIN, EQUAL, OWN
from drafts_report import accuracies

Found = Mapping[str, Any]


def plot(path: Path, found: Found) -> None:
    """A row per bench: tokens per step, speedup, accuracy by depth, CTAR; nothing before the first bench is counted."""
    benches = list(found["counts"])
    if not benches:
        return
    height = 1.5 + 0.5 * len(found["cases"])
    figure, axes = plt.subplots(
        len(benches), 4, figsize=(22, height * len(benches)), layout="constrained", squeeze=False
    )
    for row, bench in zip(axes, benches, strict=True):
        _lengths(row[0], found, bench)
        _speeds(row[1], found, bench)
        _accuracy(row[2], found, bench)
        _windows(row[3], found, bench)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _drafts(found: Found, bench: str) -> list[tuple[str, Found]]:
    """Title and counts of every draft that the bench was counted with."""
    drafts = found["counts"][bench]["drafts"]
    return [(case["title"], drafts[case["name"]]) for case in found["cases"] if case["name"] in drafts]


def _bars(axes: Any, titles: list[str], groups: Mapping[str, list[Found]]) -> None:
    """Horizontal bars, a group per title; each value with its interval."""
    width = 0.8 / len(groups)
    for number, (name, values) in enumerate(groups.items()):
        places = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(titles))]
        known = [(place, one) for place, one in zip(places, values, strict=True) if one["value"] is not None]
        spread = [_spread(one) for _, one in known]
        axes.barh(
            [place for place, _ in known],
            [one["value"] for _, one in known],
            height=width,
            color=f"C{number}",
            label=name,
            xerr=[[low for low, _ in spread], [high for _, high in spread]],
            error_kw={"elinewidth": 0.8},
        )
    axes.set_yticks(range(len(titles)), titles)
    axes.set_ylim(len(titles) - 0.5, -0.5)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.legend(loc="lower right")


def _spread(one: Found) -> tuple[float, float]:
    if one["interval"] is None:
        return 0.0, 0.0
    low, high = one["interval"]
    return max(one["value"] - low, 0.0), max(high - one["value"], 0.0)


def _lengths(axes: Any, found: Found, bench: str) -> None:
    drafts = _drafts(found, bench)
    groups: dict[str, list[Found]] = {}
    for tree in (OWN, EQUAL, CHAIN):
        counted = [draft["trees"][tree] for _, draft in drafts]
        groups[tree] = [{"value": c["acceleration_rate"], "interval": c["acceleration_interval"]} for c in counted]
    _bars(axes, [title for title, _ in drafts], groups)
    axes.set_xlabel(f"{bench}: tokens per step, float32")


def _speeds(axes: Any, found: Found, bench: str) -> None:
    times = found["times"].get(bench)
    if times is None:
        axes.set_axis_off()
        return
    cases = [case for case in found["cases"] if case["name"] in times["drafts"]]
    missing = {"value": None, "interval": None}
    groups: dict[str, list[Found]] = {}
    for tree in (OWN, EQUAL, CHAIN):
        timed = [times["drafts"][case["name"]].get(tree) for case in cases]
        groups[tree] = [missing if one is None else _speed(one) for one in timed]
    _bars(axes, [case["title"] for case in cases], groups)
    axes.set_xlabel(f"{bench}: speedup over the faster plain decoding, {times['dtype']}")


def _speed(timed: Found) -> Found:
    return {"value": timed["speedup_over_fastest"], "interval": timed["intervals"]["speedup_over_fastest"]}


def _accuracy(axes: Any, found: Found, bench: str) -> None:
    for title, draft in _drafts(found, bench):
        shares = accuracies(draft)
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=title)
    axes.set_xlabel(f"{bench}: depth")
    axes.set_ylabel("first guess right")
    axes.legend()


def _windows(axes: Any, found: Found, bench: str) -> None:
    for title, draft in _drafts(found, bench):
        shares = draft["trees"][EQUAL]["ctar"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=title)
    axes.set_xlabel(f"{bench}: w")
    axes.set_ylabel("CTAR(w), equal trees")
    axes.legend()
