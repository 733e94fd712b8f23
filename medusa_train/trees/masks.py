"""Attention masks for token trees over a cached prefix, and for sliding windows. Masks of packed
documents are in `models.document_attention`.

All masks are additive, 0 where a query attends to a key and -inf elsewhere, in the dtype of the
model: transformers' "eager" attention would add bool masks as numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.rounding import round_up

#: The table of a mask grows by this many committed columns.
_TABLE_BLOCK = 256

#: In memory, the row of each query starts at a multiple of this many numbers: torch's
#: memory-efficient kernel copies masks that are not aligned.
_ALIGNMENT = 8


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask of any shape: 0 where `visible` is true, else -inf."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))


class NodeMasks:
    """What the nodes of a tree attend to, as masks over the columns of `KVCache`.

        column - length    < 0: committed    0 .. n: the nodes    > n: masked

    Without a window, a node attends to all committed columns; with one, to none of the columns
    before the window. In both cases one column of the table can stand for many committed columns.
    So a small table is built once. It has `prefix` committed columns (`window`, or 1 without one),
    a column for each node, and a masked one. For a root with children a and b, without a window:

        column - length     ..., -2, -1    0    1    2    3, 4, ...
        column of table         0          1    2    3       4
                    root        x          x    .    .       .        x attends to, . does not
                    a           x          x    x    .       .
                    b           x          x    .    x       .

    Column j of a mask is column j - length + prefix of the table. Smaller numbers than 0 mean the
    first column of the table, larger numbers than it has mean the last. If the host knows the only
    length, `after` widens the table to all committed columns and returns a slice of it.

    The keys are n + 1 nodes, of which q are queries: usually all of them. Without a window, the
    queries may be only the last nodes, if the others ran before.

    Args:
        ancestors: which nodes each query attends to, bool [q, n + 1], see `Tree.ancestors`, or [B,
            q, n + 1] if rows differ.
        depths: depths of all nodes, long [n + 1] or [B, n + 1]; may be None without a window.
        window: number of positions that a node attends to, itself included; None: all.
        dtype: dtype of the masks.
    """

    def __init__(
        self, ancestors: Tensor, depths: Tensor | None, window: int | None, dtype: torch.dtype
    ) -> None:
        self._prefix = window or 1  # number of committed columns in the table
        visible = ancestors  # [1 or B, q, n + 1]: which nodes are visible
        if visible.dim() == 2:
            visible = visible[None]
        # 1. which committed columns are visible; the last one is right before the root, at depth -1
        if window is None:
            committed = visible.new_ones(*visible.shape[:2], self._prefix)
        else:
            assert depths is not None
            depths = torch.atleast_2d(depths)[..., None]  # [1 or B, n + 1, 1]
            offsets = torch.arange(-self._prefix, 0, device=depths.device)
            committed = depths - offsets < window  # [1 or B, n + 1, prefix]
            visible = visible & (depths - depths.transpose(1, 2) < window)
        # 2. nothing after the nodes is visible
        beyond = torch.zeros_like(visible[..., :1])  # [1 or B, q, 1]
        table = torch.cat([committed, visible, beyond], dim=2)
        self._table = additive_mask(table, dtype)  # [1 or B, q, prefix + n + 2]

    def after(self, length: int, key_length: int) -> Tensor:
        """Return the mask [1, 1, q, key_length] of a single row after `length` committed
        positions, without a copy.

        Args:
            length: number of committed positions.
            key_length: number of columns; ends at most one column after the nodes.
        """
        # 1. widen the table to `length` committed columns
        missing = length - self._prefix
        if missing > 0:
            missing = round_up(missing, _TABLE_BLOCK)
            first = self._table[:, :, :1].expand(-1, -1, missing)
            self._table = torch.cat([first, self._table], dim=2)
            self._prefix += missing
        # 2. slice the last `length` committed columns, and the nodes after them
        start = self._prefix - length
        return self._table[:, None, :, start : start + key_length]

    def at(self, lengths: Tensor, key_length: int) -> Tensor:
        """Return the mask [B, 1, q, key_length] for nodes after `lengths` committed positions,
        long [B].

        It is a slice of a larger mask, as compiled passes expect it, with rows aligned for GPU
        kernels.
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
    """Return the causal mask of queries that are written to `columns`: each attends to the columns
    up to its own.

    Args:
        columns: long [B, q].
        key_length: number of columns that are read.
        window: number of positions that a query attends to, itself included; None: all.
        dtype: dtype of the mask.

    Returns:
        [B, 1, q, key_length], a slice whose rows are aligned in memory.
    """
    keys = torch.arange(key_length + _ALIGNMENT, device=columns.device)
    own_columns = columns[..., None]  # [B, q, 1]
    visible = keys <= own_columns  # [B, q, key_length + 8]
    if window is not None:
        visible &= keys > own_columns - window
    return additive_mask(visible, dtype)[:, None, :, :key_length]


def apply_sliding_window(mask: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Mask the keys outside a sliding window, [1 or B, 1, T, T].

    Args:
        mask: additive mask of the same shape.
        positions: position ids [B, T] of the queries, which are also the keys.
        window: number of positions that a query attends to, itself included; None: all.
    """
    if window is None:
        return mask
    outside = positions[:, :, None] - positions[:, None, :] >= window  # [B, T, T]
    return mask.masked_fill(outside[:, None], float("-inf"))
