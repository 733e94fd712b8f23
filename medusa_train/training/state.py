"""How far a run has got, as plain numbers that JSON keeps to the bit. Knows no tensors and no files."""

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

from medusa_train.checkpoint.run_layout import check_nothing_is_lost, named_checkpoint
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.base import Draft
from medusa_train.training.backbone_recipe import BackboneRecipe
from medusa_train.training.distributed import SINGLE_PROCESS, World
from medusa_train.training.strategy import Strategy


@dataclass
class Window:
    """Sums over the optimizer steps since the last log line; in checkpoints, so that a resumed run logs the same.

    `lr` is no sum: it is the learning rate of the last step. `overscaled` steps changed nothing, because their float16
    gradients were scaled too far; they count as steps and have no norm.
    """

    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    correct: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    lm_ce: float = 0.0
    lm_kl: float = 0.0
    lm_count: int = 0
    overscaled: int = 0

    def add_lm(self, ce: float, kl: float, count: int) -> None:
        """Add one micro-batch's sums of the backbone's own loss, nats, over `count` targets."""
        self.lm_ce += ce
        self.lm_kl += kl
        self.lm_count += count

    def lm(self) -> dict[str, float]:
        """Mean cross-entropy against the labels and KL to the teacher, nats; nothing where the backbone is frozen."""
        if not self.lm_count:
            return {}
        return {"lm_loss": self.lm_ce / self.lm_count, "lm_kl": self.lm_kl / self.lm_count}

    def add_heads(self, correct: Sequence[int], counts: Sequence[int], known: Sequence[int]) -> None:
        """Add one step's right top-1 guesses, valid targets, and those of them that the vocabulary holds, per head."""
        self.correct = _added(self.correct, correct)
        self.counts = _added(self.counts, counts)
        self.known = _added(self.known, known)

    def outside(self) -> dict[str, float]:
        """Share of valid targets that a reduced vocabulary lacks, so that no head learnt them; nothing if none."""
        total, known = sum(self.counts), sum(self.known)
        return {"outside_vocabulary": 1.0 - known / total} if known < total else {}

    def top1(self) -> list[float]:
        """Share of valid targets that each head's first guess hits; 0 where there were none."""
        return [c / n if n else 0.0 for c, n in zip(self.correct, self.counts, strict=True)]


@dataclass
class TrainState:
    """ProcessInfo in the run: `step` optimizer steps are done.

    `data` is the loader's own place (its `state_dict`), `best_loss` the lowest held-out objective (nats), at
    `best_step`; `evals_since_best` serves early stopping; `evaluated` is the last step that was evaluated, `tree` the
    content of the tree.json that it gave.
    `tokens` and `seconds` (of training steps alone) count the whole run, and so does `skipped`: steps that changed
    nothing because their loss or gradient was not finite.
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

    def note_eval(self, loss: float) -> bool:
        """Remember a held-out objective measured now; True when it is the best so far."""
        self.evaluated = self.step
        if self.best_loss is not None and loss >= self.best_loss:
            self.evals_since_best += 1
            return False
        self.best_loss, self.best_step, self.evals_since_best = loss, self.step, 0
        return True

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainState:
        """Take back what `to_json` gave, also after a trip through a JSON file."""
        known = {f.name for f in fields(cls)} - {"window"}
        return cls(
            **{name: values[name] for name in known if name in values}, window=Window(**values.get("window", {}))
        )


def _added(left: list[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)] if left else list(right)


def take_snapshot(
    draft: Draft, recipe: BackboneRecipe, strategy: Strategy, state: TrainState, world: World = SINGLE_PROCESS
) -> dict[str, Any]:
    """Collect everything that learns, optimizer, schedule, random generators and the place in the run, for saving.

    All processes of `world` take it together; rank 0's is whole.
    """
    first, *others = world.gather(rng_state())
    return {
        "draft": draft.state_dict(),
        "student": recipe.state_dict(),
        "engine": strategy.state_dict(),
        "rng": first,
        **({"rng_of_others": others} if others else {}),
        "run": state.to_json(),
    }


def restore_weights(snapshot: dict[str, Any], draft: Draft, recipe: BackboneRecipe, where: str) -> None:
    """Put back what was learnt, and nothing else.

    Raises:
        CheckpointError: the snapshot is of other heads, or of something else; `where` names it.
    """
    with _fitting(where):
        draft.load_state_dict(snapshot["draft"])
        recipe.load_state_dict(snapshot.get("student", {}))


def restore_place(
    snapshot: dict[str, Any], strategy: Strategy, where: str, world: World = SINGLE_PROCESS
) -> TrainState:
    """Put back the rest: optimizer, schedule, this process's random generators; return where the run stood.

    Where there are more processes than took the snapshot, the added ones keep the random numbers that they have.

    Raises:
        CheckpointError: the snapshot is of something else; `where` names it.
    """
    with _fitting(where):
        strategy.load_state_dict(snapshot["engine"])
        generators = random_states(snapshot)
        if world.rank < len(generators):
            set_rng_state(generators[world.rank])
        return TrainState.from_json(snapshot["run"])


def random_states(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """The random generators' states, one for each process that took the snapshot."""
    return [snapshot["rng"], *snapshot.get("rng_of_others", [])]


