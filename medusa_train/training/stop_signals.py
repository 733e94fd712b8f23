"""Turn Ctrl-C, SIGTERM and a closed terminal into one request to stop, even if it is sent
repeatedly.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

from medusa_train.errors import Terminated, signal_exit_code

H = TypeVar("H", bound="_Handler")

#: A second signal within this many seconds repeats the first one. Supervisors signal a process and
#: then its group, and both the terminal and the launcher signal a process.
REPEAT_SECONDS = 5.0


def stop_signals() -> list[signal.Signals]:
    """List the signals that ask a process to stop. SIGHUP (closed terminal) is included unless it
    is ignored (`nohup`).
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def leave_terminal() -> None:
    """Discard all further output to the terminal, because writing to a closed terminal fails."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        with contextlib.suppress(OSError):  # the stream is closed
            if stat.S_ISCHR(os.fstat(output).st_mode):
                os.dup2(nowhere, output)
    os.close(nowhere)


class _Handler:
    """Handle signals within the `with` block, and distinguish a new request from a repeated one.

    The second signal within `REPEAT_SECONDS` repeats the first one and is ignored. A third signal,
    or a second one after that time, is a new request. A closed terminal sends SIGHUP once or twice,
    so SIGHUP never counts as a new request after the first signal. Nested handlers share their
    count.

    Attributes:
        times: arrival times of the signals.
    """

    def __init__(self, numbers: Sequence[int], handle: Callable[[int], None]) -> None:
        self.times: list[float] = []
        self._numbers = numbers
        self._handle = handle
        self._before: dict[int, Any] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            if self.times:
                return
        self.times.append(time.monotonic())
        is_second = len(self.times) == 2
        if not is_second or self.times[1] - self.times[0] >= REPEAT_SECONDS:
            self._handle(number)

    def __enter__(self: H) -> H:
        outer = signal.getsignal(signal.SIGTERM)
        if isinstance(outer, _Handler):
            self.times = outer.times
        # Python allows signal handlers only in the main thread
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self) for number in self._numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # signals that are ignored meanwhile (`ignore_signals`) stay ignored
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Within the `with` block, make SIGTERM raise Terminated, like Ctrl-C raises KeyboardInterrupt.
    Repeated signals raise nothing, so that the code that handles the first one can finish.

    SIGHUP (closed terminal) is treated like SIGTERM unless it is ignored (`nohup`) or has a
    handler. After a signal, further signals are ignored while the interpreter exits. Does nothing
    outside the main thread, where Python allows no signal handlers.
    """
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    hangup = signal.getsignal(signal.SIGHUP)
    if hangup == signal.SIG_DFL or isinstance(hangup, _Handler):
        numbers.append(signal.SIGHUP)
    handler = _Handler(numbers, _interrupt)
    in_main_thread = threading.current_thread() is threading.main_thread()
    report = sys.unraisablehook

    def send_again(lost: sys.UnraisableHookArgs) -> None:
        # Python drops what is raised in a destructor or in the callback of a weak reference
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            report(lost)
            return
        handler.times.clear()
        number = signal_exit_code(lost.exc_value) - 128
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

    if in_main_thread:
        sys.unraisablehook = send_again
    try:
        with handler:
            yield
    finally:
        if in_main_thread:
            sys.unraisablehook = report
        if handler.times:
            atexit.register(ignore_signals)


@contextlib.contextmanager
def signals_by_default() -> Iterator[None]:
    """Within the `with` block, let every Ctrl-C raise KeyboardInterrupt and let SIGTERM end the
    process. A chat needs this, because every Ctrl-C stops another answer.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore all further signals, so that they cannot change the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class StopRequest(_Handler):
    """Remember the first SIGINT or SIGTERM within the `with` block. A new request after it (see
    `_Handler`) raises KeyboardInterrupt or Terminated. SIGHUP counts as SIGTERM.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        """`notify` is called with one line at the first signal."""
        super().__init__(stop_signals(), self._stop)
        self.signal: int | None = None
        self._notify = notify

    def __bool__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code by shell convention: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def _stop(self, number: int) -> None:
        if self.signal is not None:
            _interrupt(number)
        self.signal = signal.SIGTERM if number == signal.SIGHUP else number
        # printing fails if the signal interrupted a write to the same stream
        with contextlib.suppress(RuntimeError):
            self._notify(
                "stopping after this step, then saving (a third signal, or a second one after"
                f" {REPEAT_SECONDS:.0f} s: stop now without saving)"
            )
