"""The progress line of an evaluation: turns done, tokens per second, time left. Knows nothing of what is measured."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TurnProgress:
    """A bar that is redrawn only between turns.

    rich's own refreshing thread would run beside the decoders that are being timed, so it is off.
    """

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns, {task.fields[rate]} tokens/s, left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total, rate="-")
        self._tokens = 0
        self._started = time.perf_counter()

    def __enter__(self) -> TurnProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, tokens: int) -> None:
        """One more turn is done; all its decoders together made `tokens` tokens."""
        self._tokens += tokens
        rate = self._tokens / max(time.perf_counter() - self._started, 1e-9)
        self._progress.update(self._task, advance=1, rate=f"{rate:.0f}")
        self._progress.refresh()
