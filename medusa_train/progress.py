"""What a person sees while a command runs: bars on a terminal, plain lines elsewhere.

A command opens one `RunProgress` and enters a `Phase` for each part that takes time:

    progress = RunProgress(console)
    with progress.phase("loading", ticking=True):
        model = load()
    with progress.phase("timing", total=len(prompts), unit="turns") as phase:
        for prompt in prompts:
            phase.advance(tokens=len(model.generate(prompt)))
    progress.seconds  # {"loading": 3.1, "timing": 61.0}, for the closing table

Metrics that are logged (loss, accuracy) belong to `metrics_log`.
"""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import rich.progress as rich_progress
from rich import box
from rich.console import Console
from rich.table import Table

from medusa_train.hub import FETCHING

#: Seconds between two lines if the output is not a terminal.
LINE_SECONDS = 8.0
#: Seconds before the first line of a ticking phase without a bar, and between two of its lines.
#: Together they are 10, so that consecutive phases are not silent for longer.
SILENT_SECONDS = 4.0
TICK_SECONDS = 6.0
#: Seconds between two redraws of a bar by the caller's updates.
REDRAW_SECONDS = 0.1


class RunProgress:
    """The phases of one command, on one console.

    Args:
        console: where bars or lines are shown.
        started: `time.perf_counter()` when the command began; default: now.
        line_seconds: if the console is not a terminal, print at most one progress line in this many
            seconds.
        title: shown before the name of every phase.

    Attributes:
        seconds: wall time of every finished phase by name, in order; phases of the same name are
            added up.
        last_line: `time.perf_counter()` when any instance last printed a line. Training and the
            validation within it are two instances.
    """

    last_line: ClassVar[float]

    def __init__(
        self,
        console: Console,
        started: float | None = None,
        line_seconds: float = LINE_SECONDS,
        title: str = "",
    ) -> None:
        self.console = console
        self.title = title
        self.line_seconds = line_seconds
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter() if started is None else started
        self.reset_clock()

    @property
    def total_seconds(self) -> float:
        """Wall time since the command began."""
        return time.perf_counter() - self._started

    def phase(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        *,
        completed: int = 0,
        ticking: bool = False,
        inline: bool = False,
    ) -> Phase:
        """Return a context manager that shows one phase and records its wall time.

        Args:
            name: shown before the bar and used as the key of `seconds`.
            total: number of units to do; None if it is unknown.
            unit: the name of a unit, in the plural ("turns").
            completed: units that an earlier run already did; they do not count for the time left.
            ticking: show the elapsed time from a thread although nothing advances, for loading a
                model: next to the bar, or in a line after `SILENT_SECONDS` and then every
                `TICK_SECONDS`. Do not set it for a phase that is timed: the thread would run at the
                same time.
            inline: the phase is part of one that is shown already: print lines in place of a bar.
                On a terminal the first one comes after `line_seconds`.
        """
        return Phase(self, name, total, unit, completed=completed, ticking=ticking, inline=inline)

    def table(self) -> Table:
        """Return the wall time of every phase and of the whole command, for the end of a command's
        output.
        """
        table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
        table.add_column("phase")
        table.add_column("time", justify="right")
        total = self.total_seconds
        shown = {name: seconds for name, seconds in self.seconds.items() if seconds >= 0.5}
        for name, seconds in {**shown, "other": max(total - sum(shown.values()), 0.0)}.items():
            table.add_row(name, duration(seconds))
        table.add_section()
        table.add_row("total", duration(total), style="bold")
        return table

    def print(self, line: str, style: str | None = None) -> None:
        """Print a line of text, above the bar if there is one."""
        self.reset_clock()
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def reset_clock(self) -> None:
        """Make the next progress line due in `line_seconds`."""
        RunProgress.last_line = time.perf_counter()

    def print_if_due(self, line: str) -> None:
        """Print a progress line unless the last line is less than `line_seconds` old."""
        if time.perf_counter() - self.last_line >= self.line_seconds:
            self.print(line)


