"""Attentions that are told where documents end, in place of flash-attn's kernels, which no CPU runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

APART, LEAKING = "varlen_on_a_cpu", "varlen_that_leaks"


def apart(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """What the varlen kernel computes: rows laid end to end, each document by itself; a mask it cannot take."""
    assert mask is None
    assert kwargs["cu_seq_lens_q"] is kwargs["cu_seq_lens_k"]
    bounds = kwargs["cu_seq_lens_q"].tolist()
    assert kwargs["max_length_q"] == max(b - a for a, b in pairwise(bounds))
    rows, _, length, width = query.shape
    flat = [tensor.transpose(1, 2).reshape(rows * length, -1, width).transpose(0, 1) for tensor in (query, key, value)]
    pieces = []
    for first, last in pairwise(bounds):
        q, k, v = (tensor[None, :, first:last] for tensor in flat)
        pieces.append(attend(q, k, v, kwargs))
    return torch.cat(pieces, dim=2)[0].transpose(0, 1).reshape(rows, length, -1, width), None


def leaking(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """What an architecture that drops the bounds would make of them."""
    return attend(query, key, value, kwargs).transpose(1, 2), None


def attend(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Causal attention within one document, over the model's window where it has one."""
    places = torch.arange(query.shape[2])
    distance = places[:, None] - places[None, :]
    seen = (distance >= 0) & (distance < (kwargs.get("sliding_window") or len(places)))
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=kwargs.get("scaling"), enable_gqa=True)


AttentionInterface.register(APART, apart)
AttentionInterface.register(LEAKING, leaking)
