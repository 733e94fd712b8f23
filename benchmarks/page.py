"""Draw the picture of a result page, NAME.svg, from the entry `chart` of NAME.json.

python benchmarks/page.py [NAME ...]     # all committed results, or those named

An entry has the `title`, the `values` (name of each bar and its value, or [value, low, high] with
the ends of its interval), and may have `unit` (suffix of the values), `reference` (value of a
dashed line, usually the baseline's), `digits`, and `published` (value of a second bar, by name); or
`curves` (points by name) and the title `x`. A page has a question, the answer in two sentences, the
picture, one table, how it was measured, and limits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from checkout import ROOT

from medusa_train.io import replace_text
from medusa_train.pages.charts import Bar, Curve, bars, curves

RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"
#: Colours that are readable on a light and on a dark background, since a picture in Markdown can't
# ask which it is on.
STYLE = (
    "svg{font:12px system-ui,sans-serif;background:#fff}text{fill:#1a1d23}"
    ".tick{fill:#5b6270;font-size:11px}.value{font-weight:600}.grid{stroke:#d9dde4}"
    ".reference{stroke:#5b6270;stroke-dasharray:4 3}.whisker{stroke:#1a1d23;stroke-width:1.3}"
    ".s0{fill:#2f6fd6}.s1{fill:#d9822b}"
)
COLOURS = ("#2f6fd6", "#d9822b", "#2a9d63", "#b3456f", "#7a5cc9", "#8a6d3b", "#3b8ea5", "#6b7280")
CURVES = "".join(
    f".s{i}{{fill:{c}}}.curve.s{i}{{fill:none;stroke:{c}}}" for i, c in enumerate(COLOURS)
)


def draw(description: Mapping[str, Any]) -> str:
    """Draw a chart as the text of an SVG file; a bar that equals the reference has the second
    colour.
    """
    if "curves" in description:
        shown = [
            Curve(name, [(x, y) for x, y in points])
            for name, points in description["curves"].items()
        ]
        drawing = curves(
            shown, description["title"], description["x"], from_zero=False, width=720, height=360
        )
        return styled(drawing, STYLE + CURVES)
    options = {
        key: description[key] for key in ("unit", "reference", "digits") if key in description
    }
    reference, published = options.get("reference"), description.get("published", {})
    groups = [
        (
            name,
            [
                Bar(
                    value[0], value[1:] or None, int(value[0] is not None and value[0] == reference)
                ),
                *([Bar(published[name], None, 1)] if name in published else []),
            ],
        )
        for name, value in description["values"].items()
    ]
    return styled(bars(groups, description["title"], width=720, **options), STYLE)


def styled(drawing: str, style: str) -> str:
    """Make a drawing a file of its own, with its style sheet."""
    with_namespace = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return with_namespace.replace(">", f"><style>{style}</style>", 1) + "\n"


def main(names: Sequence[str]) -> None:
    """Draw the pictures of the committed results, or of those named."""
    for path in sorted(RESULTS.glob("*.json")):
        description = json.loads(path.read_text(encoding="utf-8")).get("chart")
        if description and (not names or path.stem in names):
            replace_text(PAGES / f"{path.stem}.svg", draw(description))


if __name__ == "__main__":
    main(sys.argv[1:])
