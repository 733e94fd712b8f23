"""The mask of a tree behind a growing prefix, against the definition."""

from __future__ import annotations

import torch

from medusa_train.trees.tree import Tree
from medusa_train.trees.tree_mask import TreeMask, TreeMasks


def seen(mask: torch.Tensor) -> torch.Tensor:
    assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
    return mask[0, 0] == 0


def expected(tree: Tree, prefix: int, upto: int) -> torch.Tensor:
    out = torch.zeros(tree.size + 1, upto, dtype=torch.bool)
    out[:, :prefix] = True
    out[:, prefix : prefix + tree.size + 1] = tree.ancestors
    return out


def test_nodes_see_the_prefix_their_ancestors_and_themselves() -> None:
    tree = Tree.cartesian([2, 2])
    mask = TreeMask(tree, 40, torch.float32, torch.device("cpu"))
    for prefix in (3, 4, 4, 6, 12, 13):
        end = prefix + tree.size + 1
        assert torch.equal(seen(mask.at(prefix)), expected(tree, prefix, end))
        assert torch.equal(seen(mask.at(prefix, 32)), expected(tree, prefix, 32))


def test_trees_that_take_turns_keep_masks_of_their_own() -> None:
    small, large = Tree.chain(2), Tree.cartesian([3, 2])
    masks = TreeMasks(40, torch.float64, torch.device("cpu"))
    for prefix, tree in ((2, large), (4, small), (5, large), (11, large), (12, small)):
        mask = masks.at(tree, prefix)
        assert mask.dtype == torch.float64
        assert torch.equal(seen(mask), expected(tree, prefix, prefix + tree.size + 1))
