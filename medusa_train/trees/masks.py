"""Attention masks: of token trees over a cached prefix, of packed documents, and of sliding
windows.

All masks are additive, 0 where a query attends to a key and -inf elsewhere, in the dtype of the
model: attention in transformers' "eager" form adds bool masks as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Numbers by which rows of a mask are aligned in memory: torch's memory-efficient kernel copies
# others.
_ALIGNMENT = 8


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask of any shape: 0 where `visible` is true, else -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )


class NodeMasks:
    """What the nodes of a tree attend to, as masks over the columns of `Slots`.

        column - length    < 0: committed    0 .. n: the nodes    > n: masked

    Args:
        ancestors: bool [n + 1, n + 1], see `Tree.ancestors`, or [B, n + 1, n + 1] if rows differ.
        depths: long [n + 1], or [B, n + 1].
        window: number of positions that a node attends to, itself included; None: all.
    """

    def __init__(
        self, ancestors: Tensor, depths: Tensor, window: int | None, dtype: torch.dtype
    ) -> None:
        self._prefix = window or 1  # all columns before these are alike
        nodes = torch.atleast_2d(depths)[..., None]  # [1 or B, n + 1, 1]
        visible = ancestors if ancestors.dim() == 3 else ancestors[None]
        offsets = torch.arange(-self._prefix, 0, device=depths.device)  # of committed columns
        if window is None:
            committed = visible.new_ones(*visible.shape[:2], self._prefix)
        else:
            committed = nodes - offsets < window
            visible = visible & (nodes - nodes.transpose(1, 2) < window)
        beyond = torch.zeros_like(visible[..., :1])
        # [1 or B, n + 1, prefix + n + 2]: by column - length + prefix
        self._table = additive_mask(torch.cat([committed, visible, beyond], dim=2), dtype)

    def at(self, lengths: Tensor, key_length: int) -> Tensor:
        """Return the mask [B, 1, n + 1, key_length] for nodes after `lengths` committed positions,
        long [B].

        It is a slice of a larger one, as compiled passes expect it, whose rows are aligned as
        kernels of GPUs do.
        """
        columns = torch.arange(key_length + _ALIGNMENT, device=lengths.device)
        # [B, key_length + 8]: columns of the table
        index = (columns - lengths[:, None] + self._prefix).clamp(0, self._table.shape[2] - 1)
        if len(self._table) == 1:  # the same tree in all rows: [n + 1, B, key_length + 8]
            mask = self._table[0].index_select(1, index.flatten()).unflatten(1, index.shape)
            return mask.transpose(0, 1)[:, None, :, :key_length]
        index = index[:, None].expand(-1, self._table.shape[1], -1)
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
    visible = keys <= own
    if window is not None:
        visible &= keys > own - window
    return additive_mask(visible, dtype)[:, None, :, :key_length]


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
