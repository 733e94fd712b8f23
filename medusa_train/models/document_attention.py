"""Attention within the documents of packed rows: with a mask of T x T positions, or with the bounds
of the documents instead of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from medusa_train.models.attention import folded_head_attention, folded_head_forward
from medusa_train.trees.masks import additive_mask

#: transformers' name of flash-attn's kernels.
FLASH = "flash_attention_2"
#: Name under which `document_attention_forward` is registered with transformers. No mask function
#: is registered for it, so models do not build their own mask.
DOCUMENTS = "sdpa_documents"

_HALF = (torch.float16, torch.bfloat16)
_WINDOW_QUERIES = 256  # queries with a sliding window that share a mask


def document_mask(segments: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Build the block-diagonal causal mask of packed rows: a position attends to its own document
    only.

        segments   0 0 1 1 -       mask    x . . . .
                                           x x . . .
                                           . . x . .
                                           . . x x .
                                           . . . . x

    transformers' models derive such masks from restarting position ids only under conditions that
    differ between versions. Padding is treated as a document, since a softmax over no keys is NaN.
    `TargetModel.run` applies sliding windows.

    Args:
        segments: [B, T], index of the document within the row, contiguous; -1: padding.
        dtype: dtype of the mask.

    Returns:
        [B, 1, T, T]; None if no row holds two documents: the model's own causal mask is then
        correct, and faster.
    """
    if int(segments.max()) <= 0:
        return None
    length = segments.shape[1]  # T
    same_document = segments[:, :, None] == segments[:, None, :]  # [B, T, T]
    ones = torch.ones(length, length, dtype=torch.bool, device=segments.device)
    same_document &= ones.tril()  # and not later
    return additive_mask(same_document, dtype)[:, None]


def document_bounds(segments: Tensor) -> dict[str, Any]:
    """Return the bounds of packed documents as keyword arguments of a model (transformers'
    `FlashAttentionKwargs`).

        segments   0 0 0 1 -      cumulative lengths   0 3 4 5 | 7 10      rows joined end to end
                   0 0 1 1 1      maximum length       3

    Padding is treated as a document. The bounds are passed explicitly, because transformers derives
    them from restarting position ids only for a batch of one row.

    Args:
        segments: [B, T], index of the document within the row, contiguous; -1: padding.

    Returns:
        Cumulative lengths, int32 [documents + 1], and the maximum length, for queries and for keys.
    """
    starts = torch.ones_like(segments, dtype=torch.bool)  # [B, T], first positions of documents
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    firsts = starts.flatten().nonzero().squeeze(1)  # [documents], indices in the joined rows
    end = firsts.new_full((1,), segments.numel())
    bounds = torch.cat([firsts, end]).to(torch.int32)  # [documents + 1]
    longest = int(bounds.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@torch.no_grad()
def separates_documents(run: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Tensor) -> bool:
    """Return whether a row's second document is unchanged, bit for bit, when its first document
    changes.

    Args:
        run: inputs, position ids [2, 5] and segments [2, 5] -> states [2, 5, d].
        inputs: [2, 5, ...]; the two rows differ at every position.
    """
    segments = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]], device=inputs.device)
    positions = torch.tensor([[0, 1, 2, 0, 1]], device=inputs.device).expand(2, -1)
    # each row gets the first document of the other one
    changed = inputs.clone()
    changed[segments == 0] = inputs.flip(0)[segments == 0]
    before = run(inputs, positions, segments)
    after = run(changed, positions, segments)
    return torch.equal(before[segments == 1], after[segments == 1])


# The implementations that can be chosen


def flash_unsupported_reason(
    device: str, dtype: torch.dtype, *, capped: bool, supported: bool, installed: bool
) -> str | None:
    """Return why flash-attn's varlen kernel cannot be used; None if it can.

    Args:
        device: "cpu" or "cuda".
        dtype: dtype of the model.
        capped: whether the model soft-caps its attention scores.
        supported: whether the architecture supports flash attention.
        installed: whether the flash-attn package is installed.
    """
    if device != "cuda":
        return f"flash-attn needs a GPU, the device is {device}"
    if not installed:
        return "flash-attn is not installed"
    if dtype not in _HALF:
        return f"flash-attn does not support {str(dtype).removeprefix('torch.')}"
    if capped:
        return "this model soft-caps its attention scores"
    if not supported:
        return "this architecture does not support flash attention"
    return None


