"""The state of a run (counters, random generators, plan) and how a checkpoint saves and restores it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from medusa_train.checkpoint.run_layout import changed_weight_keys, check_nothing_is_lost, named_checkpoint
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.base import Draft
from medusa_train.models.partitioned import gathered, whole_copies
from medusa_train.training.backbone_recipe import BackboneRecipe
from medusa_train.training.distributed import SINGLE_PROCESS, World
from medusa_train.training.step_metrics import Window
from medusa_train.training.strategy import Strategy


@dataclass
class TrainState:
    """Counters of a run after `step` optimizer steps, saved in every checkpoint.

    Attributes:
        step, epoch: optimizer steps done, and passes over the data.
        data: the loader's position, its `state_dict`.
        best_loss: lowest validation objective in nats, measured at `best_step`.
        evals_since_best: evaluations since then, for early stopping.
        evaluated: step of the last evaluation. tree: content of the tree.json that it gave.
        tokens, seconds: of training steps over the whole run.
        skipped: steps skipped because of a NaN/Inf loss or gradient, over the whole run.
        window: sums since the last log line.
    """

    step: int = 0
    epoch: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)
    best_loss: float | None = None
    best_step: int = 0
    evals_since_best: int = 0
    evaluated: int = 0
    tree: dict[str, Any] | None = None
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    window: Window = field(default_factory=Window)

    def record_eval(self, objective: float) -> bool:
        """Record an evaluation at the current step; return whether its objective is the lowest so far."""
        self.evaluated = self.step
        if self.best_loss is not None and objective >= self.best_loss:
            self.evals_since_best += 1
            return False
        self.best_loss, self.best_step, self.evals_since_best = objective, self.step, 0
        return True

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainState:
        """Restore `to_json`, also after a round trip through a JSON file."""
        names = {f.name for f in fields(cls)} - {"window"}
        present = {name: values[name] for name in names if name in values}
        return cls(**present, window=Window(**values.get("window", {})))


def take_weights(draft: Draft, recipe: BackboneRecipe, world: World = SINGLE_PROCESS) -> dict[str, Any]:
    """Collect the trained weights, the parts `WEIGHTS` of a checkpoint, in rank 0.

    Partitioned weights are gathered one at a time into CPU memory; the others are not copied.
    """
    parts = {"draft": draft.state_dict(keep_vars=True), "student": recipe.parameters}
    return {name: whole_copies(part, keep=world.is_main) for name, part in parts.items()}


def take_snapshot(
    draft: Draft,
    recipe: BackboneRecipe,
    strategy: Strategy,
    state: TrainState,
    world: World = SINGLE_PROCESS,
) -> dict[str, Any]:
    """Collect a checkpoint's content: trained weights, optimizer, schedule, random generators and counters.

    All processes of `world` call it; rank 0's result is complete. Its tensors change while training goes on.
    """
    main, *others = world.gather(rng_state())
    return {
        **take_weights(draft, recipe, world),
        "engine": strategy.state_dict(),
        "rng": main,
        **({"rng_of_others": others} if others else {}),
        "run": state.to_json(),
    }


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint's path and content, and the settings of its run that differ from this one's, a line each."""

    path: Path
    snapshot: dict[str, Any]
    changed: Sequence[str] = ()


def restore_weights(checkpoint: LoadedCheckpoint, draft: Draft, recipe: BackboneRecipe) -> None:
    """Load the trained weights of a checkpoint.

    Raises:
        CheckpointError: it does not fit this run.
    """
    with _matching(checkpoint):
        with gathered(draft.parameters(), modify=True):
            draft.load_state_dict(checkpoint.snapshot["draft"])
        recipe.load_state_dict(checkpoint.snapshot.get("student", {}))


def restore_state(checkpoint: LoadedCheckpoint, strategy: Strategy, world: World = SINGLE_PROCESS) -> TrainState:
    """Load optimizer, schedule and this process's random generators; return the counters.

    With more processes than took the snapshot, the additional ones keep their current random generators.

    Raises:
        CheckpointError: it does not fit this run.
    """
    snapshot = checkpoint.snapshot
    with _matching(checkpoint):
        strategy.load_state_dict(snapshot["engine"])
        generators = rng_states(snapshot)
        if world.rank < len(generators):
            set_rng_state(generators[world.rank])
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
                f"{checkpoint.path}: does not fit this run, whose settings differ:\n{changed}\n"
                "To resume, set them back; to train with the new ones, set output_dir to a new directory and remove "
                "resume_from_checkpoint."
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{checkpoint.path}: does not fit this run ({reason}).\n"
            "To resume, keep the base_model, draft, heads (medusa_num_heads, medusa_num_layers, medusa_vocab_size, "
            "medusa_markov_rank; other drafts: their section), adapter and optimizer of the run that saved it."
        ) from error


