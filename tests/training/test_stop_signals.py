import os
import signal
import subprocess
import sys
import time

import pytest

from medusa_train.errors import Terminated
from medusa_train.training import stop_signals as signals
from medusa_train.training.stop_signals import (
    StopRequest,
    ignore_signals,
    signals_as_interrupts,
    signals_by_default,
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_remembered_and_told_once(number, code):
    lines, before = [], signal.getsignal(number)
    with StopRequest(lines.append) as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
    assert signal.getsignal(number) == before
    assert stop.exit_code == code
    assert len(lines) == 1
    assert "saving" in lines[0]


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_second_one_much_later_stops_at_once(number, raised, monkeypatch):
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt) as caught, StopRequest(lambda line: None):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), number)
    assert caught.type is raised


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_one_at_once_means_the_first_and_a_third_stops(first, second):
    """Supervisors signal a process and its group."""
    with StopRequest(lambda line: None) as stop:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)
        assert stop.exit_code == 128 + first
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_handles_the_first_one_is_not_interrupted_by_a_repetition(second):
    handled = []
    with pytest.raises(Terminated), signals_as_interrupts():  # noqa: PT012
        try:
            with signals_as_interrupts():
                os.kill(os.getpid(), signal.SIGTERM)
        except Terminated:
            os.kill(os.getpid(), second)
            handled.append(second)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
    assert handled == [second]


def test_every_ctrl_c_counts_in_a_chat():
    with signals_as_interrupts(), signals_by_default():
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_closed_terminal_lets_the_step_end_and_is_no_second_signal():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    with StopRequest(lambda line: None) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.exit_code == 143
        os.kill(os.getpid(), signal.SIGHUP)  # from the shell, and again from the kernel
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_nothing_fails_that_prints_to_a_closed_terminal():
    closed = (
        "import os, pty; master, slave = pty.openpty(); os.dup2(slave, 1); os.close(slave);"
        " os.close(master)"
    )
    program = (
        f"{closed}; from medusa_train.training import stop_signals; stop_signals.leave_terminal();"
        " os.write(1, b'x')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sigterm_is_as_ctrl_c_before_and_after_the_training():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), signals_as_interrupts():  # noqa: PT012
        with StopRequest(lambda line: None) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_in_a_destructor_is_not_lost(number):
    class Signals:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0)

    with pytest.raises(KeyboardInterrupt) as caught, signals_as_interrupts():  # noqa: PT012
        Signals()
        time.sleep(5)
    assert isinstance(caught.value, Terminated) == (number == signal.SIGTERM)


def test_a_late_signal_does_not_change_an_exit_code_that_was_decided():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with signals_as_interrupts():
            ignore_signals()
        for number in numbers:
            os.kill(os.getpid(), number)  # would end the tests
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_closed_terminal_is_as_ctrl_c_except_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with signals_as_interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, lambda number, frame: None)
        with signals_as_interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with signals_as_interrupts():
            # else the next line would end the tests
            assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
            with pytest.raises(Terminated):
                os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_stays_ignored_in_the_background_of_a_script():
    """A shell without job control ignores it for `medusa-train ... &`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_as_interrupts():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
