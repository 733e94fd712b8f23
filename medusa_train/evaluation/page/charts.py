"""Bars with intervals, columns and curves as SVG. Knows no figure by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medusa_train.evaluation.page.svg import Scale, circle, drawing, line, polyline, rect, series, short, text, ticks

_BAR = 15.0  # height of a bar
_GAP = 9.0  # between two groups of bars
_CROWDED = 24  # points of a curve beyond which they are drawn small
_LETTER = 6.6  # width of a letter at the label size, roughly


@dataclass(frozen=True)
class Bar:
    """One bar: its value (None: not measured), the ends of its interval, and which colour it has."""

    value: float | None
    interval: Sequence[float] | None = None
    colour: int = 0


@dataclass(frozen=True)
class Curve:
    """One curve: its points (x, y) by rising x, and the x of those that are marked out."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: Sequence[float] = field(default=())


def bars(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    label: str,
    *,
    unit: str = "",
    digits: int = 2,
    reference: float | None = None,
    width: float = 560,
) -> str:
    """Horizontal bars in named groups, one below the other, their intervals as whiskers.

    Args:
        groups: name and bars. label: what is shown. unit: behind every value. reference: where a dashed line stands.
    """
    left = 14 + _LETTER * max(len(name) for name, _ in groups)
    right = width - 14 - _LETTER * (digits + 4 + len(unit))
    shown = [bar for _, group in groups for bar in group]
    top = max([*(b.interval[1] if b.interval else b.value or 0.0 for b in shown), reference or 0.0]) or 1.0
    scale = Scale(0.0, top, left, right)
    height = 8 + sum(len(group) * _BAR + _GAP for _, group in groups) + 18
    bottom = height - 20
    parts = [line(scale(x), 4, scale(x), bottom) for x in ticks(0.0, top)]
    parts += [text(scale(x), height - 5, short(x) + unit, "middle", "tick") for x in ticks(0.0, top)]
    if reference is not None:
        parts.append(line(scale(reference), 4, scale(reference), bottom, "reference"))
    y = 8.0
    for name, group in groups:
        parts.append(text(left - 8, y + len(group) * _BAR / 2 + 4, name, "end"))
        for bar in group:
            parts += _bar(bar, scale, y, name, unit, digits)
            y += _BAR
        y += _GAP
    return drawing(width, height, parts, label)


def _bar(bar: Bar, scale: Scale, y: float, name: str, unit: str, digits: int) -> list[str]:
    middle = y + _BAR / 2 - 0.5
    if bar.value is None:
        return [text(scale(0) + 4, middle + 4, "not measured", cls="tick")]
    tip = f"{name}: {bar.value:.{digits}f}{unit}"
    end = bar.value
    whisker = []
    if bar.interval:
        low, high = bar.interval
        tip += f" (95 % interval {low:.{digits}f}-{high:.{digits}f})"
        end = max(end, high)
        whisker = [line(scale(low), middle, scale(high), middle, "whisker")]
        whisker += [line(scale(x), middle - 3, scale(x), middle + 3, "whisker") for x in (low, high)]
    drawn = rect(scale(0), y, scale(bar.value) - scale(0), _BAR - 2, series(bar.colour), tip)
    return [drawn, *whisker, text(scale(end) + 6, middle + 4, f"{bar.value:.{digits}f}{unit}", cls="value")]


def columns(shares: Sequence[float], label: str, x_title: str, *, width: float = 400, height: float = 230) -> str:
    """Upright bars for shares of 1, numbered from 0, with their percentages above them."""
    left, bottom, top = 44.0, height - 40, 22.0
    high = max([*shares, 0.01])
    scale = Scale(0.0, high, bottom, top)
    step = (width - left - 10) / max(len(shares), 1)
    parts = [line(left, scale(y), width - 10, scale(y)) for y in ticks(0.0, high, 4)]
    parts += [text(left - 6, scale(y) + 4, f"{100 * y:g} %", "end", "tick") for y in ticks(0.0, high, 4)]
    for number, share in enumerate(shares):
        x = left + number * step
        tip = f"{number}: {100 * share:.1f} %"
        parts.append(rect(x + step * 0.12, scale(share), step * 0.76, bottom - scale(share), series(0), tip))
        parts.append(text(x + step / 2, scale(share) - 5, f"{100 * share:.0f} %", "middle", "value"))
        parts.append(text(x + step / 2, bottom + 15, str(number), "middle", "tick"))
    parts.append(text((left + width) / 2, height - 6, x_title, "middle"))
    return drawing(width, height, parts, label)


def curves(
    drawn: Sequence[Curve],
    label: str,
    x_title: str,
    *,
    y_text: Callable[[float], str] = short,
    from_zero: bool = True,
    width: float = 400,
    height: float = 230,
) -> str:
    """Curves with a point at every value, a legend above where there is more than one, and marked points ringed."""
    points = [point for curve in drawn for point in curve.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low = 0.0 if from_zero else min(ys) - 0.08 * ((max(ys) - min(ys)) or 1.0)
    high = max(ys) + 0.06 * ((max(ys) - low) or 1.0)
    rows = _legend(drawn, width) if len(drawn) > 1 else []
    top, bottom, left = 14.0 + 17 * len(rows), height - 40, 20 + _LETTER * max(len(y_text(y)) for y in ticks(low, high))
    x_scale, y_scale = Scale(min(xs), max(xs), left + 8, width - 16), Scale(low, high, bottom, top)
    parts = [line(left, y_scale(y), width - 8, y_scale(y)) for y in ticks(low, high)]
    parts += [text(left - 6, y_scale(y) + 4, y_text(y), "end", "tick") for y in ticks(low, high)]
    x_ticks = sorted(set(xs)) if len(set(xs)) <= 10 else ticks(min(xs), max(xs), 7)
    parts += [text(x_scale(x), bottom + 15, short(x), "middle", "tick") for x in x_ticks]
    parts.append(text((left + width) / 2, height - 6, x_title, "middle"))
    parts += [part for row in rows for part in row]
    for number, curve in enumerate(drawn):
        placed = [(x_scale(x), y_scale(y)) for x, y in curve.points]
        parts.append(polyline(placed, f"curve {series(number)}"))
        for (x, y), (px, py) in zip(curve.points, placed, strict=True):
            ringed = x in curve.marked
            radius = 5.5 if ringed else 2.6 if len(placed) <= _CROWDED else 1.4
            tip = f"{curve.name}: {short(x)} -> {y_text(y)}"
            parts.append(circle(px, py, radius, f"{series(number)}{' ringed' if ringed else ''}", tip))
    return drawing(width, height, parts, label)


def _legend(drawn: Sequence[Curve], width: float) -> list[list[str]]:
    """Rows of coloured names."""
    rows: list[list[str]] = [[]]
    x = 20.0
    for number, curve in enumerate(drawn):
        room = 24 + _LETTER * len(curve.name)
        if x + room > width and rows[-1]:
            rows.append([])
            x = 20.0
        y = 12.0 + 17 * (len(rows) - 1)
        rows[-1] += [rect(x, y - 8, 10, 10, series(number)), text(x + 14, y, curve.name, cls="tick")]
        x += room
    return rows
