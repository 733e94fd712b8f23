"""Pages of reports: how many columns their cards have. And the JSON beside them."""

import json
import math
import re

import pytest

from medusa_train.pages.page import Figure, PageSection, render_page, write_files


@pytest.mark.parametrize(("count", "columns"), [(2, "cards"), (3, "cards"), (4, "cards two")])
def test_no_card_stands_alone_in_its_row(count: int, columns: str) -> None:
    """Three cards fit a row; a wide one has its own."""
    figures = [Figure(f"figure {number}", "<svg></svg>", "") for number in range(count)]
    wide = Figure("the tree", "<svg></svg>", "", wide=True)
    page = render_page("title", "subtitle", [PageSection("Draft", figures=[*figures, wide])])
    assert f'<div class="{columns}">' in page
    assert page.count("<figure>") == count
    assert "<figure class=wide>" in page


@pytest.mark.parametrize("content", [{"x": math.nan}, [{"x": math.inf}]], ids=["json", "lines"])
def test_a_number_that_is_not_finite_is_null_in_a_file(tmp_path, content) -> None:
    (path,) = write_files(tmp_path, {"report.json": content})
    assert json.loads(path.read_text()) == {"x": None}


def test_no_column_of_cards_is_wider_than_a_phone() -> None:
    """A minimum in pixels alone makes the page scroll sideways where the screen is narrower."""
    page = render_page("title", "subtitle", [PageSection("Draft", lines=["text"])])
    columns = re.findall(r"grid-template-columns:([^;}]*)", page)
    assert columns
    for column in columns:
        assert re.search(r"minmax\(min\(\d+px,100%\),1fr\)", column)


@pytest.mark.parametrize("selector", ["h1", "summary", ".question", ".answer"])
def test_long_words_are_broken(selector: str) -> None:
    """Names of runs, addresses and categories may be wider than a phone."""
    page = render_page("title", "subtitle", [PageSection("Draft", lines=["text"])])
    rules = re.findall(rf"(?:^|\}}){re.escape(selector)}\{{([^}}]*)\}}", page, flags=re.MULTILINE)
    assert any("overflow-wrap:anywhere" in rule for rule in rules)
