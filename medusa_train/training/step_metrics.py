"""Sum the metrics of a training step over micro-batches, and over the steps between
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


def metrics_row(batch: Batch, output: ObjectiveOutput) -> Tensor:
    """Return the metrics of a micro-batch as float64 [5 + 3 K], which can be summed over
    micro-batches and processes; nothing is transferred from the device.

    The entries, in this order:

        1 x  the micro-batch's share of the step's loss
        1 x  tokens read
        3 x  the target model's cross-entropy and KL in nats, and its targets; 0 if it is frozen
        K x  top-1 hits of each head
        K x  valid targets of each head
        K x  valid targets that are in each head's vocabulary
    """
    loss = output.loss.detach()
    tokens = (batch.segments >= 0).sum()
    target_model = [torch.zeros_like(loss)] * 3
    if output.lm is not None:
        target_model = [output.lm.ce, output.lm.kl, output.lm.count]
    heads = [output.head_correct, output.head_counts, output.head_in_vocab]  # [K] each
    values = [loss, tokens, *target_model, *heads]
    return torch.cat([value.double().flatten() for value in values])


@dataclass
class Window:
    """Sums over the optimizer steps since the last log line.

    It is saved in checkpoints, so that a resumed run logs the same values.

    Attributes:
        sums: sums of the rows of `metrics_row`; empty before the first step.
        lr: the learning rate of the last step.
        overscaled: number of steps that were skipped because float16 gradients overflowed. They
            count as steps, but have no gradient norm.
    """

    sums: list[float] = field(default_factory=list)
    steps: int = 0
    grad_norm: float = 0.0
    lr: float = 0.0
    seconds: float = 0.0
    overscaled: int = 0

    def add(self, sums: Sequence[float], grad_norm: float, seconds: float) -> None:
        """Add one optimizer step; `sums` are the metrics summed over its global batch."""
        self.sums = [sum(pair) for pair in zip_longest(self.sums, sums, fillvalue=0.0)]
        self.steps += 1
        self.grad_norm += grad_norm
        self.seconds += seconds

    def means(self) -> dict[str, Any]:
        """Return the window's metrics, for a training record in metrics.jsonl.

        `lm_loss` (cross-entropy against the labels) and `lm_kl` (KL to the teacher), both in nats,
        are left out if the target model is frozen. `outside_vocabulary` (the share of targets that
        a reduced draft vocabulary lacks) and `overscaled_steps` are left out if they are zero.
        """
        loss, tokens, lm_ce, lm_kl, lm_count, *heads = self.sums
        k = len(heads) // 3
        correct, counts, in_vocab = heads[:k], heads[k : 2 * k], heads[2 * k :]
        means: dict[str, Any] = {
            "loss": loss / self.steps,
            "head_top1": [
                hits / max(count, 1) for hits, count in zip(correct, counts, strict=True)
            ],
            "grad_norm": self.grad_norm / max(self.steps - self.overscaled, 1),
            "lr": self.lr,
            "tokens_per_s": tokens / max(self.seconds, 1e-9),
        }
        if lm_count:
            means |= {"lm_loss": lm_ce / lm_count, "lm_kl": lm_kl / lm_count}
        if sum(in_vocab) < sum(counts):
            means["outside_vocabulary"] = 1.0 - sum(in_vocab) / sum(counts)
        if self.overscaled:
            means["overscaled_steps"] = self.overscaled
        return means
