"""Result pages answer their question first: their form, and the pictures that are drawn from their
JSON.
"""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import page
import pytest

from medusa_train.pages.charts import COLOURS

PAGES = sorted(page.PAGES.glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_question_answer_picture_and_method(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"# .*\?", lines[0])
    assert lines[2] == "<!-- answer:start -->"
    assert re.fullmatch(r"\*\*.+\*\*", lines[3])
    assert f"]({path.stem}.svg)" in lines[6]
    assert "## How it was measured" in lines


SVG = "{http://www.w3.org/2000/svg}"


def words(drawing: str) -> list[str | None]:
    """Return the texts and tooltips of a drawing; places depend on the version of matplotlib."""
    root = ElementTree.fromstring(drawing)
    return [element.text for element in root.iter() if element.tag in (f"{SVG}text", f"{SVG}title")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_picture_shows_the_values_of_the_json(path: Path) -> None:
    chart = json.loads((page.RESULTS / f"{path.stem}.json").read_text(encoding="utf-8"))["chart"]
    assert words(path.with_suffix(".svg").read_text(encoding="utf-8")) == words(page.draw(chart))


def test_a_drawing_is_valid_and_labels_every_value() -> None:
    chart = {"title": "speed <1>", "values": {"plain": [1.0], "tree & co": [1.5, 1.25, 1.75]}}
    chart |= {"unit": "x", "reference": 1.0}
    drawing = page.draw(chart)
    assert {"plain", "tree & co", "1.00x", "1.50x"} <= set(words(drawing))
    bars = re.findall(r"<title>([^<]*): [^<]*</title>[^>]*fill: (#\w+)", drawing)
    # the baseline stands out
    assert bars == [("plain", COLOURS["--c1"]), ("tree &amp; co", COLOURS["--c0"])]


@pytest.mark.parametrize("words", [["no_such_result"], ["--help"]])
def test_a_name_without_a_chart_draws_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PAGES", tmp_path)
    with pytest.raises(SystemExit):
        page.main(words)
    assert not list(tmp_path.iterdir())
