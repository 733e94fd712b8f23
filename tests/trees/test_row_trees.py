"""Trees of rows against fixed trees of the same shape, padding, and trees that grow by
continuations.
"""

import torch

from medusa_train.trees.row_trees import RowTrees, TokenTree
from medusa_train.trees.tree import Tree

CPU = torch.device("cpu")
SPARSE = Tree.from_paths([(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 0)])
CHAIN = Tree.chain(3)


def test_a_row_has_the_tensors_of_the_fixed_tree_and_padding_after_it() -> None:
    trees = RowTrees([SPARSE.parent_list, CHAIN.parent_list, [-1]], CPU)
    assert trees.size == 6
    for row, tree in enumerate((SPARSE, CHAIN, Tree.empty())):
        count = tree.size + 1
        assert torch.equal(trees.depths[row, :count], tree.depths)
        assert torch.equal(trees.parents[row, :count], tree.parents)
        assert torch.equal(trees.ancestors[row, :count, :count], tree.ancestors)
        assert not trees.ancestors[row, :count, count:].any()  # padding is seen by padding alone
        assert trees.row(row).children == tree.children
    assert trees.ancestors[2, 4].tolist() == [True, False, False, False, True, False, False]


def test_equal_continuations_share_nodes_and_the_most_frequent_ones_are_kept() -> None:
    tree = TokenTree([9])
    for continuation in ([1, 2, 3], [1, 2, 4], [5, 6], [1, 7]):
        tree.add(continuation)
    assert tree.tokens == [9, 1, 2, 3, 4, 5, 6, 7]
    assert tree.counts == [0, 3, 2, 1, 1, 1, 1, 1]
    assert tree.most_frequent(99) is tree
    best = tree.most_frequent(4)  # ties: the shallower one first, then the one added first
    assert (best.tokens, best.parents) == ([9, 1, 2, 5, 6], [-1, 0, 1, 0, 3])


def test_merging_adds_what_is_new() -> None:
    heads = TokenTree([9, 1, 4, 2], [-1, 0, 0, 1])
    heads.merge(TokenTree([9, 4, 1, 2, 8], [-1, 0, 0, 2, 3]))
    assert (heads.tokens, heads.parents) == ([9, 1, 4, 2, 8], [-1, 0, 0, 1, 3])
