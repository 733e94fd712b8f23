"""Two stages in one run: the same as two runs, wherever it is stopped, and the first one's model
leaves the memory.
"""

import gc
import json
import shutil
import signal
import weakref
from unittest.mock import Mock

import pytest
from rich.console import Console

from medusa_train.checkpoint.run_directory import check_inputs
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.load import load_config, stage_one_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import CheckpointError, ConfigError, MedusaError
from medusa_train.progress import LoadingProgress, RunProgress
from medusa_train.training import stages
from medusa_train.training import train_stage as run_module
from medusa_train.training.distributed import SINGLE_PROCESS
from medusa_train.training.inspect_run import inspect_run
from tests.training.conftest import LORA, figures, stop_after, train

FIRST = {
    "recipe": "medusa1",
    "max_steps": 4,
    "learning_rate": 3e-2,
    "medusa_lr_multiplier": 1.0,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 1,
    "logging_steps": 1,
    "save_steps": 2,
}


def results(run):
    """All figures and weights of a run, for comparisons to the bit."""
    return figures(run), {path.name: path.read_bytes() for path in run.glob("[ha][ed]*/*")}


@pytest.fixture
def two_stages(make_config):
    def make(**keys):
        return make_config(**{**LORA, "stage_one": FIRST, **keys})

    return make


@pytest.fixture
def whole(two_stages, console, tmp_path):
    """An uninterrupted run in two stages."""
    out = tmp_path / "whole"
    assert train(two_stages(output_dir=str(out)), console) == 0
    return out


def assert_equal(ours, theirs):
    assert results(ours) == results(theirs)
    assert results(ours / "stage_one") == results(theirs / "stage_one")


def test_two_stages_equal_two_runs_to_the_bit(whole, make_config, console, tmp_path):
    text = console.file.getvalue()
    assert "stage 1 of 2: 3 Medusa heads x 1 layer, 4 steps; output: " in text
    assert "stage 2 of 2: heads and lora, 6 steps; output: " in text
    assert not (whole / "stage_one" / "tree.json").exists()
    one, two = tmp_path / "one", tmp_path / "two"
    train(make_config(**FIRST, output_dir=str(one)), console)
    train(make_config(**LORA, lora_model_dir=str(one), output_dir=str(two)), console)
    assert results(whole / "stage_one") == results(one)
    assert results(whole) == results(two)


@pytest.mark.parametrize(("stage", "step"), [("stage_one", 3), (None, 5)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_either_stage_and_resumed_is_uninterrupted(
    whole, two_stages, console, tmp_path, monkeypatch, stage, step, number
):
    out = tmp_path / "parts"
    with monkeypatch.context() as patch:
        stop_after(patch, step, number)  # stage one has four steps, stage two six
        assert train(two_stages(output_dir=str(out)), console) == 128 + number
    assert CheckpointStore(out / stage if stage else out).steps()[-1] == step
    assert f"medusa-train {out}/config.yaml resume_from_checkpoint=auto" in console.file.getvalue()
    resumed = load_config(TrainConfig, out / "config.yaml", ["resume_from_checkpoint=auto"])
    assert train(resumed, console) == 0
    assert_equal(out, whole)
    assert train(resumed, console) == 0  # nothing is left to do
    assert_equal(out, whole)


@pytest.mark.parametrize("place", ["_begin", "release_memory"])
def test_killed_before_or_between_the_stages(
    whole, two_stages, console, tmp_path, monkeypatch, place
):
    out = tmp_path / "parts"
    real = getattr(stages, place)

    def killed(*args):
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages, place, killed)
        with pytest.raises(KeyboardInterrupt):
            train(two_stages(output_dir=str(out)), console)
    with pytest.raises(ConfigError, match=r"already holds a run \(config.yaml"):
        train(two_stages(output_dir=str(out)), console)
    assert (
        train(
            load_config(TrainConfig, out / "config.yaml", ["resume_from_checkpoint=auto"]), console
        )
        == 0
    )
    assert ("are finished" in console.file.getvalue()) == (place == "release_memory")
    assert_equal(out, whole)


def test_a_new_run_in_its_place_trains_stage_one_again(whole, two_stages, console):
    before = results(whole / "stage_one")
    changed = two_stages(output_dir=str(whole), medusa_num_heads=2, overwrite_output_dir=True)
    (whole / "checkpoints").rename(whole / "kept")  # with one, stage two would resume
    (whole / "heads").rename(whole / "trained")
    (whole / "adapter").rename(whole / "other")
    with pytest.raises(
        ConfigError, match=r"trained with other settings \(medusa_num_heads: was 3, now 2\)"
    ):
        train(
            changed.model_copy(
                update={"overwrite_output_dir": False, "resume_from_checkpoint": "latest"}
            ),
            console,
        )
    assert results(whole / "stage_one") == before
    assert train(changed, console) == 0
    assert results(whole / "stage_one") != before


def test_a_checkpoint_of_stage_one_is_not_one_of_the_run(whole, two_stages, console):
    named = str(whole / "stage_one" / "checkpoints" / "step-2")
    with pytest.raises(
        CheckpointError, match="is a checkpoint of stage one; resume_from_checkpoint=auto"
    ):
        train(two_stages(output_dir=str(whole), resume_from_checkpoint=named), console)


def test_problems_of_stage_two_are_found_before_stage_one_trains(two_stages, console, tmp_path):
    for keys in ({"adapter": None, "medusa_self_distillation": False, "medusa_num_unfreeze_layers": 9}, {"datasets": [
        {"path": str(tmp_path)}]}):  # fmt: skip
        with pytest.raises(MedusaError):
            train(two_stages(**keys), console)
        assert not (tmp_path / "run").exists()
    absent = two_stages(
        stage_one={**FIRST, "datasets": [{"path": "absent.jsonl"}], "deepspeed": "absent.json"}
    )
    with pytest.raises(MedusaError, match="2 inputs are missing"):
        check_inputs(absent)


def test_data_of_its_own(two_stages, console, tmp_path, chats, monkeypatch):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(chats.read_text().splitlines(keepends=True)[:16]))
    datasets = [{"path": str(few), "type": "sharegpt"}]
    assert train(two_stages(stage_one={**FIRST, "datasets": datasets}), console) == 0
    texts = console.file.getvalue()
    assert "data: 13 conversations for training" in texts
    assert "data: 32 conversations for training" in texts
    saved = stage_one_config(load_config(TrainConfig, tmp_path / "run" / "config.yaml"))
    assert [entry.path for entry in saved.datasets] == [str(few)]
    monkeypatch.setattr(stages, "load_data", Mock(side_effect=[None, MedusaError("read again")]))
    with pytest.raises(MedusaError, match="read again"):  # one row in a pass may be longer
        train(
            two_stages(
                stage_one={**FIRST, "micro_batch_size": 1}, output_dir=str(tmp_path / "rows")
            ),
            console,
        )


