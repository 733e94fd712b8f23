import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from medusa_train.errors import CheckpointError, ConfigError, MedusaError
from medusa_train.evaluation.compare import (
    categories_table,
    differences,
    load_reports,
    runs_table,
    show,
    write,
)
from medusa_train.evaluation.report import build_report, write_report
from medusa_train.pages.page import Table
from tests.evaluation.test_report import meta
from tests.evaluation.test_report_page import TREE, Balance, record


def write_run(
    run: Path, bench: str = "tiny", categories: tuple[str, ...] = ("math", "code"), **changes: Any
) -> Path:
    asked = categories * 3  # enough questions for intervals
    records = [record(number, category) for number, category in enumerate(asked, start=1)]
    write_report(
        build_report(records, meta(bench=bench, **changes), TREE),
        records,
        run / "eval" / bench,
    )
    return run


def column(table: Table, title: str) -> list[str]:
    """Return the cells of a column."""
    return [row[list(table.titles).index(title)] for row in table.rows]


def test_runs_stand_side_by_side_with_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", categories=("math", "law"), heads=3)
    evaluated = load_reports([str(a), str(b)], None)
    table = runs_table(evaluated)
    assert column(table, "run") == [str(a), str(b)]
    assert column(table, "heads") == ["5", "3"]
    assert all("x (" in cell for cell in column(table, "speedup"))
    assert "grade" not in table.titles
    table = categories_table(evaluated)
    assert column(table, "speedup") == ["math", "code", "law"]
    assert table.rows[1][2] == table.rows[2][1] == "-"
    console = Console(file=io.StringIO(), width=200)
    console.print(show(evaluated))
    assert "different" not in console.file.getvalue()  # type: ignore[attr-defined]
    narrow = Console(file=io.StringIO(), width=80)
    monkeypatch.chdir(tmp_path)
    narrow.print(show(load_reports(["a", "b"], None)))
    assert all(title.split()[0] in narrow.file.getvalue() for title in runs_table(evaluated).titles)  # type: ignore[attr-defined]


def test_an_empty_tree_of_an_earlier_version_is_no_speedup(tmp_path: Path) -> None:
    """Its report holds the ratio of a loop to itself."""
    run = write_run(tmp_path / "a", tree_nodes=0)
    report = json.loads((run / "eval" / "tiny" / "report.json").read_text(encoding="utf-8"))
    assert report["overall"]["speedup"] > 0
    evaluated = load_reports([str(run), str(write_run(tmp_path / "b"))], None)
    table = runs_table(evaluated)
    assert column(table, "nodes") == ["no tree used", "16"]
    for title in ("tokens per step", "overhead", "speedup", "over generate"):
        assert column(table, title)[0] == "-"
        assert column(table, title)[1] != "-"
    assert {row[1] for row in categories_table(evaluated).rows} == {"-"}
    # a lookup beside the empty tree drafts
    both = [write_run(tmp_path / "c", tree_nodes=0, draft="lookup"), tmp_path / "b"]
    table = runs_table(load_reports([str(one) for one in both], None))
    assert column(table, "nodes")[0] == "0"
    assert "-" not in column(table, "speedup")


