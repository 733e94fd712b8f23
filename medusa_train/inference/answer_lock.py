"""Let the answers of several threads take turns on the memory of one decoder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from medusa_train.errors import MedusaError

#: If another thread wants the decoder, the current answer counts as abandoned after this many
#: seconds in which nobody read it. A web server may read the pieces of one answer in changing
#: threads, so another thread is no sign that the first answer was given up.
ABANDONED_SECONDS = 10.0
#: The same if the thread that wants the decoder is the one that read the current answer last. A
#: thread that starts a second answer rarely continues the first, so it waits only briefly.
ABANDONED_HERE_SECONDS = 0.2


class AnswerLock:
    """Gives the memory of a decoder to one answer at a time, from `start` to `end`.

    An answer is read pass by pass, in any threads, and its reader may leave it at any pass without
    ending it. So the next answer waits only while this one is read: once it counts as abandoned,
    the next one takes the memory, and a further `hold` of this one fails.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()  # held while a pass runs
        self._current = 0  # number of the answer that has the memory
        self._reader: int | None = None  # thread of its last pass; None once it has ended
        self._read_at = 0.0  # end of its last pass

    def start(self) -> int:
        """Wait until the current answer ends or is abandoned; return the number of a new answer."""
        this_thread = threading.get_ident()
        with self._turn:
            while self._reader is not None:
                patience = ABANDONED_SECONDS
                if self._reader == this_thread:
                    patience = ABANDONED_HERE_SECONDS
                seconds_left = self._read_at + patience - time.monotonic()
                if seconds_left <= 0:
                    break
                self._turn.wait(seconds_left)
            self._current += 1
            self._reader, self._read_at = this_thread, time.monotonic()
            return self._current

    @contextmanager
    def hold(self, answer: int) -> Iterator[None]:
        """Within this context, other threads can't use the memory.

        Raises:
            MedusaError: another answer was started.
        """
        with self._turn:
            if answer != self._current:
                raise MedusaError(
                    "another answer was started on this decoder; it holds one at a time"
                )
            yield
            self._reader, self._read_at = threading.get_ident(), time.monotonic()

    def end(self, answer: int) -> None:
        """Let the next answer start, unless one has started already."""
        with self._turn:
            if answer == self._current:
                self._reader = None
                self._turn.notify_all()