class Phase:
    """One phase of a command: a bar that is redrawn when it advances, or lines; see
    `RunProgress.phase`.
    """

    def __init__(
        self,
        progress: RunProgress,
        name: str,
        total: int | None,
        unit: str,
        *,
        completed: int,
        ticking: bool,
        inline: bool,
    ) -> None:
        self.name = name
        self._progress, self._inline = progress, inline
        self._first, self._tokens, self._detail, self._last_redraw = completed, 0, "", 0.0
        self._has_bar = progress.console.is_terminal and not inline
        self._prints_time = ticking and not self._has_bar
        self._stopped = threading.Event()
        self._bar = rich_progress.Progress(
            *_columns(total),
            console=progress.console,
            auto_refresh=ticking,  # by a thread, which must not run while something is timed
            refresh_per_second=1,
            get_time=time.perf_counter,
            transient=True,
        )
        label = f"{progress.title}: {name}" if progress.title else name
        fields: dict[str, Any] = {"unit": unit, "figures": "", "left": ""}
        added = self._bar.add_task(label, start=False, total=total, completed=completed, **fields)
        self._task = self._bar.tasks[added]

    @property
    def completed(self) -> int:
        """Number of finished units."""
        return int(self._task.completed)

    @property
    def seconds(self) -> float:
        """Wall time since the phase began."""
        return self._task.elapsed or 0.0

    def start(self) -> None:
        """Show the phase and start its clock; `with` does this."""
        self._bar.start_task(self._task.id)
        if self._inline and self._progress.console.is_terminal:
            self._progress.reset_clock()
        elif self._has_bar:
            self._bar.start()
        if not self._inline:
            self._show()
        if self._prints_time:
            self._stopped.clear()
            threading.Thread(target=self._print_time, daemon=True).start()

    def stop(self) -> None:
        """Record the wall time and stop showing the phase; `with` does this."""
        self._stopped.set()
        if self._has_bar:
            self._bar.stop()
        recorded = self._progress.seconds
        recorded[self.name] = recorded.get(self.name, 0.0) + self.seconds

    def __enter__(self) -> Phase:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def expect(self, total: int) -> None:
        """Set the number of units to do, if it is known only after the phase began."""
        self._task.total = total
        self._show()

    def advance(self, units: int = 1, *, tokens: int = 0) -> None:
        """Count finished units, and the tokens generated for them (shown as tokens per second)."""
        self._tokens += tokens
        self.update(self.completed + units)

    def update(self, completed: int, detail: str | None = None) -> None:
        """Set the number of finished units and, unless None, the numbers shown next to it."""
        self._task.completed = completed
        if detail is not None:
            self._detail = detail
        self._show()

    def line(self) -> str:
        """Return the state of the phase as one line of text."""
        task, parts = self._task, self._figures()
        done = f"{self.completed:,}" + ("" if task.total is None else f"/{task.total:,.0f}")
        if task.total is not None or self.completed:
            parts.insert(0, f"{done} {task.fields['unit']}".rstrip())
        if task.total is None:
            parts.append(f"{duration(self.seconds)} so far")
        elif self.time_left():
            parts.append(f"{self.time_left()} left")
        return f"{task.description}: {', '.join(parts)}"

    def _figures(self) -> list[str]:
        rate = [f"{self._tokens / max(self.seconds, 1e-9):,.0f} tokens/s"] if self._tokens else []
        return rate + ([self._detail] if self._detail else [])

    def time_left(self) -> str:
        """Return the time left at the rate of this phase so far; empty before anything is done."""
        done, total = self.completed - self._first, self._task.total
        if total is None or done <= 0:
            return ""
        return duration(self.seconds / done * max(total - self.completed, 0))

    def _print_time(self) -> None:
        """Print a line whenever nothing was printed for a while, until the phase ends."""
        wait = SILENT_SECONDS
        printed = self._progress.last_line
        while not self._stopped.wait(wait):
            if self._progress.last_line == printed:
                self._progress.print(self.line())
            printed = self._progress.last_line
            wait = TICK_SECONDS

    def _show(self) -> None:
        if not self._has_bar:
            self._progress.print_if_due(self.line())
            return
        left = f"{self.time_left()} left" if self.time_left() else ""
        self._task.fields.update(figures=", ".join(self._figures()), left=left)
        now = time.perf_counter()
        if now - self._last_redraw >= REDRAW_SECONDS:
            self._last_redraw = now
            self._bar.refresh()


def _columns(total: int | None) -> list[rich_progress.ProgressColumn]:
    name = rich_progress.TextColumn("{task.description}", style="bold", markup=False)
    figures = rich_progress.TextColumn("{task.fields[figures]}", markup=False)
    if total is None:
        return [name, figures, rich_progress.TimeElapsedColumn()]
    return [
        name,
        rich_progress.BarColumn(bar_width=24),
        rich_progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        figures,
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.fields[left]}"),
    ]


def duration(seconds: float) -> str:
    """Format a duration: 42 s, 3 min 05 s, 2 h 07 min."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"


class LoadingProgress:
    """Show what `data` reports while it loads: a clock, or a bar while files are fetched or
    conversations tokenized.
    """

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._phase = progress.phase("loading data", ticking=True)

    def __enter__(self) -> LoadingProgress:
        self._phase.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._phase.stop()

    def update(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` conversations are tokenized, or that a download has started,
        whose size is not known (0).
        """
        if self._phase.name != name:
            if name.startswith(FETCHING):  # a line that stays, since it explains the first minutes
                self._progress.print(name)
            self._switch(name, total or None, "conversations", done)
        self._phase.update(done)
        if total and done == total:
            self._switch("loading data")

    def _switch(
        self, name: str, total: int | None = None, unit: str = "", completed: int = 0
    ) -> None:
        self._phase.stop()
        self._phase = self._progress.phase(
            name, total, unit, completed=completed, ticking=total is None
        )
        self._phase.start()
