"""The loss of one predictor of a draft or a backbone: its targets, its teacher, and which fused loss they need."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.losses.chunks import log_mass
from medusa_train.losses.fused_losses import (
    LossSums,
    linear_cross_entropy,
    linear_kl,
    linear_soft_cross_entropy,
)
from medusa_train.losses.logits import LMHeadLike, autocast_dtype
from medusa_train.losses.row_losses import RowLoss


class TeacherStates:
    """A teacher's hidden states [B, T, d] and its lm_head."""

    def __init__(self, hidden: Tensor, lm_head: LMHeadLike, rows: Tensor) -> None:
        """Keep the states.

        Args:
            hidden: [B, T, d]. lm_head: over all tokens.
            rows: bool [B, T], positions whose predictions are compared with a student's.
        """
        self.hidden = hidden
        self._rows = rows
        self._whole = self._part = lm_head
        self._tokens: Tensor | None = None  # the vocabulary of _part
        self._mass: tuple[Tensor, Tensor] | None = None

    def lm_head_for(self, tokens: Tensor | None) -> LMHeadLike:
        """Return its lm_head restricted to `tokens` (None for all). The copy is shared by all heads."""
        if tokens is not self._tokens:
            self._part = self._whole if tokens is None else self._whole.restrict_to(tokens)
            self._tokens = tokens
        return self._part

    def log_mass_of(self, tokens: Tensor | None) -> Tensor | None:
        """Return the log-probability of `tokens` at each position, [B * T]; None for all tokens. All heads read it."""
        if tokens is None:
            return None
        if self._mass is None or self._mass[0] is not tokens:
            device = self.hidden.device.type
            rows = self._rows.flatten().nonzero().squeeze(1)
            dtype = autocast_dtype(device)
            with torch.autocast(device, enabled=False):  # all casts are explicit
                self._mass = tokens, log_mass(self.hidden.flatten(0, -2), self._whole, tokens, rows, dtype)
        return self._mass[1]


def predictor_loss(
    hidden: Tensor,
    lm_head: LMHeadLike,
    target: Tensor,
    k: int,
    teacher: TeacherStates | None,
    teacher_weight: float,
    *,
    divergence: bool = False,
    row_loss: RowLoss | None = None,
    grad_scale: float | None = None,
) -> LossSums:
    """Return the sums of the predictor of token t + k + 1.

    Rows are flattened, so t + k can point into the next row. That happens only where t + k + 1 is not a valid target,
    and such positions are ignored.

    Args:
        hidden: [B, T, d]. target: [B, T], rows of `lm_head`.
        teacher_weight: weight of the teacher in the target.
        divergence: KL to the teacher, which is then the whole target.
        row_loss: LK loss, and weights [B * T] of the positions.
        grad_scale: see `fused_losses.linear_loss`.
    """
    hidden, target = hidden.flatten(0, -2), target.flatten()
    if teacher is None or not (divergence or teacher_weight):
        return linear_cross_entropy(hidden, lm_head, target, row_loss=row_loss, grad_scale=grad_scale)
    states, theirs = teacher.hidden.flatten(0, -2), teacher.lm_head_for(lm_head.token_map)
    if divergence:
        return linear_kl(hidden, lm_head, states, theirs, target, shift=k, grad_scale=grad_scale)
    mass = None if row_loss is None or row_loss.eta is None else teacher.log_mass_of(lm_head.token_map)
    return linear_soft_cross_entropy(
        hidden,
        lm_head,
        states,
        theirs,
        target,
        teacher_weight,
        shift=k,
        row_loss=row_loss,
        log_mass=mass,
        grad_scale=grad_scale,
    )
