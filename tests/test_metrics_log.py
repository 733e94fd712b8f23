"""metrics.jsonl, the console and the dashboards: what each gets, and that none of them can stop a
run.
"""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from medusa_train.checkpoint.run_directory import other_files
from medusa_train.metrics_log import (
    ConsoleLogger,
    MetricLoggers,
    MetricsFile,
    flat_metrics,
    tensorboard,
    truncate_log,
    wandb,
)
from tests.full_disk import full_disk

TRAIN = {
    "loss": 1.25, "head_top1": [0.5, 0.25], "grad_norm": 0.75, "lr": 1e-3, "tokens_per_s": 1234.5,
}  # fmt: skip
EVAL = {"loss": 2.5, "head_top1": [0.625, 0.3], "acceptance_length": 2.345}
SKIPPED = {
    "reason": "the loss is nan", "records": ["a.jsonl:3", "[b]"], "skipped_steps": 1, "max_nonfinite_steps": 2,
}  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def console_with(terminal):
    return Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)


def test_every_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log({"kind": "train", "step": 1, "loss": 0.1 + 0.2})
    first = lines(tmp_path / "metrics.jsonl")
    assert first[0]["loss"] == 0.1 + 0.2
    assert first[0]["time"] > 0
    metrics.log({"kind": "train", "step": 2, "loss": 1.0})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    metrics.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_line_is_json_without_pythons_nan_and_infinity(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    figures = {"loss": value, "head_top": [[0.5, value]], "more": {"é": value}}
    metrics.log({"kind": "eval", "step": 1, **figures})
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(path.read_text(), parse_constant=refuse)
    found = {name: record[name] for name in figures}
    assert found == {"loss": None, "head_top": [[0.5, None]], "more": {"é": None}}


def test_a_resumed_run_drops_later_lines_and_validations_that_are_in_no_checkpoint(tmp_path):
    records = [{"kind": kind, "step": step} for step in (2, 4) for kind in ("train", "eval")]
    path = tmp_path / "metrics.jsonl"
    for step, evaluated, kept in ((4, 4, 4), (4, 2, 3), (3, 2, 2)):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        truncate_log(path, step, evaluated)
        assert lines(path) == records[:kept]


@pytest.mark.parametrize("torn", ['{"step": 2', "[2]", "", '{"step": null}'])
def test_incomplete_lines_are_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    truncate_log(path, 2, 0)
    assert path.read_text() == '{"step": 1}\n'


def test_lines_are_kept_in_memory_while_the_disk_is_full(tmp_path):
    warnings = []
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, warn=warnings.append)
    metrics.log({"kind": "train", "step": 1})
    with full_disk(path.stat().st_size + 7):  # in the middle of the next line
        metrics.log({"kind": "train", "step": 2})
        metrics.log({"kind": "train", "step": 3})
    assert len(warnings) == 1
    assert "File too large" in warnings[0]
    metrics.log({"kind": "train", "step": 4})
    metrics.close()
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert len(warnings) == 1


def test_lines_that_could_not_be_written_are_counted(tmp_path):
    warnings = []
    metrics = MetricsFile(tmp_path / "metrics.jsonl", warn=warnings.append)
    with full_disk(0):
        metrics.log({"kind": "train", "step": 1})
        metrics.log({"kind": "train", "step": 2})
        metrics.close()
    assert "the last 2 lines could not be written" in warnings[-1]


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_or_lines_show_the_metrics(tmp_path, terminal):
    shown = console_with(terminal)
    with MetricLoggers(
        [MetricsFile(tmp_path / "metrics.jsonl"), ConsoleLogger(shown, 20)]
    ) as tracker:
        tracker.advance(10)
        tracker.log("train", 10, TRAIN)
        tracker.log("eval", 10, EVAL)
        tracker.log("skipped", 11, SKIPPED)
    text = shown.file.getvalue()
    held_out = (
        "validation at step 10: loss of the heads 2.5000 | top-1 .62 .30 | 2.35 tokens per step"
    )
    skipped = "step 11 skipped (1 of at most 2): the loss is nan. Records in it: a.jsonl:3, [b]"
    for figure in ("1.25", ".50 .25", "1,23", "left", held_out, skipped):
        assert figure in text
    assert ("10/20" in text) == terminal
    assert [line["kind"] for line in lines(tmp_path / "metrics.jsonl")] == [
        "train",
        "eval",
        "skipped",
    ]


