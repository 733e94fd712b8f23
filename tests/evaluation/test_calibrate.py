import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.checkpoint.run_directory import only_writer
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import CheckpointError, MedusaError
from medusa_train.evaluation.calibrate import (
    calibrate,
    load_with_progress,
    refit_tokens,
    refit_tree,
    resumed_tree,
)
from medusa_train.evaluation.questions import load_bench
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.progress import RunProgress
from medusa_train.tree_search import choose_tree as module
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import write_backbone, write_run


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
    written = calibrate(
        cfg, load_bench(cfg.bench), resolve_model(str(paths_of), None, tree), progress
    )
    return written, progress.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZES", (0, 2, 6))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    lines = [{"question_id": n, "turns": [f"What is {n} + {n}?", "never asked"]} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.usefixtures("small")
def test_the_tree_is_chosen_among_candidates_and_written(
    run_dir: Path, questions: Path, tmp_path: Path
) -> None:
    (tree,), shown = run(run_dir, questions, tmp_path / "out")
    assert tree == tmp_path / "out" / "tree.json"
    assert "since the run's data are not available" in shown
    figures = json.loads(tree.read_text(encoding="utf-8"))
    assert [size["nodes"] for size in figures["sizes"]] == [0, 2, 6]
    assert figures["sizes"][0]["tokens_per_step"] == 1.0
    assert Tree.load(tree).size == figures["nodes"]


def test_heads_without_a_tree_are_told_how_to_fit_one(run_dir: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    shutil.copytree(run_dir / "heads", heads)
    backbone = resolve_model(str(run_dir), None, None).base_model
    progress = RunProgress(Console(file=io.StringIO(), width=1000))
    load_with_progress(resolve_model(str(heads), backbone, None), "float32", progress)
    shown = progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert f"--calibrate --model {heads} --base-model {backbone}" in shown


def write_run_with_data(home: Path) -> Path:
    """A run whose config.yaml names chats to fit a tree to."""
    directory = write_run(home / "run", write_backbone(home / "backbone"))
    data = home / "chats.jsonl"
    turn = [{"role": "user", "content": "Say {}."}, {"role": "assistant", "content": "Well, {}."}]
    lines = [
        {"messages": [{**m, "content": m["content"].format(n)} for m in turn]} for n in range(12)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = {
        "base_model": str(home / "backbone"),
        "datasets": [{"path": str(data), "type": "messages"}],
        "val_set_size": 0.5,
        "sequence_len": 128,
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return directory


@pytest.mark.usefixtures("small")
def test_a_run_is_calibrated_on_its_validation_split(tmp_path: Path, questions: Path) -> None:
    directory = write_run_with_data(tmp_path)
    written, shown = run(directory, questions, None, compile="auto")
    assert [
        part in shown for part in ("validation prompts of the run", "calibrating uncompiled")
    ] == [True, True]
    assert written[0] == directory / "tree.json"
    record = json.loads((directory / "tree.json").read_text(encoding="utf-8"))
    assert record["calibration"]["conversations"] == 6
    assert record["nodes"] == len(record["medusa_choices"])
    assert record["form"]["dtype"] == "float32"
    config = directory / "config.yaml"
    config.write_text(
        config.read_text(encoding="utf-8").replace("val_set_size: 0.5", "val_set_size: 0"), "utf-8"
    )
    assert (
        "training prompts of the run, which holds none out"
        in run(directory, questions, tmp_path / "other")[1]
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("share", "chats", "source"),
    [
        (0.09, 12, "training prompts of the run, which holds 1 out"),
        (0.5, 2, "questions of bench"),  # the training set has no three chats, either
    ],
)
def test_a_tree_is_not_fitted_to_one_held_out_chat(
    tmp_path: Path, questions: Path, share: float, chats: int, source: str
) -> None:
    directory = write_run_with_data(tmp_path)
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:chats]))
    config = directory / "config.yaml"
    config.write_text(config.read_text().replace("val_set_size: 0.5", f"val_set_size: {share}"))
    assert source in run(directory, questions, tmp_path / "other")[1]


def refit(
    directory: Path, dtype: str = "float32", **keys: object
) -> tuple[tuple[LoadedModel, ModelPaths] | None, str]:
    cfg = EvalConfig(max_new_tokens=24, calibration_tokens=400, **keys)
    progress = RunProgress(Console(file=io.StringIO(), width=300))
    paths = resolve_model(str(directory), None, None if cfg.tree is None else Path(cfg.tree))
    result = refit_tree(cfg, load_with_progress(paths, dtype, progress), paths, 100, progress)
    return result, progress.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("small")
