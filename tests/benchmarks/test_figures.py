"""Figures of README, docs/ and the result pages are those of the committed JSON."""

import json
import re
from pathlib import Path
from typing import Any

import figures
import pytest

DOCS = figures.ROOT / "docs"


def results(name: str) -> Any:
    return json.loads((figures.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_pages_say_what_their_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_figure_is_reported_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (figures.ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "README.md.jinja").write_text(
        (figures.TEMPLATES / "README.md.jinja").read_text(encoding="utf-8")
    )
    best = results("qwen_coder")["runs"][2]["overall"]["speedup"]
    assert f"| {best:.2f}x [" in readme
    (tmp_path / "README.md").write_text(readme.replace(f"| {best:.2f}x [", "| 9.99x ["))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "TEMPLATES", tmp_path / "templates")
    assert figures.main(["--check"]) == 1
    assert "README.md: differs from its JSON" in capsys.readouterr().out
    assert figures.main([]) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme


@pytest.mark.parametrize("word", ["--chek", "README.md"])
def test_a_word_that_is_not_read_writes_nothing(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "pages", lambda: pytest.fail("pages were rendered"))
    with pytest.raises(SystemExit, match="2"):
        figures.main([word])


def test_every_block_of_a_page_has_a_template() -> None:
    """A block without one would never be written again."""
    generated_elsewhere = {"keys"}
    for path in (figures.ROOT / "README.md", *DOCS.rglob("*.md")):
        marked = {match[1] for match in figures.BLOCK.finditer(path.read_text(encoding="utf-8"))}
        template = figures.TEMPLATES / path.relative_to(figures.ROOT).with_suffix(".md.jinja")
        written = template.read_text(encoding="utf-8") if template.exists() else ""
        assert marked - generated_elsewhere == set(re.findall(r"<!-- (\w+):start -->", written))


def test_every_result_page_has_an_answer_a_table_and_a_line_in_the_list() -> None:
    listing = (DOCS / "explanation" / "results.md").read_text(encoding="utf-8")
    for page in (DOCS / "results").glob("*.md"):
        blocks = {match[1] for match in figures.BLOCK.finditer(page.read_text(encoding="utf-8"))}
        assert blocks >= {"answer", "table"}
        assert f"- [{figures.title(page.stem)}](../results/{page.name}) " in listing


def test_the_readmes_headline_has_the_order_of_its_drafts() -> None:
    runs = {run["draft"]: run["overall"]["speedup"] for run in results("qwen_coder")["runs"]}
    trained = max(runs["Medusa-1"], runs["EAGLE-3"])
    assert trained < runs["prompt lookup"] < runs["Medusa-1 + lookup"] == max(runs.values())


def test_answers_that_pages_call_equal_in_float32_are_all_equal() -> None:
    smollm2 = results("studies")["removed_pages"]["smollm2_equal_answers"]
    assert smollm2["float32"] == smollm2["answers"]
    assert all(
        draft["equal"] == draft["answers"] for draft in results("qwen_coder")["float32"].values()
    )


def test_the_pairs_of_eagle3_and_medusa1_are_of_one_day() -> None:
    for part in ("both_texts", "text_without_loops"):
        runs = results("compiled_smollm2")[part]
        days = {runs[draft]["date"][:10] for draft in ("Medusa-1", "EAGLE-3")}
        assert len(days) == 1
        assert len({runs[draft]["answers"] for draft in ("Medusa-1", "EAGLE-3")}) == 1


@pytest.mark.parametrize("page", ["results/gpu.md", "explanation/results.md"])
def test_headlines_of_the_gpu_name_the_draft_of_each_speed(page: str) -> None:
    """One page had Medusa-1's, another EAGLE-3's, as if they were one measurement."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert "1.58x as fast with Medusa-1" in text
    assert "1.60x as fast with EAGLE-3" in text


def test_choosing_a_draft_says_of_amphista_what_both_result_pages_say() -> None:
    """It is slower than Medusa-1 compiled, and faster uncompiled with trees of equal size."""
    both = results("compiled_smollm2")["both_texts"]
    older = {
        row["draft"]: row
        for row in results("compiled_smollm2")["rows"]
        if row["bench"] == "MT-Bench"
    }
    for runs in (both, older):
        alone = {
            name: runs[name]["over"]["heads_alone"]["over_plain"]
            for name in ("Amphista", "Medusa-1")
        }
        assert alone["Amphista"] < alone["Medusa-1"]
    experiments = results("papers_speed_smollm2")["experiments"]
    for nodes in ("22 nodes", "64 nodes"):
        rows = experiments[f"amphista_table6, {nodes}"]["rows"]
        assert rows["Amphista"][nodes][0] > rows["Medusa"][nodes][0]
    page = (DOCS / "how-to" / "choose-a-draft.md").read_text(encoding="utf-8")
    assert "Amphista was [slower than Medusa-1](../results/compiled_smollm2.md)" in page
    assert "[faster](../results/papers_speed_smollm2.md) when neither was compiled" in page


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (figures.times(1.3551), "1.36x"),
        (figures.times(1.3551, (1.309, 1.414)), "1.36x [1.31, 1.41]"),
        (figures.ratio(1.085, (1.073, 1.098)), "1.085 [1.073, 1.098]"),
        (figures.over([1.142, [1.108, 1.177]]), "1.142 [1.108, 1.177]"),
        (figures.speed(46.63), "46.6"),
        (figures.speed(465.07), "465"),
    ],
)
def test_figures_are_rounded(written: str, expected: str) -> None:
    assert written == expected


@pytest.mark.parametrize(
    ("overall", "shown"),
    [
        ({"equal_answers_bf16": 3, "compared_answers_bf16": 4, "answers": 9}, "3/4"),
        ({"equal_answers_bf16": 3, "answers": 9}, "3/9"),
        ({"equal_answers_bf16": None, "compared_answers_bf16": 0, "answers": 9}, "-"),
    ],
    ids=["some", "an older report", "none"],
)
def test_equal_answers_are_of_those_that_were_compared(
    overall: dict[str, int | None], shown: str
) -> None:
    assert figures.equal(overall) == shown


def coder_run(draft: str, place: str, speedup: float, **changes: object) -> dict[str, Any]:
    """Return a run of the coder's page, as report.json of an evaluation has its figures."""
    overall = {
        "acceleration_rate": 1.8,
        "tokens_per_s": 40.0 * speedup,
        "baseline_tokens_per_s": 40.0,
        "speedup": speedup,
        "intervals": {"speedup": [speedup - 0.1, speedup + 0.1]},
        "equal_answers_bf16": 30,
        "answers": 40,
        "scores": {"answers": 40, "plain": {"correct": 21}, "tree": {"correct": 20}},
    }
    return {"draft": draft, "place": place, "date": "2026-11-28", "overall": {**overall, **changes}}


def test_the_page_of_the_coder_has_each_draft_next_to_its_own_plain_rate() -> None:
    templates = figures.environment()
    templates.globals["qwen_coder"] |= {
        "model": "the coder",
        "runs": [
            coder_run("prompt lookup", "a CPU", 1.2),
            coder_run("Medusa-1", "a CPU", 1.5),
            coder_run("EAGLE-3", "a GPU", 1.9, scores=None, equal_answers_bf16=None),
        ],
        "float32": {"Medusa-1": {"equal": 19, "answers": 20}},
    }
    page = templates.get_template("docs/results/qwen_coder.md.jinja").render()
    blocks = {match[1]: match[0].splitlines()[1:-1] for match in figures.BLOCK.finditer(page)}
    assert blocks["table"][2:] == [
        "| **a CPU, 2026-11-28** | none | 1.00 | - | 40.0 | - | - | 21/40 |",
        "|  | prompt lookup | 1.80 | 48.0 | 40.0 | 1.20x [1.10, 1.30] | 30/40 | 20/40 |",
        "|  | Medusa-1 | 1.80 | 60.0 | 40.0 | 1.50x [1.40, 1.60] | 30/40 | 20/40 |",
        "| **a GPU, 2026-11-28** | none | 1.00 | - | 40.0 | - | - | - |",
        "|  | EAGLE-3 | 1.80 | 76.0 | 40.0 | 1.90x [1.80, 2.00] | - | - |",
    ]
    assert blocks["answer"] == [
        "**On a CPU, Medusa-1 is the fastest of 2 drafts: the coder generates 60.0 tokens/s with it and"
        " 40.0 without, 1.50x [1.40, 1.60]. It solves 20/40 problems, and 21/40 without."
        " Answers equal in float32: Medusa-1 19/20.**"
    ]
