"""Turn Ctrl-C, SIGTERM and a closed terminal into a request to stop after the current step."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from medusa_train.errors import Terminated


def stop_signals() -> list[signal.Signals]:
    """List the signals that ask for an end; a closed terminal's only where it is not ignored
    (`nohup`).
    """
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def leave_terminal() -> None:
    """Discard what is printed to a terminal from now on: once it is closed, writing to it fails."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        with contextlib.suppress(OSError):  # closed
            if stat.S_ISCHR(os.fstat(output).st_mode):
                os.dup2(nowhere, output)
    os.close(nowhere)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise Terminated, as Ctrl-C raises KeyboardInterrupt, within the `with` block.

    SIGHUP, sent when a terminal is closed, does the same unless it is ignored (`nohup`). Does
    nothing outside the main thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, _terminate) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        leave_terminal()
    raise Terminated


class StopRequest:
    """Record the first SIGINT or SIGTERM within the `with` block; the second raises
    KeyboardInterrupt or Terminated.

    SIGHUP, which a closed terminal sends once or twice, counts as SIGTERM, but never as a second
    signal. Does nothing outside the main thread, where Python allows no signal handlers.
    """

    def __init__(self, notify: Callable[[str], None], echo: float = 0.0) -> None:
        """Call `notify` with one line at the first signal; ignore further ones within `echo`
        seconds as duplicates.
        """
        self._echo = echo
        self._since = 0.0
        self.signal: int | None = None
        self._notify = notify
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code by shell convention: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._handle) for number in stop_signals()
            }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            number = signal.SIGTERM if self.signal is None else number
        if self.signal is not None and (
            number == signal.SIGHUP or time.monotonic() - self._since < self._echo
        ):
            return
        if self.signal is not None:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.signal, self._since = number, time.monotonic()
        # printing fails if the signal interrupted a write to the same stream
        with contextlib.suppress(RuntimeError):
            self._notify("stopping after this step, then saving (again: stop now without saving)")
