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
