"""A tree taken level by level, for drafts that look at a node before they guess below it; knows no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, and how the next depth hangs on them.

    Attributes:
        first, last: the nodes are first .. last - 1.
        inner: places within the level of the nodes that have children, long [m]; None: all of them.
        inner_first, inner_last: their places among all inner nodes of the tree.
        width: how many of the best guesses below an inner node the tree reads at most.
        parents: for every node of the next level the place of its parent in `inner`, long [next].
        guesses: for every node of the next level its place in the flat [m x width] table of guesses, long [next].
    """

    first: int
    last: int
    inner: Tensor | None
    inner_first: int
    inner_last: int
    width: int
    parents: Tensor
    guesses: Tensor


class Levels:
    """The levels of a tree, the root's first, with tensors on the tree's device.

    Attributes:
        tree: the whole one. levels: one per depth.
        columns: for every node its place among the inner nodes, None for a leaf.
        inner: the inner nodes, long [m].
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._device = tree.depths.device
        depths = [0, *(len(path) for path in tree.paths)]
        inner = [node for node, below in enumerate(tree.children) if below]
        places = {node: place for place, node in enumerate(inner)}
        self.columns: list[int | None] = [places.get(node) for node in range(tree.size + 1)]
        self.inner = self._long(inner)
        ends = [depths.index(depth) for depth in range(tree.max_depth + 1)] + [tree.size + 1]
        self.levels = [self._level(ends[depth], ends[depth + 1], places) for depth in range(tree.max_depth + 1)]
        self._cut: dict[int, Tree] = {tree.max_depth: tree}

    def _long(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _level(self, first: int, last: int, places: dict[int, int]) -> Level:
        inner = [node for node in range(first, last) if node in places]
        below = [child for node in inner for child in self.tree.children[node]]
        start = places[inner[0]] if inner else len(places)
        parents = [places[self.tree.parent_list[child]] - start for child in below]
        ranks = [self.tree.paths[child - 1][-1] for child in below]
        width = max(ranks, default=-1) + 1
        return Level(
            first,
            last,
            None if len(inner) == last - first else self._long([node - first for node in inner]),
            start,
            start + len(inner),
            width,
            self._long(parents),
            self._long([parent * width + rank for parent, rank in zip(parents, ranks, strict=True)]),
        )

    def cut(self, depth: int) -> Tree:
        """The tree's first `depth` levels below the root; the same object every time."""
        if depth not in self._cut:
            paths = self.tree.paths[: self.levels[depth].last - 1]
            self._cut[depth] = Tree(paths).to(self._device)
        return self._cut[depth]
