"""Sum the metrics of a training step over micro-batches and processes, and over the steps between
two log lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from medusa_train.data.batch import Batch
from medusa_train.losses.objective import ObjectiveOutput
from medusa_train.training.distributed import DistributedContext


@dataclass(frozen=True)
class MicroBatchResult:
    """The metrics of one micro-batch, without its graph.

    Attributes:
        records: where its conversations come from, "file:line".
        loss: scalar, its share of the step's loss.
        row: float64 [5 + 3 K], the fields of `StepTotals` in their order, which can be summed.
    """

    records: list[str]
    loss: Tensor
    row: Tensor

    @classmethod
    def from_output(cls, batch: Batch, output: ObjectiveOutput) -> MicroBatchResult:
        """Detach what the objective returned for `batch`; nothing is transferred from the device."""
        loss = output.loss.detach()
        tokens = (batch.segments >= 0).sum()
        target_model = [torch.zeros_like(loss)] * 3
        if output.lm is not None:
            target_model = [output.lm.ce, output.lm.kl, output.lm.count]
        heads = [output.head_correct, output.head_counts, output.head_in_vocab]  # [K] each
        values = [loss, tokens, *target_model, *heads]
        row = torch.cat([value.double().flatten() for value in values])
        return cls(batch.records, loss, row)


@dataclass
class StepTotals:
    """Sums over a global batch: all micro-batches of all processes.

    Attributes:
        loss: the step's loss.
        tokens: tokens read.
        lm_ce, lm_kl, lm_count: cross-entropy and KL of the base model in nats, and its targets; 0 if
            it is frozen.
        correct, counts, known: top-1 hits, valid targets, and those of them in the head's vocabulary,
            per head.
    """

    loss: float = 0.0
    tokens: int = 0
    lm_ce: float = 0.0
    lm_kl: float = 0.0
    lm_count: int = 0
    correct: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)

    @classmethod
    def reduce(
        cls, results: Sequence[MicroBatchResult], distributed: DistributedContext
    ) -> StepTotals:
        """Sum this process's micro-batches, then all processes."""
        rows = torch.stack([result.row for result in results])  # [micro-batches, 5 + 3 K]
        loss, tokens, ce, kl, targets, *heads = distributed.sum(rows.sum(dim=0)).tolist()
        counted = [int(number) for number in heads]
        k = len(counted) // 3
        return cls(
            loss,
            int(tokens),
            ce,
            kl,
            int(targets),
            correct=counted[:k],
            counts=counted[k : 2 * k],
            known=counted[2 * k :],
        )


@dataclass
class Window(StepTotals):
    """Sums over the optimizer steps since the last log line.

    It is saved in checkpoints, so that a resumed run logs the same. `lr` is the learning rate of
    the last step. `overscaled` counts steps skipped because float16 gradients overflowed; they
    count as steps and have no norm.
    """

    steps: int = 0
    grad_norm: float = 0.0
    lr: float = 0.0
    seconds: float = 0.0
    overscaled: int = 0

    def add(self, totals: StepTotals, grad_norm: float, seconds: float) -> None:
        """Add one optimizer step."""
        self.steps += 1
        self.grad_norm += grad_norm
        self.seconds += seconds
        for name, value in vars(totals).items():
            total = getattr(self, name)
            if isinstance(value, list):  # one entry per head; none yet in a new window
                pairs = zip_longest(total, value, fillvalue=0)
                setattr(self, name, [before + more for before, more in pairs])
            else:
                setattr(self, name, total + value)

    def means(self) -> dict[str, Any]:
        """Return the window's metrics, for a training record in metrics.jsonl.

        `lm_loss` (cross-entropy against the labels) and `lm_kl` (KL to the teacher), both in nats,
        are left out where the base model is frozen; `outside_vocabulary`, the share of targets that a
        reduced draft vocabulary lacks, and `overscaled_steps` where they are zero.
        """
        pairs = zip(self.correct, self.counts, strict=True)
        means: dict[str, Any] = {
            "loss": self.loss / self.steps,
            "head_top1": [correct / max(count, 1) for correct, count in pairs],
            "grad_norm": self.grad_norm / max(self.steps - self.overscaled, 1),
            "lr": self.lr,
            "tokens_per_s": self.tokens / max(self.seconds, 1e-9),
        }
        if self.lm_count:
            means |= {"lm_loss": self.lm_ce / self.lm_count, "lm_kl": self.lm_kl / self.lm_count}
        if sum(self.known) < sum(self.counts):
            means["outside_vocabulary"] = 1.0 - sum(self.known) / sum(self.counts)
        if self.overscaled:
            means["overscaled_steps"] = self.overscaled
        return means
