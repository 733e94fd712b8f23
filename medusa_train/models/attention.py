"""Attention implementations: bounds of packed documents for varlen kernels, and folded query heads for CPUs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: transformers' name of flash-attn's kernels.
FLASH = "flash_attention_2"
#: Name under which `folded_head_forward` is registered with transformers.
FOLDED_HEADS = "sdpa_folded_heads"

_TIMED_KEYS = 256
_TRIALS = 30


# Packed documents


def document_bounds(segments: Tensor) -> dict[str, Any]:
    """Return the bounds of packed documents as keyword arguments of a model (transformers' `FlashAttentionKwargs`).

        segments   0 0 0 1 -      cumulative lengths   0 3 4 5 | 7 10      rows joined end to end
                   0 0 1 1 1      maximum length       3

    Padding counts as a document. The bounds are passed explicitly, since transformers derives them from restarting
    position ids only for a batch of one row.

    Args:
        segments: [B, T], index of the document within the row, contiguous; -1: padding.

    Returns:
        Cumulative lengths, int32 [documents + 1], and the maximum length, for queries and for keys.
    """
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    end = torch.tensor([segments.numel()], device=segments.device)
    bounds = torch.cat([starts.flatten().nonzero().squeeze(1), end]).to(torch.int32)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def flash_obstacle(device: str, dtype: torch.dtype, *, capped: bool, supported: bool, installed: bool) -> str | None:
    """Return why flash-attn's varlen kernel cannot be used, or None if it can.

    Args:
        device: device type. dtype: of queries and keys.
        capped: whether the model soft-caps its attention scores.
        supported: whether the architecture in transformers supports flash attention.
        installed: whether the package can be imported.
    """
    if device != "cuda":
        return f"flash-attn needs a GPU, the device is {device}"
    if not installed:
        return "flash-attn is not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn does not support {str(dtype).removeprefix('torch.')}"
    if capped:
        return "this model soft-caps its attention scores"
    return None if supported else "this architecture does not support flash attention"


# Folded heads on a CPU


def use_folded_head_attention(model: Any) -> bool:
    """Switch a model on a CPU to `folded_head_forward` if it is measured to be faster.

    Only for models with transformers' "sdpa" attention, and only in bfloat16 or with grouped query heads, where there
    is something to gain.

    Returns:
        Whether the model uses it now.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if model.device.type != "cpu" or config._attn_implementation not in ("sdpa", FOLDED_HEADS):
        return False
    if config._attn_implementation == FOLDED_HEADS:
        return True
    if not _is_faster(model.dtype, heads, kv_heads, head_dim):
        return False
    AttentionInterface.register(FOLDED_HEADS, folded_head_forward)
    AttentionMaskInterface.register(FOLDED_HEADS, sdpa_mask)
    model.set_attn_implementation(FOLDED_HEADS)
    return True


def folded_head_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention in transformers' interface: query [B, H, q, d], key and value [B, H_kv, S, d] -> [B, q, H, d].

    Decoding passes use `folded_head_attention`; all others (training, prefill, a mask per head) transformers' "sdpa".
    """
    unsupported = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if unsupported or not _is_decoding(query, attention_mask, dropout):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return folded_head_attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def folded_head_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Compute grouped-query attention, [B, H, q, d] -> [B, H, q, d_v].

    Unlike transformers' "sdpa" with a mask, this does not copy keys and values for the query heads that share them. For
    a single bfloat16 query these heads become the rows of one product, since torch's kernel for CPUs takes longer for
    one row than for two.

    Args:
        key: [B, H_kv, S, d]. value: [B, H_kv, S, d_v].
        mask: additive [1 or B, 1, q, S]; None: every query attends to every key.
        scaling: of the scores; by default 1 / sqrt(d).
    """
    kv_heads, q = key.shape[1], query.shape[2]
    if q > 1 or query.dtype != torch.bfloat16:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != kv_heads
        )
    folded = query.reshape(len(query), kv_heads, -1, query.shape[3])
    rows = folded.shape[2]
    if rows == 1:
        folded = folded.expand(-1, -1, 2, -1)
    if mask is not None:
        mask = mask.expand(-1, -1, folded.shape[2], -1)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out[:, :, :rows].reshape(*query.shape[:3], value.shape[3])


def _is_decoding(query: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Return whether there is neither gradient nor dropout, and one mask for all heads or none needed."""
    if torch.is_grad_enabled() or dropout:
        return False
    return query.shape[2] == 1 if mask is None else mask.shape[1] == 1


class _Module(torch.nn.Module):
    """The attributes of an attention layer that transformers' "sdpa" function reads."""

    is_causal = True

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_key_value_groups = heads // kv_heads


@torch.inference_mode()
def _is_faster(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Time a plain step and a step with a small tree in both implementations, alternately, and compare medians."""
    if dtype != torch.bfloat16 and heads == kv_heads:
        return False
    module = _Module(heads, kv_heads)
    key = torch.ones(1, kv_heads, _TIMED_KEYS, head_dim, dtype=dtype)
    masks = [torch.zeros(1, 1, q, _TIMED_KEYS, dtype=dtype) for q in (1, 9)]
    queries = [torch.ones(1, heads, mask.shape[2], head_dim, dtype=dtype) for mask in masks]
    times: dict[Any, list[float]] = {sdpa_attention_forward: [], folded_head_forward: []}
    for _ in range(_TRIALS):
        for forward, seconds in times.items():
            started = time.perf_counter()
            for query, mask in zip(queries, masks, strict=True):
                forward(module, query, key, key, mask)
            seconds.append(time.perf_counter() - started)
    return statistics.median(times[folded_head_forward]) < statistics.median(times[sdpa_attention_forward])
