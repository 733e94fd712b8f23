"""Tables for the terminal, Markdown and HTML from the same rows, and self-contained HTML pages
(`page.html`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as TerminalTable

from medusa_train.io import replace_text, strict_json
from medusa_train.pages.charts import PALETTE

#: A width that no table reaches.
_UNLIMITED = 10_000


@dataclass(frozen=True)
class Table:
    """Titles and rows of text. Rows with the same first cell form a group.

    Attributes:
        overall: the last row sums up the others, and is set in bold.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    overall: bool = False

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, str]], *, overall: bool = False) -> Table:
        """Return a table of rows, whose cells are given by title. Columns with nothing but "" or
        "-" are left out.
        """
        titles = [title for title in rows[0] if {row[title] for row in rows} - {"", "-"}]
        return cls(titles, [[row[title] for title in titles] for row in rows], overall)

    def markdown(self) -> str:
        """Return the lines of a Markdown table."""
        rows = [[cell.replace("|", r"\|") for cell in row] for row in self.rows]
        if self.overall:
            rows[-1] = [f"**{cell}**" for cell in rows[-1]]
        title_line, *lines = ["| " + " | ".join(cells) + " |" for cells in (self.titles, *rows)]
        alignment = "|---|" + "---:|" * (len(self.titles) - 1)  # numbers are on the right
        return "\n".join([title_line, alignment, *lines])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with every title and number on one line if the console is wide enough,
        else a narrow table.
        """
        whole = self._terminal(narrow=False)
        unlimited = options.update(max_width=_UNLIMITED)
        fits = whole.__rich_measure__(console, unlimited).maximum <= options.max_width
        yield whole if fits else self._terminal(narrow=True)

    def _terminal(self, *, narrow: bool) -> TerminalTable:
        """Return the table for a console. A `narrow` table breaks titles into words, and has
        intervals below their values.

        Numbers are never cut off: the first column wraps instead.
        """
        padding = (0, 0 if narrow else 1)
        table = TerminalTable(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False)
        rows = self.rows
        if narrow:
            rows = [[name, *[cell.replace(" (", "\n(") for cell in cells]] for name, *cells in rows]
        for index, title in enumerate(self.titles):
            cells = [row[index] for row in rows]
            # the first column names its rows
            has_numbers = index > 0 and any(cell[:1].isdigit() for cell in cells)
            table.add_column(
                title.replace(" ", "\n") if narrow and has_numbers else title,
                justify="right" if has_numbers else "left",
                overflow="fold",
                min_width=max(map(len, " ".join(cells).split())) if has_numbers else None,
                no_wrap=has_numbers or not narrow,
            )
        names = [row[0] for row in rows]
        grouped = len(set(names)) < len(names)
        for index, row in enumerate(rows):
            is_overall = self.overall and index == len(rows) - 1
            if is_overall or (grouped and index and names[index] != names[index - 1]):
                table.add_section()
            table.add_row(*row, style="bold" if is_overall else None)
        return table


def number(
    value: float | None, digits: int = 2, suffix: str = "", interval: Sequence[float] | None = None
) -> str:
    """Format a number with its interval, "1.27x (1.20-1.34)"; "-" if it was not measured."""
    if value is None:
        return "-"
    text = f"{value:.{digits}f}{suffix}"
    if interval:
        low, high = interval
        text += f" ({low:.{digits}f}-{high:.{digits}f})"
    return text


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def write_files(directory: Path, contents: Mapping[str, Any]) -> list[Path]:
    """Write files by name, and return their paths. Text is written unchanged, a list as JSON Lines,
    and any other value as JSON.
    """
    for name, content in contents.items():
        if isinstance(content, str):
            text = content
        elif isinstance(content, list):
            text = "".join(strict_json(line, ensure_ascii=False) + "\n" for line in content)
        else:
            text = strict_json(content, indent=2, ensure_ascii=False) + "\n"
        replace_text(directory / name, text)
    return [directory / name for name in contents]


@dataclass(frozen=True)
class Figure:
    """A card with a title, an SVG drawing and a caption; `wide` takes a row of its own."""

    title: str
    drawing: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class PageSection:
    """A part of a page: paragraphs, names by colour, figures, tables, facts, answers and remarks,
    in this order.

    Attributes:
        answers: answers of a model by category, each with `summary`, `details`, `asked` and `runs`.
            The runs are pieces of its text, each with the number of the head that proposed it (0:
            the target model).
    """

    title: str = ""
    lines: Sequence[str] = ()
    legend: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, str]] = ()
    answers: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """True if nothing but a title or names by colour would be shown."""
        return not (
            self.lines or self.figures or self.tables or self.facts or self.answers or self.remarks
        )


def render_page(
    title: str,
    subtitle: str,
    sections: Sequence[PageSection],
    tiles: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a page; every text is escaped, and sections without content are left out.

    Args:
        tiles: the main numbers, each with its label.
    """
    shown = [section for section in sections if not section.is_empty]
    return _template().render(
        title=title, subtitle=subtitle, sections=shown, tiles=tiles, palette=PALETTE, svg=Markup
    )


def markdown_page(title: str, sections: Sequence[PageSection]) -> str:
    """Return the page in Markdown, without figures and answers."""
    blocks = [f"# {title}"]
    for section in sections:
        tables = [table.markdown() for table in section.tables]
        facts = [f"{label}: {value}" for label, value in section.facts]
        texts = [*section.lines, *tables, _bullets(facts), _bullets(section.remarks)]
        if section.answers or not any(texts):
            continue
        if section.title:
            blocks.append(f"## {section.title}")
        blocks += [text for text in texts if text]
    return "\n\n".join(blocks) + "\n"


@cache
def _template() -> Template:
    # Answers of a model are not trusted: all text is escaped, and the page's policy lets it load
    # and run nothing.
    loader = PackageLoader("medusa_train.pages", "")
    environment = Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html")
