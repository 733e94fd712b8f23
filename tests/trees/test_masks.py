"""Masks: tree nodes attend to their ancestors, and positions of a path up to their own."""

import pytest
import torch
from torch import Tensor

from medusa_train.trees.masks import NodeMasks, causal_mask
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.tree import Tree

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
CHAIN = Tree.chain(6)


def seen_by_hand(tree: Tree, length: int, columns: int, window: int | None) -> Tensor:
    """What each node attends to: committed columns, itself and its ancestors, within the window."""
    out = torch.zeros(tree.size + 1, columns, dtype=torch.bool)
    for node in range(tree.size + 1):
        position = length + tree.depth_list[node]
        for column in range(length):
            out[node, column] = window is None or position - column < window
        for ancestor in tree.path_nodes(node):
            distance = tree.depth_list[node] - tree.depth_list[ancestor]
            out[node, length + ancestor] = window is None or distance < window
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6])
def test_nodes_attend_to_the_prefix_their_ancestors_and_themselves(window: int | None) -> None:
    """With windows smaller and larger than the tree's depth, and prefixes shorter and longer than
    the window.
    """
    lengths = torch.tensor([0, 1, 4, 11])
    mask = NodeMasks(TREE.ancestors, TREE.depths, window, torch.float64).at(lengths, 24)
    assert (mask.shape, mask.dtype) == ((4, 1, TREE.size + 1, 24), torch.float64)
    assert mask.stride(2) % 8 == 0
    assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(mask[row, 0] == 0, seen_by_hand(TREE, length, 24, window))


@pytest.mark.parametrize("window", [None, 1, 3, 6, 400])
def test_the_mask_of_a_known_length_is_a_slice_with_the_same_values(window: int | None) -> None:
    """While the text grows beyond the table, and for shorter texts after that."""
    masks = NodeMasks(TREE.ancestors, TREE.depths, window, torch.float64)
    for length in (0, 1, 5, 300, 301, 800, 2):
        for key_length in (length + 1, length + TREE.size + 1, length + TREE.size + 2):
            mask = masks.after(length, key_length)
            assert mask.shape == (1, 1, TREE.size + 1, key_length)
            assert torch.equal(mask, masks.at(torch.tensor([length]), key_length))
            assert mask.data_ptr() == masks.after(length, key_length).data_ptr()


@pytest.mark.parametrize("window", [None, 2, 6])
def test_rows_with_trees_of_their_own(window: int | None) -> None:
    trees = RowTrees([TREE.parent_list, CHAIN.parent_list], torch.device("cpu"))
    lengths = torch.tensor([3, 9])
    mask = NodeMasks(trees.ancestors, trees.depths, window, torch.float32).at(lengths, 20)
    for row, tree in enumerate((TREE, CHAIN)):
        assert torch.equal(mask[row, 0] == 0, seen_by_hand(tree, int(lengths[row]), 20, window))


def test_the_last_nodes_alone_need_no_depths_without_a_window() -> None:
    lengths = torch.tensor([3, 9])
    ancestors = TREE.ancestors.expand(2, -1, -1)
    whole = NodeMasks(ancestors, TREE.depths, None, torch.float32).at(lengths, 20)
    last = NodeMasks(ancestors[:, -2:], None, None, torch.float32).at(lengths, 20)
    assert torch.equal(last, whole[:, :, -2:])


@pytest.mark.parametrize("window", [None, 1, 3])
def test_positions_of_a_path_attend_up_to_their_own_column(window: int | None) -> None:
    columns = torch.tensor([[0, 1, 2], [5, 6, 7]])
    mask = causal_mask(columns, 10, window, torch.bfloat16)
    assert (mask.shape, mask.dtype) == ((2, 1, 3, 10), torch.bfloat16)
    for row, own_columns in enumerate(columns.tolist()):
        for i, own in enumerate(own_columns):
            first = 0 if window is None else max(0, own - window + 1)
            expected = [first <= column <= own for column in range(10)]
            assert (mask[row, 0, i] == 0).tolist() == expected
