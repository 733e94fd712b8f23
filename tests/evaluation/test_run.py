import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import BackboneError
from medusa_train.evaluation import run as module
from medusa_train.evaluation.questions import Question, load_bench
from medusa_train.evaluation.records import TimedAnswer, TurnRecord
from medusa_train.evaluation.run import evaluate
from medusa_train.evaluation.speed import SlowStepDetector, SpeedTest
from medusa_train.progress import RunProgress


def run(bench_file: Path, model: Path | None, out: Path, **keys: object) -> tuple[dict[str, object], str]:
    cfg = EvalConfig(bench=str(bench_file), output_dir=str(out), max_new_tokens=16, warmup=1, **keys)
    bench = load_bench(str(bench_file))
    paths = resolve_model(None if model is None else str(model), cfg.base_model, None)
    progress = RunProgress(Console(file=io.StringIO(), width=160))
    evaluate(cfg, bench, paths, "medusa-eval --bench small", progress)
    return json.loads((out / "report.json").read_text()), progress.console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_is_timed_compared_in_both_dtypes_and_reported(run_dir: Path, bench_file: Path, tmp_path: Path) -> None:
    report, shown = run(bench_file, run_dir, tmp_path / "out", dtype="bfloat16")
    overall, meta = report["overall"], report["meta"]
    assert isinstance(overall, dict)
    assert isinstance(meta, dict)
    assert overall["answers"] == 4
    assert overall["equal_answers"] + overall["tie_answers"] == 4
    assert 0 <= overall["equal_answers_bf16"] <= 4
    assert overall["acceleration_rate"] >= 1.0
    assert overall["speedup"] > 0
    assert set(report["categories"]) == {"sums", "words"}  # type: ignore[arg-type]
    assert (meta["dtype"], meta["tree_nodes"], meta["heads"], meta["skipped_turns"]) == ("bfloat16", 6, 3, 2)
    assert meta["command"] == "medusa-eval --bench small"
    assert set(meta["baselines"]) == {"baseline_tokens_per_s", "generate_tokens_per_s", "prompt_lookup"}
    assert set(report["baselines"]) == {"plain", "generate", "prompt_lookup"}  # type: ignore[arg-type]
    assert report["baselines"]["prompt_lookup"]["tokens_per_s"] > 0  # type: ignore[index]
    tree = report["tree"]
    assert isinstance(tree, dict)
    assert len(tree["accepted"]) == len(tree["medusa_choices"]) == 6
    assert len(overall["head_accuracy"]) == 3
    assert overall["chain_acceleration_rate"] >= 1.0
    assert not (tmp_path / "out" / "turns.jsonl").exists()
    assert meta["resumed_turns"] == 0
    assert "overall" in shown
    assert "2 turns were skipped" in shown
    assert isinstance(meta["notes"], list)
    parts = ["warm-up", "timing in bfloat16", "tracing the heads' guesses", "output equality in float32"]
    assert [name for name in meta["phases"] if "loading" not in name] == parts
    assert sum(meta["phases"].values()) <= meta["seconds"] + 0.5  # rounded
    assert shown.split()[-3] == "total"


def test_without_exactness_only_the_timed_dtype_is_compared(run_dir: Path, bench_file: Path, tmp_path: Path) -> None:
    overall = run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False)[0]["overall"]
    assert isinstance(overall, dict)
    assert overall["equal_answers"] + overall["tie_answers"] == 4
    assert overall["equal_answers_bf16"] is None


