"""The checkpoint that a run goes on from, if it goes on from one. Knows where it lies, not what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from medusa_train.training.distributed import World
from medusa_train.training.run_dir import check_nothing_is_lost, named_checkpoint


@dataclass(frozen=True)
class Earlier:
    """A run's checkpoint: where it lies, and its content."""

    path: Path
    snapshot: dict[str, Any]


def find_checkpoint(cfg: TrainConfig, store: CheckpointStore, world: World, console: Console) -> Earlier | None:
    """Read the checkpoint that `resume_from_checkpoint` names, in every process; None for a new run.

    Raises:
        CheckpointError: it is damaged; or there is none, but results that a new run would overwrite.
    """
    if cfg.resume_from_checkpoint is None:
        return None
    path = world.lead(lambda: named_checkpoint(cfg) or store.latest())
    if path is None:
        world.lead(lambda: check_nothing_is_lost(cfg))
        console.print(f"resume_from_checkpoint: {store.root} holds no checkpoint yet, starting anew")
        return None
    return world.together(lambda: Earlier(path, store.load(path)))
