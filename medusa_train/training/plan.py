"""At which optimizer steps a run logs, evaluates, saves and ends. Pure arithmetic, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
