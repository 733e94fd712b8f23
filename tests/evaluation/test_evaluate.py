import io
import json
from pathlib import Path

from rich.console import Console

from medusa_train.config.schema import EvalConfig
from medusa_train.evaluation.benches import load_bench
from medusa_train.evaluation.evaluate import evaluate
from medusa_train.evaluation.subject import locate


def run(bench_file: Path, model: Path | None, out: Path, **keys: object) -> tuple[dict[str, object], str]:
    cfg = EvalConfig(bench=str(bench_file), output_dir=str(out), max_new_tokens=16, warmup=1, **keys)
    bench = load_bench(str(bench_file))
    paths = locate(None if model is None else str(model), cfg.base_model, None)
    console = Console(file=io.StringIO(), width=160)
    evaluate(cfg, bench, paths, "medusa-eval --bench small", console)
    return json.loads((out / "report.json").read_text()), console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_is_timed_judged_in_both_dtypes_and_reported(run_dir: Path, bench_file: Path, tmp_path: Path) -> None:
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
    assert set(meta["baselines"]) == {"baseline_tokens_per_s", "generate_tokens_per_s"}
    assert "overall" in shown
    assert "2 turns were skipped" in shown


def test_timed_in_float32_without_further_passes_bf16_is_left_open(
    run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    overall = run(bench_file, run_dir, tmp_path, dtype="float32", exactness=False)[0]["overall"]
    assert isinstance(overall, dict)
    assert overall["equal_answers"] + overall["tie_answers"] == 4
    assert overall["equal_answers_bf16"] is None


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
