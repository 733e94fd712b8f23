"""LK losses and D-PACE's weights as their papers write them: target by target, with autograd and all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.models.lm_head import LMHead


def lk(p: Tensor, q: Tensor, eta: float, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The hybrid LK loss of one distribution p [V] and q [V] or [len(kept)], and alpha."""
    inside = p if kept is None else p[kept]
    alpha = torch.minimum(inside, q).sum()
    share = torch.exp(-eta * alpha.detach())
    p = inside / inside.sum()
    kl = torch.special.xlogy(p, p).sum() - (p * q.log()).sum()
    return share * kl + (1 - share) * (1 - alpha), alpha


def row(p: Tensor | None, q: Tensor, label: int, share: float, eta: float | None, kept: Tensor | None) -> Tensor:
    """The loss of one target: a teacher p [V] with weight `share`, the label with the rest."""
    hard = -q[label].log()
    if p is None or not share:
        return hard if eta is None else lk(one_hot(torch.tensor(label), len(q)).to(q.dtype), q, eta)[0]
    if eta is not None:
        return share * lk(p, q, eta, kept)[0] + (1 - share) * hard
    inside = p if kept is None else p[kept] / p[kept].sum()
    return -share * (inside * q.log()).sum() + (1 - share) * hard


def objective(
    draft: Any,
    feats: Any,
    batch: Any,
    *,
    teacher: LMHead | None = None,
    share: float = 0.0,
    eta: float | None = None,
    decay: float = 1.0,
    dpace: bool = False,
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
            chain, found = 1.0, {}
            sums = [0.0] * heads
            for k in range(1, heads + 1):
                if t + k + 1 >= length or batch.segments[b, t] != batch.segments[b, t + k + 1]:
                    continue
                token = int(batch.labels[b, t + k + 1])
                if token == IGNORE_INDEX:
                    continue
                kept = draft.lm_head(k).token_map
                label = token if kept is None else kept.tolist().index(token) if token in kept.tolist() else None
                q = probs[k - 1][b, t]
                chain *= 0.5 * (0.0 if label is None else float(q[label].detach())) + 0.5
                for j in range(k):
                    sums[j] += chain
                if label is not None:
                    p = None if own is None else own[b, t + k]
                    found[k] = row(p, q, label, share, eta, kept)
            for k, loss in found.items():
                losses[k - 1].append(loss * (sums[k - 1] if dpace else decay**k))
    return torch.stack([torch.stack(of_head).mean() for of_head in losses if of_head]).sum()