@contextmanager
def _fitting(where: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{where}: does not fit this run ({reason}).\n"
            "A run goes on with the base_model, draft, heads (medusa_num_heads, medusa_num_layers, medusa_vocab_size; "
            "other drafts: their section), adapter and optimizer it began with."
        ) from error


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A run's checkpoint: where it lies, and its content."""

    path: Path
    snapshot: dict[str, Any]


def find_checkpoint(
    cfg: TrainConfig, store: CheckpointStore, world: World, console: Console
) -> LoadedCheckpoint | None:
    """Read the checkpoint that `resume_from_checkpoint` names, in every process; None for a new run.

    Raises:
        CheckpointError: it is damaged; or there is none, but results that a new run would overwrite.
    """
    if cfg.resume_from_checkpoint is None:
        return None
    path = world.run_on_main(lambda: named_checkpoint(cfg) or store.latest())
    if path is None:
        world.run_on_main(lambda: check_nothing_is_lost(cfg))
        console.print(f"resume_from_checkpoint: {store.root} holds no checkpoint yet, starting anew")
        return None
    return world.run_on_all(lambda: LoadedCheckpoint(path, store.load(path)))


@dataclass(frozen=True)
class Plan:
    """The step counts of a run.

    `steps_per_epoch` may be a fraction: micro-batches are gathered across the end of an epoch. The `*_every`
    and `*_per_epoch` of one kind exclude each other; both None means at the end only.
    """

    total_steps: int
    steps_per_epoch: float
    logging_steps: int = 1
    eval_every: int | None = None
    evals_per_epoch: int | None = None
    save_every: int | None = None
    saves_per_epoch: int | None = None

    def logs(self, step: int) -> bool:
        """Whether a log line is due after `step` steps (1-based); the last step always logs."""
        return step % self.logging_steps == 0 or step >= self.total_steps

    def evaluates(self, step: int) -> bool:
        """Whether a held-out evaluation is due after `step` steps; the last step always is."""
        return step >= self.total_steps or self._due(step, self.eval_every, self.evals_per_epoch)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps; the last step always is."""
        return step >= self.total_steps or self._due(step, self.save_every, self.saves_per_epoch)

    def epoch(self, step: int) -> float:
        """Passes over the data that `step` steps make."""
        return step / self.steps_per_epoch

    def _due(self, step: int, every: int | None, per_epoch: int | None) -> bool:
        if every:
            return step % every == 0
        if per_epoch:
            return math.floor(self.epoch(step) * per_epoch) > math.floor(self.epoch(step - 1) * per_epoch)
        return False


def count_steps(
    micro_batches_per_epoch: int, accumulation: int, num_epochs: float, max_steps: int | None
) -> tuple[int, float]:
    """Optimizer steps of the run, and of one epoch; a positive `max_steps` takes the place of `num_epochs`."""
    per_epoch = micro_batches_per_epoch / accumulation
    if max_steps is not None and max_steps > 0:
        return max_steps, per_epoch
    return max(1, math.ceil(num_epochs * per_epoch)), per_epoch


def interval(value: float | None, total_steps: int) -> int | None:
    """`eval_steps` or `save_steps` in whole steps: a number below 1 is a share of the run."""
    if not value:
        return None
    return max(1, round(value * total_steps)) if value < 1 else int(value)


def seed_all(seed: int) -> None:
    """Seed every generator whose state is kept, so that two runs of one configuration are the same."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes no more bits
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """All generators' states, as tensors, tuples and numbers that `pack` can save."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],  # of the GPU that is in use
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Take back what `rng_state` gave; a GPU's is left out where there is none."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
