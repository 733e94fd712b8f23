"""When a run saves (what it keeps of it: test_run.py), and that dashboards can't stop it."""

import dataclasses
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.errors import CheckpointError
from medusa_train.training.trainer import Trainer
from tests.test_metrics_log import Service
from tests.training.conftest import metrics, train


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"save_steps": 4}, [4, 8, 10]),
        ({"save_steps": 0.3}, [3, 6, 9, 10]),  # shares of ten steps
        ({"saves_per_epoch": 2}, [3, 5, 8, 10]),  # of five steps each
        ({}, [5, 10]),  # once an epoch
        ({"save_steps": 0.3, "save_total_limit": 2}, [9, 10]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_checkpoints_come_when_they_are_asked_for(
    make_config: Any, console: Any, tmp_path: Path, keys: dict[str, Any], steps: list[int]
) -> None:
    cfg = make_config(
        **{"save_total_limit": 9, **keys}, val_set_size=0, max_steps=None, num_epochs=2
    )
    assert train(cfg, console) == 0
    assert CheckpointStore(tmp_path / "run").steps() == steps


def test_a_failed_write_ends_training(
    make_config: Any, console: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: CheckpointStore, number: int, *given: Any) -> Path:
        raise CheckpointError("could not write")

    monkeypatch.setattr(CheckpointStore, "save", fail)
    with pytest.raises(CheckpointError, match="could not write\\nAfter fixing this, resume with"):
        train(make_config(save_steps=2, max_steps=40, val_set_size=0), console)
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2]


def test_what_a_killed_process_left_is_removed_at_the_next_start(
    make_config: Any, console: Any, tmp_path: Path
) -> None:
    train(make_config(max_steps=2), console)
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in (".tmp-step-9", ".tmp-best-9", "best-7"):
        (checkpoints / name).mkdir()
    train(make_config(max_steps=2, **RESUME), console)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best-2", "step-2"]


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def make_run(make_config: Any, console: Any, tmp_path: Path) -> Any:
    """Train with these validation losses by step, checkpoints every three steps and early stopping
    after two evaluations; the run is killed in the evaluation after the last one.
    """

    def run(losses: dict[int, float], **keys: Any) -> None:
        evaluate = Trainer.evaluate

        def told(self: Trainer, *args: Any) -> Any:
            if self.state.step not in losses:
                raise KilledError
            return dataclasses.replace(evaluate(self, *args), objective=losses[self.state.step])

        options = {"eval_steps": 1, "save_steps": 3, "early_stopping_patience": 2, **keys}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "evaluate", told)
            train(make_config(**options, max_steps=99), console)

    return run


def kept(tmp_path: Path) -> list[str]:
    """The checkpoints of a run."""
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())


RESUME = {"resume_from_checkpoint": "auto"}


def test_a_killed_run_still_has_the_best_weights_of_its_last_checkpoint(
    make_run: Any, console: Any, tmp_path: Path
) -> None:
    """Better ones that were saved since would not be found again by every resumed run."""
    with pytest.raises(KilledError):
        make_run({1: 9.0, 2: 5.0, 3: 8.0, 4: 4.0, 5: 3.0})
    assert kept(tmp_path) == ["best-2", "best-5", "step-3"]
    make_run({4: 8.0}, **RESUME)  # evaluations that are worse this time
    assert "using the weights of step 2" in console.file.getvalue()
    best = CheckpointStore(tmp_path / "run").load(tmp_path / "run/checkpoints/best-2")["draft"]
    saved = load_file(tmp_path / "run" / "heads" / "medusa_lm_head.safetensors")
    assert torch.equal(saved["0.1.weight"], best["lm_heads.0.weight"])


def test_a_resumed_run_keeps_the_best_weights_of_the_checkpoint_that_it_came_from(
    make_run: Any, tmp_path: Path
) -> None:
    with pytest.raises(KilledError):
        make_run({1: 9.0, 2: 5.0, 3: 8.0})
    for _ in range(2):
        with pytest.raises(KilledError):
            make_run({4: 4.0, 5: 3.0}, **RESUME)
        assert kept(tmp_path) == ["best-2", "best-5", "step-3"]


def test_best_weights_that_no_checkpoint_needs_any_more_are_deleted(
    make_run: Any, tmp_path: Path
) -> None:
    """Those of step 2 go with the checkpoint of step 6, those of step 7 with the better ones."""
    losses = {1: 9.0, 2: 5.0, 3: 8.0, 4: 4.0, 5: 4.5, 6: 4.6, 7: 3.0, 8: 2.0}
    with pytest.raises(KilledError):
        make_run(losses, early_stopping_patience=9)
    assert kept(tmp_path) == ["best-4", "best-8", "step-3", "step-6"]


def test_an_evaluation_that_is_repeated_after_every_kill_is_logged_once(
    make_config: Any, make_run: Any, console: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was stopped in the evaluation of step 2, which its checkpoint lacks since then."""
    evaluate = Trainer.evaluate

    def stopped_in_step_2(self: Trainer, *args: Any) -> Any:
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", stopped_in_step_2)
        assert train(make_config(eval_steps=1, save_steps=3), console) == 130
    for _ in range(2):
        with pytest.raises(KilledError):
            make_run({2: math.inf}, **RESUME)  # not the best so far, so nothing is saved
    records = metrics(tmp_path / "run")
    assert [record["step"] for record in records if record["kind"] == "eval"] == [1, 2]


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_failing_dashboards_change_nothing(
    make_config: Any, console: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    service = Service(call).install(monkeypatch)
    assert train(make_config(wandb_project="p", use_tensorboard=True, max_steps=2), console) == 0
    text = console.file.getvalue()
    for name in ("wandb", "tensorboard"):
        assert text.count(f"{name}: {call} refused; continuing without {name}") == 1
    assert [name for name, _ in service.calls].count(call) == 2
    assert (tmp_path / "run" / "heads").is_dir()
    assert [r["step"] for r in metrics(tmp_path / "run") if r["kind"] == "train"] == [1, 2]
