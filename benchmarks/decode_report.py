"""What `decode.py` found, as JSON, as Markdown with the goals that were set, and as a plot. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decode_case import Point, Timed
from decode_floor import Floor, Rates, Sizes
from machine import sentence, table

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        point: what was measured. ms: median, None where there is an obstacle. floor_ms: the least it can take.
        bound: what sets the floor, `bytes` or `operations`. calls: how many were timed.
    """

    point: Point
    ms: float | None = None
    floor_ms: float | None = None
    bound: str = ""
    calls: int = 0
    obstacle: str = ""

    @property
    def fraction(self) -> float | None:
        """Of the floor: 1 is as fast as the device can be; above, what was read lay in its caches."""
        return None if self.ms is None or self.floor_ms is None else self.floor_ms / self.ms

    @property
    def is_plain(self) -> bool:
        """Whether it is a step of plain decoding."""
        return self.point.what in ("step", "loop") and self.point.nodes == 0 and self.ms is not None


def floor_of(point: Point, sizes: Sizes, rates: Rates, itemsize: int) -> Floor:
    """The floor of a point; a loop's step with a tree needs the heads as well as the pass."""
    size, operations = 0, 0
    if point.what in ("step", "loop"):
        size += sizes.step_bytes(point.context, point.batch, itemsize)
        operations += sizes.step_operations(point.nodes + 1, point.context, point.batch)
    if point.heads:
        size += sizes.head_numbers(point.heads, shared=point.what == "shared heads") * itemsize
        operations += sizes.head_operations(point.heads, point.batch)
    return rates.floor(size, operations, point.dtype)


def rows_of(cases: Iterable[Timed], sizes: Sizes, rates: Rates, itemsizes: Mapping[str, int]) -> list[Row]:
    """One row for every case, measured or not."""
    rows = []
    for case in cases:
        if case.median is None:
            rows.append(Row(case.point, obstacle=case.obstacle or "not measured"))
            continue
        floor = floor_of(case.point, sizes, rates, itemsizes[case.point.dtype])
        rows.append(Row(case.point, 1000 * case.median, 1000 * floor.seconds, floor.bound, len(case.seconds)))
    return rows


class Overheads:
    """Latencies over those of plain decoding, for all rows together."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._own = {_setting(row.point): row.ms for row in rows if row.is_plain}
        self._heads = {_setting(row.point): row.ms for row in rows if row.point.what == "heads" and row.ms}
        self._fastest: dict[Key, Row] = {}
        for row in rows:
            if row.is_plain:
                place = _place(row.point)
                self._fastest[place] = min(self._fastest.get(place, row), row, key=lambda one: one.ms or 0.0)

    def own(self, row: Row) -> float | None:
        """Over the plain step in the same dtype, setting and threads."""
        return _ratio(row.ms, self._own.get(_setting(row.point)))

    def fastest_plain(self, row: Row) -> Row | None:
        """The plain step at the row's context and batch that takes least time, of all dtypes, settings and threads."""
        return self._fastest.get(_place(row.point))

    def fastest(self, row: Row) -> float | None:
        """Over the fastest plain step of all dtypes and settings."""
        plain = self.fastest_plain(row)
        return None if plain is None else _ratio(row.ms, plain.ms)

    def whole(self, row: Row) -> float | None:
        """A pass over a tree with the heads' proposal, over the plain step in the same setting."""
        if row.point.what != "step" or not row.point.nodes or row.ms is None:
            return None
        heads = self._heads.get(_setting(row.point))
        return None if heads is None else _ratio(row.ms + heads, self._own.get(_setting(row.point)))


def _kind(point: Point) -> str:
    return "loop" if point.what == "loop" else "step"


def _setting(point: Point) -> Key:
    return (_kind(point), point.shape, point.dtype, point.setting, point.threads, point.context, point.batch)


def _place(point: Point) -> Key:
    return (_kind(point), point.shape, point.context, point.batch)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def name_of(point: Point) -> str:
    """What was measured, in words."""
    if point.what == "step":
        return f"tree of {point.nodes}" if point.nodes else "plain step"
    if point.what == "loop":
        return f"loop, tree of {point.nodes}" if point.nodes else "loop, plain"
    return f"{point.heads} heads" + (", shared lm_head" if point.what == "shared heads" else "")


