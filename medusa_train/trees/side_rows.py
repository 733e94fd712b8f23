"""Side rows of a verification pass: tokens that a draft runs through the backbone beside its tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.tree import Nodes, Tree


class SideLayout(Nodes):
    """Positions and mask of side rows, which hang below the root of every row of the batch beside its tree.

        committed  root  tree  side          x attends to, . does not,
        x x x x x   x     a     .    node    a attends to its ancestors and itself
        x x x x x   x     .     a    side

    Side rows are never accepted, and their keys and values are dropped after the pass.

    Args:
        parents: of every side row the index of its parent among them, or -1 for the root; parents come first.
        outputs: the draft reads the backbone's logits at this many of them, the last ones.
        device: of the tensors.

    Attributes:
        size: number of side rows, m. max_depth: of the deepest one; the root has depth 0.
        depths: long [m].
        ancestors: bool [m, m]: row i is true at side row i and its ancestors, without the root.
    """

    def __init__(self, parents: Sequence[int], outputs: int, device: torch.device) -> None:
        self.parent_list = [-1, *(parent + 1 for parent in parents)]  # the root is node 0
        self.outputs = outputs
        self.max_depth = max(self.depth_list)
        self.depths = torch.tensor(self.depth_list[1:], device=device)
        ancestors = torch.eye(self.size, dtype=torch.bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                ancestors[row] |= ancestors[parent]
        self.ancestors = ancestors.to(device)


class SideRows(NamedTuple):
    """The side rows of one proposal.

    Attributes:
        tokens: long [B, m]. layout: of every row of the batch.
    """

    tokens: Tensor
    layout: SideLayout


class PassRows:
    """The nodes of a tree, or of one tree per row of the batch, followed by side rows: what one pass computes.

    Attributes:
        size: without the root, n + m. max_depth: of the deepest one.
        depths: long [1 or B, n + 1 + m].
        ancestors: bool [1 or B, n + 1 + m, n + 1 + m]: row i is true where i attends to.
    """

    def __init__(self, tree: Tree | RowTrees, side: SideLayout) -> None:
        nodes, self.size = tree.size + 1, tree.size + side.size
        self.max_depth = max(tree.max_depth, side.max_depth)
        depths = torch.atleast_2d(tree.depths)
        self.depths = torch.cat([depths, side.depths.expand(len(depths), -1)], dim=1)
        self.ancestors = side.ancestors.new_zeros(len(depths), self.size + 1, self.size + 1)
        self.ancestors[:, :nodes, :nodes] = tree.ancestors
        self.ancestors[:, :, 0] = True
        self.ancestors[:, nodes:, nodes:] = side.ancestors
