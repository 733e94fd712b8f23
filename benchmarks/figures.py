"""Write the figures of README, docs/ and the result pages from the committed JSON.

python benchmarks/figures.py            # write the figures
python benchmarks/figures.py --check    # list the pages that differ; exit code 1 if there are any

`templates/` has a Jinja template for each page with figures, under the page's path. A template
reads the JSON files of `results/` by name and writes the blocks of the page. A block is the text
between `<!-- NAME:start -->` and `<!-- NAME:end -->`. Everything else is edited in the page itself.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkout import ROOT
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from medusa_train.io import replace_text

TEMPLATES = ROOT / "benchmarks" / "templates"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- (\w+):start -->\n.*?\n<!-- \1:end -->", re.DOTALL)


def fixed(value: float, digits: int = 2) -> str:
    """Write a number with `digits` digits after the point."""
    return f"{value:.{digits}f}"


def ratio(
    value: float, interval: Sequence[float] | None = None, digits: int = 3, unit: str = ""
) -> str:
    """Write a ratio: 1.085, or with its interval 1.085 [1.073, 1.098]."""
    text = f"{value:.{digits}f}{unit}"
    if interval is None:
        return text
    low, high = interval
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def times(value: float, interval: Sequence[float] | None = None) -> str:
    """Write a ratio of speeds: 1.36x, or with its interval 1.36x [1.31, 1.41]."""
    return ratio(value, interval, digits=2, unit="x")


def over(values: Sequence[Any] | None, digits: int = 3) -> str:
    """Write a ratio stored as [value, low, high] or [value, [low, high]]; a dash for None."""
    if values is None:
        return "-"
    value, *interval = values
    if isinstance(interval[0], list):
        interval = interval[0]
    return ratio(value, interval, digits)


def speed(value: float) -> str:
    """Write tokens per second: without decimals from 100 on, else with one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def shares(values: Iterable[float]) -> str:
    """Write shares in one cell: 0.52 0.31 0.19."""
    return " ".join(f"{value:.2f}" for value in values)


def equal(overall: Mapping[str, Any], separator: str = "/") -> str:
    """Write how many of the compared answers are equal in bfloat16; a dash if none was compared.
    Older reports compared all answers.
    """
    if overall["equal_answers_bf16"] is None:
        return "-"
    compared = overall.get("compared_answers_bf16", overall["answers"])
    return f"{overall['equal_answers_bf16']}{separator}{compared}"


def title(name: str) -> str:
    """Return the heading of a result page, which is the question that it answers."""
    page = ROOT / "docs" / "results" / f"{name}.md"
    return page.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


FILTERS = {
    "change": lambda value: f"{value:+.1%}",
    "equal": equal,
    "fixed": fixed,
    "millions": lambda count: f"{count / 1e6:.1f}M",
    "over": over,
    "ratio": ratio,
    "shares": shares,
    "signed": lambda value: f"{value:+.2f}",
    "speed": speed,
    "thousands": lambda value: f"{value:,.0f}",
    "times": times,
    "title": title,
}


def environment() -> Environment:
    """Return a Jinja environment with the filters, and with each JSON file's content as a global of
    the file's name.
    """
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= FILTERS
    made.tests["match"] = lambda text, pattern: re.match(pattern, text) is not None
    for path in RESULTS.glob("*.json"):
        made.globals[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return made


def pages() -> dict[Path, str]:
    """Return by path the text of each page with figures, with its blocks rendered from template and
    JSON.

    Raises:
        KeyError: a page has a block that its template lacks.
    """
    templates = environment()
    written = {}
    for name in templates.list_templates(["jinja"]):
        path = ROOT / name.removesuffix(".jinja")
        rendered = templates.get_template(name).render()
        blocks = {match[1]: match[0] for match in BLOCK.finditer(rendered)}
        text = path.read_text(encoding="utf-8")
        written[path] = BLOCK.sub(lambda match, blocks=blocks: blocks[match[1]], text)
    return written


def main(arguments: Sequence[str]) -> int:
    """Write the pages; with `--check` only list the pages that differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only list the pages that differ")
    is_check = parser.parse_args(arguments).check
    differing = 0
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") == text:
            continue
        differing += 1
        print(f"{path.relative_to(ROOT)}: {'differs from its JSON' if is_check else 'written'}")
        if not is_check:
            replace_text(path, text)
    return 1 if is_check and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
