import io
import json
import re
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

import medusa_train
from medusa_train.checkpoint import load_model
from medusa_train.checkpoint.heads import save_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.checkpoint.run_directory import only_writer, other_files
from medusa_train.config.schema import EvalConfig
from medusa_train.data.conversation import Message
from medusa_train.errors import CheckpointError, ConfigError, DataError, TargetModelError
from medusa_train.evaluation import answer_scores, refit_tree
from medusa_train.evaluation import run_bench as module
from medusa_train.evaluation.questions import Question, load_benchmark
from medusa_train.evaluation.run_bench import evaluate
from medusa_train.evaluation.timing import SpeedTest
from medusa_train.evaluation.turns import Turn
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.loading import load_target_model
from medusa_train.progress import RunProgress
from medusa_train.tree_search.traces import trace_answer
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import write_run
from tests.tool_chats import CHAT, TOOL, call


@pytest.fixture(autouse=True)
def with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare in bfloat16 whatever processor runs the tests."""
    monkeypatch.setattr(module, "emulates", lambda device, dtype: False)


def run(
    bench_file: Path, model: Path | None, out: Path, **keys: object
) -> tuple[dict[str, Any], str]:
    cfg = EvalConfig(
        bench=str(bench_file), output_dir=str(out), max_new_tokens=16, warmup=1, **keys
    )
    bench = load_benchmark(str(bench_file))
    paths = resolve_model(
        None if model is None else str(model),
        cfg.base_model,
        cfg.tree,
        lookup=cfg.lookup_choice,
        chat_template=cfg.chat_template,
    )
    progress = RunProgress(Console(file=io.StringIO(), width=160))
    evaluate(cfg, bench, paths, "medusa-eval --bench small", progress)
    return json.loads((out / "report.json").read_text()), progress.console.file.getvalue()  # type: ignore[attr-defined]


def test_a_checkout_that_is_not_installed_is_measured_and_may_leave_generate_out(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata.Distribution, "discover", lambda **query: iter(()))
    report, shown = run(bench_file, run_dir, tmp_path / "out", exactness=False, generate=False)
    assert report["meta"]["medusa_train"] == medusa_train.__version__
    assert "prompt lookup" in shown.partition("the speed of plain decoding")[0]
    assert set(report["baselines"]) == {"plain", "prompt_lookup"}
    assert report["overall"]["speedup_over_fastest"] == report["overall"]["speedup"] > 0
    assert (
        report["overall"]["speedup_over_generate"]
        is report["overall"]["generate_tokens_per_s"]
        is None
    )


def test_two_processes_do_not_evaluate_into_one_directory(
    run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    """They would time each other, and delete each other's log."""
    out = tmp_path / "out"
    with (
        only_writer(out),
        pytest.raises(CheckpointError, match=f"another process is working in {out}"),
    ):
        run(bench_file, run_dir, out)
    assert not out.exists()


