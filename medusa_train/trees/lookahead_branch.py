"""A lookahead branch: tokens below the root of every row that run through the target model in the
same pass as the tree, and are never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.tree import Nodes, Tree


class BranchLayout(Nodes):
    """Positions and mask of a lookahead branch, the same in every row.

        committed  root  tree  branch        x attends to, . does not,
        x x x x x   x     a     .    node    a attends to its ancestors and itself
        x x x x x   x     .     a    branch

    Branch tokens are never accepted, and their keys and values are dropped after the pass.

    Args:
        parents: for every branch token, the index of its parent among the branch tokens, or -1 for
            the root. Parents come before children.
        outputs: number of branch tokens, the last ones, whose logits the draft reads.
        device: device of the tensors.

    Attributes:
        size: number of branch tokens, m.
        outputs: number of branch tokens whose logits the draft reads; see the argument.
        max_depth: depth of the deepest branch token; the root has depth 0.
        depths: depth of every branch token, long [m].
        ancestors: bool [m, m]: row i is true at branch token i and its ancestors, without the root.
    """

    def __init__(self, parents: Sequence[int], outputs: int, device: torch.device) -> None:
        super().__init__([-1, *(parent + 1 for parent in parents)])  # the root is node 0 here
        self.outputs = outputs
        self.max_depth = max(self.depth_list)
        self.depths = torch.tensor(self.depth_list[1:], device=device)
        ancestors = self.ancestor_rows(self.size + 1)[1:, 1:]
        self.ancestors = torch.from_numpy(ancestors).to(device)


class LookaheadBranch(NamedTuple):
    """The branch of one proposal: its tokens, long [B, m], and the layout of every row."""

    tokens: Tensor
    layout: BranchLayout


class TreeAndBranch:
    """The nodes of a tree, or of one tree per row of the batch, followed by branch tokens: the
    queries of one pass.

    Attributes:
        size: number of nodes and branch tokens without the root, n + m.
        depths: depths of nodes and branch tokens, long [1 or B, n + 1 + m].
        ancestors: bool [1 or B, n + 1 + m, n + 1 + m]: row i is true where i attends.
    """

    def __init__(self, tree: Tree | RowTrees, branch: BranchLayout) -> None:
        nodes = tree.size + 1
        self.size = tree.size + branch.size
        tree_depths = torch.atleast_2d(tree.depths)  # [1 or B, n + 1]
        trees = len(tree_depths)
        branch_depths = branch.depths.expand(trees, -1)  # [1 or B, m]
        self.depths = torch.cat([tree_depths, branch_depths], dim=1)
        # tree nodes and branch tokens attend to their own ancestors, and all attend to the root
        total = self.size + 1
        ancestors = branch.ancestors.new_zeros(trees, total, total)
        ancestors[:, :nodes, :nodes] = tree.ancestors
        ancestors[:, :, 0] = True
        ancestors[:, nodes:, nodes:] = branch.ancestors
        self.ancestors = ancestors


#: What a pass of the target model runs over.
AnyTree = Tree | RowTrees | TreeAndBranch
