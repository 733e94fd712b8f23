"""Write a run's checkpoints in a background thread, from copies in CPU memory, while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from medusa_train.io import describe_size
from medusa_train.models.precision import free_memory

#: Share of the free CPU memory that the copy of a checkpoint may take.
MEMORY_SHARE = 0.5


def copy_fits(size: int) -> bool:
    """Return whether CPU memory has room for a copy of `size` bytes beside training and loading data."""
    free = free_memory(torch.device("cpu"))
    return free is None or size <= MEMORY_SHARE * free


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread; the next one waits for it.

    An error of the thread is kept in `failed` until `wait` or the next `start` raises it. The thread ends with the
    process: a checkpoint in flight is lost then, and earlier ones are not affected.

    Args:
        notify: called with a line for the log after each checkpoint, from the thread as well.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._told = False

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written, and nobody was told yet."""
        return self._error is not None

    def may_copy(self, size: int) -> bool:
        """Return whether a state of `size` bytes can be copied; print a line at the first one that cannot be."""
        fits = copy_fits(size)
        if not fits and not self._told:
            self._told = True
            self._notify(
                f"checkpoints: training waits for them, since a copy ({describe_size(size)}) would take more than "
                f"{MEMORY_SHARE:.0%} of the free CPU memory"
            )
        return fits

    def write(self, save: Callable[[], Path], since: float, *, background: bool) -> None:
        """Call `save`, which writes a checkpoint and returns its directory.

        Args:
            since: `time.perf_counter()` from which training has waited for this checkpoint.
            background: return at once and write in the thread; what `save` reads must not change then.

        Raises:
            MedusaError: an earlier checkpoint could not be written, or this one where `background` is False.
        """
        self.wait()
        waited = time.perf_counter() - since
        if not background:
            self._write(save, lambda: time.perf_counter() - since)
            self.wait()
            return
        # a daemon, so that an impatient user can end the process while a disk is slow
        self._thread = threading.Thread(
            target=self._write, args=(save, lambda: waited), name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint in flight.

        Raises:
            MedusaError: it, or one before it, could not be written.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the checkpoint in flight where another error ends the run; print its error, if any."""
        if self._thread is not None and self._thread.is_alive():
            self._notify("waiting for the checkpoint that is being written")
        self._join()
        if self._error is not None:
            self._notify(str(self._error))
        self._error = None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, save: Callable[[], Path], waited: Callable[[], float]) -> None:
        started = time.perf_counter()
        try:
            path = save()
        except Exception as error:  # raised by `wait`, in the main thread
            self._error = error
            return
        seconds = time.perf_counter() - started
        size = describe_size(sum(file.stat().st_size for file in path.iterdir()))
        self._notify(f"checkpoint {path.name}: {size} written in {seconds:.1f} s, training waited {waited():.1f} s")