def test_a_run_is_timed_compared_in_both_dtypes_and_reported(
    run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    report, shown = run(bench_file, run_dir, tmp_path / "out", dtype="bfloat16")
    overall, meta = report["overall"], report["meta"]
    assert overall["answers"] == 4
    assert overall["equal_answers"] + overall["tie_answers"] == 4
    assert 0 <= overall["equal_answers_bf16"] <= 4
    assert overall["acceleration_rate"] >= 1.0
    assert overall["speedup"] > 0
    assert set(report["categories"]) == {"sums", "words"}
    assert (meta["dtype"], meta["tree_nodes"], meta["heads"], meta["skipped_turns"]) == (
        "bfloat16",
        6,
        3,
        2,
    )
    assert meta["command"] == "medusa-eval --bench small"
    assert (meta["chat_template"], meta["chat_template_kwargs"]) == (None, None)
    assert set(meta["baselines"]) == {
        "baseline_tokens_per_s",
        "generate_tokens_per_s",
        "prompt_lookup",
    }
    assert set(report["baselines"]) == {"plain", "generate", "prompt_lookup"}
    assert report["baselines"]["prompt_lookup"]["tokens_per_s"] > 0
    tree = report["tree"]
    assert len(tree["accepted"]) == len(tree["medusa_choices"]) == 6
    assert len(overall["head_accuracy"]) == 3
    assert overall["chain_rates"][-1] >= 1.0
    answers, ranks = (
        (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()
        for name in ("answers", "ranks")
    )
    tokens = [json.loads(line).get("tokens") for line in answers]
    assert [len(json.loads(line)["ranks"]) for line in ranks] == [
        count for count in tokens if count
    ]
    assert not (tmp_path / "out" / "turns.jsonl").exists()
    assert list(other_files(tmp_path / "out")) == []
    assert meta["resumed_turns"] == 0
    assert "overall" in shown
    assert "2 turns were skipped" in shown
    parts = [
        "warm-up",
        "timing in bfloat16",
        "tracing the heads' guesses",
        "output equality in float32",
    ]
    assert [name for name in meta["phases"] if "loading" not in name] == parts
    assert sum(meta["phases"].values()) <= meta["seconds"] + 0.5  # rounded
    assert "total" in shown.split()[-5:]  # and the time, in two or four words


@pytest.mark.parametrize(
    ("draft", "batch_size"),
    [("prompt_lookup", 1), ("medusa+prompt_lookup", 1), ("medusa+prompt_lookup", 2)],
)
def test_drafts_without_training_are_timed_like_heads(
    draft: str, batch_size: int, run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    keys = {
        "dtype": "float32",
        "exactness": False,
        "prompt_lookup": False,
        "batch_size": batch_size,
    }
    report, shown = run(bench_file, run_dir, tmp_path, draft=draft, lookup={"nodes": 4}, **keys)
    overall, meta = report["overall"], report["meta"]
    assert overall["acceleration_rate"] > 1.0
    assert overall["equal_answers"] + overall["tie_answers"] == 4
    assert meta["draft"] == f"{draft} (max ngram 3, max tokens 10, nodes 4, min probability 0.05)"
    assert meta["heads"] == (None if draft == "prompt_lookup" else 3)
    assert ("tree" in report) == (draft != "prompt_lookup")
    assert f"draft {draft} (" in " ".join(shown.split())  # lines are wrapped
    parts = set() if draft == "prompt_lookup" else {"heads_alone", "lookup_alone"}
    assert set(report["baselines"]) == {"plain", "generate", *parts}
    for name in parts:
        assert report["baselines"][name]["tokens_per_step"] >= 1.0
        assert report["baselines"][name]["equal_to_plain"] == 4
        assert re.search(rf"^ {name.replace('_', ' ')} +\d", shown, re.MULTILINE)


def test_a_datastore_is_named_in_the_report(
    run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("any text", encoding="utf-8")
    rest = {"draft": "rest", "rest": {"datastore": str(text)}}
    report, _ = run(
        bench_file, run_dir, tmp_path, dtype="float32", exactness=False, prompt_lookup=False, **rest
    )
    assert "text.txt, max ngram 16" in report["meta"]["draft"]


@pytest.mark.parametrize(
    ("tree", "batch_size", "draft"),
    [("dynamic", 1, None), ("dynamic:8x3", 2, None), ("dynamic", 1, "eagle3+lookahead")],
)
def test_dynamic_trees_are_timed_beside_the_fixed_one(
    tree: str,
    batch_size: int,
    draft: str | None,
    target_model_dir: Path,
    bench_file: Path,
    tmp_path: Path,
) -> None:
    model = write_run(tmp_path / "run", target_model_dir, draft="eagle3")
    keys = {
        "tree": tree,
        "dtype": "float32",
        "exactness": False,
        "prompt_lookup": False,
        "batch_size": batch_size,
    }
    report, _ = run(bench_file, model, tmp_path / "out", draft=draft, **keys)
    overall, meta = report["overall"], report["meta"]
    assert overall["acceleration_rate"] >= 1.0
    assert overall["equal_answers"] + overall["tie_answers"] == 4
    fixed = {"fixed_tree", *({"heads_alone", "lookup_alone"} if draft else ())}
    assert set(report["baselines"]) == {"plain", "generate", *fixed}
    for name in fixed:
        baseline = report["baselines"][name]
        assert baseline["tokens_per_step"] >= 1.0
        assert baseline["equal_to_plain"] == 4
        assert baseline["speedup_interval"] is None  # of fewer than five questions
        over_plain = overall["speedup"] / baseline["speedup"]
        assert baseline["over_plain"] == pytest.approx(over_plain)
        assert baseline["over_plain_interval"] is None
    assert meta["baselines"]["fixed_tree"].endswith("tree of 6 nodes in every step")
    assert not draft or meta["baselines"]["heads_alone"].endswith("heads alone, dynamic trees")
    assert meta["tree_nodes"] == "dynamic"
    size, depth = (6, 2) if tree == "dynamic" else (8, 3)
    assert meta["dynamic_trees"] == {"size": size, "depth": depth}
    assert "tree" not in report
    summary = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert f"dynamic trees of {size} nodes, up to {depth} deep" in summary
    assert "| fixed tree |" in summary


def test_a_threshold_and_a_tree_of_the_command_line_have_a_report_of_their_own(
    target_model_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        load_model, "use_cuda_graphs", lambda target_model: pytest.fail("a graph cannot stop early")
    )
    target_model = load_target_model(str(target_model_dir), dtype="float32")
    save_draft(
        KangarooDraft(target_model, num_heads=3, exit_layer=1),
        tmp_path / "run" / "heads",
        str(target_model_dir),
    )
    (tmp_path / "run" / "config.yaml").write_text(
        f"base_model: {target_model_dir}\n", encoding="utf-8"
    )
    Tree.chain(2).save(tmp_path / "two.json")
    asked = {
        "bench": str(bench_file),
        "max_new_tokens": 8,
        "dtype": "float32",
        "exactness": False,
        "limit": 1,
    }
    longest = []
    for keys in ({"threshold": 1.0}, {"threshold": 0.0, "tree": str(tmp_path / "two.json")}):
        cfg = EvalConfig(**asked, **keys)
        paths = resolve_model(str(tmp_path / "run"), None, cfg.tree, threshold=cfg.threshold)
        progress = RunProgress(Console(file=io.StringIO()))
        written = evaluate(cfg, load_benchmark(cfg.bench).limited(1), paths, "", progress)
        report = json.loads(written[0].read_text())
        longest.append(len(report["overall"]["ctar"]))
        assert report["meta"]["early_stop"] == cfg.threshold
    assert longest[0] <= 1  # it stops after every token
    names = sorted(path.name for path in (tmp_path / "run" / "eval").iterdir())
    assert names[0] == "small-threshold1"
    assert re.fullmatch(r"small-two-[0-9a-f]{8}-threshold0", names[1])


def test_answers_with_a_known_result_are_scored_for_both_decoders(
    run_dir: Path, tmp_path: Path
) -> None:
    problems = [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?", "answer": "#### 4"}]
    bench = tmp_path / "sums.jsonl"
    bench.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
    report, shown = run(bench, run_dir, tmp_path / "out", dtype="float32", exactness=False)
    scores = report["overall"]["scores"]
    assert (scores["metric"], scores["answers"]) == ("exact match", 2)
    assert scores["tree"] == scores["plain"]
    assert "with plain decoding equal on every question" in shown
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    ]
    assert all(set(line["scores"]) == {"tree", "plain"} for line in lines)


def test_answers_are_scored_by_rouge_where_asked(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    (tmp_path / "texts.jsonl").write_text(
        json.dumps({"question_id": 1, "turns": ["Hi"], "reference": "a b"})
    )
    report, shown = run(
        tmp_path / "texts.jsonl",
        run_dir,
        tmp_path / "out",
        dtype="float32",
        exactness=False,
        rouge=True,
    )
    assert report["rouge"] == {
        "answers": 1,
        "tree": report["rouge"]["plain"],
        "plain": report["rouge"]["plain"],
    }
    assert "Quality: ROUGE-1/2/L" in shown


def test_code_is_not_run_without_permission(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = {
        "task_id": "a/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "test": "def check(f): f()",
    }
    bench = tmp_path / "code.jsonl"
    bench.write_text(json.dumps(problem), encoding="utf-8")
    monkeypatch.setattr(
        module, "load_with_progress", lambda *args, **keys: pytest.fail("loaded nevertheless")
    )
    with pytest.raises(ConfigError, match="allow_code_execution=true"):
        run(bench, run_dir, tmp_path / "out")


def test_code_that_is_not_scored_is_not_run(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = {
        "task_id": "a/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "test": "def check(f): f()",
    }
    bench = tmp_path / "code.jsonl"
    bench.write_text(json.dumps(problem), encoding="utf-8")
    monkeypatch.setattr(answer_scores, "run_program", lambda *_: pytest.fail("run nevertheless"))
    report, _ = run(bench, run_dir, tmp_path / "out", score=False)
    assert report["overall"]["speedup"] > 0
    assert not report["overall"].get("scores")


def test_a_sampled_run_reports_its_mode_and_compares_no_answers(
    run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    keys = {"acceptance": "sampling", "temperature": 0.8, "top_p": 0.9, "batch_size": 2}
    report, shown = run(bench_file, run_dir, tmp_path, dtype="float32", **keys)
    overall, meta = report["overall"], report["meta"]
    assert meta["decoding"] == {
        "acceptance": "sampling",
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 0,
        "batch_size": 2,
    }
    assert (meta["exactness"], meta["plain_equal_generate"]) == (None, None)
    assert overall["equal_answers"] is None
    assert overall["speedup"] > 0
    assert overall["overhead"] > 0
    assert set(report["baselines"]) == {"plain", "generate"}
    assert "in float32, sampling at temperature 0.8, top-p 0.9, in batches of 2" in shown
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "lossless in distribution" in text
    assert "equal fp32" not in text
    assert "equal to plain" not in text


def test_an_empty_tree_is_no_speedup(
    target_model_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    """Both sides would be the same loop, and their ratio noise."""
    model = write_run(tmp_path / "run", target_model_dir)
    Tree.empty().save(model / "tree.json")
    report, shown = run(bench_file, model, tmp_path / "out", dtype="float32")
    overall = report["overall"]
    assert "No tree used, so no speedup: the tree is empty" in shown
    assert overall["speedup"] is overall["overhead"] is overall["acceleration_rate"] is None
    assert overall["intervals"] == {}
    assert report["meta"]["tree_nodes"] == 0
    assert len(overall["head_accuracy"]) == 3  # along plain answers
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "speedup over" not in page
    assert "No tree used" in page
    load = report["meta"]["machine_load"]
    assert load["plain_step_spread"] >= 0
    assert load["cores"] + 1 >= load["other_cores"] >= 0  # of a moment: accurate to some ticks


def test_a_target_model_alone_gives_baselines(
    target_model_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    report, shown = run(
        bench_file, None, tmp_path, base_model=str(target_model_dir), dtype="float32"
    )
    overall, meta = report["overall"], report["meta"]
    assert overall["speedup"] is None
    assert overall["generate_tokens_per_s"] > 0
    assert meta["model"] is None
    assert meta["plain_equal_generate"] == 4
    assert "Baselines only" in shown


def test_without_a_tree_guesses_are_traced_along_plain_answers(
    run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    report, shown = run(
        bench_file, run_dir, tmp_path / "none", tree="none", batch_size=2, dtype="float32"
    )
    assert set(report["baselines"]) == {"plain"}
    assert (
        report["overall"]["speedup"]
        is report["overall"]["acceleration_rate"]
        is report["meta"]["tree_nodes"]
        is None
    )
    assert "nothing was drafted" in shown
    run(bench_file, run_dir, tmp_path / "fixed", dtype="float32", exactness=False)
    none, fixed = ((tmp_path / name / "ranks.jsonl").read_text() for name in ("none", "fixed"))
    assert none == fixed


def test_an_interrupted_evaluation_is_resumed(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | str] = []
    measure = SpeedTest._measure

    def stops(self: SpeedTest, asking: Any, *args: Any, **keys: Any) -> None:
        asked.extend(one.question_id for one in asking)
        if asked == [1, 1, 2]:
            raise KeyboardInterrupt
        measure(self, asking, *args, **keys)

    monkeypatch.setattr(SpeedTest, "_measure", stops)
    with pytest.raises(KeyboardInterrupt):
        run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False)
    assert (tmp_path / "turns.jsonl").exists()
    report, shown = run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False)
    assert "2 turns are measured" in shown
    assert asked == [1, 1, 2, 2, 2]  # the first question is not asked again
    assert report["overall"]["answers"] == 4
    assert report["meta"]["resumed_turns"] == 2
    assert not (tmp_path / "turns.jsonl").exists()


def test_a_question_that_was_skipped_before_an_interruption_is_not_asked_again(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = bench_file.read_text().splitlines(keepends=True)
    bench_file.write_text("".join(reversed(lines)))  # the third one does not fit
    measure, ask, asked = SpeedTest._measure, Question.asked, []

    def recorded(question: Question, turn: int) -> list[Message]:
        asked.append(question.question_id)
        return ask(question, turn)

    monkeypatch.setattr(SpeedTest, "_measure", Mock(side_effect=KeyboardInterrupt))
    keys = {"dtype": "float32", "exactness": False, "generate": False, "prompt_lookup": False}
    with pytest.raises(KeyboardInterrupt):
        run(bench_file, run_dir, tmp_path / "out", **keys)
    monkeypatch.setattr(SpeedTest, "_measure", measure)
    monkeypatch.setattr(Question, "asked", recorded)
    report, _ = run(bench_file, run_dir, tmp_path / "out", **keys)
    assert asked == [2, 2, 1, 1]
    assert report["meta"]["resumed_turns"] == report["meta"]["skipped_turns"] == 2


def test_if_no_question_fits_the_error_says_why(run_dir: Path, tmp_path: Path) -> None:
    bench = tmp_path / "long.jsonl"
    bench.write_text(json.dumps({"question_id": 1, "turns": ["x" * 250]}), encoding="utf-8")
    with pytest.raises(DataError, match=r"context of 256 tokens: 16 are reserved.*prompt has 268"):
        run(bench, run_dir, tmp_path / "out", dtype="float32", prompt_lookup=False)


def test_the_log_of_an_older_version_starts_over_and_says_so(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines have other keys, and would be read as turns that were skipped."""
    measure, log = SpeedTest._measure, tmp_path / "turns.jsonl"

    def stops(self: SpeedTest, asking: Any, *args: Any, **keys: Any) -> None:
        if log.read_text().count("\n") == 3:  # the header and two turns
            raise KeyboardInterrupt
        measure(self, asking, *args, **keys)

    monkeypatch.setattr(SpeedTest, "_measure", stops)
    with pytest.raises(KeyboardInterrupt):
        run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False)
    monkeypatch.setattr(SpeedTest, "_measure", measure)
    header, *lines = (json.loads(line) for line in log.read_text().splitlines())
    del header["settings"]["format"]
    older = [line | line.pop("answers") for line in lines]
    log.write_text("".join(json.dumps(line) + "\n" for line in (header, *older)))
    report, shown = run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False)
    assert "had a different format: starting over" in " ".join(shown.split())
    assert report["meta"]["resumed_turns"] == 0
    assert report["overall"]["answers"] == 4


def no_memory(*args: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_without_memory_for_the_comparison_its_figures_are_missing(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_regenerated_answers = module.compare_regenerated_answers

    def fails_at_the_end(*args: Any, **keys: Any) -> None:
        compare_regenerated_answers(*args, **keys)
        no_memory()

    monkeypatch.setattr(module, "compare_regenerated_answers", fails_at_the_end)
    report, shown = run(bench_file, run_dir, tmp_path, dtype="bfloat16")
    overall, meta = report["overall"], report["meta"]
    assert overall["speedup"] > 0
    assert (overall["equal_answers"], overall["tie_answers"]) == (None, None)
    assert overall["equal_answers_bf16"] is not None
    assert meta["exactness"] == {"float32": "not enough memory", "bfloat16": "compared"}
    assert "answers were not compared in float32: not enough memory" in shown


def test_without_memory_for_tracing_no_part_of_the_answers_is_shown_for_all(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []

    def fails_at_the_third(*args: Any) -> Any:
        if len(traced) == 2:
            no_memory()
        traced.append(trace_answer(*args))
        return traced[-1]

    monkeypatch.setattr(module, "trace_answer", fails_at_the_third)
    keys = {"exactness": False, "generate": False, "prompt_lookup": False}
    report, _ = run(bench_file, run_dir, tmp_path, dtype="float32", **keys)
    assert len(traced) == 2
    assert report["overall"]["speedup"] > 0
    assert (report["overall"]["head_accuracy"], report["overall"]["chain_rates"]) == (None, [])
    assert "tree" not in report
    assert not (tmp_path / "ranks.jsonl").exists()


def test_a_comparison_of_some_answers_says_how_many_of_how_many(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LEAST_COMPARED", 1), ("ALL_WITHIN", 0.0)):
        monkeypatch.setattr(f"medusa_train.evaluation.output_equality.{name}", value)
    compare_regenerated_answers = module.compare_regenerated_answers

    def in_no_time(*args: Any, seconds: float | None, **keys: Any) -> None:
        given = None if seconds is None else 0.0
        compare_regenerated_answers(*args, seconds=given, **keys)

    monkeypatch.setattr(module, "compare_regenerated_answers", in_no_time)
    report, shown = run(bench_file, run_dir, tmp_path / "some", dtype="bfloat16")
    overall, count = report["overall"], report["overall"]["answers"]
    assert (overall["compared_answers"], overall["equal_answers"]) == (1, 1)
    assert overall["compared_answers_bf16"] == count > 1
    assert f"1 of {count} answers were compared in float32, drawn at random" in shown
    drawn = f"float32: 1 of 1 (drawn at random from {count}) answers equal plain decoding's"
    assert drawn in " ".join(shown.split())
    report, shown = run(bench_file, run_dir, tmp_path / "all", dtype="bfloat16", equality="all")
    assert report["overall"]["compared_answers"] == count


@pytest.mark.parametrize("emulated", [False, True])
def test_a_dtype_that_does_not_fit_or_is_emulated_is_not_loaded_for_the_comparison(
    emulated: bool, run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "emulates", lambda device, dtype: emulated)
    monkeypatch.setattr(module.WeightMemory, "fit", lambda self, dtype: emulated)
    monkeypatch.setattr(
        module,
        "compare_regenerated_answers",
        lambda *args, **keys: pytest.fail("loaded nevertheless"),
    )
    report, shown = run(bench_file, run_dir, tmp_path, dtype="float32")
    reason = module.EMULATED if emulated else "not enough memory"
    assert report["meta"]["exactness"] == {"float32": "compared", "bfloat16": reason}
    assert f"answers were not compared in bfloat16: {reason}" in shown


def test_the_timed_model_is_gone_when_the_next_dtype_is_loaded(
    run_dir: Path,
    bench_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large target model fits into the memory of a GPU once."""
    loaded, alive = [], []

    def load_with_progress(*args: Any, **keys: Any) -> Any:
        model = refit_tree.load_with_progress(*args, **keys)
        loaded.append(weakref.ref(model.target_model.model))
        return model

    def fit(self: object, dtype: str) -> bool:
        alive.append(loaded[0]() is not None)
        return True

    monkeypatch.setattr(module, "load_with_progress", load_with_progress)
    monkeypatch.setattr(module.WeightMemory, "fit", fit)
    run(bench_file, run_dir, tmp_path, dtype="float32")
    assert (len(loaded), alive) == (2, [False])


def test_an_interruption_during_the_comparison_keeps_the_timed_results(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_regenerated_answers = module.compare_regenerated_answers

    def interrupted(records: list[Turn], *args: Any, **keys: Any) -> None:
        compare_regenerated_answers(records[:1], *args, **keys)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "compare_regenerated_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(bench_file, run_dir, tmp_path, dtype="float32")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["overall"]["speedup"] > 0
    assert report["overall"]["equal_answers_bf16"] is None
    assert report["overall"]["equal_answers"] + report["overall"]["tie_answers"] == 4
    assert report["meta"]["exactness"] == {"float32": "compared", "bfloat16": "not compared"}
    assert report["meta"]["backbone"] == "unquantised"
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 6


def test_without_memory_for_timing_the_error_says_what_to_set(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_train.evaluation.refit_tree.load_for_decoding", no_memory)
    with pytest.raises(
        TargetModelError,
        match=r"not enough memory to decode with it in float32\.\nSet another dtype",
    ):
        run(bench_file, run_dir, tmp_path, dtype="float32")


#: Short, for a context of 256 characters; takes one call at a time.
ONE_CALL = (
    "{{ tools | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if loop.length > 1 %}{{ raise_exception('one call!') }}"
    "{% endif %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_answers_with_calls_and_without_are_reported_apart(run_dir: Path, tmp_path: Path) -> None:
    path, template = tmp_path / "chats.jsonl", tmp_path / "one_call.jinja"
    template.write_text(ONE_CALL, encoding="utf-8")
    question, answer = CHAT["messages"][1], CHAT["messages"][-1]
    both = {"role": "assistant", "content": None, "tool_calls": [call(3), call(4)]}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "r"} for n in (3, 4)]
    chats = [CHAT, {"messages": [question, both, *results, answer], "tools": [TOOL]}]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    report, printed = run(
        path,
        run_dir,
        tmp_path / "out",
        chat_template=str(template),
        exactness=False,
        generate=False,
        prompt_lookup=False,
    )
    groups = report["categories"]
    assert {name: group["answers"] for name, group in groups.items()} == {
        "with calls": 3,
        "without calls": 1,
    }
    assert all(group["acceleration_rate"] >= 1 for group in groups.values())
    assert "with calls" in printed
    assert "1 questions are left out; the first: the chat template rejects" in printed
