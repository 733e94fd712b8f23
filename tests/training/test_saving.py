"""When a run saves (what it keeps of it: test_run.py), and that dashboards can't stop it."""

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.errors import CheckpointError
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
    cfg = make_config(max_steps=2)
    train(cfg, console)
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in (".tmp-step-9", ".tmp-best-9", "best-7"):
        (checkpoints / name).mkdir()
    train(cfg.model_copy(update={"resume_from_checkpoint": "auto"}), console)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best-2", "step-2"]


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
