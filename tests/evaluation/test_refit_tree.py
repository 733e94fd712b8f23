import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.checkpoint.run_directory import only_writer
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import CheckpointError, MedusaError
from medusa_train.evaluation.questions import load_bench
from medusa_train.evaluation.refit_tree import (
    calibrate,
    describe_misfit,
    is_compiled,
    load_with_progress,
)
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.progress import RunProgress
from medusa_train.tree_search import choose_tree as module
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import write_run, write_target_model


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
    target_model = resolve_model(str(run_dir), None, None).target_model
    progress = RunProgress(Console(file=io.StringIO(), width=1000))
    load_with_progress(resolve_model(str(heads), target_model, None), "float32", progress)
    shown = progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert f"--calibrate --model {heads} --base-model {target_model}" in shown


def write_run_with_data(home: Path) -> Path:
    """A run whose config.yaml names chats to fit a tree to."""
    directory = write_run(home / "run", write_target_model(home / "backbone"))
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
    written, shown = run(directory, questions, None)
    assert "validation prompts of the run" in shown
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


def misfit(directory: Path, dtype: str = "float32", **keys: object) -> str | None:
    """What is said of the tree of a run that is decoded in `dtype`."""
    cfg = EvalConfig(bench="tiny", **keys)
    paths = resolve_model(str(directory), None, None if cfg.tree is None else Path(cfg.tree))
    return describe_misfit(cfg, load_with_progress(paths, dtype, quiet()), paths)


@pytest.fixture
def fitted(tmp_path: Path) -> tuple[Path, DecodingSettings]:
    """A run, and the settings in which it decodes here."""
    directory = write_run(tmp_path / "run", write_target_model(tmp_path / "backbone"))
    paths = resolve_model(str(directory), None, None)
    return directory, DecodingSettings.of(
        load_with_progress(paths, "float32", quiet()).target_model
    )


def test_a_tree_that_fits_needs_no_line(fitted: tuple[Path, DecodingSettings]) -> None:
    directory, settings = fitted
    Tree.chain(2).save(directory / "tree.json", **settings.record())
    assert misfit(directory) is None


def test_a_tree_without_settings_is_reported(fitted: tuple[Path, DecodingSettings]) -> None:
    shown = misfit(fitted[0])
    assert shown is not None
    assert "does not say for which dtype and device it was fitted" in shown


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": "cuda", "device_name": "A GPU"}, "device cuda, now cpu, device name A GPU"),
        (
            {"quantization": "nf4", "merged": False},
            "quantization nf4, now none, merged no, now yes",
        ),
        ({"compiled": True}, "compiled yes, now no"),
    ],
    ids=["device", "weights", "compiled"],
)
def test_a_tree_of_other_settings_names_the_command_that_fits_it_again(
    changed: dict[str, object], words: str, fitted: tuple[Path, DecodingSettings]
) -> None:
    directory, settings = fitted
    Tree.chain(2).save(directory / "tree.json", **replace(settings, **changed).record())
    shown = misfit(directory)
    assert shown is not None
    assert words in shown
    assert f"medusa-eval --calibrate --model {directory} dtype=float32" in shown


def test_a_tree_that_the_user_names_is_used_as_it_is(
    fitted: tuple[Path, DecodingSettings],
) -> None:
    directory, settings = fitted
    tree = directory / "tree.json"
    Tree.chain(2).save(tree, **replace(settings, compiled=True).record())
    assert misfit(directory, tree=str(tree)) is None


@pytest.mark.parametrize("compiled", [False, True])
def test_decoding_is_compiled_by_default_if_the_tree_was_fitted_to_it(
    compiled: bool, fitted: tuple[Path, DecodingSettings]
) -> None:
    directory, settings = fitted
    Tree.chain(2).save(directory / "tree.json", **replace(settings, compiled=compiled).record())
    paths = resolve_model(str(directory), None, None)
    assert is_compiled(EvalConfig(), paths) == compiled
    assert not is_compiled(EvalConfig(compile=False), paths)
    assert is_compiled(EvalConfig(compile=True), paths)


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
def test_calibrating_uncompiled_after_a_compiled_fit_is_said(
    run_dir: Path, questions: Path, tmp_path: Path
) -> None:
    settings = DecodingSettings.of(
        load_with_progress(resolve_model(str(run_dir), None, None), "float32", quiet()).target_model
    )
    tree = tmp_path / "tree.json"
    Tree.chain(2).save(tree, **replace(settings, compiled=True).record())
    _, shown = run(run_dir, questions, tmp_path / "out", tree=str(tree))
    assert "calibrating uncompiled; compile=true fits to compiled steps" in shown
    assert "uncompiled" not in run(run_dir, questions, tmp_path / "plain")[1]


def test_calibration_errors(
    run_dir: Path, target_model_dir: Path, bench_file: Path, questions: Path, tmp_path: Path
) -> None:
    with pytest.raises(MedusaError, match="answered chats, got 2"):
        run(run_dir, bench_file, tmp_path)
    alone = resolve_model(None, str(target_model_dir), None)
    with pytest.raises(CheckpointError, match="chooses a tree for heads"):
        calibrate(
            EvalConfig(),
            load_bench(str(questions)),
            alone,
            RunProgress(Console(file=io.StringIO())),
        )
