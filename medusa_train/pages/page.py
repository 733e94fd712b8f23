"""Render a self-contained HTML page: tiles, charts, tables and a model's answers, by the template `page.html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from medusa_train.pages.charts import PALETTE
from medusa_train.pages.table import Table


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
        answers: each with `summary`, `details`, `asked` and `runs`: pieces of its text, each with the number of the
            head that proposed it, 0 for the backbone.
    """

    name: str
    answers: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    """A part of a page, in this order: paragraphs, names by colour, figures, tables, facts, answers and remarks."""

    title: str = ""
    lines: Sequence[str] = ()
    legend: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, str]] = ()
    answers: Sequence[AnswerGroup] = ()
    remarks: Sequence[str] = ()


def render_page(title: str, subtitle: str, sections: Sequence[Section], tiles: Sequence[tuple[str, str]] = ()) -> str:
    """Return a page; every text is escaped, and sections without content are left out.

    Args:
        tiles: the main figures, each with its label.
    """
    shown = [one for one in sections if any((one.lines, one.figures, one.tables, one.facts, one.answers, one.remarks))]
    return _template().render(title=title, subtitle=subtitle, sections=shown, tiles=tiles, palette=PALETTE, svg=Markup)


def percent(share: float) -> str:
    """Format a share of 1 as an axis label."""
    return f"{100 * share:g} %"


@cache
def _template() -> Template:
    # answers of a model are not trusted: all text is escaped, and by its policy the page loads and runs nothing
    loader = PackageLoader("medusa_train.pages", "")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html")
