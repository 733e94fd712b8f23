import os
import signal

import pytest

from medusa_train.training.interrupt import StopRequest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_remembered_and_told_once(number, code):
    lines = []
    with StopRequest(lines.append) as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
    assert stop.exit_code == code
    assert len(lines) == 1
    assert "saving" in lines[0]


def test_the_second_stops_at_once():
    with pytest.raises(KeyboardInterrupt), StopRequest(lambda line: None):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(lambda line: None):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
