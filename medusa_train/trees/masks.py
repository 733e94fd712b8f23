"""What the nodes of a tree may see behind a growing prefix, as an additive mask updated in place; knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.trees.tree import Tree


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible` (bool, any shape) is true, else -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


class TreeMask:
    """The additive mask of a tree pass, updated in place: [1, 1, n + 1, capacity].

    Args:
        block: the mask among the nodes themselves, additive [n + 1, n + 1].
    """

    def __init__(self, block: Tensor, capacity: int) -> None:
        self._block = block
        # columns after the nodes stay masked
        self._mask = block.new_full((1, 1, len(block), capacity), float("-inf"))
        self._clean = 0  # columns up to here are all zero

    def at(self, prefix: int, upto: int | None = None) -> Tensor:
        """The mask [1, 1, n + 1, S] for nodes after `prefix` cached positions, which must never decrease.

        Args:
            upto: S; by default prefix + n + 1. Columns after the nodes are masked.
        """
        end = prefix + len(self._block)
        self._mask[..., self._clean : prefix] = 0
        self._mask[0, 0, :, prefix:end] = self._block
        self._clean = prefix
        return self._mask[..., : end if upto is None else upto]


class TreeMasks:
    """The masks of all trees that occur in an answer, built once per tree.

    A draft may cut the tree it is asked for, so there can be several.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._capacity = capacity
        self._dtype = dtype
        self._device = device
        # by identity, since comparing trees compares their paths; holding the tree keeps its id from being reused
        self._blocks: dict[int, tuple[Tree, Tensor]] = {}
        self._masks: dict[int, TreeMask] = {}

    def block(self, tree: Tree) -> Tensor:
        """The mask among the nodes of `tree`: itself and its ancestors, additive [n + 1, n + 1]."""
        if id(tree) not in self._blocks:
            self._blocks[id(tree)] = tree, additive_mask(tree.ancestors.to(self._device), self._dtype)
        return self._blocks[id(tree)][1]

    def at(self, tree: Tree, prefix: int, upto: int | None = None) -> Tensor:
        """The mask of `tree` after `prefix` cached positions, see `TreeMask.at`."""
        if id(tree) not in self._masks:
            self._masks[id(tree)] = TreeMask(self.block(tree), self._capacity)
        return self._masks[id(tree)].at(prefix, upto)


def packing_mask(segments: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A block-diagonal causal mask: each position sees itself and the earlier ones of its own document.

        segments   0 0 1 1 -       sees  x
                                         x x
                                         . . x
                                         . . x x
                                         . . . . x

    Stock models make such masks from restarting position ids only under conditions that differ between versions,
    and otherwise let documents leak into each other without a word. Padding forms a document of its own, so that no
    position sees nothing at all (a softmax over nothing is NaN). Sliding windows are laid over it by `Backbone.run`:
    within a document positions differ as in a row of its own, and between documents nothing is seen anyway.

    Args:
        segments: [B, T], the document within the row, contiguous; -1: padding.
        dtype: of the backbone. Additive, as attention in transformers' "eager" form takes bool masks for numbers.

    Returns:
        [B, 1, T, T], 0 where seen, else -inf; or None where no row holds two documents, for which the model's own
        causal mask does, and is faster.
    """
    if int(segments.max()) <= 0:
        return None
    length = segments.shape[1]
    seen = segments[:, :, None] == segments[:, None, :]
    seen &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None]


def windowed(mask: Tensor, positions: Tensor, prefix: int, window: int | None) -> Tensor:
    """AND an additive mask with a sliding window.

    Args:
        mask: [1 or B, 1, T, prefix + T], 0 where seen, else -inf.
        positions: [B, T], of the T queries and last keys; the keys before them stand at positions 0 .. prefix - 1.
        window: how far back a position sees, itself included; None: everything.
    """
    if window is None:
        return mask
    keys = torch.cat([torch.arange(prefix, device=positions.device).expand(len(positions), -1), positions], dim=1)
    too_far = positions[:, :, None] - keys[:, None, :] >= window
    return mask.masked_fill(too_far[:, None], float("-inf"))
