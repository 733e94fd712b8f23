"""Draw the picture of a result page, NAME.svg, from the entry `chart` of NAME.json.

python benchmarks/page.py [NAME ...]     # the named results; without names all committed results

An entry `chart` describes bars or curves, and has a `title`. Keys of bars:

- `values`: for each bar its name and its value, or [value, low, high] with the ends of its interval
- `unit` (optional): suffix of the values
- `reference` (optional): value of a dashed line, usually the baseline's
- `digits` (optional): digits after the point
- `published` (optional): by name, the value of a second bar

Keys of curves: `curves` (points by name) and `x` (title of the x axis).

A result page consists of a question, the answer in two sentences, the picture, one table, how it
was measured, and limits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from checkout import ROOT

from medusa_train.io import replace_text
from medusa_train.pages.charts import COLOURS, Bar, Curve, bars, curves

RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"


def draw(description: Mapping[str, Any]) -> str:
    """Draw a chart; return the text of an SVG file. A bar whose value equals the reference has the
    second color.
    """
    if "curves" in description:
        shown = [
            Curve(name, [(x, y) for x, y in points])
            for name, points in description["curves"].items()
        ]
        drawing = curves(
            shown, description["title"], description["x"], from_zero=False, width=720, height=360
        )
        return as_file(drawing)
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
    return as_file(bars(groups, description["title"], width=720, **options))


def as_file(drawing: str) -> str:
    """Turn a drawing into a standalone SVG file with the light page's colors, because an image in
    Markdown cannot adapt to the page's background.
    """
    for variable, colour in COLOURS.items():
        drawing = drawing.replace(f"var({variable})", colour)
    attributes = 'xmlns="http://www.w3.org/2000/svg" style="background:#fff;'
    return drawing.replace('style="', attributes, 1) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Draw the pictures of the named results; without names of all committed results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args(arguments).names
    charts = {}
    for path in sorted(RESULTS.glob("*.json")):
        if description := json.loads(path.read_text(encoding="utf-8")).get("chart"):
            charts[path.stem] = description
    if unknown := set(names) - set(charts):
        parser.error(f"no chart: {', '.join(sorted(unknown))}; there are {', '.join(charts)}")
    for name in names or charts:
        replace_text(PAGES / f"{name}.svg", draw(charts[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
