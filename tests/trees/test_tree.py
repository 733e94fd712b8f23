"""Trees: order, parents, ancestor masks and files."""

import json
from pathlib import Path

import pytest
import torch

from medusa_train.errors import CheckpointError, DataError
from medusa_train.trees.tree import Tree


def test_a_small_tree_written_out() -> None:
    tree = Tree.from_paths([(1,), (0, 2), (0,), (0, 2, 1)])
    assert tree.paths == ((0,), (1,), (0, 2), (0, 2, 1))
    assert tree.parent_list == [-1, 0, 0, 1, 3]
    assert tree.children == [[1, 2], [3], [], [4], []]
    assert tree.depths.tolist() == [0, 1, 1, 2, 3]
    assert tree.ranks.tolist() == [0, 0, 1, 2, 1]
    assert (tree.size, tree.max_depth, tree.width) == (4, 3, 3)
    # index of each candidate in a [3 heads x 3 ranks] table
    assert tree.candidate_index.tolist() == [0, 1, 3 + 2, 6 + 1]
    assert tree.ancestors.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_a_cartesian_tree_has_the_size_that_the_paper_gives() -> None:
    for choices in ([2, 3], [4, 2, 2], [1, 1, 1, 1, 1], [3]):
        product, expected = 1, 0
        for count in choices:
            product *= count
            expected += product
        tree = Tree.cartesian(choices)
        assert tree.size == expected
        assert tree.ancestors.sum(1).tolist() == [1 + depth for depth in tree.depths.tolist()]


def test_chain_and_empty() -> None:
    assert Tree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    empty = Tree.empty()
    assert (empty.size, empty.max_depth, empty.width) == (0, 0, 0)
    assert torch.equal(empty.ancestors, torch.ones(1, 1, dtype=torch.bool))


def test_orphans_negative_ranks_and_the_root_are_rejected() -> None:
    with pytest.raises(DataError, match=r"\[0, 1\] has no parent: add \[0\]"):
        Tree.from_paths([(1,), (0, 1)])
    for bad in ([()], [(-1,)]):
        with pytest.raises(DataError, match="invalid tree path"):
            Tree.from_paths(bad)


def test_files_round_trip_and_broken_ones_are_rejected(tmp_path: Path) -> None:
    tree = Tree.cartesian([2, 2])
    path = tmp_path / "tree.json"
    tree.save(path, note="x")
    record = json.loads(path.read_text())
    assert record["medusa_choices"] == [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
    assert record["note"] == "x"
    assert Tree.load(path) == tree
    path.write_text("[[0], [0, 0]]")
    assert Tree.load(path) == Tree.chain(2)
    for broken in ("[[0, 0]]", "{", '{"tree": []}', "7", "[[0], [0]]"):
        path.write_text(broken)
        with pytest.raises(CheckpointError, match="not a tree file"):
            Tree.load(path)
    for paths in ("null", '"[[0]]"', "[0, 1]"):
        path.write_text(f'{{"medusa_choices": {paths}}}')
        with pytest.raises(CheckpointError, match="its paths are not a list of lists"):
            Tree.load(path)
    with pytest.raises(CheckpointError, match="no such tree file"):
        Tree.load(tmp_path / "other.json")


@pytest.mark.parametrize("paths", ["[[1e999]]", "[[1.5]]", "[[true]]", '[["a"]]', "7", '{"a": 1}'])
def test_ranks_that_are_no_numbers_are_refused(paths: str, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(paths)
    with pytest.raises(CheckpointError, match="not a tree file"):
        Tree.load(tmp_path / "tree.json")
