import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import CheckpointError
from medusa_train.evaluation import calibrate as calibration
from medusa_train.evaluation.calibrate import CalibrationResult, NamedCandidate, calibrate, interpolate
from medusa_train.evaluation.questions import load_bench
from medusa_train.inference.tree_fit import SEARCHES
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree
from tests.evaluation.html_report.test_page import Balance
from tests.evaluation.tiny_model import write_backbone, write_run


def test_latencies_are_interpolated_between_measured_sizes() -> None:
    measured = {0: 3.0, 4: 5.0, 8: 6.0}
    assert [interpolate(measured, nodes) for nodes in (0, 1, 4, 6, 8, 20)] == [3.0, 3.5, 5.0, 5.5, 6.0, 6.0]
    assert interpolate({4: 5.0}, 0) == 5.0


def small_result() -> CalibrationResult:
    sizes = range(3)
    trees = {name: {n: Tree.from_paths([(i,) for i in range(n)]) for n in sizes} for name in ("joint", "independent")}
    trees["chain"] = {n: Tree.chain(min(n, 1)) for n in sizes}
    curves = {name: {n: 1 + n / 2 for n in sizes} for name in trees}
    side = [NamedCandidate(trees[name][1], 1.5, 4.0, name) for name in trees]
    about = {"conversations": 4, "answers": 5, "tokens": 600}
    return CalibrationResult(trees, curves, {0: 2.0, 2: 4.0}, 2, side, [[0.5, 0.75]], [0.5, 0.25], about)


def test_content_of_tree_json_and_calibration_json() -> None:
    record = small_result().tree_record()
    assert set(record) == {"nodes", "tokens_per_step", "step_ms", "head_accuracy", "calibration", "sizes"}
    assert record["sizes"][1] == {"nodes": 1, "tokens_per_step": 1.5, "step_ms": 3.0, "tokens_per_s": 500.0}
    everything = small_result().as_json()
    assert [size["nodes"] for size in everything["searches"]["chain"]] == [0, 1]
    assert everything["medusa_choices"] == [[0], [1]]
    assert everything["candidates"][0]["tokens_per_s"] == 375.0


def run(paths_of: Path, bench: Path, out: Path | None, **keys: object) -> tuple[list[Path], str]:
    cfg = EvalConfig(
        bench=str(bench),
        dtype="float32",
        max_new_tokens=24,
        calibration_tokens=400,
        output_dir=None if out is None else str(out),
        **keys,
    )
    tree = None if cfg.tree is None else Path(cfg.tree)
    progress = RunProgress(Console(file=io.StringIO(), width=160))
    written = calibrate(cfg, load_bench(cfg.bench), resolve_model(str(paths_of), None, tree), progress)
    return written, progress.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LARGEST", 6)
    monkeypatch.setattr(calibration, "SIZES", (0, 2, 6))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    lines = [{"question_id": n, "turns": [f"What is {n} + {n}?", "never asked"]} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.usefixtures("small")
def test_the_tree_is_chosen_among_candidates_and_written(run_dir: Path, questions: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text("[[0], [1]]", encoding="utf-8")
    written, shown = run(run_dir, questions, tmp_path / "out", tree=str(own))
    tree, data, page = written
    assert tree == tmp_path / "out" / "tree.json"
    assert "evaluate on another one" in shown
    assert "partly by construction" in shown
    figures = json.loads(data.read_text(encoding="utf-8"))
    assert [one["name"] for one in figures["candidates"]] == [*SEARCHES, "named"]
    assert figures["candidates"][-1]["medusa_choices"] == [[0], [1]]
    assert list(figures["latency_ms"]) == ["0", "2", "6"]
    assert [size["nodes"] for size in figures["searches"]["joint"]] == list(range(7))
    assert figures["searches"]["joint"][0]["tokens_per_step"] == 1.0
    assert Tree.load(tree).size == figures["nodes"]
    best = max(figures["searches"]["joint"], key=lambda size: size["tokens_per_s"])
    assert best["nodes"] == figures["nodes"]
    balance = Balance()
    balance.feed(page.read_text(encoding="utf-8"))
    assert balance.open == []


@pytest.mark.usefixtures("small")
def test_a_run_is_calibrated_on_its_validation_split(tmp_path: Path, questions: Path) -> None:
    directory = write_run(tmp_path / "run", write_backbone(tmp_path / "backbone"))
    data = tmp_path / "chats.jsonl"
    turn = [{"role": "user", "content": "Say {}."}, {"role": "assistant", "content": "Well, {}."}]
    lines = [{"messages": [{**m, "content": m["content"].format(n)} for m in turn]} for n in range(12)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = {
        "base_model": str(tmp_path / "backbone"),
        "datasets": [{"path": str(data), "type": "messages"}],
        "val_set_size": 0.5,
        "sequence_len": 128,
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    written, shown = run(directory, questions, None)
    assert "validation prompts of the run" in shown
    assert written[0] == directory / "tree.json"
    record = json.loads((directory / "tree.json").read_text(encoding="utf-8"))
    assert record["calibration"]["conversations"] == 6
    assert record["nodes"] == len(record["medusa_choices"])


def test_calibration_errors(
    run_dir: Path, backbone_dir: Path, bench_file: Path, questions: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="only 2 conversations"):
        run(run_dir, bench_file, tmp_path)
    alone = resolve_model(None, str(backbone_dir), None)
    with pytest.raises(CheckpointError, match="chooses a tree for heads"):
        calibrate(EvalConfig(), load_bench(str(questions)), alone, RunProgress(Console(file=io.StringIO())))
