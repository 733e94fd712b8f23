"""SVG in small pieces: elements, scales, ticks. Knows no chart and no figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

#: Colours of series and heads; more of them start anew with the first.
PALETTE = 8


@dataclass(frozen=True)
class Scale:
    """A linear map from values `low..high` to pixels `start..end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Pixels of a value."""
        if self.high == self.low:
            return self.start
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many, in steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def short(value: float) -> str:
    """A tick's text without needless zeros."""
    return f"{value:.10g}"


def element(name: str, content: str = "", **attributes: object) -> str:
    """One element. Numbers are rounded to a tenth; `cls` stands for class, underscores in names for hyphens."""
    shown = []
    for key, value in attributes.items():
        if value is None:
            continue
        text = f"{value:.1f}" if isinstance(value, float) else escape(str(value), quote=True)
        shown.append(f' {"class" if key == "cls" else key.replace("_", "-")}="{text}"')
    opened = f"<{name}{''.join(shown)}"
    return f"{opened}>{content}</{name}>" if content else f"{opened}/>"


def text(x: float, y: float, content: str, anchor: str = "start", cls: str = "label") -> str:
    """A line of text; `anchor` is start, middle or end."""
    return element("text", escape(content), x=float(x), y=float(y), text_anchor=anchor, cls=cls)


def line(x1: float, y1: float, x2: float, y2: float, cls: str = "grid") -> str:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), cls=cls)


def rect(x: float, y: float, width: float, height: float, cls: str, title: str = "") -> str:
    """A rectangle, with a tooltip where there is one."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    return element(
        "rect", tip, x=float(x), y=float(y), width=float(max(width, 0)), height=float(max(height, 0)), rx=2, cls=cls
    )


def circle(x: float, y: float, radius: float, cls: str, title: str = "") -> str:
    """A disc, with a tooltip where there is one."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    return element("circle", tip, cx=float(x), cy=float(y), r=float(radius), cls=cls)


def polyline(points: Sequence[tuple[float, float]], cls: str) -> str:
    """Joined line segments."""
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), cls=cls)


def drawing(width: float, height: float, parts: Iterable[str], label: str) -> str:
    """The whole `<svg>`, as wide as its place on the page at most; `label` is read out to those who can't see it."""
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{escape(label, quote=True)}">{body}</svg>'
    )


def series(number: int) -> str:
    """The class that gives a series its colour, counted from 0."""
    return f"s{number % PALETTE}"