def test_the_model_of_stage_one_is_freed(two_stages, console, monkeypatch):
    models = []
    real = run_module.build_trainer

    def build(*args):
        assert all(model() is None for model in models)
        trainer = real(*args)
        models.extend(
            map(weakref.ref, (trainer.recipe.target_model.model, trainer.draft, trainer.strategy))
        )
        return trainer

    monkeypatch.setattr(run_module, "build_trainer", build)
    gc.disable()  # what is left to the collector's chance would be there
    try:
        assert train(two_stages(), console) == 0
    finally:
        gc.enable()
    assert len(models) == 6


def test_inspect_adds_both_up(two_stages, console):
    page = Console(record=True, width=140, file=console.file)
    assert inspect_run(two_stages(), console, page) == 0
    parts = page.export_text().split("stages\n")
    assert [
        parts[0].count(title) for title in ("stage 1 of 2", "stage 2 of 2", "chats.jsonl:")
    ] == [1, 1, 3]
    lines = [
        line.split()[-2:] for line in parts[0].splitlines() if line.startswith(("memory", "disk"))
    ]
    sizes = [float(number) * {"KiB": 1 / 1024, "MiB": 1.0}[unit] for number, unit in lines]
    both = {line.split()[0]: line for line in parts[1].splitlines() if line.strip()}
    assert "10 in all" in both["steps"]
    assert f"{max(sizes[0], sizes[2])} MiB" in both["memory"]
    assert float(both["disk"].split()[3]) == pytest.approx(sizes[1] + sizes[3], abs=0.11)


@pytest.mark.parametrize(
    ("draft", "architecture", "count"),
    [("eagle3", "Gemma3ForCausalLM", 1), ("eagle3", None, 0), ("medusa", "Gemma3ForCausalLM", 0)],
)
def test_it_is_said_before_training_that_vllm_cannot_draft(
    draft, architecture, count, target_model_dir, make_config, console, tmp_path
):
    base = tmp_path / "base"
    shutil.copytree(target_model_dir, base)
    if architecture is not None:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    cfg = make_config(base_model=str(base), draft=draft)
    with LoadingProgress(RunProgress(console)) as shown:
        stages.load_stages([cfg], console, SINGLE_PROCESS, shown)
    printed = " ".join(console.file.getvalue().split())
    note = "note: vLLM 0.32 cannot draft with EAGLE-3 for Gemma3ForCausalLM"
    assert printed.count(note) == count
