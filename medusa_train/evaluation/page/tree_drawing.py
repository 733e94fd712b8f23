"""The tree of guesses drawn, with the share of steps that accept each node. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from medusa_train.evaluation.page.svg import circle, drawing, element, series, text

_ROW = 74.0
_MARGIN = 62.0
_NARROWEST = 21.0  # between two leaves, so that a percentage fits
_NARROW = 27.0  # below this the percent sign is left out

Path = tuple[int, ...]


def tree_drawing(paths: Sequence[Sequence[int]], accepted: Sequence[float] | None, width: float = 1040) -> str:
    """Draw a tree from the root down; a row for each head, node size and edge width by the share of steps.

    Args:
        paths: rank paths, prefix-closed. accepted: share of steps that accept each, in the same order; None: unknown.
    """
    nodes = [tuple(path) for path in paths]
    share = dict(zip(nodes, accepted if accepted is not None else [0.0] * len(nodes), strict=True))
    places = _columns(nodes)
    leaves = 1 + max(places.values())
    step = max(_NARROWEST, min(70.0, (width - _MARGIN - 20) / leaves))
    at = {path: (_MARGIN + step * (place + 0.5), 26 + _ROW * len(path)) for path, place in places.items()}
    depth = max((len(path) for path in nodes), default=0)
    parts = [
        text(4, 30 + _ROW * level, f"head {level}" if level else "backbone", cls="tick") for level in range(depth + 1)
    ]
    for path in nodes:
        (x1, y1), (x2, y2) = at[path[:-1]], at[path]
        middle = (y1 + y2) / 2
        parts.append(
            element(
                "path",
                d=f"M{x1:.1f},{y1:.1f}C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}",
                cls="edge",
                stroke_width=1 + 7 * share[path],
            )
        )
    parts.append(circle(*at[()], 8, "root", "the backbone's own next token: always accepted"))
    for path in nodes:
        parts += _node(path, at[path], None if accepted is None else share[path], step)
    return drawing(max(_MARGIN + step * leaves + 10, 300), 26 + _ROW * depth + 40, parts, "tree of guesses")


def _node(path: Path, place: tuple[float, float], share: float | None, step: float) -> list[str]:
    x, y = place
    tip = f"{list(path)}: guess {path[-1] + 1} of head {len(path)}"
    if share is None:
        return [circle(x, y, 5, series(len(path) - 1), tip)]
    tip += f", accepted in {100 * share:.1f} % of the steps"
    radius = min(4 + 9 * share, step / 2 - 1)
    number = f"{100 * share:.0f}" if share >= 0.0095 else f"{100 * share:.1f}".replace("0.", ".")
    shown = f"{number} %" if step >= _NARROW else number
    return [circle(x, y, radius, series(len(path) - 1), tip), text(x, y + radius + 12, shown, "middle", "node")]


def _columns(nodes: Sequence[Path]) -> Mapping[Path, float]:
    """The column of every node and of the root: leaves side by side, a parent in the middle above its children."""
    below: dict[Path, list[Path]] = {path: [] for path in ((), *nodes)}
    for path in sorted(nodes):
        below[path[:-1]].append(path)
    places: dict[Path, float] = {}
    leaves = 0
    for path in sorted(below, reverse=True):  # children before their parents, the last child first
        if below[path]:
            places[path] = (places[below[path][0]] + places[below[path][-1]]) / 2
        else:
            places[path] = float(leaves)
            leaves += 1
    return {path: leaves - 1 - place for path, place in places.items()}
