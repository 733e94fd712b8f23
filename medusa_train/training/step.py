"""What is kept of a micro-batch, and what an optimizer step adds up to over all of them. Knows no loop, no engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.losses.objective import LMSums


@dataclass
class MicroStep:
    """What is kept of one micro-batch once its gradients are added."""

    records: list[str]
    loss: Tensor  # scalar, this micro-batch's share
    correct: Tensor  # long [K]
    counts: Tensor  # long [K]
    known: Tensor  # long [K]
    tokens: int
    lm: LMSums | None  # of the backbone's own loss, where it learns

    def row(self) -> Tensor:
        """All numbers in one row, float64 on the CPU, to be added up; `StepSums.of` takes the sum apart."""
        lm = [0.0, 0.0, 0.0] if self.lm is None else [float(self.lm.ce), float(self.lm.kl), float(self.lm.count)]
        heads = [*self.correct.tolist(), *self.counts.tolist(), *self.known.tolist()]
        return torch.tensor([float(self.loss), self.tokens, *lm, *heads], dtype=torch.float64)


@dataclass(frozen=True)
class StepSums:
    """Sums over one global batch: all micro-batches of all processes.

    Attributes:
        loss: the step's. tokens: read.
        lm_ce, lm_kl, lm_count: the backbone's own sums in nats, and its targets; 0 where it is frozen.
        correct, counts, known: top-1 hits, valid targets, and those of them in the head's vocabulary, per head.
    """

    loss: float
    tokens: int
    lm_ce: float
    lm_kl: float
    lm_count: int
    correct: list[int]
    counts: list[int]
    known: list[int]

    @classmethod
    def of(cls, row: Tensor) -> StepSums:
        """Take apart a sum of `MicroStep.row`."""
        loss, tokens, ce, kl, targets, *rest = row.tolist()
        heads = [int(number) for number in rest]
        count = len(heads) // 3
        parts = (heads[start : start + count] for start in (0, count, 2 * count))
        return cls(loss, int(tokens), ce, kl, int(targets), *parts)
