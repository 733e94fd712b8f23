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
    factor = 0.0
    if high > low:
        factor = (end - start) / (high - low)
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
    steps = [factor * power for factor in (1, 2, 2.5, 5, 10)]
    step = next(step for step in steps if step >= rough * 0.999)
    # the tolerance keeps a bound that rounding puts just outside
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def short(value: float) -> str:
    """Format a number without trailing zeros."""
    return f"{value:.10g}"


def element(name: str, content: str = "", title: str = "", **attributes: object) -> str:
    """Render one element with an optional tooltip.

    Floats are rounded to 0.1; underscores in names become hyphens.
    """
    if title:
        content += f"<title>{escape(title)}</title>"
    opened = f"<{name}"
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")  # class_ is class, text_anchor text-anchor
        shown = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
        opened += f' {attribute}="{shown}"'
    if not content:
        return f"{opened}/>"
    return f"{opened}>{content}</{name}>"


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
    # 1. names take at most half of the width; left and right of the bars there is room for text
    longest = int(width / 2 / _LETTER)
    names = [_shortened(name, longest) for name, _ in groups]
    left = 14 + _LETTER * max(len(name) for name in names)
    right = width - 14 - _LETTER * (digits + 4 + len(unit))

    # 2. the scales: values across, one bar below the other
    top = reference or 0.0
    height = 26.0
    for _, group in groups:
        top = max(top, *[_end(bar) for bar in group])
        height += len(group) * _BAR + _GAP
    top = top or 1.0
    x_of = scale(0.0, top, left, right)
    bottom = height - 20

    # 3. the grid with its numbers, and the bars
    grid = ticks(0.0, top)
    parts = [line(x_of(x), 4, x_of(x), bottom) for x in grid]
    parts += [text(x_of(x), height - 5, short(x) + unit, "middle", "tick") for x in grid]
    if reference is not None:
        parts.append(line(x_of(reference), 4, x_of(reference), bottom, "reference"))
    y = 8.0
    for name, (_, group) in zip(names, groups, strict=True):
        parts.append(text(left - 8, y + len(group) * _BAR / 2 + 4, name, "end"))
        for bar in group:
            parts += _bar(bar, x_of, y, name, unit, digits)
            y += _BAR
        y += _GAP
    return drawing(width, height, parts, label)


