"""Ctrl-C and SIGTERM as a wish to stop at a good place. Knows nothing of what is being stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from medusa_train.errors import Terminated

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within, SIGTERM raises Terminated where Ctrl-C raises KeyboardInterrupt, instead of ending the process silently.

    Outside of the main thread, where Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is only remembered; the second raises KeyboardInterrupt or Terminated.

    Outside of the main thread, where Python allows no handlers, nothing is caught.
    """

    def __init__(self, notify: Callable[[str], None], echo: float = 0.0) -> None:
        """`notify` is given one line for the user when the first signal arrives.

        Args:
            echo: seconds after the first signal in which others are taken for the same one.
        """
        self._echo = echo
        self._since = 0.0
        self.signal: int | None = None
        self._notify = notify
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that this signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and time.monotonic() - self._since < self._echo:
            return
        if self.signal is not None:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.signal, self._since = number, time.monotonic()
        # a signal may arrive in the middle of a write to the terminal, which then takes no second one
        with contextlib.suppress(RuntimeError):
            self._notify("stopping: finishing this step, then saving (once more: stop at once, without saving)")