def test_a_tree_that_was_fitted_to_another_form_is_fitted_again(tmp_path: Path) -> None:
    directory = write_run_with_data(tmp_path)
    tree = directory / "tree.json"
    before = tree.read_bytes()
    result, shown = refit(directory)
    assert result is None
    assert "does not say for which dtype and device it was fitted; using it as it is" in shown
    form = DecodingSettings.of(
        load_with_progress(resolve_model(str(directory), None, None), "float32", quiet()).backbone
    )
    Tree.chain(2).save(tree, **form.record())
    assert refit(directory)[0] is None
    Tree.chain(2).save(tree, **replace(form, quantization="nf4", merged=False).record())
    result, shown = refit(directory, tree=str(tree))
    assert result is None
    assert "(quantization nf4, now none, merged no, now yes); using it as named by tree" in shown
    result, shown = refit(directory)
    assert "(quantization nf4, now none, merged no, now yes): fitting it again" in shown
    assert result is not None
    model, paths = result
    assert paths.tree == tree
    assert model.tree == Tree.load(tree)
    assert DecodingSettings.load(tree) == form
    assert tree.read_bytes() != before
    assert refit(directory)[0] is None  # now it fits
    Tree.chain(2).save(tree, **replace(form, compiled=True).record())
    assert refit(directory)[0] is None  # auto, by default here, does not compile a few questions
    assert refit(directory, compile=False)[0] is not None
    other = Path(shutil.copytree(directory, tmp_path / "elsewhere"))
    cfg = EvalConfig(bench="tiny", output_dir=str(other))
    assert resumed_tree(cfg, paths).tree == other / "tree.json"
    os.utime(tree)
    assert resumed_tree(cfg, paths).tree == tree  # chosen again since
    os.utime(other / "tree.json")
    (other / "tree_traces.npz").unlink()
    assert resumed_tree(cfg, paths) is paths

    traces = (directory / "tree_traces.npz").read_bytes()
    (tmp_path / "chats.jsonl").unlink()  # nothing is answered again
    result, shown = refit(directory, dtype="bfloat16")
    assert "(dtype float32, now bfloat16): choosing it again from the 144 kept tokens" in shown
    assert result is not None
    assert DecodingSettings.load(tree) == replace(form, dtype="bfloat16")
    assert (directory / "tree_traces.npz").read_bytes() == traces
    with (tmp_path / "backbone" / "config.json").open("a") as file:
        file.write("\n")
    assert "the run's data to fit it again are not available" in refit(directory)[1]


def test_without_the_runs_data_a_tree_of_another_form_is_used_as_it_is(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", write_backbone(tmp_path / "backbone"))
    form = DecodingSettings.of(
        load_with_progress(resolve_model(str(directory), None, None), "float32", quiet()).backbone
    )
    Tree.chain(2).save(
        directory / "tree.json", **replace(form, device="cuda", device_name="A GPU").record()
    )
    result, shown = refit(directory)
    assert result is None
    assert (
        f"(device cuda, now cpu, device name A GPU, now {form.device_name}); using it as it is,"
        " since the" in shown
    )


def test_a_short_bench_is_worth_a_short_fit() -> None:
    assert [refit_tokens(EvalConfig(), tokens) for tokens in (100, 10_000, 10**6)] == [
        2000,
        5000,
        12_000,
    ]
    assert refit_tokens(EvalConfig(calibration_tokens=700), 10**6) == 700


def quiet() -> RunProgress:
    return RunProgress(Console(file=io.StringIO()))


def test_two_processes_do_not_calibrate_into_one_directory(
    run_dir: Path, questions: Path, tmp_path: Path
) -> None:
    """They would time each other, and replace each other's tree."""
    for out in (tmp_path / "out", None):
        directory = out or run_dir
        with (
            only_writer(directory),
            pytest.raises(CheckpointError, match=f"another process is working in {directory}"),
        ):
            run(run_dir, questions, out)


@pytest.mark.usefixtures("small")
def test_compilation_that_is_chosen_for_benches_is_named_as_not_used(
    run_dir: Path, questions: Path, tmp_path: Path
) -> None:
    _, shown = run(run_dir, questions, tmp_path, compile="auto")
    assert "compile: auto is for benches: calibrating uncompiled; compile=true" in shown
    assert "uncompiled" not in run(run_dir, questions, tmp_path)[1]


def test_calibration_errors(
    run_dir: Path, backbone_dir: Path, bench_file: Path, questions: Path, tmp_path: Path
) -> None:
    with pytest.raises(MedusaError, match="answered chats, got 2"):
        run(run_dir, bench_file, tmp_path)
    alone = resolve_model(None, str(backbone_dir), None)
    with pytest.raises(CheckpointError, match="chooses a tree for heads"):
        calibrate(
            EvalConfig(),
            load_bench(str(questions)),
            alone,
            RunProgress(Console(file=io.StringIO())),
        )
