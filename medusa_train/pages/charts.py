"""Draw SVG charts: bars with intervals, columns, curves and draft trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

#: Number of colours for series and heads; further ones reuse them from the first.
PALETTE = 8


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map from values in `low..high` to pixels in `start..end`."""
    factor = (end - start) / (high - low) if high > low else 0.0
    return lambda value: start + (value - low) * factor


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` round numbers from `low` to `high`, in steps of 1, 2, 2.5 or 5 times a
    power of ten.
    """
    span = high - low
    if span <= 0:
        return [low]
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Format a number without trailing zeros."""
    return f"{value:.10g}"


def element(name: str, content: str = "", title: str = "", **attributes: object) -> str:
    """Render one element with an optional tooltip.

    Floats are rounded to 0.1; underscores in names become hyphens.
    """
    content += f"<title>{escape(title)}</title>" if title else ""
    shown = [
        f' {key.rstrip("_").replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for key, value in attributes.items()
    ]
    opened = f"<{name}{''.join(shown)}"
    return f"{opened}>{content}</{name}>" if content else f"{opened}/>"


def text(x: float, y: float, content: str, anchor: str = "start", cls: str = "label") -> str:
    """Render a line of text; `anchor` is start, middle or end."""
    return element("text", escape(content), x=float(x), y=float(y), text_anchor=anchor, class_=cls)


def line(x1: float, y1: float, x2: float, y2: float, cls: str = "grid") -> str:
    """Render a straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=cls)


def rect(x: float, y: float, width: float, height: float, cls: str, title: str = "") -> str:
    """Render a rectangle."""
    return element(
        "rect",
        title=title,
        x=float(x),
        y=float(y),
        width=float(width),
        height=height,
        rx=2,
        class_=cls,
    )


def circle(x: float, y: float, radius: float, cls: str, title: str = "") -> str:
    """Render a disc."""
    return element("circle", title=title, cx=float(x), cy=float(y), r=float(radius), class_=cls)


def drawing(width: float, height: float, parts: Iterable[str], label: str) -> str:
    """Render the `<svg>` element, at most `width` pixels wide; `label` is its text for screen
    readers.
    """
    attributes = (
        f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img"'
    )
    return f'<svg {attributes} aria-label="{escape(label)}">{"".join(parts)}</svg>'


def series(number: int) -> str:
    """Return the CSS class of a series' colour; series count from 0."""
    return f"s{number % PALETTE}"


_BAR = 15.0  # height of a bar
_GAP = 9.0  # between two groups of bars
_CROWDED = 24  # points of a curve above which they are drawn smaller
_LETTER = 6.6  # approximate width of a letter at the label size


@dataclass(frozen=True)
class Bar:
    """One bar: its value (None: not measured), the bounds of its interval, and the number of its
    colour.
    """

    value: float | None
    interval: Sequence[float] | None = None
    colour: int = 0


@dataclass(frozen=True)
class Curve:
    """One curve: points (x, y) by ascending x, and the x values that are marked with a ring."""

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
    """Draw horizontal bars in named groups, with intervals as whiskers and a dashed line at
    `reference`.
    """
    longest = int(width / 2 / _LETTER)
    groups = [
        (name if len(name) <= longest else f"{name[: longest - 1]}…", group)
        for name, group in groups
    ]
    left = 14 + _LETTER * max(len(name) for name, _ in groups)
    right = width - 14 - _LETTER * (digits + 4 + len(unit))
    ends = [
        bar.interval[1] if bar.interval else bar.value or 0.0
        for _, group in groups
        for bar in group
    ]
    top = max([*ends, reference or 0.0]) or 1.0
    x_of = scale(0.0, top, left, right)
    height = 8 + sum(len(group) * _BAR + _GAP for _, group in groups) + 18
    bottom = height - 20
    parts = [line(x_of(x), 4, x_of(x), bottom) for x in ticks(0.0, top)]
    parts += [text(x_of(x), height - 5, short(x) + unit, "middle", "tick") for x in ticks(0.0, top)]
    if reference is not None:
        parts.append(line(x_of(reference), 4, x_of(reference), bottom, "reference"))
    y = 8.0
    for name, group in groups:
        parts.append(text(left - 8, y + len(group) * _BAR / 2 + 4, name, "end"))
        for bar in group:
            parts += _bar(bar, x_of, y, name, unit, digits)
            y += _BAR
        y += _GAP
    return drawing(width, height, parts, label)


def _bar(
    bar: Bar, x_of: Callable[[float], float], y: float, name: str, unit: str, digits: int
) -> list[str]:
    middle = y + _BAR / 2 - 0.5
    if bar.value is None:
        return [text(x_of(0) + 4, middle + 4, "not measured", cls="tick")]
    tip = f"{name}: {bar.value:.{digits}f}{unit}"
    end = bar.value
    whisker = []
    if bar.interval:
        low, high = bar.interval
        tip += f" (95 % interval {low:.{digits}f}-{high:.{digits}f})"
        end = max(end, high)
        whisker = [line(x_of(low), middle, x_of(high), middle, "whisker")]
        whisker += [line(x_of(x), middle - 3, x_of(x), middle + 3, "whisker") for x in (low, high)]
    body = rect(x_of(0), y, x_of(bar.value) - x_of(0), _BAR - 2, series(bar.colour), tip)
    return [
        body,
        *whisker,
        text(x_of(end) + 6, middle + 4, f"{bar.value:.{digits}f}{unit}", cls="value"),
    ]


def curves(
    shown: Sequence[Curve],
    label: str,
    x_title: str,
    *,
    y_text: Callable[[float], str] = short,
    from_zero: bool = True,
    width: float = 400,
    height: float = 230,
) -> str:
    """Draw curves with a dot at every point and rings at marked points; several curves get a legend
    above.
    """
    points = [point for curve in shown for point in curve.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low = 0.0 if from_zero else min(ys) - 0.08 * ((max(ys) - min(ys)) or 1.0)
    high = max(ys) + 0.06 * ((max(ys) - low) or 1.0)
    rows = _legend(shown, width) if len(shown) > 1 else []
    top, bottom, left = (
        14.0 + 17 * len(rows),
        height - 40,
        20 + _LETTER * max(len(y_text(y)) for y in ticks(low, high)),
    )
    x_scale, y_scale = scale(min(xs), max(xs), left + 8, width - 16), scale(low, high, bottom, top)
    parts = [line(left, y_scale(y), width - 8, y_scale(y)) for y in ticks(low, high)]
    parts += [text(left - 6, y_scale(y) + 4, y_text(y), "end", "tick") for y in ticks(low, high)]
    x_ticks = sorted(set(xs)) if len(set(xs)) <= 10 else ticks(min(xs), max(xs), 7)
    parts += [text(x_scale(x), bottom + 15, short(x), "middle", "tick") for x in x_ticks]
    parts.append(text((left + width) / 2, height - 6, x_title, "middle"))
    parts += [part for row in rows for part in row]
    for number, curve in enumerate(shown):
        pixels = [(x_scale(x), y_scale(y)) for x, y in curve.points]
        points_text = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        parts.append(element("polyline", points=points_text, class_=f"curve {series(number)}"))
        for (x, y), (px, py) in zip(curve.points, pixels, strict=True):
            ringed = x in curve.marked
            radius = 5.5 if ringed else 2.6 if len(pixels) <= _CROWDED else 1.4
            tip = f"{curve.name}: {short(x)} -> {y_text(y)}"
            parts.append(
                circle(px, py, radius, f"{series(number)}{' ringed' if ringed else ''}", tip)
            )
    return drawing(width, height, parts, label)


def _legend(shown: Sequence[Curve], width: float) -> list[list[str]]:
    """Render the names of curves with their colours, in rows of at most `width` pixels."""
    rows: list[list[str]] = [[]]
    x = 20.0
    for number, curve in enumerate(shown):
        needed = 24 + _LETTER * len(curve.name)
        if x + needed > width and rows[-1]:
            rows.append([])
            x = 20.0
        y = 12.0 + 17 * (len(rows) - 1)
        rows[-1] += [
            rect(x, y - 8, 10, 10, series(number)),
            text(x + 14, y, curve.name, cls="tick"),
        ]
        x += needed
    return rows


_ROW = 74.0
_MARGIN = 62.0
_MIN_STEP = 21.0  # between two leaves, so that a percentage fits
_STEP_WITH_SIGN = 27.0  # below this the percent sign is left out

Path = tuple[int, ...]


def tree_drawing(
    paths: Sequence[Sequence[int]], accepted: Sequence[float], width: float = 1040
) -> str:
    """Draw a draft tree with one row per head; node size and edge width show the share of steps.

    Args:
        paths: rank paths of the nodes, prefix-closed.
        accepted: share of steps that accept each node, in the same order.
        width: of the drawing in pixels, if the leaves fit.
    """
    nodes = [tuple(path) for path in paths]
    share = dict(zip(nodes, accepted, strict=True))
    positions = _node_columns(nodes)
    leaves = 1 + max(positions.values())
    step = max(_MIN_STEP, min(70.0, (width - _MARGIN - 20) / leaves))
    at = {
        path: (_MARGIN + step * (column + 0.5), 26 + _ROW * len(path))
        for path, column in positions.items()
    }
    depth = max((len(path) for path in nodes), default=0)
    parts = [
        text(4, 30 + _ROW * k, f"head {k}" if k else "backbone", cls="tick")
        for k in range(depth + 1)
    ]
    for path in nodes:
        (x1, y1), (x2, y2) = at[path[:-1]], at[path]
        middle = (y1 + y2) / 2
        curve = f"M{x1:.1f},{y1:.1f}C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}"
        parts.append(element("path", d=curve, class_="edge", stroke_width=1 + 7 * share[path]))
    parts.append(circle(*at[()], 8, "root", "next token of the backbone: always accepted"))
    for path in nodes:
        parts += _node(path, at[path], share[path], step)
    return drawing(
        max(_MARGIN + step * leaves + 10, 300), 26 + _ROW * depth + 40, parts, "draft tree"
    )


def _node(path: Path, center: tuple[float, float], share: float, step: float) -> list[str]:
    x, y = center
    tip = (
        f"{list(path)}: top-{path[-1] + 1} token of head {len(path)}, accepted in {100 * share:.1f}"
        " % of the steps"
    )
    radius = min(4 + 9 * share, step / 2 - 1)
    number = f"{100 * share:.0f}" if share >= 0.0095 else f"{100 * share:.1f}".replace("0.", ".")
    shown = f"{number} %" if step >= _STEP_WITH_SIGN else number
    return [
        circle(x, y, radius, series(len(path) - 1), tip),
        text(x, y + radius + 12, shown, "middle", "node"),
    ]


def _node_columns(nodes: Sequence[Path]) -> Mapping[Path, float]:
    """Return the column of every node and of the root: leaves side by side, parents centered above
    their children.
    """
    children: dict[Path, list[Path]] = {path: [] for path in ((), *nodes)}
    for path in sorted(nodes):
        children[path[:-1]].append(path)
    columns: dict[Path, float] = {}
    leaves = 0
    # children before their parents, the last child first
    for path in sorted(children, reverse=True):
        if children[path]:
            columns[path] = (columns[children[path][0]] + columns[children[path][-1]]) / 2
        else:
            columns[path] = float(leaves)
            leaves += 1
    return {path: leaves - 1 - column for path, column in columns.items()}