def find_checkpoint(
    cfg: TrainConfig, store: CheckpointStore, world: World, console: Console
) -> LoadedCheckpoint | None:
    """Load the checkpoint that `resume_from_checkpoint` names, in every process; None for a new run.

    Raises:
        CheckpointError: it is damaged, or there is none but results that a new run would overwrite.
    """
    if cfg.resume_from_checkpoint is None:
        return None
    path = world.run_on_main(lambda: named_checkpoint(cfg) or store.latest())
    if path is None:
        world.run_on_main(lambda: check_nothing_is_lost(cfg))
        console.print(f"resume_from_checkpoint: no checkpoint in {store.root}, starting a new run")
        return None
    return world.run_on_all(
        lambda: LoadedCheckpoint(path, store.load(path), changed_weight_keys(cfg, path.parent.parent))
    )


@dataclass(frozen=True)
class Plan:
    """When a run logs, evaluates, saves and ends.

    `steps_per_epoch` may be a fraction: micro-batches of one step may come from two epochs. Of `eval_every` and
    `evals_per_epoch` at most one is set, likewise for saving; with neither, it happens only after the last step.
    """

    total_steps: int
    steps_per_epoch: float
    logging_steps: int = 1
    eval_every: int | None = None
    evals_per_epoch: int | None = None
    save_every: int | None = None
    saves_per_epoch: int | None = None

    def logs(self, step: int) -> bool:
        """Return whether to log after `step` steps (1-based); always after the last one."""
        return step % self.logging_steps == 0 or step >= self.total_steps

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate after `step` steps; always after the last one."""
        return step >= self.total_steps or self._due(step, self.eval_every, self.evals_per_epoch)

    def saves(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step` steps; always after the last one."""
        return step >= self.total_steps or self._due(step, self.save_every, self.saves_per_epoch)

    def epoch(self, step: int) -> float:
        """Return the passes over the data after `step` steps."""
        return step / self.steps_per_epoch

    def _due(self, step: int, every: int | None, per_epoch: int | None) -> bool:
        if every:
            return step % every == 0
        if per_epoch:
            return self._parts(step, per_epoch) > self._parts(step - 1, per_epoch)
        return False

    def _parts(self, step: int, per_epoch: int) -> int:
        """Return the completed parts of epochs; one that ends with a step is complete in spite of rounding."""
        return math.floor(self.epoch(step) * per_epoch + 1e-9)


def make_plan(cfg: TrainConfig, micro_batches_per_epoch: int, processes: int = 1) -> Plan:
    """Plan the run's steps; it evaluates and saves once per epoch unless the configuration says otherwise."""
    total, per_epoch = count_steps(
        micro_batches_per_epoch, cfg.gradient_accumulation_steps * processes, cfg.num_epochs, cfg.max_steps
    )
    return Plan(
        total_steps=total,
        steps_per_epoch=per_epoch,
        logging_steps=cfg.logging_steps,
        eval_every=interval(cfg.eval_steps, total),
        evals_per_epoch=None if cfg.eval_steps else cfg.evals_per_epoch or 1,
        save_every=interval(cfg.save_steps, total),
        saves_per_epoch=None if cfg.save_steps else cfg.saves_per_epoch or 1,
    )


def count_steps(
    micro_batches_per_epoch: int, accumulation: int, num_epochs: float, max_steps: int | None
) -> tuple[int, float]:
    """Return the optimizer steps of the run and of one epoch; a positive `max_steps` overrides `num_epochs`."""
    per_epoch = micro_batches_per_epoch / accumulation
    if max_steps is not None and max_steps > 0:
        return max_steps, per_epoch
    return max(1, math.ceil(num_epochs * per_epoch)), per_epoch


def interval(value: float | None, total_steps: int) -> int | None:
    """Convert `eval_steps` or `save_steps` to whole steps: a number below 1 is a fraction of the run."""
    if not value:
        return None
    return max(1, round(value * total_steps)) if value < 1 else int(value)


def seed_all(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the states of all random generators, as tensors, tuples and numbers that a checkpoint can hold."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],  # of the current device
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
