"""A tree level by level: every node is found again below its parent."""

from __future__ import annotations

import pytest

from medusa_train.trees.levels import Levels
from medusa_train.trees.tree import Tree

TREES = {
    "chain": Tree.chain(3),
    "full": Tree.cartesian([3, 2, 2]),
    "sparse": Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (2, 0), (2, 1), (0, 3, 1)]),
}


@pytest.mark.parametrize("name", TREES)
def test_guesses_by_rank_rebuild_every_path(name: str) -> None:
    """Let the guess of rank r below a node be its path and r: then each node's token is its own path."""
    tree = TREES[name]
    levels = Levels(tree)
    tokens: list[tuple[int, ...]] = [()]
    for level in levels.levels:
        here = tokens[level.first : level.last]
        assert len(here) == level.last - level.first
        inner = here if level.inner is None else [here[i] for i in level.inner.tolist()]
        assert [levels.inner[i].item() for i in range(level.inner_first, level.inner_last)] == [
            tokens.index(path) for path in inner
        ]
        table = [(*path, rank) for path in inner for rank in range(level.width)]
        below = [table[place] for place in level.guesses.tolist()]
        assert [path[:-1] for path in below] == [inner[parent] for parent in level.parents.tolist()]
        tokens += below
    assert tokens == [(), *tree.paths]


def test_inner_nodes_have_columns_and_leaves_none() -> None:
    levels = Levels(TREES["sparse"])
    assert levels.columns == [0, 1, None, 2, None, None, 3, None, None, None]
    assert levels.inner.tolist() == [0, 1, 3, 6]
    assert [level.inner is None for level in levels.levels] == [True, False, False, False]


def test_a_tree_cut_short() -> None:
    tree = TREES["sparse"]
    levels = Levels(tree)
    assert levels.cut(3) is tree
    assert levels.cut(1).paths == ((0,), (1,), (2,), (5,))
    assert levels.cut(2) is levels.cut(2)
    assert levels.cut(2).paths == tree.paths[:8]
