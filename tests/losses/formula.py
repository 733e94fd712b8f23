"""The heads' loss target by target, with autograd and all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.models.lm_head import LMHead


def row(p: Tensor | None, q: Tensor, label: int, share: float, kept: Tensor | None) -> Tensor:
    """The loss of one target: a teacher p [V] with weight `share`, the label with the rest."""
    hard = -q[label].log()
    if p is None or not share:
        return hard
    inside = p if kept is None else p[kept] / p[kept].sum()
    return -share * (inside * q.log()).sum() + (1 - share) * hard


def objective(
    draft: Any,
    feats: Any,
    batch: Any,
    *,
    teacher: LMHead | None = None,
    share: float = 0.0,
    decay: float = 1.0,
) -> Tensor:
    """The heads' loss on a frozen backbone, in plain loops over heads and positions."""
    rows, length = batch.labels.shape
    own = None if teacher is None else teacher.logits(feats.hidden).softmax(-1).detach()
    probs = [
        draft.lm_head(k).logits(states).softmax(-1) for k, states in enumerate(draft.head_states(feats, batch), start=1)
    ]
    heads = len(probs)
    losses: list[list[Tensor]] = [[] for _ in probs]
    for b in range(rows):
        for t in range(length):
            for k in range(1, heads + 1):
                if t + k + 1 >= length or batch.segments[b, t] != batch.segments[b, t + k + 1]:
                    continue
                token = int(batch.labels[b, t + k + 1])
                if token == IGNORE_INDEX:
                    continue
                kept = draft.lm_head(k).token_map
                label = token if kept is None else kept.tolist().index(token) if token in kept.tolist() else None
                q = probs[k - 1][b, t]
                if label is not None:
                    p = None if own is None else own[b, t + k]
                    losses[k - 1].append(row(p, q, label, share, kept) * decay**k)
    return torch.stack([torch.stack(of_head).mean() for of_head in losses if of_head]).sum()
