"""Attention masks: of token trees over a cached prefix, of packed documents, and of sliding
windows.

All masks are additive, 0 where a query attends to a key and -inf elsewhere, in the dtype of the
model: attention in transformers' "eager" form adds bool masks as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from medusa_train.trees.kv_cache import BatchCache, TreeCache

#: Numbers by which rows of a mask are aligned in memory: torch's memory-efficient kernel copies
# others.
_ALIGNMENT = 8


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask of any shape: 0 where `visible` is true, else -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )


class MaskTable:
    """The mask of a tree at any prefix by one lookup, for steps whose shapes and addresses are
    fixed.

        column - length    < 0: committed    0 .. n: the nodes    > n: masked

    Args:
        ancestors: bool [n + 1, n + 1], see `Tree.ancestors`. depths: long [n + 1].
        window: number of positions that a node attends to, itself included; None: all.
    """

    def __init__(
        self, ancestors: Tensor, depths: Tensor, window: int | None, dtype: torch.dtype
    ) -> None:
        self._prefix = window or 1  # all columns before these are alike
        offsets = torch.arange(-self._prefix, 0, device=depths.device)
        committed = torch.ones(len(depths), self._prefix, dtype=torch.bool, device=depths.device)
        if window is not None:
            committed = depths[:, None] - offsets < window
            ancestors = ancestors & (depths[:, None] - depths < window)
        self._table = additive_mask(
            torch.cat([committed, ancestors, torch.zeros_like(committed[:, :1])], dim=1), dtype
        )

    def at(self, lengths: Tensor, key_length: int) -> Tensor:
        """Return the mask [B, 1, n + 1, key_length] for nodes after `lengths` committed positions,
        long [B].

        It is a slice of a larger one, as compiled passes expect it, whose rows are aligned as
        kernels of GPUs do.
        """
        columns = torch.arange(key_length + _ALIGNMENT, device=lengths.device)
        index = (columns - lengths[:, None] + self._prefix).clamp(0, self._table.shape[1] - 1)
        mask = self._table.index_select(1, index.flatten()).unflatten(1, index.shape)
        return mask.transpose(0, 1)[:, None, :, :key_length]


def mask_with_prefix(cache: TreeCache, block: Tensor) -> Tensor:
    """Extend a mask among pending positions by the committed positions of each row.

    Args:
        cache: a `BatchCache` masks the padding between a row's committed positions and the pending
            ones.
        block: additive, [q, q], or [1 or B, q, q] if rows differ.

    Returns:
        [1 or B, 1, q, cache.length + q], with B for a `BatchCache`.
    """
    block = block if block.dim() == 3 else block[None]
    if not isinstance(cache, BatchCache):
        mask = block.new_zeros(1, 1, block.shape[1], cache.length + block.shape[2])
        mask[0, :, :, cache.length :] = block
        return mask
    rows = len(cache.lengths)
    prefix = block.new_zeros(rows, cache.length).masked_fill_(
        cache.padding_mask(block.device), float("-inf")
    )
    prefix = prefix[:, None].expand(-1, block.shape[1], -1)
    return torch.cat([prefix, block.expand(rows, -1, -1)], dim=2)[:, None]


def mask_of_slots(cache: TreeCache, block: Tensor, key_length: int) -> Tensor:
    """Mask keys in fixed columns: the committed positions of each row and those pending after
    `TreeCache.reserve`.

    Args:
        block: additive mask among the pending positions, [q, q], or [1 or B, q, q] if rows differ.
        key_length: S; columns after the pending ones are masked.

    Returns: [1 or B, 1, q, S]; contiguous for a `BatchCache`, else a slice of a larger one, see
        `CompiledPass`.
    """
    if not isinstance(cache, BatchCache) or block.shape[-1] > 1:
        mask, further = (
            mask_with_prefix(cache, block),
            0 if isinstance(cache, BatchCache) else _ALIGNMENT,
        )
        padding = (0, key_length + further - mask.shape[3])
        return torch.nn.functional.pad(mask, padding, value=float("-inf"))[..., :key_length]
    columns = torch.arange(key_length, device=block.device)
    return additive_mask(columns <= cache.pending_columns(block.device), block.dtype)[:, None, None]


def document_mask(segments: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Build the block-diagonal causal mask of packed rows: a position attends to its own document
    only.

        segments   0 0 1 1 -       mask    x . . . .
                                           x x . . .
                                           . . x . .
                                           . . x x .
                                           . . . . x

    Models in transformers derive such masks from restarting position ids only under conditions that
    differ between versions. Padding counts as a document, since a softmax over no keys is NaN.
    `Backbone.run` applies sliding windows.

    Args:
        segments: [B, T], index of the document within the row, contiguous; -1: padding.

    Returns: [B, 1, T, T]; None if no row holds two documents, where the model's own causal mask is
        correct and faster.
    """
    if int(segments.max()) <= 0:
        return None
    length = segments.shape[1]
    attended = segments[:, :, None] == segments[:, None, :]
    attended &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return additive_mask(attended, dtype)[:, None]


def apply_sliding_window(
    mask: Tensor, positions: Tensor, prefix: int, window: int | None
) -> Tensor:
    """Mask the keys outside a sliding window.

    Args:
        mask: additive, [1 or B, 1, T, prefix + T].
        positions: [B, T] position ids of the queries, which are the last T keys; keys before are at
            0 .. prefix - 1.
        window: number of positions that a query attends to, itself included; None: all.
    """
    if window is None:
        return mask
    keys = torch.cat(
        [torch.arange(prefix, device=positions.device).expand(len(positions), -1), positions], dim=1
    )
    outside = positions[:, :, None] - keys[:, None, :] >= window
    return mask.masked_fill(outside[:, None], float("-inf"))


def layer_masks(
    mask: Tensor, positions: Tensor, prefix: int, layer_types: Iterable[str], window: int | None
) -> dict[str, Tensor]:
    """Return the mask of each layer type, see `apply_sliding_window`.

    A 4-D mask replaces the one that a model builds itself, sliding windows included, so these must
    be applied again.
    """
    masks = dict.fromkeys(layer_types, mask)
    if "sliding_attention" in masks:
        masks["sliding_attention"] = apply_sliding_window(mask, positions, prefix, window)
    return masks