@contextmanager
def use_attention(config: Any, implementation: str) -> Iterator[None]:
    """Within this context, layers with this transformers config attend by `implementation`.

    It is set on the config, which the layers read at each call: the model's own method visits all
    modules, too slow for every step.
    """
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def register_document_attention() -> str:
    """Register `document_attention_forward` with transformers, and return its name there.

    It is excluded from torch.compile's programs of the layers that call it, because the lengths of
    documents differ in every batch.
    """
    AttentionInterface.register(DOCUMENTS, torch.compiler.disable(document_attention_forward))
    return DOCUMENTS


# Attention


def document_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention in transformers' interface: query [B, H, T, d], key and value [B, H_kv, T,
    d] -> [B, T, H, d].

    Attention is causal within every document; `cu_seq_lens_q` comes from `document_bounds`. Without
    bounds this is `folded_head_forward`.

    Raises:
        ValueError: the model needs something that this does not compute, or has a sliding window
            but neither bounds nor a mask.
    """
    # 1. without bounds there is one document per row
    if cu_seq_lens_q is None:
        if attention_mask is None and sliding_window is not None and key.shape[2] > sliding_window:
            raise ValueError("a sliding window needs the bounds of documents or a mask")
        return folded_head_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    names = ("position_bias", "softcap", "cache", "s_aux")
    unsupported = [name for name in names if kwargs.get(name) is not None]
    if unsupported:
        raise ValueError(f"attention by document does not support {', '.join(unsupported)}")

    # 2. rotary embeddings leave queries and keys in float32
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)

    # 3. join the rows end to end
    rows, heads, length, _ = query.shape
    joined = [states.transpose(0, 1).flatten(1, 2) for states in (query, key, value)]  # [H, B*T, d]

    # 4. attend within each document
    lengths = cu_seq_lens_q.diff().tolist()
    out = _one_by_one(joined, lengths, sliding_window, scaling, dropout)
    return out.view(rows, length, heads, value.shape[3]), None


def _one_by_one(
    joined: list[Tensor],
    lengths: list[int],
    window: int | None,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Compute each document in a separate call, -> [B * T, H, d]."""
    # split instead of slicing: the gradient of a slice is as long as the whole row
    queries, keys, values = (states.split(lengths, dim=1) for states in joined)
    outputs = []
    for query, key, value in zip(queries, keys, values, strict=True):  # [H, L, d] of one document
        document = (query[None], key[None], value[None])
        if window is None or query.shape[1] <= window:
            out = _causal(*document, scaling, dropout)
        else:
            out = _windowed(*document, window, scaling, dropout)
        outputs.append(out[0].transpose(0, 1))  # [L, H, d]
    return torch.cat(outputs)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float
) -> Tensor:
    """Compute causal attention of one document, query [1, H, L, d] -> [1, H, L, d]."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type == "cuda" and query.dtype not in _HALF:
        # torch's only GPU kernel for groups in float32 stores all scores, so copy the keys and
        # values (this branch has never been run)
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float | None, dropout: float
) -> Tensor:
    """Compute attention of one document longer than its sliding window, in blocks of queries with
    their keys.

        window 3, blocks of 2     block 1   x . . .     block 2   x x x .     all blocks have the
        (keys from left)                    x x                     x x x     same mask, cut where
                                                                              the document begins

    The mask has `_WINDOW_QUERIES` x (window - 1 + `_WINDOW_QUERIES`) positions at most, for any
    length of the document.
    """
    length = query.shape[2]
    size = min(_WINDOW_QUERIES, length)
    # the mask of a block, whose keys begin `window - 1` positions before its queries
    queries = torch.arange(size, device=query.device)[:, None]
    keys = torch.arange(window - 1 + size, device=query.device)[None]
    visible = (queries <= keys) & (keys < queries + window)  # [size, window - 1 + size]
    outputs = []
    for start in range(0, length, size):
        end = min(start + size, length)
        first_key = max(0, start - window + 1)
        # cut the mask's columns before the document, and its rows and columns after the end
        origin = start - window + 1
        mask = visible[: end - start, first_key - origin : end - origin]
        out = folded_head_attention(
            query[:, :, start:end],
            key[:, :, first_key:end],
            value[:, :, first_key:end],
            mask[None, None],
            scaling,
            dropout,
        )  # [1, H, end - start, d]
        outputs.append(out)
    return torch.cat(outputs, dim=2)