RECORD = {
    "kind": "train",
    "step": 3,
    "loss": 1.5,
    "head_top1": [0.5, 0.25],
    "head_top": [[0.5]],
    "best": True,
}
FIGURES = {"train/loss": 1.5, "train/head_top1_1": 0.5, "train/head_top1_2": 0.25}


class Service:
    """Stands for `wandb` and `torch.utils.tensorboard`: notes every call, and fails in those that
    it is told to.
    """

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
            id=keys.get("id") or "new",
            log=lambda figures, step: self.note("log", (figures, step)),
            add_scalar=lambda name, value, step: self.note("log", (name, value, step)),
            finish=lambda: self.note("finish", None),
            close=lambda: self.note("finish", None),
        )


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


OPENED = {
    "wandb": lambda console, out: wandb(console, out, "project", None, None),
    "tensorboard": lambda console, out: tensorboard(console, out, step=7),
}


def test_figures_for_a_dashboard_are_numbers() -> None:
    assert flat_metrics(RECORD) == FIGURES


@pytest.mark.parametrize("name", OPENED)
def test_every_figure_arrives_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, name: str
) -> None:
    service = Service().install(monkeypatch)
    sink = OPENED[name](console, tmp_path)
    sink.log(RECORD)
    sink.close()
    sent = [given for call, given in service.calls if call == "log"]
    assert sent == (
        [(FIGURES, 3)] if name == "wandb" else [(*figure, 3) for figure in FIGURES.items()]
    )
    assert [service.calls[0][0], service.calls[-1][0]] == ["start", "finish"]
    assert text_of(console) == ""
    if name == "tensorboard":
        assert service.calls[0][1] == ((str(tmp_path / "tensorboard"),), {"purge_step": 8})


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_failing_service_is_dropped_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, call: str
) -> None:
    service = Service(call).install(monkeypatch)
    sink = OPENED["wandb"](console, tmp_path)
    sink.log(RECORD)
    sink.log(RECORD)
    sink.close()
    sink.close()
    assert text_of(console).splitlines() == [f"wandb: {call} refused; continuing without wandb"]
    assert [done for done, _ in service.calls].count(call) == 1  # it is left alone from then on


def test_a_resumed_run_of_wandb_goes_on_as_itself_and_shows_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    service = Service().install(monkeypatch)
    for run_id in (None, None, "given", None):
        sink = wandb(console, tmp_path, "project", None, run_id, config={"seed": 1})
        sink.log(RECORD)
        sink.close()
    started = [given[1] for call, given in service.calls if call == "start"]
    assert [(keys["id"], keys["resume"]) for keys in started] == [
        (None, None),
        ("new", "allow"),
        ("given", "allow"),
        ("given", "allow"),
    ]
    assert all(keys["config"] == {"seed": 1} for keys in started)


def test_wandb_offline_writes_only_to_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    out.mkdir()
    sink = wandb(console, out, "project", None, None)
    sink.log(RECORD)
    sink.close()
    assert text_of(console) == ""
    assert list(out.glob("wandb/offline-run-*/*.wandb"))
    assert not (tmp_path / "wandb").exists()
    assert list(other_files(out / "wandb")) == []


def test_tensorboards_reader_gets_the_figures(tmp_path: Path, console: Console) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, last in (((1, 2, 3), 0), ((2, 3), 1)):  # the second one goes on after step 1
        sink = tensorboard(console, tmp_path, step=last)
        for step in steps:
            sink.log({"kind": "train", "step": step, "loss": 10.0 * last + step})
        sink.close()
    assert text_of(console) == ""
    assert list(other_files(tmp_path / "tensorboard")) == []
    found = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in found] == [(1, 1.0), (2, 12.0), (3, 13.0)]
