"""Medusa heads with their weights laid out for a CPU's kernels; knows how heads compute, and no decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_train.models.packed import Layout


class PackedHeads:
    """The products of K heads for a few rows.

    Every first block reads the same states, so theirs is one matrix of K d rows; all others are one per head.

    Args:
        blocks: per residual layer, if there are any, the K linear maps d -> d, all with a bias.
        lm_heads: the K unembeddings; empty where the heads share the backbone's.
    """

    def __init__(self, blocks: Sequence[Sequence[nn.Linear]], lm_heads: Sequence[nn.Linear]) -> None:
        first, later = blocks[:1], blocks[1:]
        self._first = [Layout(torch.cat([linear.weight.detach() for linear in layer])) for layer in first]
        self._first_bias = [torch.cat([linear.bias.detach() for linear in layer]) for layer in first]
        self._later = [[(Layout(linear.weight), linear.bias.detach()) for linear in layer] for layer in later]
        self._unembeddings = [
            (Layout(linear.weight), None if linear.bias is None else linear.bias.detach()) for linear in lm_heads
        ]
        self._count = len(first[0]) if first else 0

    def states(self, hidden: Tensor, count: int) -> Tensor:
        """The backbone's states [B, d] -> those of heads 1..count, [count, B, d]."""
        x = hidden.expand(count, *hidden.shape)
        for layout, bias in zip(self._first, self._first_bias, strict=True):
            flat = layout.product(hidden, bias)
            x = hidden + silu(flat.unflatten(1, (self._count, -1))[:, :count].transpose(0, 1))
        for layer in self._later:
            added = [layout.product(row, bias) for row, (layout, bias) in zip(x, layer, strict=False)]
            x = x + silu(torch.stack(added))
        return x

    def logits(self, states: Tensor) -> Tensor:
        """[count, B, d] -> [count, B, V] by every head's own matrix, without soft cap and scale."""
        made = [layout.product(row, bias) for row, (layout, bias) in zip(states, self._unembeddings, strict=False)]
        return torch.stack(made)
