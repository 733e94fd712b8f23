"""What the nodes of a tree may see behind a growing prefix, as an additive mask updated in place; knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.trees.tree import Tree


class TreeMask:
    """The additive mask of a tree pass, updated in place: [1, 1, n + 1, capacity]."""

    def __init__(self, tree: Tree, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block = torch.zeros(tree.ancestors.shape, dtype=dtype)
        self._block.masked_fill_(~tree.ancestors, float("-inf"))
        self._block = self._block.to(device)
        # what lies behind the nodes is never seen
        self._mask = torch.full((1, 1, tree.size + 1, capacity), float("-inf"), dtype=dtype, device=device)
        self._clean = 0  # columns up to here are all zero

    def at(self, prefix: int, upto: int | None = None) -> Tensor:
        """The mask [1, 1, n + 1, S] for nodes behind `prefix` cached positions, which never shrink.

        Args:
            upto: S; by default prefix + n + 1. What lies behind the nodes is masked.
        """
        end = prefix + len(self._block)
        self._mask[..., self._clean : prefix] = 0
        self._mask[0, 0, :, prefix:end] = self._block
        self._clean = prefix
        return self._mask[..., : end if upto is None else upto]


class TreeMasks:
    """The masks of the trees that proposals come with: nearly always the one that was asked for."""

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._options = (capacity, dtype, device)
        self._made: dict[int, tuple[Tree, TreeMask]] = {}  # by identity, since comparing trees takes their paths

    def at(self, tree: Tree, prefix: int, upto: int | None = None) -> Tensor:
        """The mask of `tree`, see `TreeMask.at`."""
        if id(tree) not in self._made:
            self._made[id(tree)] = tree, TreeMask(tree, *self._options)  # keeps the tree, and so its identity
        return self._made[id(tree)][1].at(prefix, upto)


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
