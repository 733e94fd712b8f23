"""Services that draw a run's figures: Weights & Biases, TensorBoard. Knows nothing of training.

Whatever goes wrong in one of them is said in one line, and costs the run nothing but its figures there.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Console

from medusa_train.progress import Record


class Dashboard(ABC):
    """A sink that is given up at its first failure."""

    name: str

    def __init__(self, console: Console, start: Callable[[], Any]) -> None:
        """Take what `start` returns as the service's own writer."""
        self._console = console
        self._writer: Any = None
        try:
            self._writer = start()
        except Exception as error:  # whatever a service does, the run goes on
            self._give_up(error)

    def log(self, record: Record) -> None:
        """Send a record's numbers, one value per head."""
        self._try(lambda: self._send(flat_figures(record), int(record["step"])))

    def advance(self, step: int) -> None:  # noqa: B027 (not abstract: the same for all)
        """Nothing to show between records."""

    def close(self) -> None:
        """Let it finish what it has to send."""
        self._try(self._finish)

    @abstractmethod
    def _send(self, figures: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    def _try(self, action: Callable[[], None]) -> None:
        if self._writer is None:
            return
        try:
            action()
        except Exception as error:  # as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        self._console.print(f"{self.name}: {reason}; going on without it", style="yellow", markup=False)
        self._writer = None


class Wandb(Dashboard):
    """Weights & Biases, through `wandb`'s own modes (WANDB_MODE: online, offline, disabled)."""

    name = "wandb"

    def __init__(self, console: Console, run_dir: Path, project: str, entity: str | None, run_id: str | None) -> None:
        """Start, or go on with, a run of `project`; its files lie in `run_dir`/wandb."""

        def start() -> Any:
            import wandb

            return wandb.init(
                project=project,
                entity=entity,
                id=run_id,
                resume="allow" if run_id else None,
                dir=str(run_dir),
                name=run_dir.name,
                mode=_wandb_mode(),
                settings=wandb.Settings(silent=True),
            )

        super().__init__(console, start)

    def _send(self, figures: dict[str, float], step: int) -> None:
        self._writer.log(figures, step=step)

    def _finish(self) -> None:
        self._writer.finish()


class TensorBoard(Dashboard):
    """Event files for `tensorboard --logdir`, where the package tensorboard is installed."""

    name = "tensorboard"

    def __init__(self, console: Console, run_dir: Path, step: int = 0) -> None:
        """Write into `run_dir`/tensorboard; a run that goes on after `step` hides what an earlier try wrote later."""

        def start() -> Any:
            from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

            return SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else None)

        super().__init__(console, start)

    def _send(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def _finish(self) -> None:
        self._writer.close()


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


def _wandb_mode() -> Literal["online", "offline", "disabled"]:
    """WANDB_MODE; where it is silent online with a key at hand, else offline: a run never stops to ask for one."""
    named = os.environ.get("WANDB_MODE", "")
    if named in ("online", "offline", "disabled"):
        return cast(Literal["online", "offline", "disabled"], named)
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").is_file()
    return "online" if has_key else "offline"