def test_a_slow_moment_is_noted_in_the_report(
    backbone_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def observe(self: SlowStepDetector, plain: TimedAnswer) -> str | None:
        self.notes[:] = ["steps are slow"]
        return "steps are slow"

    monkeypatch.setattr(SlowStepDetector, "observe", observe)
    report, shown = run(bench_file, None, tmp_path, base_model=str(backbone_dir), dtype="float32")
    assert report["meta"]["notes"] == ["steps are slow"]  # type: ignore[index]
    assert "note: steps are slow" in shown


def test_a_backbone_alone_gives_baselines(backbone_dir: Path, bench_file: Path, tmp_path: Path) -> None:
    report, shown = run(bench_file, None, tmp_path, base_model=str(backbone_dir), dtype="float32")
    overall, meta = report["overall"], report["meta"]
    assert isinstance(overall, dict)
    assert isinstance(meta, dict)
    assert overall["speedup"] is None
    assert overall["generate_tokens_per_s"] > 0
    assert meta["model"] is None
    assert meta["plain_equal_generate"] == 4
    assert "Baselines only" in shown


def test_an_interrupted_evaluation_is_resumed(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | str] = []
    measure = SpeedTest._measure

    def stops(self: SpeedTest, question: Question, *args: Any, **keys: Any) -> TurnRecord:
        asked.append(question.question_id)
        if asked == [1, 1, 2]:
            raise KeyboardInterrupt
        return measure(self, question, *args, **keys)

    monkeypatch.setattr(SpeedTest, "_measure", stops)
    with pytest.raises(KeyboardInterrupt):
        run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False)
    assert (tmp_path / "turns.jsonl").exists()
    report, shown = run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False)
    assert "2 turns are measured" in shown
    assert asked == [1, 1, 2, 2, 2]  # the first question is not asked again
    assert report["overall"]["answers"] == 4  # type: ignore[index]
    assert report["meta"]["resumed_turns"] == 2  # type: ignore[index]
    assert not (tmp_path / "turns.jsonl").exists()


def test_different_settings_start_over(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    trace_records = module.trace_records
    monkeypatch.setattr(module, "trace_records", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(bench_file, run_dir, tmp_path, dtype="float32")
    monkeypatch.setattr(module, "trace_records", trace_records)
    report, shown = run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False, prompt_lookup=False)
    assert "had a different prompt_lookup: starting over" in shown
    assert report["meta"]["resumed_turns"] == 0  # type: ignore[index]
    assert set(report["baselines"]) == {"plain", "generate"}  # type: ignore[arg-type]


def no_memory(*args: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_without_memory_for_the_comparison_its_figures_are_missing(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_regenerated_answers = module.compare_regenerated_answers

    def fails_at_the_end(*args: object) -> None:
        compare_regenerated_answers(*args)  # type: ignore[arg-type]
        no_memory()

    monkeypatch.setattr(module, "compare_regenerated_answers", fails_at_the_end)
    report, shown = run(bench_file, run_dir, tmp_path, dtype="bfloat16")
    overall, meta = report["overall"], report["meta"]
    assert isinstance(overall, dict)
    assert isinstance(meta, dict)
    assert overall["speedup"] > 0
    assert (overall["equal_answers"], overall["tie_answers"]) == (None, None)
    assert overall["equal_answers_bf16"] is not None
    assert meta["exactness"] == {"float32": "not enough memory", "bfloat16": "compared"}
    assert "answers were not compared in float32: not enough memory" in shown


def test_weights_that_do_not_fit_are_not_loaded_for_the_comparison(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.WeightMemory, "fit", lambda self, dtype: False)
    monkeypatch.setattr(module, "compare_regenerated_answers", lambda *args: pytest.fail("loaded nevertheless"))
    meta = run(bench_file, run_dir, tmp_path, dtype="float32")[0]["meta"]
    assert isinstance(meta, dict)
    assert meta["exactness"] == {"float32": "compared", "bfloat16": "not enough memory"}


def test_an_interruption_during_the_comparison_keeps_the_timed_results(
    run_dir: Path, bench_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
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
    monkeypatch.setattr(module, "load_with_draft", no_memory)
    with pytest.raises(BackboneError, match=r"not enough memory to decode with it in float32\.\nSet another dtype"):
        run(bench_file, run_dir, tmp_path, dtype="float32")
