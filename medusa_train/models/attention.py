"""How the documents of a packed row are kept apart: a mask, or their bounds for a varlen kernel. Knows no model."""

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


def document_bounds(segments: Tensor) -> dict[str, Any]:
    """Where documents begin and end, as transformers' attention takes it (its `FlashAttentionKwargs`).

        segments   0 0 0 1 -      cumulative lengths   0 3 4 5 | 7 10      rows laid end to end
                   0 0 1 1 1      longest              3

    Padding stands as a document of its own. The bounds are handed over as they are: left to itself transformers
    derives them from restarting position ids, and only for a batch of one row.

    Args:
        segments: [B, T], the document within the row, contiguous; -1: padding.

    Returns:
        Cumulative lengths, int32 [documents + 1], and the longest length, for queries and for keys.
    """
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    ends = torch.tensor([segments.numel()], device=segments.device)
    bounds = torch.cat([starts.flatten().nonzero().squeeze(1), ends]).to(torch.int32)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def flash_obstacle(device: str, dtype: torch.dtype, *, capped: bool, known: bool, installed: bool) -> str | None:
    """Say why flash-attn's varlen kernel can't be used, or None where it can.

    Args:
        device: its type. dtype: of queries and keys.
        capped: the model caps its attention scores, for which it was loaded with another attention.
        known: the architecture takes flash attention. installed: the package can be imported.
    """
    if device != "cuda":
        return f"flash-attn has no kernels for a {device}"
    if not installed:
        return "flash-attn is not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn does not compute in {str(dtype).removeprefix('torch.')}"
    if capped:
        return "this model caps its attention scores"
    return None if known else "this architecture does not take flash attention"


NAME = "sdpa_few_rows"  # to transformers

_SAMPLE_KEYS = 256
_TRIALS = 30


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
    """transformers' interface: query [B, H, q, d], key and value [B, H_kv, S, d] -> [B, q, H, d].

    What is not a few rows of a decoding pass goes to the stock function.
    """
    asks_more = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if asks_more or not _decodes(query, attention_mask, dropout):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return folded_head_attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def folded_head_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attention whose query heads share keys and values: [B, H, q, d] -> [B, H, q, d_v].

    Args:
        key: [B, H_kv, S, d]. value: [B, H_kv, S, d_v].
        mask: additive [1 or B, 1, q, S]; None: every row sees every key.
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


def _decodes(query: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether there is neither gradient nor dropout, and one mask for all heads or no need of one."""
    if torch.is_grad_enabled() or dropout:
        return False
    return query.shape[2] == 1 if mask is None else mask.shape[1] == 1


def register() -> None:
    """Make `NAME` known to transformers, with the masks of its "sdpa"."""
    AttentionInterface.register(NAME, folded_head_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def use_folded_head_attention(model: Any) -> bool:
    """Switch a model on a CPU to this attention where it is measured to be faster; return whether it is used now.

    Only one whose attention is transformers' "sdpa", and where there is something to gain: in bfloat16, or where query
    heads share keys and values.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if model.device.type != "cpu" or config._attn_implementation not in ("sdpa", NAME):
        return False
    if config._attn_implementation == NAME:
        return True
    if not _faster(model.dtype, heads, kv_heads, size):
        return False
    register()
    model.set_attn_implementation(NAME)
    return True


class _Shares(torch.nn.Module):
    """What the stock function asks a layer for."""

    is_causal = True

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_key_value_groups = heads // kv_heads


@torch.inference_mode()
def _faster(dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> bool:
    """Whether a plain step and a small tree's take less time, measured in turns."""
    if dtype != torch.bfloat16 and heads == kv_heads:
        return False
    layer = _Shares(heads, kv_heads)
    key = torch.ones(1, kv_heads, _SAMPLE_KEYS, size, dtype=dtype)
    stock: list[float] = []
    ours: list[float] = []
    cases = [torch.zeros(1, 1, q, _SAMPLE_KEYS, dtype=dtype) for q in (1, 9)]
    queries = [torch.ones(1, heads, mask.shape[2], size, dtype=dtype) for mask in cases]
    for _ in range(_TRIALS):
        for forward, taken in ((sdpa_attention_forward, stock), (folded_head_forward, ours)):
            started = time.perf_counter()
            for query, mask in zip(queries, cases, strict=True):
                forward(layer, query, key, key, mask)
            taken.append(time.perf_counter() - started)
    return statistics.median(ours) < statistics.median(stock)
