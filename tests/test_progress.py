import io
import json
import threading

import pytest
from rich.console import Console

from medusa_train.progress import MetricsFile, duration, open_metric_loggers, standing, truncate_log
from tests.full_disk import full_disk

TRAIN = {
    "loss": 1.25, "head_top1": [0.5, 0.25], "grad_norm": 0.75, "lr": 1e-3, "tokens_per_s": 1234.5,
}  # fmt: skip
EVAL = {"loss": 2.5, "head_top1": [0.625, 0.3], "acceptance_length": 2.345}


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
    truncate_log(path, 2, 0)
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_an_evaluation_that_no_checkpoint_knows_is_made_again(tmp_path):
    records = [{"kind": kind, "step": step} for step in (2, 4) for kind in ("train", "eval")]
    path = tmp_path / "metrics.jsonl"
    for evaluated, kept in ((4, records), (2, records[:3])):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        truncate_log(path, 4, evaluated)
        assert lines(path) == kept


@pytest.mark.parametrize("torn", ['{"step": 2', "[2]", "", "null", '{"step": null}'])
def test_what_is_no_record_goes(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    truncate_log(path, 2, 0)
    assert path.read_text() == '{"step": 1}\n'


def test_lines_wait_while_the_disk_is_full(tmp_path):
    told = []
    path = tmp_path / "metrics.jsonl"
    sink = MetricsFile(path, warn=told.append)
    sink.log({"kind": "train", "step": 1})
    with full_disk(path.stat().st_size + 7):  # in the middle of the next line
        sink.log({"kind": "train", "step": 2})
        sink.log({"kind": "train", "step": 3})
    assert len(told) == 1
    assert "File too large" in told[0]
    sink.log({"kind": "train", "step": 4})
    sink.close()
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert len(told) == 1


def test_lines_that_were_never_written_are_counted(tmp_path):
    told = []
    sink = MetricsFile(tmp_path / "metrics.jsonl", warn=told.append)
    with full_disk(0):
        sink.log({"kind": "train", "step": 1})
        sink.log({"kind": "train", "step": 2})
        sink.close()
    assert "the last 2 lines could not be written" in told[-1]


def test_a_new_run_begins_with_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsFile(path).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_or_lines_show_the_figures(tmp_path, terminal):
    shown = console(terminal)
    with open_metric_loggers(tmp_path, shown, total_steps=20) as tracker:
        tracker.advance(10)
        tracker.log("train", 10, TRAIN)
        tracker.log("eval", 10, EVAL)
    text = shown.file.getvalue()
    held_out = "held-out at step 10: heads' loss 2.5000 | top-1 .62 .30 | 2.35 tokens per step"
    for figure in ("1.25", ".50 .25", "1,23", "left", held_out):
        assert figure in text
    assert ("10/20" in text) == terminal
    assert [line["kind"] for line in lines(tmp_path / "metrics.jsonl")] == ["train", "eval"]


def test_plain_lines_are_one_per_record(tmp_path):
    shown = console(False)
    with open_metric_loggers(tmp_path, shown, total_steps=20) as tracker:
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


@pytest.mark.parametrize("terminal", [True, False])
def test_a_skipped_step_is_a_line_of_its_own(tmp_path, terminal):
    shown = console(terminal)
    figures = {"reason": "the loss is nan", "records": ["a.jsonl:3", "[b]"], "skipped_steps": 1}
    with open_metric_loggers(tmp_path, shown, total_steps=20) as tracker:
        tracker.log("skipped", 7, {**figures, "max_nonfinite_steps": 2})
    text = "step 7 skipped (1 of at most 2): the loss is nan. Records in it: a.jsonl:3, [b]"
    assert text in shown.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_standing_line_runs_nothing_beside_what_is_done(terminal):
    shown = console(terminal)
    before = set(threading.enumerate())
    with standing(shown, "loading"):
        assert set(threading.enumerate()) <= before
        assert ("loading ..." in shown.file.getvalue()) == terminal
        shown.print("found")
    assert "found" in shown.file.getvalue()
