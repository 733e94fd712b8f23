"""Ctrl-C and SIGTERM as a wish to stop at a good place. Knows nothing of what is being stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is only remembered; the second stops at once.

    Outside of the main thread, where Python allows no handlers, nothing is caught.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        """`notify` is given one line for the user when the first signal arrives."""
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
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        # a signal may arrive in the middle of a write to the terminal, which then takes no second one
        with contextlib.suppress(RuntimeError):
            self._notify("stopping: finishing this step, then saving (once more: stop at once, without saving)")
