"""What a user sees of a run: a bar on a terminal, a line now and then elsewhere, a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from medusa_train.selfdistill.distill import Tally
from medusa_train.tracking import duration

LINE_EVERY = 30.0  # seconds between lines where there is no terminal


class DistillProgress:
    """Shows a `Tally`: conversations, tokens per second, time left, dropped turns by reason."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._last = time.perf_counter()
        self._progress = Progress(
            TextColumn("conversations"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("conversations", total=total, figures="")

    def __enter__(self) -> DistillProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, tally: Tally) -> None:
        """Bring the display up to date."""
        figures = describe(tally)
        self._progress.update(self._task, completed=tally.finished, figures=figures)
        now = time.perf_counter()
        if not self._console.is_terminal and now - self._last >= LINE_EVERY:
            self._last = now
            self._console.print(
                f"{tally.finished} of {tally.total} conversations, {figures}", highlight=False, soft_wrap=True
            )


def describe(tally: Tally) -> str:
    """Tokens per second, time left and dropped turns, on one line."""
    parts = [f"{tally.tokens_per_s:,.0f} tokens/s"]
    made = tally.finished - tally.earlier
    if made and tally.finished < tally.total:
        parts.append(f"{duration(tally.seconds / made * (tally.total - tally.finished))} left")
    if tally.dropped:
        parts.append("dropped turns: " + ", ".join(f"{count} {why}" for why, count in sorted(tally.dropped.items())))
    return ", ".join(parts)


def summary(tally: Tally, figures: Mapping[str, str] | None = None) -> Table:
    """The table at the end of a run, with the `figures` of its engine below."""
    table = Table(title="self-distillation", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("how many", justify="right")
    rows: list[tuple[str, str]] = [("seed conversations", f"{tally.total:,}")]
    if tally.earlier:
        rows.append(("done by an earlier run", f"{tally.earlier:,}"))
    rows += [("conversations written", f"{tally.written:,}"), ("answers in them", f"{tally.turns:,}")]
    if tally.cut:
        rows.append(("of them shorter than their seed", f"{tally.cut:,}"))
    if tally.looping:
        rows.append(("answers that loop", f"{tally.looping:,}"))
    if tally.empty:
        rows.append(("conversations with no answer left", f"{tally.empty:,}"))
    rows += [(f"dropped turns: {why}", f"{count:,}") for why, count in sorted(tally.dropped.items())]
    rows += [
        ("tokens generated", f"{tally.tokens:,}"),
        ("time", duration(tally.seconds)),
        ("tokens per second", f"{tally.tokens_per_s:,.0f}"),
        *(figures or {}).items(),
    ]
    for row in rows:
        table.add_row(*row)
    return table
