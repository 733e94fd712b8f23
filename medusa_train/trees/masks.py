"""Attention masks: of token trees over a cached prefix, and of sliding windows. Those of packed
documents are in `models.document_attention`.

All masks are additive, 0 where a query attends to a key and -inf elsewhere, in the dtype of the
model: attention in transformers' "eager" form adds bool masks as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: The table of a mask grows by so many committed columns.
_TABLE_BLOCK = 256

#: In memory the keys of a query are aligned by so many numbers: torch's memory-efficient kernel
#: copies other masks.
_ALIGNMENT = 8


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask of any shape: 0 where `visible` is true, else -inf."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))


class NodeMasks:
    """What the nodes of a tree attend to, as masks over the columns of `KVCache`.

        column - length    < 0: committed    0 .. n: the nodes    > n: masked

    Committed columns beyond the window, or all of them without one, are the same. So a small table is
    made once, and the mask for given lengths is looked up in it: column j of a row is column
    j - length + prefix of the table, or in its first or last one. For a single length that the host
    knows it is a slice of the table, which is made wide enough.

    Of the n + 1 nodes that are seen, q see: usually all of them, and without a window also the last
    ones alone, where the others ran before.

    Args:
        ancestors: which nodes each of the q sees, bool [q, n + 1], see `Tree.ancestors`, or [B, q,
            n + 1] if rows differ.
        depths: of all nodes, long [n + 1] or [B, n + 1]; only read with a window, else it may be
            None.
        window: number of positions that a node attends to, itself included; None: all.
        dtype: of the masks.
    """

    def __init__(
        self, ancestors: Tensor, depths: Tensor | None, window: int | None, dtype: torch.dtype
    ) -> None:
        self._prefix = window or 1  # committed columns in the table
        visible = ancestors  # [1 or B, q, n + 1]: of the nodes
        if visible.dim() == 2:
            visible = visible[None]
        # 1. of the committed columns; the last one is right before the root, at depth -1
        if window is None:
            committed = visible.new_ones(*visible.shape[:2], self._prefix)
        else:
            assert depths is not None
            depths = torch.atleast_2d(depths)[..., None]  # [1 or B, n + 1, 1]
            offsets = torch.arange(-self._prefix, 0, device=depths.device)
            committed = depths - offsets < window  # [1 or B, n + 1, prefix]
            visible = visible & (depths - depths.transpose(1, 2) < window)
        # 2. nothing behind the nodes
        beyond = torch.zeros_like(visible[..., :1])  # [1 or B, q, 1]
        table = torch.cat([committed, visible, beyond], dim=2)
        self._table = additive_mask(table, dtype)  # [1 or B, q, prefix + n + 2]

    def after(self, length: int, key_length: int) -> Tensor:
        """Return the mask [1, 1, q, key_length] of a single row after `length` committed
        positions, without a copy.

        Args:
            key_length: at most one column behind the nodes.
        """
        # 1. a table with so many committed columns
        missing = length - self._prefix
        if missing > 0:
            missing = -(-missing // _TABLE_BLOCK) * _TABLE_BLOCK  # rounded up
            first = self._table[:, :, :1].expand(-1, -1, missing)
            self._table = torch.cat([first, self._table], dim=2)
            self._prefix += missing
        # 2. of which the last ones precede the nodes
        start = self._prefix - length
        return self._table[:, None, :, start : start + key_length]

    def at(self, lengths: Tensor, key_length: int) -> Tensor:
        """Return the mask [B, 1, q, key_length] for nodes after `lengths` committed positions,
        long [B].

        It is a slice of a larger one, as compiled passes expect it, whose rows are aligned as
        kernels of GPUs do.
        """
        # 1. columns of the table, [B, key_length + 8]
        columns = torch.arange(key_length + _ALIGNMENT, device=lengths.device)
        index = columns - lengths[:, None] + self._prefix
        index = index.clamp(0, self._table.shape[2] - 1)
        # 2. the same tree in all rows
        if len(self._table) == 1:
            mask = self._table[0].index_select(1, index.flatten())  # [q, B * (key_length + 8)]
            mask = mask.unflatten(1, index.shape)  # [q, B, key_length + 8]
            return mask.transpose(0, 1)[:, None, :, :key_length]
        # 3. or one tree per row
        index = index[:, None].expand(-1, self._table.shape[1], -1)  # [B, q, key_length + 8]
        return self._table.gather(2, index)[:, None, :, :key_length]


def causal_mask(columns: Tensor, key_length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the mask of positions that are written to `columns` and see those up to their own.

    Args:
        columns: long [B, q]. key_length: columns that are read.
        window: number of positions that each attends to, itself included; None: all.

    Returns: [B, 1, q, key_length], a slice whose rows are aligned in memory.
    """
    keys = torch.arange(key_length + _ALIGNMENT, device=columns.device)
    own = columns[..., None]  # [B, q, 1]
    visible = keys <= own  # [B, q, key_length + 8]
    if window is not None:
        visible &= keys > own - window
    return additive_mask(visible, dtype)[:, None, :, :key_length]


def apply_sliding_window(
    mask: Tensor, positions: Tensor, prefix: int, window: int | None
) -> Tensor:
    """Mask the keys outside a sliding window, [1 or B, 1, T, prefix + T].

    Args:
        mask: additive, of the same shape.
        positions: [B, T] position ids of the queries, which are the last T keys; keys before are at
            0 .. prefix - 1.
        window: number of positions that a query attends to, itself included; None: all.
    """
    if window is None:
        return mask
    before = torch.arange(prefix, device=positions.device).expand(len(positions), -1)
    keys = torch.cat([before, positions], dim=1)  # [B, prefix + T]: positions of the keys
    outside = positions[:, :, None] - keys[:, None, :] >= window  # [B, T, prefix + T]
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
