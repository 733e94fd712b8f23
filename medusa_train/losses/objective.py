"""What a recipe minimises: the heads' weighted cross-entropies. Knows no model class, optimizer or process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from medusa_train.data.targets import IGNORE, shift
from medusa_train.losses.linear_ce import linear_cross_entropy
from medusa_train.losses.matrix import UnembeddingLike
from medusa_train.losses.schedules import head_weight


class Heads(Protocol):
    """A draft, as far as a loss is concerned."""

    num_heads: int

    def hidden(self, feats: Any) -> Iterator[Tensor]:
        """For k = 1..K the state [B, T, d] that head k's unembedding reads."""

    def unembed(self, k: int) -> UnembeddingLike:
        """Head k's matrix and logit transform, k = 1..K."""


class Labelled(Protocol):
    """A batch, as far as a loss is concerned: right-padded rows of tokens."""

    @property
    def labels(self) -> Tensor:
        """Long [B, T]: the token itself where it is supervised, else IGNORE."""

    @property
    def segments(self) -> Tensor:
        """Long [B, T]: which document a position belongs to; -1 is padding."""


@dataclass(frozen=True)
class ObjectiveOutput:
    """One micro-batch's share of the loss over the whole global batch.

    Attributes:
        loss: scalar, differentiable. The shares of all micro-batches add up to the global batch's loss.
        head_sums: [K], sum of cross-entropies in nats; detached.
        head_correct: long [K], top-1 hits.
        head_counts: long [K], valid targets in this micro-batch.
    """

    loss: Tensor
    head_sums: Tensor
    head_correct: Tensor
    head_counts: Tensor


class Medusa1Objective:
    """`L1 = sum_k c^k * CE_k / n_k`: head k at position t against the label at t + k + 1 (Medusa, Eq. 1).

    CE_k sums over the n_k valid targets of head k in the whole global batch. Only the target's label decides whether
    a position counts: the hidden state itself may lie in the prompt. lambda0 belongs to joint training, not here.
    """

    def __init__(self, draft: Heads, decay: float) -> None:
        """`decay` is c, `medusa_decay_coefficient`."""
        self.draft = draft
        self.decay = decay

    def counts(self, batch: Labelled) -> Tensor:
        """Long [K]: valid targets of each head. Summed over a global batch they are `loss`'s `counts_total`."""
        return torch.stack([(target != IGNORE).sum() for target in self._targets(batch)])

    def loss(self, feats: Any, batch: Labelled, counts_total: Tensor) -> ObjectiveOutput:
        """One micro-batch's share of L1.

        Args:
            feats: the backbone's features of this batch, as the draft reads them.
            batch: labels and segments [B, T].
            counts_total: [K], valid targets over the global batch; a head with none contributes 0.
        """
        results, counts = [], []
        for hidden, (k, target) in zip(self.draft.hidden(feats), enumerate(self._targets(batch), start=1), strict=True):
            results.append(linear_cross_entropy(hidden.flatten(0, -2), self.draft.unembed(k), target.flatten()))
            counts.append((target != IGNORE).sum())
        sums = torch.stack([result.loss_sum for result in results])
        weights = sums.new_tensor([head_weight(k, self.decay) for k in range(1, len(results) + 1)])
        factors = weights / counts_total.to(sums).clamp(min=1.0)
        return ObjectiveOutput(
            loss=(sums * factors).sum(),
            head_sums=sums.detach(),
            head_correct=torch.stack([result.correct for result in results]),
            head_counts=torch.stack(counts),
        )

    def _targets(self, batch: Labelled) -> Iterator[Tensor]:
        for k in range(1, self.draft.num_heads + 1):
            yield shift(batch.labels, k, batch.segments)
