"""Tables and headline figures of the pages are those of the committed JSON."""

from pathlib import Path

import estimates
import pytest
import result_tables
import tables


def test_pages_say_what_their_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_figure_is_named_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    speedup = tables.results("smollm2")["loop_free_text"]["overall"]["speedup"]
    assert f"| {speedup:.2f}x |" in readme
    (tmp_path / "README.md").write_text(readme.replace(f"| {speedup:.2f}x |", "| 9.99x |"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "MARKED", {"README.md": tables.MARKED["README.md"]})
    monkeypatch.setattr(tables, "ANSWERS", {})
    monkeypatch.setattr(tables, "TABLES", {})
    assert tables.main(["--check"]) == 1
    assert "README.md: differs from its JSON" in capsys.readouterr().out
    assert tables.main([]) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme


def test_every_result_page_has_an_answer_a_table_and_a_line_in_the_list() -> None:
    names = {path.stem for path in result_tables.RESULTS.glob("*.md")}
    assert names == set(tables.ANSWERS) == set(tables.TABLES) == set(tables.SHORT)


def test_the_pairs_of_eagle3_and_medusa1_are_of_equal_questions() -> None:
    """Two rows of a table may have the same name, with other numbers of questions."""
    rows = result_tables.compiled_rows()
    found = [
        [(place, number) for _, place, number, run in rows if run == one]
        for _, *pair in result_tables.eagle3_pairs()
        for one in pair
    ]
    assert len(found) == 6
    assert [first == second for first, second in zip(found[::2], found[1::2], strict=True)] == [
        True,
        True,
        True,
    ]


def test_every_marked_block_is_generated() -> None:
    """A block without its function would never be written again."""
    generated_elsewhere = {"keys", *estimates.TABLES}
    docs = [*(tables.ROOT / "docs").glob("*.md"), *result_tables.RESULTS.glob("*.md")]
    for path in (tables.ROOT / "README.md", *docs):
        marked = set(tables.MARKS.findall(path.read_text(encoding="utf-8"))) - generated_elsewhere
        name = path.relative_to(tables.ROOT).as_posix()
        assert marked == set(tables.MARKED.get(name, {})), name


def test_a_result_page_gets_its_answer_and_its_first_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ANSWERS", {"speed": lambda: "Twice."})
    monkeypatch.setattr(tables, "TABLES", {"speed": lambda: tables.table(("a", "b:"), [(1, 2)])})
    text = "# How fast?\n\n**Old.**\n\n| x |\n| - |\n| 0 |\n\n## Limits\n\n| kept |\n"
    assert tables.result_page("speed", text) == (
        "# How fast?\n\n**Twice.**\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n## Limits\n\n| kept |\n"
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (result_tables.times(1.3551), "1.36x"),
        (result_tables.times(1.3551, (1.309, 1.414)), "1.36x [1.31, 1.41]"),
        (result_tables.ratio(1.085, (1.073, 1.098)), "1.085 [1.073, 1.098]"),
        (result_tables.speed(46.63), "46.6"),
        (result_tables.speed(465.07), "465"),
    ],
)
def test_figures_are_rounded(written: str, expected: str) -> None:
    assert written == expected
