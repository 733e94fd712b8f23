"""Collect and restore a checkpoint's content: weights, optimizer, counters, random generators."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.errors import CheckpointError
from medusa_train.hide_secrets import excerpt
from medusa_train.models.drafts.base import Draft
from medusa_train.models.partitioned import gathered, is_partitioned, whole_copies
from medusa_train.training.distributed import DistributedContext
from medusa_train.training.optimizer import Strategy
from medusa_train.training.step_metrics import Window
from medusa_train.training.target_model_recipe import TargetModelRecipe


@dataclass
class TrainState:
    """Counters of a run after `step` optimizer steps, saved in every checkpoint.

    Attributes:
        step, epoch: number of finished optimizer steps, and of passes over the data.
        data: the loader's `state_dict`, with its position in the data.
        best_loss: lowest validation objective in nats, measured at `best_step`.
        evals_since_best: number of evaluations after `best_step`, for early stopping.
        evaluated: step of the last evaluation.
        validation: fingerprint of the validation data of that evaluation.
        objective: names and values of the settings that define the objective. Like `validation` it
            is None before the first evaluation and in older checkpoints.
        base_model_digest: digest of the target model's weights. None if there are no weight files,
            and for checkpoints before 0.3.0, whose fingerprint was of another kind and cannot be
            compared with it.
        tokens, seconds: tokens and time of all training steps of the run.
        skipped: number of steps of the run that were skipped because of a NaN/Inf loss or gradient.
        window: sums since the last log line.
    """

    step: int = 0
    epoch: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)
    best_loss: float | None = None
    best_step: int = 0
    evals_since_best: int = 0
    evaluated: int = 0
    validation: str | None = None
    objective: dict[str, Any] | None = None
    base_model_digest: str | None = None
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    window: Window = field(default_factory=Window)

    def record_eval(self, objective: float) -> bool:
        """Record an evaluation at the current step; return whether its objective is the lowest so
        far.
        """
        self.evaluated = self.step
        is_lowest = self.best_loss is None or objective < self.best_loss
        if not is_lowest or not math.isfinite(objective):
            self.evals_since_best += 1
            return False
        self.best_loss = objective
        self.best_step = self.step
        self.evals_since_best = 0
        return True

    @property
    def best(self) -> str:
        """Description of the best evaluation."""
        if self.best_loss is None:
            return "none was finite"
        return f"lowest {self.best_loss:.4f} at step {self.best_step}"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainState:
        """Restore the output of `dataclasses.asdict`, also after a round trip through JSON."""
        known_values = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        window = known_values.pop("window", {})
        if "sums" not in window:  # an earlier version saved other sums
            return cls(**known_values)
        return cls(**known_values, window=Window(**window))


def take_weights(
    draft: Draft, recipe: TargetModelRecipe, distributed: DistributedContext
) -> dict[str, Any]:
    """Collect the trained weights (the parts `WEIGHTS` of a checkpoint) in rank 0.

    Partitioned weights are gathered one at a time into CPU memory; other weights are not copied.
    """
    parts = {"draft": draft.state_dict(keep_vars=True), "student": recipe.parameters}
    return {name: whole_copies(part, keep=distributed.is_main) for name, part in parts.items()}


def take_snapshot(
    draft: Draft,
    recipe: TargetModelRecipe,
    strategy: Strategy,
    state: TrainState,
    distributed: DistributedContext,
) -> dict[str, Any]:
    """Collect a checkpoint's content, complete only in rank 0. Its tensors may share memory with
    the model, so they change when training continues.
    """
    main, *others = distributed.gather(rng_state())
    snapshot = take_weights(draft, recipe, distributed)
    snapshot["engine"] = strategy.state_dict()
    snapshot["rng"] = main
    if others:
        snapshot["rng_of_others"] = others
    snapshot["run"] = asdict(state)
    return snapshot


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint's path and content, and one line per setting that differs from this run's."""

    path: Path
    snapshot: dict[str, Any]
    changed: Sequence[str] = ()


def load_snapshot(
    store: CheckpointStore,
    path: Path,
    distributed: DistributedContext,
    parts: Collection[str] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint in every process. Rank 0 reads all of it to compare checksums; other
    processes read only what they restore.

    Args:
        parts: see `CheckpointStore.load`.
    """
    snapshot: dict[str, Any] = {}
    for reads in (distributed.is_main, not distributed.is_main):
        with distributed.failing_together():
            if reads:
                snapshot = store.load(path, verify=distributed.is_main, parts=parts)
    return snapshot


def restore_weights(
    checkpoint: LoadedCheckpoint,
    draft: Draft,
    recipe: TargetModelRecipe,
    distributed: DistributedContext,
) -> None:
    """Load the trained weights of a checkpoint; CheckpointError if it does not fit this run.

    If weights are partitioned, only rank 0 reads their values.
    """
    reads = distributed.is_main or not any(map(is_partitioned, draft.parameters()))
    with _matching(checkpoint):
        with gathered(draft.parameters(), modify=True):
            if reads:
                draft.load_state_dict(checkpoint.snapshot["draft"])
        recipe.load_state_dict(checkpoint.snapshot.get("student", {}), distributed)


def restore_state(
    checkpoint: LoadedCheckpoint,
    strategy: Strategy,
    distributed: DistributedContext,
) -> TrainState:
    """Load optimizer, schedule and this process's random generators; return the counters.

    If there are more processes than when the snapshot was taken, the additional processes keep
    their current random generators.
    """
    snapshot = checkpoint.snapshot
    with _matching(checkpoint):
        strategy.load_state_dict(snapshot["engine"])
        generators = rng_states(snapshot)
        if distributed.rank < len(generators):
            set_rng_state(generators[distributed.rank])
        return TrainState.from_json(snapshot["run"])


def rng_states(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the random generators' states of every process that took the snapshot."""
    return [snapshot["rng"], *snapshot.get("rng_of_others", [])]


@contextmanager
def _matching(checkpoint: LoadedCheckpoint) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        if checkpoint.changed:
            changed = "\n".join(f"  {line}" for line in checkpoint.changed)
            raise CheckpointError(
                f"{checkpoint.path}: does not fit this run, whose settings differ:\n{changed}\nTo"
                " resume, set them back; to train with the new ones, set output_dir to a new"
                " directory and remove resume_from_checkpoint."
            ) from error
        reason = excerpt(str(error), 300)
        raise CheckpointError(
            f"{checkpoint.path}: does not fit this run ({reason}).\nTo resume, keep the base_model,"
            " draft, heads (medusa_num_heads, medusa_num_layers, medusa_vocab_size,"
            " medusa_markov_rank; other drafts: their section), adapter and optimizer of the run"
            " that saved it."
        ) from error


def rng_state() -> dict[str, Any]:
    """Return the states of all random generators as tensors, tuples and numbers, which a checkpoint
    can store.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = []
    if torch.cuda.is_available():
        cuda.append(torch.cuda.get_rng_state())  # only the current device
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore `rng_state`; a CUDA state is ignored without a GPU."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
