"""Where a run's figures go: `metrics.jsonl`, and a progress bar or plain lines. Knows nothing of training or torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Record = Mapping[str, Any]


class Sink(Protocol):
    """One place that figures go to."""

    def log(self, record: Record) -> None:
        """Take one record: `kind` ("train" or "eval"), `step`, and that kind's figures."""

    def advance(self, step: int) -> None:
        """`step` optimizer steps are done."""

    def close(self) -> None:
        """Nothing more comes."""


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, on disk as soon as it is logged."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        """Open for appending.

        Args:
            path: the file; made when absent.
            resume_step: lines after this step are dropped first, since the resumed run writes them again.
        """
        if path.exists():
            keep_until(path, resume_step)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def log(self, record: Record) -> None:
        """Write one line and flush it."""
        self._file.write(json.dumps({**record, "time": round(time.time(), 3)}) + "\n")
        self._file.flush()

    def advance(self, step: int) -> None:
        """Nothing to do: only figures are kept."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that a killed process left half written."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(fresh, path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


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
        """Show a training record's figures beside the bar, an evaluation's on a line above it."""
        if record["kind"] == "train":
            self._progress.update(self._task, figures=bar_figures(record))
        else:
            self._progress.console.print(describe(record), highlight=False)

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
        self._console.print(line, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Nothing to show between records."""

    def close(self) -> None:
        """Nothing to close."""

    def _left(self, step: int) -> str:
        done = step - self._first
        per_step = (time.monotonic() - self._started) / done if done > 0 else 0.0
        return duration(per_step * (self._total - step))


class Wandb:
    """Weights & Biases, through `wandb`'s own modes (WANDB_MODE: online, offline, disabled).

    Whatever goes wrong there is said once and costs the run nothing.
    """

    def __init__(self, console: Console, run_dir: Path, project: str, entity: str | None, run_id: str | None) -> None:
        """Start, or go on with, a run of `project`; its files lie in `run_dir`."""
        self._console = console
        self._run: Any = None
        try:
            import wandb

            self._run = wandb.init(
                project=project,
                entity=entity,
                id=run_id,
                resume="allow" if run_id else None,
                dir=str(run_dir),
                name=run_dir.name,
                mode=_wandb_mode(),
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # whatever a service does, the run goes on
            self._give_up(error)

    def log(self, record: Record) -> None:
        """Send a record's numbers, one value per head."""
        if self._run is None:
            return
        try:
            self._run.log(flat_figures(record), step=int(record["step"]))
        except Exception as error:  # as above
            self._give_up(error)

    def advance(self, step: int) -> None:
        """Nothing to show between records."""

    def close(self) -> None:
        """Let it finish what it has to send."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:  # as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        reason = " ".join(str(error).split())[:200]
        self._console.print(f"wandb: {reason}; going on without it", style="yellow", markup=False)
        self._run = None


def _wandb_mode() -> Literal["online", "offline", "disabled"]:
    """WANDB_MODE; where it is silent online with a key at hand, else offline: a run never stops to ask for one."""
    named = os.environ.get("WANDB_MODE", "")
    if named in ("online", "offline", "disabled"):
        return cast(Literal["online", "offline", "disabled"], named)
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").is_file()
    return "online" if has_key else "offline"


def flat_figures(record: Record) -> dict[str, float]:
    """A record as `kind/name` numbers; a list becomes `name_1`, `name_2`, ... and a table is left out."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, bool) or name == "step":
            continue
        if isinstance(value, (int, float)):
            flat[f"{record['kind']}/{name}"] = value
        elif isinstance(value, list) and all(isinstance(x, (int, float)) for x in value):
            flat.update({f"{record['kind']}/{name}_{k}": x for k, x in enumerate(value, start=1)})
    return flat


class Tracker:
    """Hands every record to all sinks, and closes them on leaving the `with` block."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """Take the sinks, in the order in which they are served."""
        self._sinks = list(sinks)

    def log(self, kind: str, step: int, figures: Record) -> None:
        """Record `figures` of `kind` ("train", "eval") after `step` optimizer steps."""
        record = {"kind": kind, "step": step, **figures}
        for sink in self._sinks:
            sink.log(record)

    def advance(self, step: int) -> None:
        """`step` optimizer steps are done."""
        for sink in self._sinks:
            sink.advance(step)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for sink in self._sinks:
            sink.close()


def open_tracker(
    run_dir: Path, console: Console, total_steps: int, step: int = 0, extra: Sequence[Sink] = ()
) -> Tracker:
    """Set up metrics.jsonl in `run_dir`, and a bar on a terminal, or plain lines elsewhere, then the `extra` sinks.

    `step` is where a resumed run goes on; 0 for a new one.
    """
    shown: Sink = (ProgressBar if console.is_terminal else PlainLines)(console, total_steps, step)
    return Tracker([MetricsFile(run_dir / "metrics.jsonl", step), shown, *extra])


def bar_figures(record: Record) -> str:
    """Render the figures beside the bar, short enough for one terminal line."""
    heads = " ".join(_share(x) for x in record["head_top1"])
    return f"loss {record['loss']:.3f}  top-1 {heads}  {record['tokens_per_s']:,.0f} tok/s"


def describe(record: Record) -> str:
    """Render one record as one line of text."""
    heads = " ".join(_share(x) for x in record["head_top1"])
    own = "".join(f" | {name} {record[key]:.4f}" for name, key in (("lm", "lm_loss"), ("kl", "lm_kl")) if key in record)
    if record["kind"] == "eval":
        return f"held-out at step {record['step']}: heads' loss {record['loss']:.4f} | top-1 {heads}{own}"
    return (
        f"step {record['step']} | loss {record['loss']:.4f} | top-1 {heads}{own} | grad {record['grad_norm']:.3f}"
        f" | lr {record['lr']:.2e} | {record['tokens_per_s']:,.0f} tok/s"
    )


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
