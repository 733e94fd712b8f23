import io
import json

import pytest
from rich.console import Console

from medusa_train.tracking import MetricsFile, Wandb, duration, flat_figures, keep_until, open_tracker

TRAIN = {
    "loss": 1.25, "head_top1": [0.5, 0.25], "grad_norm": 0.75, "lr": 1e-3, "tokens_per_s": 1234.5,
}  # fmt: skip
EVAL = {"loss": 2.5, "head_top1": [0.625, 0.3]}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def console(terminal):
    return Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)


def test_every_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    sink = MetricsFile(tmp_path / "metrics.jsonl")
    sink.log({"kind": "train", "step": 1, "loss": 0.1 + 0.2})
    first = lines(tmp_path / "metrics.jsonl")
    assert first[0]["loss"] == 0.1 + 0.2
    assert first[0]["time"] > 0
    sink.log({"kind": "train", "step": 2, "loss": 1.0})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    sink.close()


def test_a_resumed_run_writes_later_lines_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    keep_until(path, 2)
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_a_new_run_begins_with_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsFile(path).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_or_lines_show_the_figures(tmp_path, terminal):
    shown = console(terminal)
    with open_tracker(tmp_path, shown, total_steps=20) as tracker:
        tracker.advance(10)
        tracker.log("train", 10, TRAIN)
        tracker.log("eval", 10, EVAL)
    text = shown.file.getvalue()
    for figure in ("1.25", ".50 .25", "1,23", "left", "held-out at step 10: heads' loss 2.5000 | top-1 .62 .30"):
        assert figure in text
    assert ("10/20" in text) == terminal
    assert [line["kind"] for line in lines(tmp_path / "metrics.jsonl")] == ["train", "eval"]


def test_plain_lines_are_one_per_record(tmp_path):
    shown = console(False)
    with open_tracker(tmp_path, shown, total_steps=20) as tracker:
        for step in range(1, 21):
            tracker.advance(step)
            if step % 10 == 0:
                tracker.log("train", step, TRAIN)
    assert len(shown.file.getvalue().splitlines()) == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7640, "2 h 07 min")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


RECORD = {"kind": "train", "step": 3, "loss": 1.5, "head_top1": [0.5, 0.25], "head_top": [[0.5]], "best": True}


def test_figures_for_a_dashboard_are_numbers():
    assert flat_figures(RECORD) == {"train/loss": 1.5, "train/head_top1_1": 0.5, "train/head_top1_2": 0.25}


def test_wandb_offline_writes_into_the_run_directory_alone(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    out.mkdir()
    console = Console(file=io.StringIO())
    sink = Wandb(console, out, "project", None, None)
    sink.log(RECORD)
    sink.close()
    assert console.file.getvalue() == ""
    assert list(out.glob("wandb/offline-run-*/*.wandb"))
    assert not (tmp_path / "wandb").exists()


def test_a_failing_wandb_is_said_once_and_stops_nothing(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**keys):
        raise RuntimeError("no such project")

    monkeypatch.setattr(wandb, "init", refuse)
    console = Console(file=io.StringIO(), width=120)
    sink = Wandb(console, tmp_path, "project", None, None)
    sink.log(RECORD)
    sink.close()
    assert console.file.getvalue().count("no such project; going on without it") == 1

    class Broken:
        def log(self, *args, **keys):
            raise OSError("connection lost")

    sink._run = Broken()
    sink.log(RECORD)
    sink.log(RECORD)
    assert console.file.getvalue().count("connection lost") == 1
