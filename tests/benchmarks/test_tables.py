"""Tables and headline figures of the pages are those of the committed JSON."""

from pathlib import Path

import pytest
import tables
from result_tables import coder, drafts, gpu, lookup, pages, writing


def test_pages_say_what_their_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_figure_is_named_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    best = tables.results("qwen_coder")["runs"][2]["overall"]["speedup"]
    assert f"| {best:.2f}x [" in readme
    (tmp_path / "README.md").write_text(readme.replace(f"| {best:.2f}x [", "| 9.99x ["))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "MARKED", {"README.md": tables.MARKED["README.md"]})
    monkeypatch.setattr(tables, "RESULT_PAGES", {})
    assert tables.main(["--check"]) == 1
    assert "README.md: differs from its JSON" in capsys.readouterr().out
    assert tables.main([]) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme


def test_the_readme_has_the_demo_as_it_was_measured_on_two_processors() -> None:
    minutes, gains, tests = [], [], []
    for run in tables.results("demo")["runs"]:
        minutes.append(in_minutes(sum(run["command_seconds"].values())))
        overall = run["overall"]
        gains.append(f"{overall['speedup']:.2f}x, {overall['tokens_per_step']:.2f} tokens a step")
        tests.append(in_minutes(run["make_test_seconds"]))
    readme = (tables.ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert f"| `make demo`, once installed | {' | '.join(minutes)} |" in readme
    assert f"| what its heads gain | {' | '.join(gains)} |" in readme
    assert f"| `make test` | {' | '.join(tests)} |" in readme


def in_minutes(seconds: float) -> str:
    return "{} min {} s".format(*divmod(round(seconds), 60))


def test_every_result_page_has_an_answer_a_table_and_a_line_in_the_list() -> None:
    names = {path.stem for path in writing.PAGES.glob("*.md")}
    assert names == set(pages.RESULT_PAGES)


def test_the_pairs_of_eagle3_and_medusa1_are_of_equal_questions() -> None:
    """Two rows of a table may have the same name, with other numbers of questions."""
    rows = lookup.compiled_rows()
    found = [
        [(place, number) for _, place, number, run in rows if run == one]
        for _, *pair in drafts.eagle3_pairs()
        for one in pair
    ]
    assert len(found) == 6
    assert [first == second for first, second in zip(found[::2], found[1::2], strict=True)] == [
        True,
        True,
        True,
    ]


def test_headlines_of_the_gpu_name_the_draft_of_each_speed() -> None:
    """One page had Medusa-1's, another EAGLE-3's, as if they were one measurement."""
    for headline in (gpu.gpu_answer(), gpu.gpu_short()):
        assert "1.58x as fast with Medusa-1" in headline
        assert "1.60x as fast with EAGLE-3" in headline


def test_training_says_of_amphista_what_both_result_pages_say() -> None:
    """It is slower than Medusa-1 compiled, and faster uncompiled with trees of equal size."""
    compiled = {
        (title, place, questions): run["over"]["heads_alone"]["over_plain"]
        for title, place, questions, run in lookup.compiled_rows()
    }
    pairs = [
        (ratio, compiled[title.replace("Amphista", "Medusa-1"), place, questions])
        for (title, place, questions), ratio in compiled.items()
        if title.startswith("Amphista")
    ]
    assert len(pairs) == 2
    assert all(amphista < medusa for amphista, medusa in pairs)
    experiments = writing.results("papers_speed_smollm2")["experiments"]
    for nodes in ("22 nodes", "64 nodes"):
        rows = experiments[f"amphista_table6, {nodes}"]["rows"]
        assert rows["Amphista"][nodes][0] > rows["Medusa"][nodes][0]
    page = (tables.ROOT / "docs" / "how-to" / "choose-a-draft.md").read_text(encoding="utf-8")
    assert "Amphista was [slower than Medusa-1](../results/compiled_smollm2.md)" in page
    assert "[faster](../results/papers_speed_smollm2.md) when neither was compiled" in page


def test_every_marked_block_is_generated() -> None:
    """A block without its function would never be written again."""
    generated_elsewhere = {"keys"}
    for path in (tables.ROOT / "README.md", *(tables.ROOT / "docs").rglob("*.md")):
        marked = set(tables.MARKS.findall(path.read_text(encoding="utf-8"))) - generated_elsewhere
        name = path.relative_to(tables.ROOT).as_posix()
        assert marked == set(tables.MARKED.get(name, {})), name


def test_a_result_page_gets_its_answer_and_its_first_table(monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages.ResultPage(
        answer=lambda: "Twice.",
        table=lambda: writing.table(("a", "b:"), [(1, 2)]),
        short=lambda: "Twice.",
    )
    monkeypatch.setattr(tables, "RESULT_PAGES", {"speed": page})
    text = "# How fast?\n\n**Old.**\n\n| x |\n| - |\n| 0 |\n\n## Limits\n\n| kept |\n"
    assert tables.result_page("speed", text) == (
        "# How fast?\n\n**Twice.**\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n## Limits\n\n| kept |\n"
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (writing.times(1.3551), "1.36x"),
        (writing.times(1.3551, (1.309, 1.414)), "1.36x [1.31, 1.41]"),
        (writing.ratio(1.085, (1.073, 1.098)), "1.085 [1.073, 1.098]"),
        (writing.speed(46.63), "46.6"),
        (writing.speed(465.07), "465"),
    ],
)
def test_figures_are_rounded(written: str, expected: str) -> None:
    assert written == expected


def coder_run(draft: str, place: str, speedup: float, **changes: object) -> writing.Json:
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


def test_the_page_of_the_coder_has_each_draft_beside_its_own_plain_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [
        coder_run("prompt lookup", "a CPU", 1.2),
        coder_run("Medusa-1", "a CPU", 1.5),
        coder_run("EAGLE-3", "a GPU", 1.9, scores=None, equal_answers_bf16=None),
    ]
    exact = {"Medusa-1": {"equal": 19, "answers": 20}}
    content = {"model": "the coder", "bench": "HumanEval", "runs": runs, "float32": exact}
    monkeypatch.setattr(coder, "results", lambda name: {"qwen_coder": content}[name])
    assert coder.coder_table().splitlines()[2:] == [
        "| **a CPU, 2026-11-28** | none | 1.00 | - | 40.0 | - | - | 21/40 |",
        "|  | prompt lookup | 1.80 | 48.0 | 40.0 | 1.20x [1.10, 1.30] | 30/40 | 20/40 |",
        "|  | Medusa-1 | 1.80 | 60.0 | 40.0 | 1.50x [1.40, 1.60] | 30/40 | 20/40 |",
        "| **a GPU, 2026-11-28** | none | 1.00 | - | 40.0 | - | - | - |",
        "|  | EAGLE-3 | 1.80 | 76.0 | 40.0 | 1.90x [1.80, 2.00] | - | - |",
    ]
    assert coder.coder_answer() == (
        "On a CPU, Medusa-1 is the fastest of 2 drafts: the coder makes 60.0 tokens/s with it and"
        " 40.0 without, 1.50x [1.40, 1.60]. It solves 20/40 problems, and 21/40 without."
        " Answers equal in float32: Medusa-1 19/20."
    )
    assert coder.coder_short() == (
        "a CPU, HumanEval: 40.0 to 60.0 tokens/s, 1.50x, with Medusa-1, the fastest."
    )


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
    assert writing.equal_in_bfloat16(overall) == shown
