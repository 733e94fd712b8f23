"""When a run logs, evaluates, saves and ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import BatchLoader
from medusa_train.data.examples import EncodedDataset
from medusa_train.errors import ConfigError

#: Tolerance in comparisons of fractional epochs and steps.
ROUNDING = 1e-9
#: If a run has fewer steps in total, a note says which keys to change.
FEW_STEPS = 20


@dataclass(frozen=True)
class TrainingSchedule:
    """When a run logs, evaluates, saves and ends. After the last step it does all of these.

    `steps_per_epoch`, `eval_every` and `save_every` are numbers of steps. They may be fractional,
    because the micro-batches of one step may come from two epochs.
    """

    total_steps: int
    steps_per_epoch: float
    warmup_steps: int = 0
    logging_steps: int = 1
    eval_every: float = math.inf
    save_every: float = math.inf

    def logs(self, step: int) -> bool:
        """Return whether to log after `step` steps (1-based)."""
        return self._is_due(step, self.logging_steps)

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate after `step` steps."""
        return self._is_due(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step` steps."""
        return self._is_due(step, self.save_every)

    def epoch(self, step: int) -> float:
        """Return the number of passes over the data after `step` steps."""
        return step / self.steps_per_epoch

    def _is_due(self, step: int, every: float) -> bool:
        # ROUNDING makes sure that an interval that ends exactly at a step counts as complete
        done = math.floor(step / every + ROUNDING)
        done_before = math.floor((step - 1) / every + ROUNDING)
        return step >= self.total_steps or done > done_before


def plan_steps(
    cfg: TrainConfig, train: EncodedDataset, rank: int = 0, processes: int = 1
) -> tuple[BatchLoader, TrainingSchedule]:
    """Return the batches of process `rank`, and the schedule of the run.

    Raises:
        ConfigError: the learning rate is 0 in all steps.
    """
    loader = BatchLoader(train, cfg.micro_batch_size, cfg.seed, rank=rank, size=processes)
    return loader, make_schedule(cfg, loader.batches_per_epoch / processes)


def make_schedule(cfg: TrainConfig, micro_batches_per_epoch: float) -> TrainingSchedule:
    """Plan the run's steps. By default the run evaluates and saves once per epoch.

    Args:
        micro_batches_per_epoch: number of micro-batches of each process per epoch.

    Raises:
        ConfigError: the learning rate is 0 in all steps.
    """
    per_epoch = micro_batches_per_epoch / cfg.gradient_accumulation_steps
    total = cfg.max_steps or max(1, math.ceil(cfg.num_epochs * per_epoch - ROUNDING))
    warmup = cfg.warmup_steps
    if warmup is None:
        warmup = math.ceil((cfg.warmup_ratio or 0.0) * total - ROUNDING)

    if cfg.lr_scheduler == "constant":
        warmup = 0
    if total == 1 and warmup > 0:  # warmup starts with a learning rate of 0
        key = "warmup_ratio" if cfg.warmup_steps is None else "warmup_steps"
        more = f"max_steps: {FEW_STEPS}"
        if cfg.max_steps is None:
            more = _keys_for_more_steps(cfg, per_epoch)
        raise ConfigError(
            f"{key}: {getattr(cfg, key)}: the learning rate is 0 in the only step of the run, so"
            f" nothing would be trained. Set {more}, or {key}: 0"
        )

    def every(steps: float | None, times_per_epoch: int | None) -> float:
        """Return the number of steps between two evaluations or checkpoints."""
        if not steps:
            return per_epoch / (times_per_epoch or 1)
        if steps < 1:  # a fraction of the run
            return max(1, round(steps * total))
        return steps

    return TrainingSchedule(
        total_steps=total,
        steps_per_epoch=per_epoch,
        warmup_steps=warmup,
        logging_steps=cfg.logging_steps,
        eval_every=every(cfg.eval_steps, cfg.evals_per_epoch),
        save_every=every(cfg.save_steps, cfg.saves_per_epoch),
    )


def few_steps_advice(cfg: TrainConfig, schedule: TrainingSchedule) -> str | None:
    """Return a note on what to change if a run has few steps and `max_steps` is not set."""
    if cfg.max_steps is not None or schedule.total_steps >= FEW_STEPS:
        return None
    more = _keys_for_more_steps(cfg, schedule.steps_per_epoch)
    return (
        f"note: {schedule.total_steps} steps in all are few to train a draft; for more set {more}"
    )


def _keys_for_more_steps(cfg: TrainConfig, steps_per_epoch: float) -> str:
    """Return keys and values with which the run has `FEW_STEPS` steps: a smaller batch and, if that
    is not enough, more epochs.
    """
    micro_batches = steps_per_epoch * cfg.gradient_accumulation_steps  # per epoch
    accumulation = max(1, int(cfg.num_epochs * micro_batches / FEW_STEPS + ROUNDING))
    epochs = math.ceil(FEW_STEPS * accumulation / micro_batches - ROUNDING)
    changed = []
    if accumulation < cfg.gradient_accumulation_steps:
        changed.append(f"gradient_accumulation_steps: {accumulation}")
    if epochs > cfg.num_epochs:
        changed.append(f"num_epochs: {epochs}")
    return " and ".join(changed)


def warmup_warning(warmup_steps: int, total_steps: int) -> str | None:
    """Return a warning if a run ends before its warmup does."""
    if warmup_steps < total_steps:
        return None
    return (
        f"note: {warmup_steps:,} warmup steps in a run of {total_steps:,}: the learning rate never"
        f" reaches its peak ({(total_steps - 1) / warmup_steps:.0%} of it at the end); lower"
        " warmup_steps or train longer"
    )
