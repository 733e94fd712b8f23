"""Losses and top-1..top-10 accuracies of every head on held-out text. Knows no optimizer and no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from medusa_train.data.dataset import Batch
from medusa_train.data.targets import IGNORE, shift
from medusa_train.losses.schedules import head_weight
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.models.unembedding import Unembedding
from medusa_train.training.precision import Precision

TOP = 10
ROWS = 512  # positions whose logits exist at once: [ROWS, V]


@dataclass(frozen=True)
class HeldOut:
    """What a held-out evaluation found.

    Attributes:
        loss: `sum_k c^k * head_loss[k]`, nats; comparable with the training loss.
        head_loss: mean cross-entropy per head, nats per valid target.
        top: per head the share of valid targets among its best 1, 2, ..., 10 guesses.
        targets: valid targets per head.
    """

    loss: float
    head_loss: list[float]
    top: list[list[float]]
    targets: list[int]

    def figures(self) -> dict[str, Any]:
        """The record for metrics.jsonl."""
        return {
            "loss": self.loss,
            "head_loss": self.head_loss,
            "head_top1": [shares[0] for shares in self.top],
            "head_top": self.top,
            "targets": self.targets,
        }


@torch.no_grad()
def evaluate_held_out(
    backbone: Backbone,
    draft: Draft,
    batches: Iterable[Batch],
    decay: float,
    precision: Precision,
    stop: Callable[[], bool] = lambda: False,
) -> HeldOut | None:
    """Measure the heads on `batches`, assistant tokens only, with never more than [ROWS, V] logits in memory.

    Args:
        backbone: run frozen, as in training.
        draft: the heads, left in the mode that they are in.
        batches: the whole held-out set, once.
        decay: c of the weighted sum.
        precision: as in training.
        stop: asked before every batch; True gives up.

    Returns:
        The figures, or None when `stop` said so.
    """
    sums = torch.zeros(draft.num_heads, dtype=torch.float64)
    hits = torch.zeros(draft.num_heads, TOP, dtype=torch.long)
    targets = torch.zeros(draft.num_heads, dtype=torch.long)
    for batch in batches:
        if stop():
            return None
        batch = batch.to(backbone.device)
        feats = backbone.run(batch.tokens, positions=batch.positions)
        with precision.autocast():
            for i, hidden in enumerate(draft.hidden(feats)):
                wanted = shift(batch.labels, i + 1, batch.segments)
                valid = wanted != IGNORE
                for loss, found in _score(hidden[valid], wanted[valid], draft.unembed(i + 1)):
                    sums[i] += loss
                    hits[i] += found
                targets[i] += int(valid.sum())
    means = sums / targets.clamp(min=1)
    weighted = sum(head_weight(k, decay) * float(mean) for k, mean in enumerate(means, start=1))
    shares = hits / targets.clamp(min=1)[:, None]
    return HeldOut(float(weighted), means.tolist(), shares.tolist(), targets.tolist())


def _score(hidden: Tensor, wanted: Tensor, unembedding: Unembedding) -> Iterator[tuple[float, Tensor]]:
    """Summed cross-entropy and top-1..top-10 hits [TOP] of hidden states [N, d] against tokens [N], by chunks."""
    for rows, tokens in zip(hidden.split(ROWS), wanted.split(ROWS), strict=True):
        if not len(tokens):
            continue
        logits = unembedding.logits(rows).float()
        best = logits.topk(min(TOP, logits.shape[-1])).indices
        found = (best == tokens[:, None]).sum(dim=0).cumsum(dim=0).cpu()
        # a vocabulary of fewer than TOP tokens: the last share stands for the rest
        found = torch.cat([found, found[-1:].expand(TOP - len(found))])
        yield float(cross_entropy(logits, tokens, reduction="sum")), found
