"""Two stages in one command: what the first one takes from the run, and that they equal two runs."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.behaviour.processes import Process
from tests.behaviour.test_joint_training import LORA
from tests.behaviour.test_resume import (
    assert_equal_runs,
    last_step,
    stop_in_this_process,
    words_of,
)
from tests.behaviour.test_runs import same, without_times
from tests.behaviour.world import metrics, tensors, train, training_keys

#: The keys in which the first stage differs from the run.
STAGE = {"micro_batch_size": 2, "learning_rate": 0.02, "medusa_lr_multiplier": 1.0, "max_steps": 3}
#: Keys of joint training.
JOINT = {"recipe", "adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear"} | {
    "medusa_heads_coefficient"
}


@pytest.fixture
def keys(model: Path, chats: Path, tmp_path: Path) -> dict[str, Any]:
    keys = training_keys(model, chats, tmp_path / "run", **LORA)
    return {**keys, "lora_dropout": 0.2, "max_steps": 4, "stage_one": STAGE}


@pytest.fixture
def heads_alone(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a run of its own that trains as the first stage does."""
    shared = {key: value for key, value in keys.items() if key not in {*JOINT, "stage_one"}}
    return shared | STAGE


def test_two_stages_equal_two_runs_to_the_bit(
    keys: dict[str, Any], heads_alone: dict[str, Any], tmp_path: Path
) -> None:
    train(**keys).ok().says("stage 1 of 2", "stage 2 of 2")
    run = tmp_path / "run"
    alone = tmp_path / "alone"
    train(**heads_alone | {"output_dir": alone}).ok()
    assert same(
        tensors(run / "stage_one" / "heads" / "medusa_lm_head.safetensors"),
        tensors(alone / "heads" / "medusa_lm_head.safetensors"),
    )
    assert without_times(run / "stage_one") == without_times(alone)
    second = {**keys, "stage_one": None, "lora_model_dir": alone, "output_dir": tmp_path / "second"}
    train(**second).ok().says("initializing the heads from")
    assert_equal_runs(run, tmp_path / "second")
    assert len(metrics(run / "stage_one")) == 3
    assert metrics(run / "stage_one")[0]["lr"] == 0.02


def test_what_stage_one_takes_from_the_run(keys: dict[str, Any], tmp_path: Path) -> None:
    def first(**changes: Any) -> dict[str, Any]:
        shown = train("--print-config", **{**keys, **changes}).ok()
        _, _, stage = shown.out.partition("# stage one:")
        values: dict[str, Any] = yaml.safe_load(
            "\n".join(line.removeprefix("# ") for line in stage.splitlines())
        )
        return values

    values = first(seed=7)
    assert values["output_dir"] == str(tmp_path / "run" / "stage_one")
    assert (values["recipe"], values["adapter"]) == ("medusa1", None)
    assert (values["micro_batch_size"], values["learning_rate"]) == (2, 0.02)
    assert values["seed"] == 7
    assert values["calibration_tokens"] == 0
    assert first(sequence_len=77)["sequence_len"] == 77
    assert first(optimizer="adamw_8bit")["optimizer"] == "adamw_8bit"
    changed = first(**{"stage_one.max_steps": 9, "stage_one.sequence_len": 55})
    assert (changed["max_steps"], changed["sequence_len"]) == (9, 55)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage_one.medusa_num_heads": 5}, ["medusa_num_heads"]),
        ({"stage_one.seed": 5}, ["seed", "whole run"]),
        ({"stage_one.output_dir": "x"}, ["output_dir"]),
        ({"stage_one.learning_rat": 5}, ["learning_rate"]),
        ({"stage_one": "one.yaml"}, ["second file is no longer read", "write the keys"]),
        ({"stage_one.base_model": "other"}, ["base_model"]),
    ],
)
def test_a_first_stage_that_does_not_fit(
    changes: dict[str, Any], words: list[str], keys: dict[str, Any]
) -> None:
    train(**{**keys, **changes}).fails(2, *words)


def test_a_killed_first_stage_goes_on(keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"save_steps": 1, "stage_one.save_steps": 1, "stage_one.max_steps": 8}
    train(**keys | {"output_dir": tmp_path / "whole"}).ok()
    words = words_of(keys, resume_from_checkpoint="auto")
    run = tmp_path / "run"
    process = Process(tmp_path / "log", "train", *words)
    there = process.wait_for(lambda: last_step(run / "stage_one") > 1)
    assert process.send(signal.SIGKILL) == -signal.SIGKILL if there else process.end() == 0
    train(*words).ok()
    assert_equal_runs(run, tmp_path / "whole")
    assert without_times(run / "stage_one") == without_times(tmp_path / "whole" / "stage_one")
    train(run / "config.yaml", resume_from_checkpoint="auto").ok()
    (run / "config.yaml").write_text((run / "config.yaml").read_text())
    train(**keys, resume_from_checkpoint="auto").ok().says("resuming after step 4")


def test_finished_heads_are_not_trained_again(keys: dict[str, Any], tmp_path: Path) -> None:
    train(**keys).ok()
    run = tmp_path / "run"
    before = (run / "stage_one" / "metrics.jsonl").read_bytes()
    for name in ("checkpoints", "heads", "adapter"):  # as if it had ended between the stages
        shutil.rmtree(run / name)
    (run / "metrics.jsonl").unlink()
    shown = train(**keys, resume_from_checkpoint="auto").ok()
    shown.says("the heads in", "are finished")
    assert (run / "stage_one" / "metrics.jsonl").read_bytes() == before


def test_heads_of_another_run_start_a_new_one(
    keys: dict[str, Any], heads_alone: dict[str, Any], tmp_path: Path
) -> None:
    train(**heads_alone | {"output_dir": tmp_path / "first"}).ok()
    plain = {key: value for key, value in keys.items() if key not in LORA and key != "stage_one"}
    plain |= {"medusa_num_heads": 2, "learning_rate": 1e-30, "max_steps": 1, "lora_dropout": None}
    train(**plain, lora_model_dir=tmp_path / "first").ok()
    name = "heads/medusa_lm_head.safetensors"
    assert same(tensors(tmp_path / "run" / name), tensors(tmp_path / "first" / name))
    train(
        **plain | {"medusa_num_heads": 3, "output_dir": tmp_path / "x"},
        lora_model_dir=tmp_path / "first",
    ).fails(2, "medusa_num_heads")
    train(**plain | {"output_dir": tmp_path / "y"}, lora_model_dir=tmp_path / "none").fails(
        1, "none"
    )


def test_an_interrupted_first_stage_ends_the_run(keys: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    thread = stop_in_this_process(run / "stage_one", 1, signal.SIGINT)
    stopped = train(**keys | {"stage_one.max_steps": 400})
    thread.join()
    stopped.fails(130, "resume_from_checkpoint=auto", str(run / "config.yaml"))
    assert last_step(run / "stage_one") < 400
    assert not (run / "metrics.jsonl").exists()
