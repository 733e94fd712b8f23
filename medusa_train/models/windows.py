"""Sliding windows laid over a mask; knows no model."""

from __future__ import annotations

import torch
from torch import Tensor


def windowed(mask: Tensor, positions: Tensor, prefix: int, window: int | None) -> Tensor:
    """AND an additive mask with a sliding window.

    Args:
        mask: [1 or B, 1, T, prefix + T], 0 where seen, else -inf.
        positions: [B, T], of the T queries and last keys; the keys before them stand at positions 0 .. prefix - 1.
        window: how far back a position sees, itself included; None: everything.
    """
    if window is None:
        return mask
    keys = torch.cat([torch.arange(prefix, device=positions.device).expand(len(positions), -1), positions], dim=1)
    too_far = positions[:, :, None] - keys[:, None, :] >= window
    return mask.masked_fill(too_far[:, None], float("-inf"))
