import os
import signal
import subprocess
import sys

import pytest

from medusa_train.errors import Terminated
from medusa_train.training.signals import StopRequest, sigterm_as_interrupt


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
def test_the_second_stops_at_once(number, raised):
    with pytest.raises(KeyboardInterrupt) as caught, StopRequest(lambda line: None):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), number)
    assert caught.type is raised


def test_a_closed_terminal_lets_the_step_end_and_is_no_second_signal():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    with StopRequest(lambda line: None) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.exit_code == 143
        os.kill(os.getpid(), signal.SIGHUP)  # from the shell, and again from the kernel
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_nothing_fails_that_prints_to_a_closed_terminal():
    closed = (
        "import os, pty; master, slave = pty.openpty(); os.dup2(slave, 1); os.close(slave);"
        " os.close(master)"
    )
    program = (
        f"{closed}; from medusa_train.training import signals; signals.leave_terminal();"
        " os.write(1, b'x')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sigterm_is_as_ctrl_c_before_and_after_the_training():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), sigterm_as_interrupt():  # noqa: PT012
        with StopRequest(lambda line: None) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_closed_terminal_is_as_ctrl_c_except_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with sigterm_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, lambda number, frame: None)
        with sigterm_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with sigterm_as_interrupt():
            # else the next line would end the tests
            assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
            with pytest.raises(Terminated):
                os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
