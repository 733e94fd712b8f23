"""Checkpoints written beside training: what was saved, when, and that no error is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.checkpoint.background import BackgroundWriter
from medusa_train.checkpoint.serialize import copy_to_cpu
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.errors import CheckpointError
from tests.full_disk import full_disk


class Slow(CheckpointStore):
    """Waits, before it writes, until it is told to go on."""

    def __init__(self, output_dir: Path) -> None:
        super().__init__(output_dir)
        self.go = threading.Event()
        self.saving: list[int] = []

    def save(self, step: int, *given: Any, **keys: Any) -> Path:
        self.saving.append(step)
        assert self.go.wait(60)
        return super().save(step, *given, **keys)


def test_a_copy_is_saved_while_training_goes_on(tmp_path: Path) -> None:
    store, lines = Slow(tmp_path), []
    writer = BackgroundWriter(lines.append)
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 50)).sum().backward()
        optimizer.step()

    step()
    live = {"draft": model.state_dict(), "engine": optimizer.state_dict(), "run": {"betas": (0.9, 0.95)}}
    state = copy_to_cpu(live)
    wanted = copy_to_cpu(live)
    writer.write(lambda: store.save(1, state), 0.0, background=True)
    step()  # changes weights, moments and AdamW's counters in place
    assert store.steps() == []
    store.go.set()
    writer.wait()
    loaded = store.load(store.root / "step-1")
    assert torch.equal(loaded["draft"]["weight"], wanted["draft"]["weight"])
    assert not torch.equal(loaded["draft"]["weight"], model.weight)
    for number, moments in wanted["engine"]["state"].items():
        assert all(torch.equal(loaded["engine"]["state"][number][key], value) for key, value in moments.items())
    assert loaded["run"] == {"betas": (0.9, 0.95)}
    (line,) = lines
    assert line.startswith("checkpoint step-1: ")
    assert " KiB written in " in line


def test_one_is_in_flight_and_the_next_waits_for_it(tmp_path: Path) -> None:
    store = Slow(tmp_path)
    writer = BackgroundWriter(lambda line: None)
    writer.write(lambda: store.save(1, {"run": {}}), 0.0, background=True)
    second = threading.Thread(target=writer.write, args=(lambda: store.save(2, {"run": {}}), 0.0),
                              kwargs={"background": True})  # fmt: skip
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert store.saving == [1]
    store.go.set()
    second.join()
    writer.wait()
    assert store.steps() == store.saving == [1, 2]


@pytest.mark.parametrize("background", [True, False])
def test_an_error_is_raised_by_the_next_call_and_once(tmp_path: Path, background: bool) -> None:
    store, lines = CheckpointStore(tmp_path), []
    writer = BackgroundWriter(lines.append)
    good = store.save(1, {"run": {}})
    state = {"draft": {"w": torch.zeros(5000)}}

    def write_two() -> None:
        for step in (2, 3):
            writer.write(lambda step=step: store.save(step, state), 0.0, background=background)

    with full_disk(4096), pytest.raises(CheckpointError, match="could not write the checkpoint of step 2") as caught:
        write_two()
    assert "KiB needed" in str(caught.value)
    assert f"The last good checkpoint is {good}" in str(caught.value)
    assert (writer.failed, store.steps(), lines) == (False, [1], [])
    writer.wait()


def test_an_error_beside_another_one_is_printed(tmp_path: Path) -> None:
    lines: list[str] = []
    writer = BackgroundWriter(lines.append)

    def fail() -> Path:
        raise CheckpointError("disk full")

    writer.write(fail, 0.0, background=True)
    writer.close()
    assert lines[-1] == "disk full"
    writer.wait()


def test_a_copy_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    writer = BackgroundWriter(lines.append)
    monkeypatch.setattr("medusa_train.checkpoint.background.free_memory", lambda device: 1000)
    assert writer.may_copy(500)
    assert not writer.may_copy(501)
    assert not writer.may_copy(502)
    assert lines == [
        "checkpoints: training waits for them, since a copy (501 bytes) would take more than 50% of the free CPU memory"
    ]
    monkeypatch.setattr("medusa_train.checkpoint.background.free_memory", lambda device: None)
    assert writer.may_copy(10**18)
