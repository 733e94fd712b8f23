"""Tables for the terminal, Markdown and HTML from the same rows, and self-contained HTML pages
(`page.html`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as TerminalTable

from medusa_train.io import replace_text
from medusa_train.pages.charts import PALETTE

#: A width that no table reaches.
_UNLIMITED = 10_000


@dataclass(frozen=True)
class Table:
    """Titles and rows of text; rows that have the first cell in common belong together.

    Attributes:
        overall: the last row sums up the others, and is set in bold.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    overall: bool = False

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[str]], *, overall: bool = False) -> Table:
        """Return a table of columns by title; those with nothing but "" or "-" are left out."""
        shown = {
            title: cells for title, cells in columns.items() if not {"", "-"}.issuperset(cells)
        }
        return cls(
            list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)], overall
        )

    def column(self, title: str) -> list[str]:
        """Return the cells of a column."""
        return [row[self.titles.index(title)] for row in self.rows]

    def markdown(self) -> str:
        """Return the lines of a Markdown table."""
        rows = [[cell.replace("|", r"\|") for cell in row] for row in self.rows]
        if self.overall:
            rows[-1] = [f"**{cell}**" for cell in rows[-1]]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.titles, *rows)]
        return "\n".join([lines[0], "|---|" + "---:|" * (len(self.titles) - 1), *lines[1:]])

    def terminal(self, padding: int = 1) -> FittedTable:
        """Return the table for a console, as wide as the console allows."""
        return FittedTable(self, padding)

    def whole(self) -> TerminalTable:
        """Return the table with every title and every figure on one line."""
        table = TerminalTable(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for number, title in enumerate(self.titles):
            is_figure = number and any(row[number][:1].isdigit() for row in self.rows)
            table.add_column(title, justify="right" if is_figure else "left", no_wrap=True)
        self._add_rows(table, self.rows)
        return table

    def narrow(self, padding: int) -> TerminalTable:
        """Return the table with narrow columns, and intervals below their values.

        Numbers are never cut off: the first column gives way.
        """
        table = TerminalTable(box=box.SIMPLE_HEAD, padding=(0, padding), pad_edge=False)
        for number, title in enumerate(self.titles):
            cells = [row[number] for row in self.rows]
            if number == 0 or not any(cell[:1].isdigit() for cell in cells):
                table.add_column(title, overflow="fold")
            else:
                width = max(len(word) for cell in cells for word in cell.split(" "))
                table.add_column(
                    title.replace(" ", "\n"),
                    justify="right",
                    overflow="fold",
                    min_width=width,
                    no_wrap=True,
                )
        rows = [[row[0], *(cell.replace(" (", "\n(") for cell in row[1:])] for row in self.rows]
        self._add_rows(table, rows)
        return table

    def _add_rows(self, table: TerminalTable, rows: Sequence[Sequence[str]]) -> None:
        """Add `rows`, the cells of this table as they are shown, with a line between groups."""
        grouped = len({row[0] for row in self.rows}) < len(self.rows)
        for number, row in enumerate(self.rows):
            is_overall = self.overall and number == len(self.rows) - 1
            if is_overall or (grouped and number and row[0] != self.rows[number - 1][0]):
                table.add_section()
            table.add_row(*rows[number], style="bold" if is_overall else None)


@dataclass(frozen=True)
class FittedTable:
    """A table on a console: whole where the width is there, else narrow, with `padding`."""

    table: Table
    padding: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table that fits."""
        whole = self.table.whole()
        unlimited = options.update(max_width=_UNLIMITED)
        if whole.__rich_measure__(console, unlimited).maximum <= options.max_width:
            yield whole
        else:
            yield self.table.narrow(self.padding)


def number(
    value: float | None, digits: int = 2, suffix: str = "", interval: Sequence[float] | None = None
) -> str:
    """Format a figure with its interval, "1.27x (1.20-1.34)"; "-" if it was not measured."""
    if value is None:
        return "-"
    bounds = "" if not interval else f" ({interval[0]:.{digits}f}-{interval[1]:.{digits}f})"
    return f"{value:.{digits}f}{suffix}{bounds}"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def write_files(directory: Path, contents: Mapping[str, Any]) -> list[Path]:
    """Write files by their names, text as it is, lists as JSON Lines, and other values as JSON;
    returns their paths.
    """
    for name, content in contents.items():
        if isinstance(content, list):
            content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in content)
        elif not isinstance(content, str):
            content = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        replace_text(directory / name, content)
    return [directory / name for name in contents]


@dataclass(frozen=True)
class Figure:
    """A card with a title, an SVG drawing and a caption; `wide` takes a row of its own."""

    title: str
    drawing: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class AnswerGroup:
    """Answers of a model, by question.

    Attributes:
        answers: each with `summary`, `details`, `asked` and `runs`: pieces of its text, each with
            the number of the head that proposed it, 0 for the backbone.
    """

    name: str
    answers: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    """A part of a page, in this order: paragraphs, names by colour, figures, tables, facts, answers
    and remarks.
    """

    title: str = ""
    lines: Sequence[str] = ()
    legend: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, str]] = ()
    answers: Sequence[AnswerGroup] = ()
    remarks: Sequence[str] = ()


def render_page(
    title: str, subtitle: str, sections: Sequence[Section], tiles: Sequence[tuple[str, str]] = ()
) -> str:
    """Return a page; every text is escaped, and sections without content are left out.

    Args:
        tiles: the main figures, each with its label.
    """
    shown = [
        one
        for one in sections
        if any((one.lines, one.figures, one.tables, one.facts, one.answers, one.remarks))
    ]
    return _template().render(
        title=title, subtitle=subtitle, sections=shown, tiles=tiles, palette=PALETTE, svg=Markup
    )


def markdown_page(title: str, sections: Sequence[Section]) -> str:
    """Return the same in Markdown, without figures and answers."""
    blocks = [f"# {title}"]
    for one in sections:
        facts = [f"{label}: {value}" for label, value in one.facts]
        texts = [
            *one.lines,
            *(table.markdown() for table in one.tables),
            _bullets(facts),
            _bullets(one.remarks),
        ]
        if any(texts) and not one.answers:
            blocks += [f"## {one.title}" if one.title else "", *texts]
    return "\n\n".join(block for block in blocks if block) + "\n"


def percent(share: float) -> str:
    """Format a share of 1 as an axis label."""
    return f"{100 * share:g} %"


@cache
def _template() -> Template:
    # answers of a model are not trusted: all text is escaped, and by its policy the page loads and
    # runs nothing
    loader = PackageLoader("medusa_train.pages", "")
    environment = Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html")
