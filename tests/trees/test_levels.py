"""Trees by level: candidates, inner nodes and truncated trees."""

import pytest
import torch

from medusa_train.trees.levels import TreeLevels, levels_of
from medusa_train.trees.tree import Tree

TREES = {
    "chain": Tree.chain(3),
    "full": Tree.cartesian([3, 2, 2]),
    "sparse": Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (2, 0), (2, 1), (0, 3, 1)]),
}


@pytest.mark.parametrize("name", TREES)
def test_candidates_by_rank_rebuild_every_path(name: str) -> None:
    """With candidate r below a node being its path and r, the token of each node is its path."""
    tree = TREES[name]
    levels = TreeLevels(tree)
    tokens: list[tuple[int, ...]] = [()]
    for level in levels.levels:
        current = tokens[level.first : level.last]
        assert len(current) == level.last - level.first
        inner = current if level.inner is None else [current[i] for i in level.inner.tolist()]
        inner_nodes = [tokens.index(path) for path in inner]
        # the root is node 1 of `inner_nodes`
        columns_after_root = list(range(level.inner_first - 1, level.inner_last - 1))
        assert levels.inner_index[inner_nodes].tolist() == columns_after_root
        table = [(*path, rank) for path in inner for rank in range(level.width)]
        children = [table[index] for index in level.candidates.tolist()]
        assert [path[:-1] for path in children] == [
            inner[parent] for parent in level.parents.tolist()
        ]
        tokens += children
    assert tokens == [(), *tree.paths]


def test_inner_nodes_are_numbered_and_form_a_tree_below_the_position_before_the_root() -> None:
    levels = TreeLevels(TREES["sparse"])
    assert levels.inner_index.tolist() == [0, 1, 0, 2, 0, 0, 3, 0, 0, 0]
    inner = [node for node, children in enumerate(levels.tree.children) if children]
    assert inner == [0, 1, 3, 6]
    paths = [levels.tree.paths[node - 1] for node in inner[1:]]
    assert levels.inner_nodes.paths == ((0,), *[(0, *path) for path in paths])
    assert [level.inner is None for level in levels.levels] == [True, False, False, False]


def test_masks_of_inner_nodes_follow_the_committed_columns() -> None:
    """Nodes 1, 3 and 6: two children of the root, and a child of the first of them."""
    levels = TreeLevels(TREES["sparse"])
    ranges = [(level.inner_first, level.inner_last) for level in levels.levels]
    assert ranges == [(1, 2), (2, 4), (4, 5), (5, 5)]
    masks = levels.inner_masks(None, torch.float32)
    assert levels.inner_masks(None, torch.float32) is masks
    seen = masks.at(torch.tensor([1]), 7)[0, 0] == 0  # one committed column
    assert seen.long().tolist() == [
        [1, 1, 0, 0, 0, 0, 0],  # the position before the root
        [1, 1, 1, 0, 0, 0, 0],  # the root
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 1, 0],
    ]


def test_masks_may_begin_before_the_first_column() -> None:
    """After a prompt of one token, there is no column before an EAGLE-3 layer's root."""
    masks = TreeLevels(Tree.chain(2)).inner_masks(None, torch.float32)
    seen = masks.at(torch.tensor([-1]), 3)[0, 0] == 0
    assert seen[1:].long().tolist() == [[1, 0, 0], [1, 1, 0]]


def test_truncated_trees() -> None:
    tree = TREES["sparse"]
    levels = TreeLevels(tree)
    assert levels.truncate(3) is tree
    assert levels.truncate(1).paths == ((0,), (1,), (2,), (5,))
    assert levels.truncate(2) is levels.truncate(2)
    assert levels.truncate(2).paths == tree.paths[:8]


def test_a_tree_keeps_its_levels() -> None:
    tree = Tree.chain(2)
    levels = levels_of(tree)
    assert levels is levels_of(tree)
    assert levels.tree is tree
    assert levels_of(Tree.chain(2)).tree is not tree  # equal, but perhaps on another device
