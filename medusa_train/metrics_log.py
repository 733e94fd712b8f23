"""Logs a training run's metrics: `metrics.jsonl`, the console, Weights & Biases, TensorBoard.

A record is a mapping with `kind` ("train", "eval" or "skipped"), `step` (optimizer steps done) and
the metrics of that kind. Every `MetricLogger` gets every record. A dashboard that fails is dropped
with a warning; the run continues.
"""

from __future__ import annotations

import netrc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from rich.console import Console

from medusa_train.console_streams import failed_streams
from medusa_train.hide_secrets import excerpt, mask_values
from medusa_train.io import (
    parse_json,
    replace_bytes,
    replace_text,
    write_failure,
)
from medusa_train.json_lines import JsonLinesFile, complete_lines
from medusa_train.progress import RunProgress

Record = Mapping[str, Any]
Send = Callable[[dict[str, float], int], None]
T = TypeVar("T")

#: If a console is not a terminal, it shows the current step after this many seconds without a
#: record.
QUIET_SECONDS = 60.0


class MetricLogger(ABC):
    """A destination of metrics."""

    @abstractmethod
    def log(self, record: Record) -> None:
        """Log one record."""

    def advance(self, step: int) -> None:  # noqa: B027 (only a bar shows it)
        """Take note that `step` optimizer steps are done."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


class MetricLoggers:
    """Passes every record to all its loggers, and closes them at the end of the `with` block."""

    def __init__(self, loggers: Sequence[MetricLogger]) -> None:
        self._loggers = list(loggers)

    def log(self, kind: str, step: int, metrics: Record) -> None:
        """Log metrics of `kind` ("train", "eval", "skipped") after `step` optimizer steps."""
        record = {"kind": kind, "step": step, **metrics}
        for logger in self._loggers:
            logger.log(record)

    def advance(self, step: int) -> None:
        """Take note that `step` optimizer steps are done."""
        for logger in self._loggers:
            logger.advance(step)

    def __enter__(self) -> MetricLoggers:
        return self

    def __exit__(self, *error: object) -> None:
        for logger in self._loggers:
            logger.close()


class MetricsFile(MetricLogger):
    """Appends records to `metrics.jsonl`, one JSON object per line, each written at once.

    Lines that cannot be written (disk full) are kept and written, in order, with the next record.
    If stdout or stderr cannot be written, one record of kind "console" says so.

    `truncate_log` removes the lines that a run resumed after `step` will write again.
    """

    def __init__(
        self,
        path: Path,
        step: int = 0,
        evaluated: int = 0,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        if path.exists():
            truncate_log(path, step, evaluated)
        self._file = JsonLinesFile(path)
        self._warn = warn
        self._warned = False
        self._step = step
        self._told_of_console = False

    def log(self, record: Record) -> None:
        """Write one line."""
        self._step = record["step"]
        self._append(record)
        self._tell_of_console()

    def close(self) -> None:
        """Write the pending records and close the file."""
        self._tell_of_console()
        self._try(self._file.flush)
        if lost := self._file.pending_lines:
            self._warn(f"{self._file.path}: the last {lost} lines could not be written")
        self._file.close()

    def _append(self, record: Record) -> None:
        self._try(lambda: self._file.append({**record, "time": round(time.time(), 3)}))

    def _tell_of_console(self) -> None:
        """Record once that the console cannot be written: the console itself cannot show it."""
        failures = failed_streams()
        if failures and not self._told_of_console:
            self._told_of_console = True
            self._append({"kind": "console", "step": self._step, "failed": failures})

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned:
                directory = self._file.path.parent
                self._warn(
                    f"{write_failure(self._file.path.name, directory, error)}; retrying with every"
                    " record"
                )
            self._warned = True


def truncate_log(path: Path, step: int, evaluated: int) -> None:
    """Remove the lines that a run resumed after `step` will write again, and an incomplete last
    line.

    These are records of later steps, and validations after step `evaluated`. A validation that was
    logged but not saved with a checkpoint is repeated.
    """
    replace_bytes(path, [line for line in complete_lines(path) if _keep(line, step, evaluated)])


def _keep(line: bytes, step: int, evaluated: int) -> bool:
    try:
        record = parse_json(line)
        return float(record["step"]) <= (evaluated if record.get("kind") == "eval" else step)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


class ConsoleLogger(MetricLogger):
    """Shows training on the console: a bar with the latest metrics on a terminal, one line per
    record elsewhere.
    """

    def __init__(self, console: Console, total_steps: int, step: int = 0, title: str = "") -> None:
        """Start at `step` of `total_steps`."""
        self._is_terminal = console.is_terminal
        self._progress = RunProgress(console, line_seconds=QUIET_SECONDS, title=title)
        self._phase = self._progress.phase("train", total_steps, "steps", completed=step)
        self._phase.start()

    def log(self, record: Record) -> None:
        """Show a training record next to the bar. Print other records as a line; without a bar,
        print all records.
        """
        if record["kind"] == "train" and self._is_terminal:
            self._phase.update(record["step"], bar_metrics(record))
            return
        line = describe(record)
        if record["kind"] == "train":
            line += f" | {self._phase.time_left() or '?'} left"
        self._progress.print(line, style="yellow" if record["kind"] == "skipped" else None)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._phase.update(step)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self._progress.print(line, style="yellow")

    def close(self) -> None:
        """Stop the bar."""
        self._phase.stop()


def bar_metrics(record: Record) -> str:
    """Format a training record for the bar: loss, top-1 accuracy per head, tokens per second."""
    return (
        f"loss {record['loss']:.3f}  top-1 {_top1(record)}  {record['tokens_per_s']:,.0f} tokens/s"
    )


def describe(record: Record) -> str:
    """Format a record as one line of text."""
    if record["kind"] == "skipped":
        count = f"{record['skipped_steps']} of at most {record['max_nonfinite_steps']}"
        records = ", ".join(record["records"])
        return (
            f"step {record['step']} skipped ({count}): {record['reason']}. Records in it: {records}"
        )
    heads = _top1(record)
    joint = "".join(
        f" | {loss} {record[k]:.4f}"
        for loss, k in (("lm", "lm_loss"), ("kl", "lm_kl"))
        if k in record
    )
    if record["kind"] == "eval":
        if (length := record.get("acceptance_length")) is not None:
            joint += f" | {length:.2f} tokens per step"
        return (
            f"validation at step {record['step']}: loss of the heads {record['loss']:.4f} | top-1"
            f" {heads}{joint}"
        )
    return (
        f"step {record['step']} | loss {record['loss']:.4f} | top-1 {heads}{joint} | grad"
        f" {record['grad_norm']:.3f} | lr {record['lr']:.2e} | {record['tokens_per_s']:,.0f}"
        " tokens/s"
    )


def _top1(record: Record) -> str:
    """Format the top-1 accuracy of each head, without leading zeros: .62 .48."""
    return " ".join(f"{x:.2f}".removeprefix("0") for x in record["head_top1"])


class Dashboard(MetricLogger):
    """An external service that plots metrics. It is dropped, with a warning on the console, at its
    first failure.

    `start` connects to it. It returns a function that sends the metrics of a step, and one that
    ends the connection.
    """

    def __init__(
        self, name: str, console: Console, start: Callable[[], tuple[Send, Callable[[], None]]]
    ) -> None:
        self._name = name
        self._console = console
        self._functions: tuple[Send, Callable[[], None]] | None = None
        self._functions = self._try(start)

    def log(self, record: Record) -> None:
        """Send the numbers of a record, one value per head."""
        if self._functions is not None:
            send, _ = self._functions
            self._try(lambda: send(flat_metrics(record), int(record["step"])))

    def close(self) -> None:
        """Wait until everything is sent."""
        if self._functions is not None:
            self._try(self._functions[1])

    def _try(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:  # no failure of a dashboard may end the run
            reason = excerpt(str(error), 200) or type(error).__name__
            line = f"{self._name}: {reason}; continuing without {self._name}"
            self._console.print(line, style="yellow", markup=False)
            self._functions = None
            return None


#: File in `run_dir`/wandb with the id of the run at Weights & Biases.
WANDB_ID = "run_id.txt"


def wandb(
    console: Console,
    run_dir: Path,
    project: str,
    entity: str | None,
    run_id: str | None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Dashboard:
    """Start or resume a run of Weights & Biases, with its files in `run_dir`/wandb.

    WANDB_MODE applies. A resumed run continues its run at Weights & Biases, since the id is stored
    next to its files.

    Args:
        run_id: the id of the run; None: the stored id, or a new one.
        config: the settings that Weights & Biases shows.
    """

    def start() -> tuple[Send, Callable[[], None]]:
        import wandb

        id_file = run_dir / "wandb" / WANDB_ID
        stored_id = run_id or _stored_id(id_file)
        run = wandb.init(
            project=project,
            entity=entity,
            id=stored_id,
            resume="allow" if stored_id else None,
            config=mask_values(config or {}),
            dir=str(run_dir),
            name=name or run_dir.name,
            mode=_wandb_mode(),
            settings=wandb.Settings(silent=True),
        )
        id_file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(id_file, f"{run.id}\n")
        return lambda metrics, step: run.log(metrics, step=step), run.finish

    return Dashboard("wandb", console, start)


def _stored_id(path: Path) -> str | None:
    """Return the id that an earlier process stored, or None."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def tensorboard(console: Console, run_dir: Path, step: int = 0) -> Dashboard:
    """Write event files to `run_dir`/tensorboard. A run resumed after `step` hides the events of
    later steps that the earlier run wrote.
    """

    def start() -> tuple[Send, Callable[[], None]]:
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else None)

        def send(metrics: dict[str, float], step: int) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        return send, writer.close

    return Dashboard("tensorboard", console, start)


def flat_metrics(record: Record) -> dict[str, float]:
    """Flatten a record to `kind/name` numbers; a list becomes `name_1`, `name_2`, ..., nested lists
    are left out.
    """
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, bool) or name == "step":
            continue
        if isinstance(value, (int, float)):
            flat[f"{record['kind']}/{name}"] = value
        elif isinstance(value, list) and all(isinstance(x, (int, float)) for x in value):
            flat.update({f"{record['kind']}/{name}_{k}": x for k, x in enumerate(value, start=1)})
    return flat


def _wandb_mode() -> Literal["online", "offline", "disabled"]:
    """Return WANDB_MODE. If it is unset, return "online" if wandb is logged in, else "offline", so
    that no run waits for a login.
    """
    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("online", "offline", "disabled"):
        return cast(Literal["online", "offline", "disabled"], mode)
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    with suppress(OSError, netrc.NetrcParseError):
        host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
        if netrc.netrc(os.environ.get("NETRC")).authenticators(host):
            return "online"
    return "offline"
