"""Draw charts as SVG by matplotlib: bars with intervals, curves and draft trees.

A drawing is inline in its page. Its colours are the page's CSS variables, so that it can be read on
a light and on a dark background. Tooltips are `<title>` elements.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

#: Number of colours for series and heads. More of them reuse the colours, beginning with the first.
PALETTE = 8
#: Colours by their variable in page.css; matplotlib draws with the values of the light page.
COLOURS = {
    "--ink": "#1a1d23",
    "--soft": "#5b6270",
    "--rule": "#d9dde4",
    "--c0": "#2f6fd6",
    "--c1": "#d9822b",
    "--c2": "#2e9e6b",
    "--c3": "#b8447f",
    "--c4": "#7a57c8",
    "--c5": "#1f9fb5",
    "--c6": "#a58a1c",
    "--c7": "#c2503f",
}
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["--rule"],
    "axes.grid": True,
    "axes.labelcolor": COLOURS["--ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": COLOURS["--rule"],
    "svg.fonttype": "none",
    "svg.hashsalt": "medusa",  # the same drawing is the same text
    "text.color": COLOURS["--ink"],
    "text.parse_math": False,
    "xtick.color": COLOURS["--rule"],
    "xtick.labelcolor": COLOURS["--soft"],
    "ytick.color": COLOURS["--rule"],
    "ytick.labelcolor": COLOURS["--soft"],
}
_LONGEST_NAME = 40  # characters of a group's name
_TIP = "tip "  # prefix of the ids of elements with a tooltip


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
    marked: Sequence[float] = ()


def _svg(label: str, width: float, height: float, paint: Callable[[Any], None]) -> str:
    """Return the `<svg>` element of what `paint` draws on axes. `width` and `height` are in points;
    `label` is the text for screen readers.
    """
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font of the layout lacks
        figure = Figure(figsize=(width / 72, height / 72))  # 72 points are an inch
        paint(figure.subplots())
        for artist in figure.findobj():
            artist.set_clip_on(False)  # names of clip paths would have to be unique in the page
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(
            buffer, format="svg", bbox_inches="tight", transparent=True, metadata=nothing
        )
    head, _, body = buffer.getvalue().partition("<svg ")[2].partition(">")
    box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', head)
    assert box is not None
    # Make tooltips, and remove all other ids, which several drawings on a page would share.
    body = re.sub(f'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    # A style sheet would apply to the whole page.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", body)
    body = body.replace("xlink:href", "href")
    for variable, colour in COLOURS.items():
        body = body.replace(colour, f"var({variable})")
    size = f"{float(box[1]):.0f}pt"  # the page's style sheet uses --width to keep text legible
    style = f"max-width:{size};--width:{size}"
    attributes = f'style="{style}" role="img" aria-label="{escape(label)}"'
    return f"<svg {box[0]} {attributes}>{body}".strip()


def _colour(number: int) -> str:
    return COLOURS[f"--c{number % PALETTE}"]


def bars(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    label: str,
    *,
    unit: str = "",
    digits: int = 2,
    reference: float | None = None,
    width: float = 400,
) -> str:
    """Draw horizontal bars in named groups, with intervals as whiskers and a dashed line at
    `reference`.
    """
    count = sum(len(group) for _, group in groups)
    height = 40 + 14 * count + 8 * len(groups)
    ink = COLOURS["--ink"]

    def paint(axes: Any) -> None:
        names: list[str] = []
        places: list[float] = []  # y of each name: the middle of its group
        y = 0.0
        for name, group in groups:
            names.append(name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…")
            places.append(y + (len(group) - 1) / 2)
            for bar in group:
                shown = "not measured"
                end = value = bar.value or 0.0
                if bar.value is not None:
                    shown = f"{value:.{digits}f}{unit}"
                    tip = f"{name}: {shown}"
                    if bar.interval:
                        low, high = bar.interval
                        tip += f" (95 % interval {low:.{digits}f}-{high:.{digits}f})"
                        end = max(end, high)
                        error = [[value - low], [high - value]]
                        axes.errorbar(value, y, xerr=error, color=ink, capsize=3, linewidth=1.2)
                    colour = _colour(bar.colour)
                    axes.barh(y, value, height=0.85, color=colour)[0].set_gid(_TIP + tip)
                offset = {"textcoords": "offset points", "va": "center", "weight": "bold"}
                axes.annotate(shown, (end, y), (6, 0), **offset)  # after the end of the bar
                y += 1
            y += 0.6
        axes.set_yticks(places, names, color=ink)
        axes.set_ylim(y - 0.9, -0.7)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(lambda x, place: f"{x:g}{unit}")
        axes.set_xlim(left=0)
        if reference is not None:
            axes.axvline(reference, linestyle="--", color=COLOURS["--soft"], gid=f"{_TIP}reference")

    return _svg(label, 0.6 * width, height, paint)


def curves(
    shown: Sequence[Curve],
    label: str,
    x_title: str,
    *,
    y_text: Callable[[float], str] = "{:.10g}".format,
    from_zero: bool = True,
    width: float = 400,
    height: float = 230,
) -> str:
    """Draw curves with a dot at every point and rings at marked points; several curves get a legend
    above.
    """

    def paint(axes: Any) -> None:
        for number, curve in enumerate(shown):
            colour = _colour(number)
            xs, ys = zip(*curve.points, strict=True)
            axes.plot(xs, ys, color=colour, label=curve.name, gid=_TIP + curve.name)
            for x, y in curve.points:
                ring = {"markersize": 8, "markeredgecolor": COLOURS["--ink"]}
                size = ring if x in curve.marked else {"markersize": 3}
                tip = f"{_TIP}{curve.name}: {x:.10g} -> {y_text(y)}"
                axes.plot(x, y, "o", color=colour, gid=tip, **size)
        axes.set_xlabel(x_title)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(lambda y, place: y_text(round(y, 10)))
        if from_zero:
            axes.set_ylim(bottom=0)
        if len(shown) > 1:
            axes.legend(
                loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False, fontsize=8
            )

    return _svg(label, 0.75 * width, 0.75 * height, paint)


Path = tuple[int, ...]


def tree_drawing(paths: Sequence[Sequence[int]], accepted: Sequence[float]) -> str:
    """Draw a draft tree with one row per head; node size and edge width show the share of steps.

    Args:
        paths: rank paths of the nodes, prefix-closed.
        accepted: share of steps that accept each node, in the same order.
    """
    nodes = [tuple(path) for path in paths]
    columns = _node_columns(nodes)
    leaves = 1 + max(columns.values())
    depth = max(len(path) for path in nodes)
    soft = COLOURS["--soft"]

    def paint(axes: Any) -> None:
        for path, share in zip(nodes, accepted, strict=True):
            x, y = columns[path], len(path)
            edge = [columns[path[:-1]], x], [y - 1, y]
            axes.plot(*edge, color=soft, alpha=0.4, linewidth=1 + 6 * share, zorder=0)
            tip = (
                f"{list(path)}: top-{path[-1] + 1} token of head {y}, accepted in"
                f" {100 * share:.1f} % of the steps"
            )
            size = 5 + 13 * share
            axes.plot(x, y, "o", markersize=size, color=_colour(y - 1), gid=_TIP + tip)
            # with a decimal if it would round to 0 or 1
            percent = f"{100 * share:.0f}" if share >= 0.0095 else f"{100 * share:.1f}"
            below = (0, -size / 2 - 9)
            axes.annotate(
                percent, (x, y), below, textcoords="offset points", ha="center", size=8, color=soft
            )
        tip = "next token of the target model: always accepted"
        axes.plot(columns[()], 0, "o", markersize=12, color=COLOURS["--ink"], gid=_TIP + tip)
        axes.set_yticks(
            range(depth + 1), ["target model", *[f"head {k}" for k in range(1, depth + 1)]]
        )
        axes.set_xticks([])
        axes.set_ylim(depth + 0.5, -0.3)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    width = max(16 * leaves, min(728, 50 * leaves))
    return _svg("draft tree", width, 52 * depth, paint)


def _node_columns(nodes: Sequence[Path]) -> Mapping[Path, float]:
    """Return the column of every node and of the root: leaves side by side, parents centered above
    their children.
    """
    children: dict[Path, list[Path]] = {path: [] for path in [(), *nodes]}
    for path in sorted(nodes):
        children[path[:-1]].append(path)
    columns: dict[Path, float] = {}
    leaves = iter(range(len(children)))

    def place(path: Path) -> float:
        below = [place(child) for child in children[path]]
        columns[path] = (below[0] + below[-1]) / 2 if below else next(leaves)
        return columns[path]

    place(())
    return columns