def write_report(out: Path, machine: Mapping[str, Any], rates: Rates, rows: Sequence[Row]) -> str:
    """Write decode.json, decode.md and, where matplotlib is installed, decode.png; returns the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    over = Overheads(rows)
    record = [
        {
            **asdict(row.point),
            "name": name_of(row.point),
            **{key: getattr(row, key) for key in ("ms", "calls", "floor_ms", "bound", "fraction", "obstacle")},
            "overhead": over.own(row),
            "over_fastest_plain": over.fastest(row),
            "with_heads": over.whole(row),
        }
        for row in rows
    ]
    content = {"machine": machine, "rates": asdict(rates), "rows": record}
    (out / "decode.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = markdown(machine, rates, rows)
    (out / "decode.md").write_text(text, encoding="utf-8")
    plot(out / "decode.png", rows)
    return text


def markdown(machine: Mapping[str, Any], rates: Rates, rows: Sequence[Row]) -> str:
    """The whole page."""
    measured = ", ".join(f"{dtype} {rate / 1e12:,.3g} Tflop/s" for dtype, rate in rates.matrix.items())
    parts = [
        "# Latency of decoding steps",
        sentence(dict(machine)),
        f"Measured here: reads {rates.bandwidth / 1e9:,.1f} GB/s; products {measured}. The floor of a row is the "
        "larger of the bytes of weights and cache that it must read and of its operations, over these. Overheads: "
        "over the plain step in the same dtype and setting; over the fastest plain step of all dtypes and settings; "
        "pass and heads together over the plain step. A fraction of the floor above 1 was read from caches.",
    ]
    if goals := goal_lines(machine, rows):
        parts += ["## Goals", "\n".join(goals)]
    over = Overheads(rows)
    places = dict.fromkeys((row.point.shape, row.point.batch, row.point.context) for row in rows)
    for shape, batch, context in places:
        some = [row for row in rows if (row.point.shape, row.point.batch, row.point.context) == (shape, batch, context)]
        title = f"## {shape}, batch {batch}, context {context:,}" if context else f"## {shape}"
        parts += [title, _table(some, over)]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row], over: Overheads) -> str:
    titles = ["dtype", "setting", "threads", "what", "ms", "floor ms", "of the floor", "set by", "overhead"]
    lines = []
    for row in rows:
        first = [row.point.dtype, row.point.setting, str(row.point.threads or ""), name_of(row.point)]
        if row.ms is None or row.floor_ms is None:
            lines.append([*first, row.obstacle, *[""] * 6])
            continue
        ratios = [_two(over.own(row)), _two(over.fastest(row)), _two(over.whole(row))]
        lines.append([*first, f"{row.ms:.3f}", f"{row.floor_ms:.3f}", _two(row.fraction), row.bound, *ratios])
    return table([*titles, "over fastest plain", "with heads"], lines, words=4)


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def goal_lines(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """The latencies that decoding is meant to reach, and whether it does.

    On a GPU: shape 7B, bfloat16, batch 1, context 1,024, in each setting. On a CPU: shapes tiny and 160M, batch 1, 16
    nodes, in the fastest dtype and setting over the fastest plain step of all.
    """
    over = Overheads(rows)
    if machine["kind"] == "cuda":
        at = [r for r in rows if (r.point.shape, r.point.dtype, r.point.batch) == ("7B", "bfloat16", 1)]
        at = [row for row in at if row.point.context == 1024 and row.ms is not None]
        return _gpu_goals(at, over)
    trees: dict[Key, Row] = {}
    for row in rows:
        point = row.point
        named = point.shape in ("tiny", "160M") and (point.what, point.nodes, point.batch) == ("step", 16, 1)
        if named and row.ms is not None:
            best = trees.get(_place(point), row)
            trees[_place(point)] = min(best, row, key=lambda one: one.ms or 0.0)
    return [_cpu_goal(tree, over) for tree in trees.values()]


def _cpu_goal(tree: Row, over: Overheads) -> str:
    plain, ratio, point = over.fastest_plain(tree), over.fastest(tree), tree.point
    where = f"{point.shape}, context {point.context:,}"
    if plain is None or ratio is None:
        return f"- {where}: no plain step was measured beside the tree of 16"
    text = f"{where}: a tree of 16 takes {ratio:.2f} of the fastest plain step, at most 1.25"
    floors = ""
    if tree.floor_ms and plain.floor_ms:  # what the ratio would be if nothing but the machine's rates counted
        floors = f"; their floors: {tree.floor_ms / plain.floor_ms:.2f}"
    return _goal(f"{text} (tree: {_took(tree)}; plain: {_took(plain)}{floors})", ratio <= 1.25)


def _took(row: Row) -> str:
    """Milliseconds, and how."""
    point = row.point
    threads = f", {point.threads} threads" if point.threads else ""
    return f"{row.ms:.3f} ms, {point.dtype} {point.setting}{threads}"


def _gpu_goals(rows: Sequence[Row], over: Overheads) -> list[str]:
    lines = []
    for row in rows:
        if row.fraction is None:
            continue
        times = 1 / row.fraction
        name = "7B" if row.point.setting == "stock" else f"7B {row.point.setting}"
        if row.is_plain and row.point.what == "step":
            lines.append(_goal(f"{name}: a plain step takes {times:.2f} of its floor, at most 1.25", times <= 1.25))
        elif row.point.what in ("heads", "shared heads"):
            text = f"{name}: {name_of(row.point)} take {times:.2f} of their floor, at most 1.25"
            lines.append(_goal(text, times <= 1.25))
        elif row.point.what == "step" and row.point.nodes == 64:
            ratio, whole = over.own(row), over.whole(row)
            if ratio is not None:
                lines.append(_goal(f"{name}: a tree of 64 takes {ratio:.2f} plain steps, at most 1.08", ratio <= 1.08))
            if whole is not None:
                text = f"{name}: with its heads {whole:.2f} plain steps, at most 1.12 with cheaper heads"
                lines.append(_goal(text, whole <= 1.12))
    return lines


def _goal(text: str, kept: bool) -> str:
    return f"- {'kept' if kept else '**missed**'}: {text}"


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Milliseconds over nodes at the smallest batch, a panel for each shape and context; needs matplotlib."""
    passes = [row for row in rows if row.point.what == "step" and row.ms is not None]
    try:
        import matplotlib
    except ImportError:
        return
    if not passes:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    least = min(row.point.batch for row in passes)
    passes = [row for row in passes if row.point.batch == least]
    shapes = list(dict.fromkeys(row.point.shape for row in passes))
    contexts = sorted({row.point.context for row in passes})
    size = (4.5 * len(contexts), 3.5 * len(shapes))
    figure, axes = pyplot.subplots(len(shapes), len(contexts), figsize=size, squeeze=False)
    for line, shape in enumerate(shapes):
        for column, context in enumerate(contexts):
            some = [row for row in passes if (row.point.shape, row.point.context) == (shape, context)]
            _panel(axes[line][column], some)
            axes[line][column].set_title(f"{shape}, context {context:,}, batch {least}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    """A line for each dtype, setting and number of threads that there are, and dashed the floor of each dtype."""
    kinds = list(dict.fromkeys(_line(row) for row in rows))
    several = [len({kind[place] for kind in kinds}) > 1 for place in range(3)]
    floors: set[str] = set()
    for number, kind in enumerate(kinds):
        some = sorted((row for row in rows if _line(row) == kind), key=lambda row: row.point.nodes)
        dtype, setting, threads = kind
        nodes, colour = [row.point.nodes for row in some], f"C{number}"
        words = [dtype, *([setting] if several[1] else []), *([f"{threads} threads"] if several[2] else [])]
        axes.plot(nodes, [row.ms for row in some], "o-", color=colour, label=", ".join(words))
        if dtype not in floors:
            floors.add(dtype)
            axes.plot(nodes, [row.floor_ms for row in some], "--", color=colour, label=f"{dtype}, floor")
    axes.set_xlabel("nodes")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    if axes.lines:  # nothing but cases that can't run leaves none
        axes.legend(fontsize=7)


def _line(row: Row) -> tuple[str, str, int]:
    return row.point.dtype, row.point.setting, row.point.threads
