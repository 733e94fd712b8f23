"""The objective's terms target by target, with autograd and all logits at once."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.models.lm_head import LMHead


def term(
    logits: Tensor,
    batch: Any,
    k: int,
    *,
    teacher: Tensor | None = None,
    share: float = 0.0,
    divergence: bool = False,
    kept: Tensor | None = None,
    shift: int = 1,
    teacher_ahead: int = 0,
) -> Tensor | None:
    """Mean loss of the predictor of t + k + 1 from logits [B, T, V], None without a target.

    A teacher's logits at t + k have the part `share` of the target. `kept` are the tokens of a
    reduced vocabulary. `shift` = 1 and `teacher_ahead` = 0 are right; others are the mistakes that
    a test must be able to see.
    """
    losses = []
    rows, length = batch.labels.shape
    for b in range(rows):
        for t in range(length - k - max(shift, teacher_ahead)):
            label = int(batch.labels[b, t + k + shift])
            if label == IGNORE_INDEX or batch.segments[b, t] != batch.segments[b, t + k + shift]:
                continue
            if kept is not None and label not in kept:
                continue
            row = label if kept is None else kept.tolist().index(label)
            log_p = log_softmax(logits[b, t], dim=0)
            loss = (share - 1) * log_p[row]
            if teacher is not None and share:
                theirs = teacher[b, t + k + teacher_ahead].detach()
                log_q = log_softmax(theirs if kept is None else theirs[kept], dim=0)
                loss = loss + share * (log_q.exp() * ((log_q if divergence else 0.0) - log_p)).sum()
            losses.append(loss)
    return torch.stack(losses).mean() if losses else None


def objective(
    draft: Any,
    hidden_states: Any,
    batch: Any,
    *,
    teacher: LMHead | None = None,
    share: float = 0.0,
    decay: float = 1.0,
) -> Tensor:
    """The heads' loss on a frozen target model."""
    theirs = None if teacher is None else teacher.logits(hidden_states.final)
    terms = []
    for k, states in enumerate(draft.head_states(hidden_states, batch), start=1):
        head = draft.lm_head(k)
        mean = term(head.logits(states), batch, k, teacher=theirs, share=share, kept=head.token_map)
        terms += [] if mean is None else [mean * decay**k]
    return torch.stack(terms).sum()
