"""How is the JSON of a result page read, and how are figures and tables written?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: The pages and pictures that are written from them.
PAGES = Path(__file__).resolve().parents[2] / "docs" / "results"
Json = dict[str, Any]
Cells = list[object]


def results(name: str) -> Json:
    """Read the JSON of a result page."""
    content: Json = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def times(value: float, interval: Sequence[float] | None = None) -> str:
    """Write a ratio of speeds: 1.36x, or with its interval 1.36x [1.31, 1.41]."""
    return f"{value:.2f}x{between(interval)}"


def ratio(value: float, interval: Sequence[float] | None = None, digits: int = 3) -> str:
    """Write a ratio of tokens per step: 1.085, or with its interval 1.085 [1.073, 1.098]."""
    return f"{value:.{digits}f}{between(interval, digits)}"


def two_digits(values: Sequence[float]) -> str:
    """Write a ratio that stands as [value, low, high] with two digits: 0.88 [0.86, 0.91]."""
    value, *interval = values
    return ratio(value, interval, 2)


def over(values: Sequence[Any] | None) -> str:
    """Write a ratio that stands as [value, low, high] or [value, [low, high]]; a dash for none."""
    if values is None:
        return "-"
    value, *interval = values
    if isinstance(interval[0], list):
        interval = interval[0]
    return ratio(value, interval)


def between(interval: Sequence[float] | None, digits: int = 2) -> str:
    """Write an interval, with a space before it; nothing without one."""
    if interval is None:
        return ""
    low, high = interval
    return f" [{low:.{digits}f}, {high:.{digits}f}]"


def speed(value: float) -> str:
    """Write tokens per second: whole numbers from 100 on, else one digit."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def millions(count: int) -> str:
    """Write a number of parameters: 20.2M."""
    return f"{count / 1e6:.1f}M"


def shares(values: Iterable[float]) -> str:
    """Write shares in one cell: 0.52 0.31 0.19."""
    return " ".join(f"{value:.2f}" for value in values)


def equal_in_bfloat16(overall: Json) -> str:
    """Write how many of the compared answers are equal in bfloat16; "-" if none was compared. Older
    reports compared all.
    """
    equal = overall["equal_answers_bf16"]
    return (
        "-"
        if equal is None
        else f"{equal}/{overall.get('compared_answers_bf16', overall['answers'])}"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; columns whose title ends with `:` are aligned to the right, without it."""
    marks = ["---:" if title.endswith(":") else "---" for title in head]
    titles = [title.removesuffix(":") for title in head]
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join(marks)} |"]
    for row in rows:
        lines.append(f"| {' | '.join(str(cell) for cell in row)} |")
    return "\n".join(lines)
