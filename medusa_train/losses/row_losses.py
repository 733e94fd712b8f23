"""Losses of single rows with their gradients over the logits: cross-entropies and the LK loss.

p is a row's target distribution, q the student's, and alpha = sum_v min(p_v, q_v) the probability that lossless
sampling accepts a token drawn from q. The LK loss (LK Losses, https://arxiv.org/abs/2602.23881, the hybrid form) is

    L = lambda * KL(p || q) + (1 - lambda) * (1 - alpha),    lambda = exp(-eta * alpha)

with lambda computed for each row and held constant by the gradient. With m_v = 1 where q_v < p_v, else 0, the
derivative of alpha with respect to the logit z_i is q_i (m_i - sum_v q_v m_v), hence

    dL / dz = lambda * (q - p) + (1 - lambda) * q * (sum_v q_v m_v - m)

For a label y, p is its one-hot: alpha = q_y, KL = -log q_y, and the gradient is a multiple of q - p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowLoss(NamedTuple):
    """How a row's loss differs from the mean cross-entropy's.

    Attributes:
        eta: use the LK loss with this eta in place of the soft cross-entropy, or without a teacher in place of the
            cross-entropy against the labels; None: neither.
        weights: factor on each row's loss; None: 1.
    """

    eta: float | None = None
    weights: Tensor | None = None


class LabelTerms(NamedTuple):
    """Losses against labels, [b, 1] each; the gradient over the logits is `slope * (q - onehot)`."""

    loss: Tensor
    slope: Tensor
    alpha: Tensor


class TeacherTerms(NamedTuple):
    """Losses against a teacher: [b] each, and the gradient over the logits, [b, V]. alpha is 0 for cross-entropy."""

    loss: Tensor
    kl: Tensor
    alpha: Tensor
    grad: Tensor


def label_terms(log_q: Tensor, eta: float | None) -> LabelTerms:
    """Compute cross-entropy (`eta` None) or LK loss against labels.

    Args:
        log_q: [b, 1], the labels' log-probabilities.
    """
    if eta is None:
        return LabelTerms(-log_q, torch.ones_like(log_q), torch.zeros_like(log_q))
    alpha = log_q.exp()
    kl_weight = torch.exp(-eta * alpha)
    return LabelTerms((1 - kl_weight) * (1 - alpha) - kl_weight * log_q, kl_weight + (1 - kl_weight) * alpha, alpha)


def soft_cross_entropy_terms(log_q: Tensor, log_p: Tensor) -> TeacherTerms:
    """Compute the cross-entropy against a teacher, from log-probabilities [b, V]."""
    q, p = log_q.exp(), log_p.exp()
    kl = (log_p - log_q).mul_(p).sum(dim=1)
    entropy = -(p * log_p).sum(dim=1)
    return TeacherTerms(kl + entropy, kl, torch.zeros_like(kl), q.sub_(p))


def lk_terms(log_q: Tensor, log_p: Tensor, log_mass: Tensor | None, eta: float) -> TeacherTerms:
    """Compute the LK loss against a teacher.

    Over a reduced vocabulary the KL is from p restricted to it, and alpha from the whole p: at most the mass that p has
    in the vocabulary.

    Args:
        log_q: [b, V]. log_p: [b, V], of p restricted to the student's tokens.
        log_mass: [b], log of the whole p's mass in these tokens; None: they are all tokens.
    """
    q, p = log_q.exp(), log_p.exp()
    kl = (log_p - log_q).mul_(p).sum(dim=1)
    whole = p if log_mass is None else p * log_mass.exp()[:, None]
    alpha = torch.minimum(whole, q).sum(dim=1)
    below = (q < whole).to(q.dtype)
    kl_weight = torch.exp(-eta * alpha)[:, None]
    slope = below.neg_().sub_((q * below).sum(dim=1, keepdim=True))  # sum_v q_v m_v - m
    grad = slope.mul_(1 - kl_weight).add_(kl_weight).mul_(q).sub_(p.mul_(kl_weight))
    kl_weight = kl_weight[:, 0]
    return TeacherTerms(kl_weight * kl + (1 - kl_weight) * (1 - alpha), kl, alpha, grad)