def _shortened(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    return f"{name[: longest - 1]}…"


def _end(bar: Bar) -> float:
    """Return the largest value that a bar shows."""
    if bar.interval:
        return bar.interval[1]
    return bar.value or 0.0


def _bar(
    bar: Bar, x_of: Callable[[float], float], y: float, name: str, unit: str, digits: int
) -> list[str]:
    middle = y + _BAR / 2 - 0.5
    if bar.value is None:
        return [text(x_of(0) + 4, middle + 4, "not measured", cls="tick")]
    shown = f"{bar.value:.{digits}f}{unit}"
    tip = f"{name}: {shown}"
    end = bar.value
    whisker = []
    if bar.interval:
        low, high = bar.interval
        tip += f" (95 % interval {low:.{digits}f}-{high:.{digits}f})"
        end = max(end, high)
        whisker = [line(x_of(low), middle, x_of(high), middle, "whisker")]
        whisker += [line(x_of(x), middle - 3, x_of(x), middle + 3, "whisker") for x in (low, high)]
    length = x_of(bar.value) - x_of(0)
    body = rect(x_of(0), y, length, _BAR - 2, series(bar.colour), tip)
    return [body, *whisker, text(x_of(end) + 6, middle + 4, shown, cls="value")]


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
    # 1. the range of the values, with some room above, and below if it does not begin at zero
    xs: list[float] = []
    ys: list[float] = []
    for curve in shown:
        xs += [x for x, _ in curve.points]
        ys += [y for _, y in curve.points]
    low = 0.0
    if not from_zero:
        low = min(ys) - 0.08 * ((max(ys) - min(ys)) or 1.0)
    high = max(ys) + 0.06 * ((max(ys) - low) or 1.0)

    # 2. the scales: the legend above, numbers on the left and below
    legend = _legend(shown, width) if len(shown) > 1 else []
    top = 14.0 + 17 * len(legend)
    bottom = height - 40
    y_ticks = ticks(low, high)
    left = 20 + _LETTER * max(len(y_text(y)) for y in y_ticks)
    x_of = scale(min(xs), max(xs), left + 8, width - 16)
    y_of = scale(low, high, bottom, top)

    # 3. the grid with its numbers, the title of the axis, the legend
    x_ticks = sorted(set(xs))
    if len(x_ticks) > 10:
        x_ticks = ticks(min(xs), max(xs), 7)
    parts = [line(left, y_of(y), width - 8, y_of(y)) for y in y_ticks]
    parts += [text(left - 6, y_of(y) + 4, y_text(y), "end", "tick") for y in y_ticks]
    parts += [text(x_of(x), bottom + 15, short(x), "middle", "tick") for x in x_ticks]
    parts.append(text((left + width) / 2, height - 6, x_title, "middle"))
    for row in legend:
        parts += row

    # 4. the curves
    for number, curve in enumerate(shown):
        pixels = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve.points]
        colour = series(number)
        parts.append(element("polyline", points=" ".join(pixels), class_=f"curve {colour}"))
        radius = 2.6 if len(pixels) <= _CROWDED else 1.4
        for x, y in curve.points:
            tip = f"{curve.name}: {short(x)} -> {y_text(y)}"
            if x in curve.marked:
                parts.append(circle(x_of(x), y_of(y), 5.5, f"{colour} ringed", tip))
            else:
                parts.append(circle(x_of(x), y_of(y), radius, colour, tip))
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
    # 1. places: a column per leaf, a row per head, the root on top
    nodes = [tuple(path) for path in paths]
    columns = _node_columns(nodes)
    leaves = 1 + max(columns.values())
    step = max(_MIN_STEP, min(70.0, (width - _MARGIN - 20) / leaves))
    places = {}
    for path, column in columns.items():
        places[path] = (_MARGIN + step * (column + 0.5), 26 + _ROW * len(path))

    # 2. names of the rows
    depth = max(len(path) for path in places)
    parts = [text(4, 30, "backbone", cls="tick")]
    for head in range(1, depth + 1):
        parts.append(text(4, 30 + _ROW * head, f"head {head}", cls="tick"))

    # 3. edges, then nodes on top of them
    share_of = dict(zip(nodes, accepted, strict=True))
    for path in nodes:
        x1, y1 = places[path[:-1]]
        x2, y2 = places[path]
        middle = (y1 + y2) / 2
        curve = f"M{x1:.1f},{y1:.1f}C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}"
        parts.append(element("path", d=curve, class_="edge", stroke_width=1 + 7 * share_of[path]))
    parts.append(circle(*places[()], 8, "root", "next token of the backbone: always accepted"))
    for path in nodes:
        parts += _node(path, places[path], share_of[path], step)
    drawn_width = max(_MARGIN + step * leaves + 10, 300)
    return drawing(drawn_width, 66 + _ROW * depth, parts, "draft tree")


def _node(path: Path, center: tuple[float, float], share: float, step: float) -> list[str]:
    x, y = center
    percent = 100 * share
    tip = (
        f"{list(path)}: top-{path[-1] + 1} token of head {len(path)}, accepted in {percent:.1f}"
        " % of the steps"
    )
    radius = min(4 + 9 * share, step / 2 - 1)
    shown = f"{percent:.0f}"
    if share < 0.0095:  # would be 0 or 1
        shown = f"{percent:.1f}".replace("0.", ".")
    if step >= _STEP_WITH_SIGN:
        shown += " %"
    return [
        circle(x, y, radius, series(len(path) - 1), tip),
        text(x, y + radius + 12, shown, "middle", "node"),
    ]


def _node_columns(nodes: Sequence[Path]) -> Mapping[Path, float]:
    """Return the column of every node and of the root: leaves side by side, parents centered above
    their children.
    """
    children: dict[Path, list[Path]] = {(): []}
    for path in nodes:
        children[path] = []
    for path in sorted(nodes):
        children[path[:-1]].append(path)
    columns: dict[Path, float] = {}
    leaves = 0
    # children before their parents, the last child first
    for path in sorted(children, reverse=True):
        if children[path]:
            first = columns[children[path][0]]
            last = columns[children[path][-1]]
            columns[path] = (first + last) / 2
        else:
            columns[path] = float(leaves)
            leaves += 1
    return {path: leaves - 1 - column for path, column in columns.items()}
