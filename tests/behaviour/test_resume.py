"""Runs that are stopped, killed or changed, and go on: to the bit as if nothing had happened, or with
an error that says what to do.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.behaviour.processes import Process
from tests.behaviour.test_joint_training import LORA
from tests.behaviour.test_runs import checkpoints, same, without_times
from tests.behaviour.world import (
    as_yaml,
    metrics,
    read_lines,
    tensors,
    train,
    training_keys,
    write_lines,
    write_model,
)

STEPS = 12


@pytest.fixture(scope="module")
def keys(model: Path, chats: Path, held_out: Path) -> dict[str, Any]:
    """Keys of a run whose steps depend on all that a checkpoint has to hold: dropout, the order of
    data, moments of the optimizer, the schedule, windows of the log, and the best evaluation.
    """
    written = training_keys(model, chats, Path(), **LORA)
    written |= {"lora_dropout": 0.3, "medusa_self_distillation": True, "micro_batch_size": 1}
    written |= {"max_steps": STEPS, "save_steps": 5, "eval_steps": 4, "logging_steps": 3}
    written |= {"val_set_size": None, "test_datasets": [{"path": str(held_out)}]}
    written |= {"gradient_accumulation_steps": 2, "medusa_scheduler": "linear"}
    del written["output_dir"]
    return written


@pytest.fixture(scope="module")
def whole(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(**keys, output_dir=out).ok()
    return out


def assert_equal_runs(run: Path, whole: Path) -> None:
    """Compare weights and logs, to the bit."""
    for name in ("heads/medusa_lm_head.safetensors", "adapter/adapter_model.safetensors"):
        if (whole / name).exists():
            assert same(tensors(run / name), tensors(whole / name)), name
    ours, theirs = (sorted(without_times(path), key=str) for path in (run, whole))
    assert ours == theirs


def words_of(keys: dict[str, Any], **more: Any) -> list[str]:
    given = {**keys, **more}
    return [f"{key}={as_yaml(value)}" for key, value in given.items() if value is not None]


def last_step(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return len([line for line in lines if '"train"' in line])


def stop_in_this_process(run: Path, records: int, number: int) -> threading.Thread:
    """Send a signal once the run has logged so many records."""

    def wait() -> None:
        ends = time.monotonic() + 60
        while last_step(run) < records and time.monotonic() < ends:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_and_the_run_goes_on_to_the_bit(
    number: int, code: int, keys: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    thread = stop_in_this_process(run, 1, number)
    stopped = train(**keys, output_dir=run)
    thread.join()
    stopped.fails(code, "resume_from_checkpoint=auto", str(run / "config.yaml"))
    (newest,) = [name for name in checkpoints(run) if name.startswith("step-")][-1:]
    assert 3 <= int(newest.partition("-")[2]) < STEPS
    train(run / "config.yaml", resume_from_checkpoint="auto").ok().says("resuming after step")
    assert_equal_runs(run, whole)


def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(
    keys: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    """Killed several times, most of the time while a checkpoint is written."""
    run = tmp_path / "run"
    words = words_of(keys, output_dir=run, save_steps=1, resume_from_checkpoint="auto")
    kills = 0
    for step in (2, 5, 9):
        process = Process(tmp_path / f"{step}.log", "train", *words)
        there = process.wait_for(
            lambda step=step: (run / "checkpoints" / f"step-{step}").exists()  # type: ignore[misc]
        )
        time.sleep(0.003 * step)
        if there and process.send(signal.SIGKILL) == -signal.SIGKILL:
            kills += 1
    assert kills
    train(*words).ok()
    assert_equal_runs(run, whole)
    left = [path for path in run.rglob("*") if path.name.startswith((".tmp", ".old"))]
    assert not left


def test_a_finished_run_trains_nothing_more(
    keys: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    train("--resume", whole / "config.yaml").ok().says(f"resuming after step {STEPS}")
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_named_checkpoint_in_another_directory(
    keys: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    named = whole / "checkpoints" / "step-10"
    train(**keys, output_dir=tmp_path / "run", resume_from_checkpoint=named).ok()
    name = "adapter/adapter_model.safetensors"
    assert same(tensors(tmp_path / "run" / name), tensors(whole / name))


def test_a_longer_run_continues(model: Path, chats: Path, tmp_path: Path) -> None:
    """With a constant rate, four steps and four more are eight."""
    keys = training_keys(model, chats, tmp_path / "run", lr_scheduler="constant")
    train(**keys | {"max_steps": 4}).ok()
    train(**keys | {"max_steps": 8}, resume_from_checkpoint="auto").ok()
    train(**keys | {"max_steps": 8, "output_dir": tmp_path / "whole"}).ok()
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_without_a_checkpoint_a_new_run_begins_with_a_note(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    keys = training_keys(model, chats, tmp_path / "run", resume_from_checkpoint="auto")
    train(**keys).ok().says("no checkpoint in", "starting a new run")
    train(
        **keys | {"resume_from_checkpoint": tmp_path / "none", "output_dir": tmp_path / "b"}
    ).fails(1, str(tmp_path / "none"))


# What changed since


@pytest.fixture
def short(model: Path, chats: Path, tmp_path: Path) -> dict[str, Any]:
    """Keys of a run of two steps that has ended, to resume it with four."""
    keys = training_keys(model, chats, tmp_path / "run", medusa_num_heads=2)
    train(**keys).ok()
    return {**keys, "max_steps": 4, "resume_from_checkpoint": "auto"}


def test_changed_settings_behind_the_weights_are_named(
    short: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """The same weights in another directory are the same model, but somebody should know."""
    shutil.copytree(model, tmp_path / "moved")
    train(**short | {"base_model": tmp_path / "moved"}).ok().says(
        "changed since that checkpoint: base_model: was"
    )


def test_a_moved_run_goes_on_where_it_is(short: dict[str, Any], tmp_path: Path) -> None:
    """Its own config.yaml names the directory that it is in, not the one that it was in."""
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    train(moved / "config.yaml", resume_from_checkpoint="auto", max_steps=4).ok()
    assert [record["step"] for record in metrics(moved)] == [1, 2, 3, 4]
    assert not (tmp_path / "run").exists()


def test_the_learning_rate_of_the_configuration_is_used(short: dict[str, Any]) -> None:
    train(**short | {"learning_rate": 0.5, "lr_scheduler": "constant"}).ok()
    assert [record["lr"] for record in metrics(short["output_dir"])[2:]] == [0.5, 0.5]


def test_changed_data_are_refused(short: dict[str, Any], chats: Path, tmp_path: Path) -> None:
    records = read_lines(chats)
    records[3]["messages"][-1]["content"] += " one"
    other = write_lines(tmp_path / "other.jsonl", records)
    train(**short | {"datasets": [{"path": str(other)}]}).fails(1, "data")
    train(**short | {"micro_batch_size": 3}).fails(1, "micro_batch_size")
    train(**short | {"seed": 1}).fails(1, "seed")


def test_other_weights_of_the_model_are_refused(short: dict[str, Any], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    train(**short | {"base_model": other}).fails(1, "other weights", str(other))


def test_another_shape_of_the_draft_is_refused(short: dict[str, Any]) -> None:
    found = train(**short | {"medusa_num_heads": 3})
    assert found.code in (1, 2)
    assert "medusa_num_heads" in found.text or "shape" in found.text


@pytest.mark.parametrize("name", ["draft.safetensors", "engine.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named(name: str, short: dict[str, Any]) -> None:
    """A byte that flipped, as on a bad disk."""
    (path,) = short["output_dir"].glob(f"checkpoints/step-2/{name}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    train(**short).fails(1, name)


def test_another_number_of_micro_batches_is_noted(short: dict[str, Any]) -> None:
    train(**short | {"gradient_accumulation_steps": 3}).ok().says("gradient_accumulation_steps")


def test_early_stopping_counts_on(model: Path, chats: Path, held_out: Path, tmp_path: Path) -> None:
    keys = training_keys(model, chats, tmp_path / "run", learning_rate=0.3, max_steps=30)
    keys |= {"val_set_size": None, "test_datasets": [{"path": str(held_out)}], "eval_steps": 1}
    keys |= {"early_stopping_patience": 4, "save_steps": 1, "save_total_limit": 50}
    whole = tmp_path / "whole"
    train(**keys | {"output_dir": whole}).ok().says("stopped early")
    stops = last_step(whole)
    shutil.copytree(whole, tmp_path / "run")
    for step in (stops, stops - 1):  # as if it had been killed two steps before its end
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step}")
    shutil.rmtree(tmp_path / "run" / "heads")
    train(**keys, resume_from_checkpoint="auto").ok().says("stopped early")
    assert_equal_runs(tmp_path / "run", whole)


def test_weights_of_half_precision_are_kept_whole_in_checkpoints(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    """A checkpoint holds float32 weights, the run's heads those in which they decode."""
    keys = training_keys(model, chats, tmp_path / "run", bf16=True)
    train(**keys).ok()
    saved = tensors(tmp_path / "run" / "checkpoints" / "step-2" / "draft.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    whole = tmp_path / "whole"
    train(**keys | {"output_dir": whole, "max_steps": 4, "lr_scheduler": "constant"}).ok()
    train(**keys | {"overwrite_output_dir": True, "lr_scheduler": "constant"}).ok()
    train(
        **keys | {"max_steps": 4, "lr_scheduler": "constant", "resume_from_checkpoint": "auto"}
    ).ok()
    assert_equal_runs(tmp_path / "run", whole)


def test_two_runs_do_not_train_in_one_directory(keys: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = words_of(keys, output_dir=run, max_steps=100_000, save_steps=100_000)
    process = Process(tmp_path / "first.log", "train", *words)
    assert process.wait_for(lambda: last_step(run) > 0)
    second: Callable[..., Any] = train
    try:
        second(*words, "resume_from_checkpoint=auto").fails(1, str(run))
    finally:
        assert process.send(signal.SIGKILL) == -signal.SIGKILL
