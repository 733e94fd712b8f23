"""How the documents of a packed row are kept apart: a mask, or their bounds for a varlen kernel. Knows no model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
