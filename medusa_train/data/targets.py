"""Shifted labels: the token that each head predicts at each position."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100


def shift_labels(labels: Tensor, k: int, segments: Tensor | None = None) -> Tensor:
    """Align labels with the positions that predict them: `out[b, t] = labels[b, t + k + 1]`.

    k = 0 is next-token prediction by the language model; Medusa head k >= 1 predicts the token k + 1 positions ahead
    (Medusa, Medusa Heads). Only the label decides whether a position counts: position t itself may be in a prompt.
    Targets never cross a document boundary, and the last k + 1 positions have none.

        labels    a b c | d e f        (two documents, segments 0 0 0 1 1 1)
        shift 0   b c - | e f -
        shift 1   c - - | f - -

    Args:
        labels: [B, T] token ids, `IGNORE_INDEX` where unsupervised.
        k: offset beyond the next token, 0 or more.
        segments: [B, T] document of each position, contiguous within a row (padding: -1); None for one per row.

    Returns:
        [B, T], `IGNORE_INDEX` where there is no target.

    Raises:
        ValueError: k is negative.
    """
    if k < 0:
        raise ValueError(f"k must be 0 or more, not {k}")
    ahead = k + 1
    out = torch.full_like(labels, IGNORE_INDEX)
    if ahead >= labels.shape[1]:
        return out
    target = labels[:, ahead:]
    if segments is not None:
        same = segments[:, ahead:] == segments[:, :-ahead]
        target = torch.where(same, target, IGNORE_INDEX)
    out[:, :-ahead] = target
    return out
