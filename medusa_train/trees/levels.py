"""A token tree by levels, for drafts that predict one level after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from medusa_train.trees.masks import NodeMasks
from medusa_train.trees.tree import Ranks, Tree


def levels_of(tree: Tree) -> TreeLevels:
    """Return the levels of `tree`; the same object every time, which its `__dict__` keeps, as for a
    `cached_property`. `trees.tree` can't have this property: the imports would form a circle.
    """
    if "levels" not in tree.__dict__:
        tree.__dict__["levels"] = TreeLevels(tree)
    levels: TreeLevels = tree.__dict__["levels"]
    return levels


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, and the edges to the next level.

        depth 1 of    root - a - c       first 1, last 3: the nodes a, b
                          `- b - d       inner None: both have children
                               `- e      parents 0 1 1 of c, d, e

    Inner nodes are nodes with children. `TreeLevels.inner_nodes` numbers them.

    Attributes:
        first, last: the level has nodes first .. last - 1.
        inner: indices within the level of its m inner nodes, long [m]; None: all nodes are inner.
        inner_first, inner_last: its inner nodes are nodes inner_first .. inner_last - 1 of
            `TreeLevels.inner_nodes`.
        width: number of top-k candidates used per inner node.
        parents: for every node of the next level, the index of its parent among the m inner nodes,
            long [next].
        candidates: for every node of the next level, its index in the flat [m x width] table of
            candidates, long [next].
    """

    first: int
    last: int
    inner: Tensor | None
    inner_first: int
    inner_last: int
    width: int
    parents: Tensor
    candidates: Tensor

    def at_inner(self, values: Tensor) -> Tensor:
        """Select the inner nodes' values [B, m, ...] from all nodes' values [B, nodes, ...]."""
        return values if self.inner is None else values[:, self.inner]

    def at_next(self, values: Tensor) -> Tensor:
        """Select the next level's values [B, next] from those of all candidates, [B, m, width]."""
        return values.flatten(1)[:, self.candidates]


class TreeLevels:
    """A tree by levels, for drafts that predict one level after the other; tensors are on the
    tree's device.

    Inner nodes are nodes with children. A draft's layer runs over them only, and its KV cache has
    a column for each. For the tree of `Level`, where . is the position before the root:

                                 .    root   a   b   c   d   e
        nodes of `tree`               0      1   2   3   4   5
        nodes of `inner_nodes`   0    1      2   3
        `inner_index`                 0      1   2   0   0   0      columns after the root's

    Attributes:
        tree: the whole tree.
        levels: one per depth, the root's first.
        inner_nodes: the inner nodes as a tree of their own, whose root is the position before the
            given tree's root.
        inner_index: number of columns from the root's to every node's, long [n + 1]; 0 for a leaf.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._device = tree.depths.device
        # 1. the levels; their nodes, and their inner nodes, are consecutive
        firsts = [tree.depth_list.index(depth) for depth in range(tree.max_depth + 1)]
        self.levels: list[Level] = []
        inner_first = 1  # node 0 of `inner_nodes` is the position before the root
        for first, last in pairwise([*firsts, tree.size + 1]):
            level = self._level(first, last, inner_first)
            self.levels.append(level)
            inner_first = level.inner_last
        # 2. the inner nodes
        inner = [node for node, children in enumerate(tree.children) if children]
        index = {node: i for i, node in enumerate(inner)}
        self.inner_index = self._long([index.get(node, 0) for node in range(tree.size + 1)])
        paths: list[Ranks] = [(), *tree.paths]
        self.inner_nodes = Tree(tuple((0, *paths[node]) for node in inner)).to(self._device)
        self._truncated: dict[int, Tree] = {tree.max_depth: tree}
        self._masks: dict[tuple[int | None, torch.dtype], NodeMasks] = {}

    def _long(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _level(self, first: int, last: int, inner_first: int) -> Level:
        """Return the level of the nodes first .. last - 1, whose first inner node is node
        `inner_first` of `inner_nodes`.
        """
        # 1. its inner nodes
        inner = [node for node in range(first, last) if self.tree.children[node]]
        # 2. the next level: parent and rank of each node
        parents: list[int] = []
        ranks: list[int] = []
        for place, node in enumerate(inner):
            for child in self.tree.children[node]:
                parents.append(place)
                ranks.append(self.tree.paths[child - 1][-1])
        # 3. the index of each node in a table with `width` candidates per inner node
        width = max(ranks, default=-1) + 1
        candidates = []
        for parent, rank in zip(parents, ranks, strict=True):
            candidates.append(parent * width + rank)
        inner_in_level: Tensor | None = None
        if len(inner) < last - first:
            inner_in_level = self._long([node - first for node in inner])
        return Level(
            first=first,
            last=last,
            inner=inner_in_level,
            inner_first=inner_first,
            inner_last=inner_first + len(inner),
            width=width,
            parents=self._long(parents),
            candidates=self._long(candidates),
        )

    def inner_masks(self, window: int | None, dtype: torch.dtype) -> NodeMasks:
        """Return the masks of `inner_nodes`; the same object every time."""
        key = (window, dtype)
        if key not in self._masks:
            ancestors, depths = self.inner_nodes.ancestors, self.inner_nodes.depths
            self._masks[key] = NodeMasks(ancestors, depths, window, dtype)
        return self._masks[key]

    def truncate(self, depth: int) -> Tree:
        """Return the tree down to `depth`; the same object every time."""
        if depth not in self._truncated:
            nodes = self.levels[depth].last  # number of nodes, the root included
            self._truncated[depth] = Tree(self.tree.paths[: nodes - 1]).to(self._device)
        return self._truncated[depth]
