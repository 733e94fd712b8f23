import io
import re
import threading
import time

import pytest
from rich.console import Console

from medusa_train.progress import SILENT_SECONDS, TICK_SECONDS, RunProgress, duration


def console(terminal):
    return Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)


def shown(progress):
    return progress.console.file.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """`time.perf_counter` under the test's control: `clock(5)` lets five seconds pass."""
    now = [100.0]
    monkeypatch.setattr("medusa_train.progress.time.perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


def test_lines_come_at_most_every_eight_seconds(clock):
    progress = RunProgress(console(False))
    with progress.phase("timing", total=20, unit="turns") as phase:
        for _ in range(10):
            clock(3)
            phase.advance(tokens=30)
    assert shown(progress).splitlines() == [
        "timing: 3/20 turns, 10 tokens/s, 51 s left",
        "timing: 6/20 turns, 10 tokens/s, 42 s left",
        "timing: 9/20 turns, 10 tokens/s, 33 s left",
    ]


def test_a_phase_within_another_is_due_by_the_last_line_of_either(clock):
    training = RunProgress(console(False))
    within = RunProgress(console(False))
    clock(5)
    training.print("step 10")
    with within.phase("validation", unit="batches", inline=True) as phase:
        clock(6)
        phase.advance()
        assert shown(within) == ""
        clock(2)
        phase.advance()
        assert shown(within) == "validation: 2 batches, 8 s so far\n"


def test_the_time_of_every_phase_is_kept(clock):
    progress = RunProgress(console(False), started=98.0)
    with progress.phase("loading"):
        clock(2)
    interrupted = progress.phase("timing")
    interrupted.start()
    clock(3)
    interrupted.__exit__(KeyboardInterrupt, None, None)
    with progress.phase("loading"):
        clock(4)
    assert progress.seconds == {"loading": 6, "timing": 3}
    assert progress.total_seconds == 11


def test_units_of_an_earlier_run_do_not_count_for_the_time_left(clock):
    progress = RunProgress(console(False))
    with progress.phase("conversations", total=100, completed=80) as phase:
        clock(20)
        phase.update(90, "dropped turns: 2")
    assert shown(progress) == "conversations: 90/100, dropped turns: 2, 20 s left\n"


def test_a_bar_shows_the_figures(clock):
    progress = RunProgress(console(True))
    with progress.phase("timing", total=20, unit="turns") as phase:
        phase.update(0, "busy")
        clock(2)
        phase.advance(5, tokens=30)
        assert "5/20 turns 15 tokens/s, busy" in shown(progress)
        assert "6 s left" in shown(progress)
        progress.print("a [note]")
    assert "a [note]" in shown(progress)


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_runs_beside_what_is_timed(terminal):
    progress = RunProgress(console(terminal))
    before = set(threading.enumerate())
    with progress.phase("timing", total=2, unit="turns") as phase:
        phase.advance()
        assert set(threading.enumerate()) <= before
    assert ("timing" in shown(progress)) == terminal


def test_a_ticking_phase_shows_that_time_passes():
    progress = RunProgress(console(True))
    with progress.phase("loading", ticking=True):
        end = time.monotonic() + 30
        while not re.search("0:00:0[1-9]", shown(progress)) and time.monotonic() < end:
            time.sleep(0.05)
        assert re.search("0:00:0[1-9]", shown(progress))


def test_a_ticking_phase_of_a_log_file_says_that_it_goes_on(monkeypatch):
    """A line once it was silent for a while, and further ones; none where it is over before."""
    monkeypatch.setattr("medusa_train.progress.SILENT_SECONDS", 0.05)
    monkeypatch.setattr("medusa_train.progress.TICK_SECONDS", 0.05)
    progress = RunProgress(console(False))
    with progress.phase("loading", ticking=True):
        end = time.monotonic() + 30
        while shown(progress).count("loading: 0 s so far\n") < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert shown(progress).count("loading: 0 s so far\n") >= 2
    monkeypatch.setattr("medusa_train.progress.SILENT_SECONDS", 30)
    progress = RunProgress(console(False))
    with progress.phase("loading", ticking=True):
        assert threading.active_count() > 1
    assert not shown(progress)


def test_phases_that_follow_each_other_are_silent_for_at_most_ten_seconds():
    assert SILENT_SECONDS + TICK_SECONDS <= 10


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7640, "2 h 07 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
