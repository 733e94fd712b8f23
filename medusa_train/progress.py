"""Where a run's figures go: `metrics.jsonl`, and a progress bar or plain lines. Knows nothing of training or torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from medusa_train.io import JsonLinesFile, complete_lines, replace_bytes, write_failure

Record = Mapping[str, Any]


@contextmanager
def standing(console: Console, line: str) -> Iterator[None]:
    """Show `line` on a terminal while something is done, and take it away; drawn once.

    A spinner's refreshing thread would run beside what is timed meanwhile.
    """
    if not console.is_terminal:
        yield
        return
    with Live(f"{line} ...", console=console, auto_refresh=False, transient=True):
        yield


class MetricLogger(Protocol):
    """One place that figures go to."""

    def log(self, record: Record) -> None:
        """Take one record: `kind` ("train", "eval" or "skipped"), `step`, and that kind's figures."""

    def advance(self, step: int) -> None:
        """`step` optimizer steps are done."""

    def close(self) -> None:
        """Nothing more comes."""


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, on disk as soon as it is logged.

    Lines that the disk does not take wait, and go out in their order with the next one that it takes.
    """

    def __init__(
        self, path: Path, resume_step: int = 0, evaluated: int = 0, warn: Callable[[str], None] = lambda line: None
    ) -> None:
        """Open for appending.

        Args:
            path: the file; made when absent.
            resume_step, evaluated: see `truncate_log`; lines that the resumed run writes again are dropped first.
            warn: takes a line for the user.
        """
        if path.exists():
            truncate_log(path, resume_step, evaluated)
        self._file = JsonLinesFile(path)
        self._warn = warn
        self._warned = False

    def log(self, record: Record) -> None:
        """Write one line."""
        self._try(lambda: self._file.append({**record, "time": round(time.time(), 3)}))

    def advance(self, step: int) -> None:
        """Nothing to do: only figures are kept."""

    def close(self) -> None:
        """Close the file."""
        self._try(self._file.flush)
        if lost := self._file.pending_lines:
            self._warn(f"{self._file.path}: the last {lost} lines could not be written")
        self._file.close()

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned:
                directory = self._file.path.parent
                self._warn(f"{write_failure(self._file.path.name, directory, error)}; retrying with every record")
            self._warned = True


def truncate_log(path: Path, step: int, evaluated: int) -> None:
    """Drop what a run that goes on after `step` writes again, and a last line that a killed process left half written.

    That are the lines of later steps, and a held-out evaluation after the step `evaluated`: one that was logged, and
    never saved with a checkpoint, is made again.
    """
    replace_bytes(path, [line for _, line in complete_lines(path) if _stays(line, step, evaluated)])


def _stays(line: bytes, step: int, evaluated: int) -> bool:
    try:
        record = json.loads(line)
        return float(record["step"]) <= (evaluated if record.get("kind") == "eval" else step)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


class ProgressBar:
    """A rich bar: loss, top-1 of each head, tokens/s, time left."""

    def __init__(self, console: Console, total_steps: int, step: int = 0) -> None:
        """Start the bar at `step` of `total_steps`."""
        self._progress = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._progress.start()
        self._task = self._progress.add_task("train", total=total_steps, completed=step, figures="")

    def log(self, record: Record) -> None:
        """Show a training record's figures beside the bar, other records on a line above it."""
        if record["kind"] == "train":
            self._progress.update(self._task, figures=bar_figures(record))
        else:
            _print(self._progress.console, record, describe(record))

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Leave the bar where it is."""
        self._progress.stop()


class PlainLines:
    """One line per record, for logs and pipes; time left is reckoned from the steps done here."""

    def __init__(self, console: Console, total_steps: int, step: int = 0) -> None:
        """Count from `step` of `total_steps`."""
        self._console, self._total, self._first = console, total_steps, step
        self._started = time.monotonic()

    def log(self, record: Record) -> None:
        """Print the record."""
        line = describe(record)
        if record["kind"] == "train":
            line += f" | {self._left(int(record['step']))} left"
        _print(self._console, record, line)

    def advance(self, step: int) -> None:
        """Nothing to show between records."""

    def close(self) -> None:
        """Nothing to close."""

    def _left(self, step: int) -> str:
        done = step - self._first
        per_step = (time.monotonic() - self._started) / done if done > 0 else 0.0
        return duration(per_step * (self._total - step))


class MetricLoggers:
    """Hands every record to all sinks, and closes them on leaving the `with` block."""

    def __init__(self, sinks: Sequence[MetricLogger]) -> None:
        """Take the sinks, in the order in which they are served."""
        self._sinks = list(sinks)

    def log(self, kind: str, step: int, figures: Record) -> None:
        """Record `figures` of `kind` ("train", "eval", "skipped") after `step` optimizer steps."""
        record = {"kind": kind, "step": step, **figures}
        for sink in self._sinks:
            sink.log(record)

    def advance(self, step: int) -> None:
        """`step` optimizer steps are done."""
        for sink in self._sinks:
            sink.advance(step)

    def __enter__(self) -> MetricLoggers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for sink in self._sinks:
            sink.close()


def open_metric_loggers(
    run_dir: Path,
    console: Console,
    total_steps: int,
    step: int = 0,
    extra: Sequence[MetricLogger] = (),
    evaluated: int = 0,
) -> MetricLoggers:
    """Set up metrics.jsonl in `run_dir`, and a bar on a terminal, or plain lines elsewhere, then the `extra` sinks.

    `step` is where a resumed run goes on, `evaluated` the last step of it that was evaluated; 0 for a new one.
    """

    def warn(line: str) -> None:
        console.print(line, style="yellow", markup=False, highlight=False)

    shown: MetricLogger = (ProgressBar if console.is_terminal else PlainLines)(console, total_steps, step)
    return MetricLoggers([MetricsFile(run_dir / "metrics.jsonl", step, evaluated, warn), shown, *extra])


def bar_figures(record: Record) -> str:
    """Render the figures beside the bar, short enough for one terminal line."""
    heads = " ".join(_share(x) for x in record["head_top1"])
    return f"loss {record['loss']:.3f}  top-1 {heads}  {record['tokens_per_s']:,.0f} tok/s"


def describe(record: Record) -> str:
    """Render one record as one line of text."""
    if record["kind"] == "skipped":
        count = f"{record['skipped_steps']} of at most {record['max_nonfinite_steps']}"
        records = ", ".join(record["records"])
        return f"step {record['step']} skipped ({count}): {record['reason']}. Records in it: {records}"
    heads = " ".join(_share(x) for x in record["head_top1"])
    own = "".join(f" | {name} {record[key]:.4f}" for name, key in (("lm", "lm_loss"), ("kl", "lm_kl")) if key in record)
    if record["kind"] == "eval":
        if (length := record.get("acceptance_length")) is not None:
            own += f" | {length:.2f} tokens per step"
        return f"held-out at step {record['step']}: heads' loss {record['loss']:.4f} | top-1 {heads}{own}"
    return (
        f"step {record['step']} | loss {record['loss']:.4f} | top-1 {heads}{own} | grad {record['grad_norm']:.3f}"
        f" | lr {record['lr']:.2e} | {record['tokens_per_s']:,.0f} tok/s"
    )


def _print(console: Console, record: Record, line: str) -> None:
    style = "yellow" if record["kind"] == "skipped" else None
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as people write them: 42 s, 3 min 05 s, 2 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _share(x: float) -> str:
    """Write a share below one as .62, the way tables of accuracies do."""
    return f"{x:.2f}".removeprefix("0")
