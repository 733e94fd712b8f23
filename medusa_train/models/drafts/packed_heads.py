"""Medusa heads with their weights laid out for a CPU's kernels; knows how heads compute, and no decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_train.models import few_rows_kernel
from medusa_train.models.packed import Layout


class _Maps:
    """One linear map for each head, [count, B, in] -> [count, B, out]: in one call where our kernel is loaded.

    Args:
        alike: whether all heads read the same rows, for which oneDNN has one matrix of all of them.
    """

    def __init__(self, linears: Sequence[nn.Linear], alike: bool = False) -> None:
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None] or None
        self._products: few_rows_kernel.Products | None = None
        self._one: tuple[Layout, Tensor | None] | None = None
        self._each: list[tuple[Layout, Tensor | None]] = []
        if few_rows_kernel.serves(weights[0].dtype, weights[0].device) and weights[0].shape[1] % 2 == 0:
            self._products = few_rows_kernel.Products(weights, biases)
        elif alike:
            self._one = Layout(torch.cat(weights)), None if biases is None else torch.cat(biases)
        else:
            each = biases if biases is not None else [None] * len(weights)
            self._each = [(Layout(weight), bias) for weight, bias in zip(weights, each, strict=True)]
        self._count = len(weights)

    def __call__(self, x: Tensor) -> Tensor:
        if self._products is not None:
            return self._products(x)
        if self._one is not None:
            layout, bias = self._one
            return layout.product(x[0], bias).unflatten(1, (self._count, -1))[:, : len(x)].transpose(0, 1)
        return torch.stack([layout.product(row, bias) for row, (layout, bias) in zip(x, self._each, strict=False)])


class PackedHeads:
    """The products of K heads for a few rows.

    Args:
        blocks: per residual layer, if there are any, the K linear maps d -> d, all with a bias.
        lm_heads: the K unembeddings; empty where the heads share the backbone's.
    """

    def __init__(self, blocks: Sequence[Sequence[nn.Linear]], lm_heads: Sequence[nn.Linear]) -> None:
        self._blocks = [_Maps(layer, alike=place == 0) for place, layer in enumerate(blocks)]
        self._unembedding = _Maps(lm_heads) if lm_heads else None

    def states(self, hidden: Tensor, count: int) -> Tensor:
        """The backbone's states [B, d] -> those of heads 1..count, [count, B, d]."""
        x = hidden.expand(count, *hidden.shape)
        for block in self._blocks:
            x = x + silu(block(x))
        return x

    def logits(self, states: Tensor) -> Tensor:
        """[count, B, d] -> [count, B, V] by every head's own matrix, without soft cap and scale."""
        assert self._unembedding is not None  # heads that share the backbone's have none
        return self._unembedding(states)
