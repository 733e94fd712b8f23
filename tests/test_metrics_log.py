"""Services that draw figures: what they are sent, and that none of them can stop a run."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from medusa_train.metrics_log import TensorBoard, Wandb, flat_figures

RECORD = {"kind": "train", "step": 3, "loss": 1.5, "head_top1": [0.5, 0.25], "head_top": [[0.5]], "best": True}
FIGURES = {"train/loss": 1.5, "train/head_top1_1": 0.5, "train/head_top1_2": 0.25}


class Service:
    """Stands for `wandb` and `torch.utils.tensorboard`: notes every call, and fails in those that it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.calls: list[tuple[str, Any]] = []

    def note(self, name: str, given: Any) -> None:
        self.calls.append((name, given))
        if name in self.failing:
            raise OSError(f"{name} refused")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Service:
        wandb, tensorboard = ModuleType("wandb"), ModuleType("torch.utils.tensorboard")
        wandb.Settings = SimpleNamespace  # type: ignore[attr-defined]
        wandb.init = self.start  # type: ignore[attr-defined]
        tensorboard.SummaryWriter = self.start  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
        return self

    def start(self, *given: Any, **keys: Any) -> SimpleNamespace:
        self.note("start", (given, keys))
        return SimpleNamespace(
            log=lambda figures, step: self.note("log", (figures, step)),
            add_scalar=lambda name, value, step: self.note("log", (name, value, step)),
            finish=lambda: self.note("finish", None),
            close=lambda: self.note("finish", None),
        )


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


OPENED = {
    "wandb": lambda console, out: Wandb(console, out, "project", None, None),
    "tensorboard": lambda console, out: TensorBoard(console, out, step=7),
}


def test_figures_for_a_dashboard_are_numbers() -> None:
    assert flat_figures(RECORD) == FIGURES


@pytest.mark.parametrize("name", OPENED)
def test_every_figure_arrives_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, name: str
) -> None:
    service = Service().install(monkeypatch)
    sink = OPENED[name](console, tmp_path)
    sink.log(RECORD)
    sink.close()
    sent = [given for call, given in service.calls if call == "log"]
    assert sent == ([(FIGURES, 3)] if name == "wandb" else [(*figure, 3) for figure in FIGURES.items()])
    assert [service.calls[0][0], service.calls[-1][0]] == ["start", "finish"]
    assert text_of(console) == ""
    if name == "tensorboard":
        assert service.calls[0][1] == ((str(tmp_path / "tensorboard"),), {"purge_step": 8})


@pytest.mark.parametrize("call", ["start", "log", "finish"])
@pytest.mark.parametrize("name", OPENED)
def test_a_failing_service_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, name: str, call: str
) -> None:
    service = Service(call).install(monkeypatch)
    sink = OPENED[name](console, tmp_path)
    sink.log(RECORD)
    sink.log(RECORD)
    sink.close()
    sink.close()
    assert text_of(console).splitlines() == [f"{name}: {call} refused; going on without it"]
    assert [done for done, _ in service.calls].count(call) == 1  # it is left alone from then on


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_service_that_is_not_installed_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    sink = OPENED[name](console, tmp_path)
    sink.log(RECORD)
    sink.close()
    assert text_of(console).count("going on without it") == 1
    assert text_of(console).startswith(f"{name}: ")


def test_wandb_offline_writes_into_the_run_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    out.mkdir()
    sink = Wandb(console, out, "project", None, None)
    sink.log(RECORD)
    sink.close()
    assert text_of(console) == ""
    assert list(out.glob("wandb/offline-run-*/*.wandb"))
    assert not (tmp_path / "wandb").exists()


def test_tensorboard_s_own_reader_finds_the_figures(tmp_path: Path, console: Console) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, last in (((1, 2, 3), 0), ((2, 3), 1)):  # the second one goes on after step 1
        sink = TensorBoard(console, tmp_path, step=last)
        for step in steps:
            sink.log({"kind": "train", "step": step, "loss": 10.0 * last + step})
        sink.close()
    assert text_of(console) == ""
    found = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in found] == [(1, 1.0), (2, 12.0), (3, 13.0)]