def test_conditions_that_differ_are_named(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", dtype="float32", max_new_tokens=64)
    evaluated = load_reports([str(a), str(b)], None)
    expected = ["different max_new_tokens: 16, 64", "different dtype: bfloat16, float32"]
    assert differences(evaluated) == expected
    judged = {
        name: {**report, "judge": {"model": judge}}
        for judge, (name, report) in zip("xy", evaluated.items(), strict=True)
    }
    assert differences(judged) == [*expected, "different judge: x, y"]


@pytest.mark.parametrize(
    "key",
    [
        *("bench", "bench_file", "questions", "max_new_tokens", "base_model", "backbone"),
        *("chat_template", "chat_template_kwargs", "dtype", "packed", "attention"),
        *("compiled", "cuda_graphs", "torch", "transformers", "device", "threads"),
    ],
)
def test_what_speeds_depend_on_is_compared(key: str) -> None:
    reports = {name: {"meta": {key: name, "command": name}} for name in ("a", "b")}
    (line,) = differences(reports)
    assert line.startswith("different ")
    assert line.endswith(": a, b")


def test_a_condition_that_an_older_report_lacks_differs_only_from_a_value(tmp_path: Path) -> None:
    older = write_run(tmp_path / "older")
    on_gpu = write_run(tmp_path / "gpu", cuda_graphs=None)
    on_cpu = write_run(tmp_path / "cpu", cuda_graphs=True)
    assert differences(load_reports([str(older), str(on_gpu)], None)) == []
    found = differences(load_reports([str(older), str(on_cpu)], None))
    assert found == ["different CUDA graphs: not recorded, True"]


def test_evaluations_in_different_modes_are_refused(tmp_path: Path) -> None:
    sampling = {
        "acceptance": "sampling",
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "batch_size": 1,
    }
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", decoding=sampling)
    with pytest.raises(
        CheckpointError, match=r"a: greedy decoding, .*b: sampling at temperature 0\.7\)"
    ):
        load_reports([str(a), str(b)], None)
    load_reports([str(b), str(write_run(tmp_path / "d", decoding=sampling))], None)


def test_the_newest_report_is_taken_or_that_of_the_bench(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    write_run(tmp_path / "a", "mtbench")
    os.utime(run / "eval" / "tiny" / "report.json", (1, 1))
    other = write_run(tmp_path / "b")
    newest = load_reports([str(run), str(other)], None)
    assert [one["meta"]["bench"] for one in newest.values()] == ["mtbench", "tiny"]
    assert next(iter(newest)).endswith("a (mtbench)")
    named = load_reports([str(run), str(other / "eval" / "tiny")], "tiny")
    assert [one["meta"]["bench"] for one in named.values()] == ["tiny", "tiny"]


def test_the_newest_evaluation_is_named_if_it_measured_another_draft(tmp_path: Path) -> None:
    """Otherwise its speed would seem to be that of the run's own draft."""
    run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (run / "eval" / "tiny").rename(run / "eval" / "tiny-prompt_lookup")
    assert list(load_reports([str(run), str(other)], None)) == [
        f"{run} (tiny-prompt_lookup)",
        f"{other} (tiny)",
    ]


def test_an_evaluation_is_found_by_its_question_file(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", "mine"), write_run(tmp_path / "b", "mine")
    write_run(tmp_path / "b")
    reports = load_reports([str(a), str(b)], "questions/mine.jsonl")
    assert [report["meta"]["bench"] for report in reports.values()] == ["mine", "mine"]
    with pytest.raises(CheckpointError, match=r"only on mine, tiny; run .* --bench other\.jsonl"):
        load_reports([str(b), str(a)], "other.jsonl")


def test_one_whole_page_and_the_figures_are_written(tmp_path: Path) -> None:
    evaluated = load_reports(
        [str(write_run(tmp_path / "a")), str(write_run(tmp_path / "<b>"))], None
    )
    page, data = write(evaluated, tmp_path / "out")
    html = page.read_text(encoding="utf-8")
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    assert balance.seen.count("svg") == 1
    assert "<b>/" not in html
    assert set(json.loads(data.read_text(encoding="utf-8"))) == set(evaluated)


def test_a_report_of_an_older_version_has_fewer_figures_and_correct_answers_a_column(
    tmp_path: Path,
) -> None:
    runs = write_run(tmp_path / "old"), write_run(tmp_path / "new")
    paths = [run / "eval" / "tiny" / "report.json" for run in runs]
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    for figures in (old["overall"], *old["categories"].values()):
        for key in ("intervals", "ctar", "head_accuracy", "baselines"):
            del figures[key]
    plain = {"correct": 2, "rate": 0.5, "interval": [0.15, 0.85]}
    new["overall"]["scores"] = {"metric": "pass@1", "answers": 4, "plain": plain}
    for path, report in zip(paths, (old, new), strict=True):
        path.write_text(json.dumps(report), encoding="utf-8")
    evaluated = load_reports([str(run) for run in runs], None)
    assert "(" not in column(runs_table(evaluated), "speedup")[0]
    assert column(runs_table(evaluated), "correct") == ["-", "50.0% (15.0%-85.0%)"]
    write(evaluated, tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "two runs or more"),
        (["a", "absent"], "absent: no such run"),
        (["a", "empty"], "holds no evaluation on bench tiny yet"),
        (["a", "broken"], "not a report"),
    ],
)
def test_reports_that_cannot_be_compared_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], message: str
) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MedusaError, match=message) as raised:
        load_reports(names, "tiny")
    assert isinstance(raised.value, ConfigError) == (len(names) < 2)  # wrong usage: exit code 2
