"""Attention implementations that take the bounds of documents, in place of flash-attn's kernels on
a CPU.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

APART, LEAKING = "varlen_on_a_cpu", "varlen_that_leaks"


def apart(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """Compute what the varlen kernel does: rows joined end to end, attention within each document,
    no mask.
    """
    assert mask is None
    assert kwargs["cu_seq_lens_q"] is kwargs["cu_seq_lens_k"]
    bounds = kwargs["cu_seq_lens_q"].tolist()
    assert kwargs["max_length_q"] == max(b - a for a, b in pairwise(bounds))
    rows, _, length, width = query.shape
    flat = [
        tensor.transpose(1, 2).reshape(rows * length, -1, width).transpose(0, 1)
        for tensor in (query, key, value)
    ]
    outputs = []
    for first, last in pairwise(bounds):
        q, k, v = (tensor[None, :, first:last] for tensor in flat)
        outputs.append(attend(q, k, v, kwargs))
    return torch.cat(outputs, dim=2)[0].transpose(0, 1).reshape(rows, length, -1, width), None


def leaking(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """Compute what an architecture that drops the bounds does."""
    return attend(query, key, value, kwargs).transpose(1, 2), None


def attend(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Compute causal attention within one document, with the model's sliding window if it has one."""
    positions = torch.arange(query.shape[2])
    distance = positions[:, None] - positions[None, :]
    visible = (distance >= 0) & (distance < (kwargs.get("sliding_window") or len(positions)))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=kwargs.get("scaling"), enable_gqa=True
    )


AttentionInterface.register(APART, apart)
AttentionInterface.register(LEAKING, leaking)
