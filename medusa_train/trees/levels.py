"""A token tree by levels, for drafts that predict one level after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from medusa_train.trees.masks import NodeMasks
from medusa_train.trees.tree import Ranks, Tree

#: Number of nodes of `TreeLevels.inner_nodes` that are not below the tree's root: the position
#: before the root, and the root itself.
_TO_ROOT = 2


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

    Inner nodes are nodes with children.

    Attributes:
        first, last: the level has nodes first .. last - 1.
        inner: indices within the level of its m inner nodes, long [m]; None: all nodes are inner.
        inner_first, inner_last: the level has inner nodes inner_first .. inner_last - 1, counted
            over the whole tree.
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

    @property
    def inner_below_root(self) -> slice:
        """The range of the level's inner nodes among all inner nodes below the root. Not for the
        root's level.
        """
        return slice(self.inner_first - 1, self.inner_last - 1)


class TreeLevels:
    """A tree by levels, for drafts that predict one level after the other; tensors are on the
    tree's device.

    Inner nodes are nodes with children. They are counted in three ways; for the tree of `Level`:

                                          .    root   a   b   c   d   e
        nodes of the tree                      0      1   2   3   4   5
        inner nodes                            0      1   2                inner_index, inner_first
        below the root                                0   1                inner_below_root
        nodes of `inner_nodes`            0    1      2   3

    where . is the position before the root.

    Attributes:
        tree: the whole tree.
        levels: one per depth, the root's first.
        inner_index: index of every node among the inner nodes, long [n + 1]; 0 for a leaf.
        inner_nodes: the inner nodes as a tree of their own, whose root is the position before the
            given tree's root. Kangaroo's adapter runs over these nodes.
        inner_depths: depths in the tree of the inner nodes below the root, long [inner]; 1 for
            children of the root.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._device = tree.depths.device
        # 1. the inner nodes, in the order of the tree
        inner = [node for node, children in enumerate(tree.children) if children]
        place_of = {node: place for place, node in enumerate(inner)}
        self.inner_index = self._long([place_of.get(node, 0) for node in range(tree.size + 1)])
        # 2. the same as a tree: below the position before the root, whose only child is the root
        paths: list[Ranks] = [(0,)]
        for node in inner:
            if node != 0:
                paths.append((0, *tree.paths[node - 1]))
        self.inner_nodes = Tree(tuple(paths)).to(self._device)
        # subtract 1: in `inner_nodes`, the position before the root has depth 0
        self.inner_depths = self.inner_nodes.depths[_TO_ROOT:] - 1
        # 3. the levels; the nodes of a level are consecutive
        firsts = [tree.depth_list.index(depth) for depth in range(tree.max_depth + 1)]
        self.levels: list[Level] = []
        for first, last in pairwise([*firsts, tree.size + 1]):
            self.levels.append(self._level(first, last, place_of))
        self._truncated: dict[int, Tree] = {tree.max_depth: tree}
        self._masks: dict[tuple[int, int | None, torch.dtype], NodeMasks] = {}

    def _long(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _level(self, first: int, last: int, place_of: dict[int, int]) -> Level:
        """Return the level of the nodes first .. last - 1; `place_of` maps each inner node to its
        index among all inner nodes.
        """
        # 1. its inner nodes
        inner = [node for node in range(first, last) if node in place_of]
        inner_first = len(place_of)
        if inner:
            inner_first = place_of[inner[0]]
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
        return self._kept_masks(0, window, dtype)

    def inner_masks_below_root(self, dtype: torch.dtype) -> NodeMasks:
        """Return the masks of the inner nodes below the root; the same object every time. The
        root's column counts as the last committed one.
        """
        return self._kept_masks(_TO_ROOT, None, dtype)

    def _kept_masks(self, skip: int, window: int | None, dtype: torch.dtype) -> NodeMasks:
        """Return the masks of `inner_nodes`, where the first `skip` count as committed."""
        key = (skip, window, dtype)
        if key not in self._masks:
            ancestors = self.inner_nodes.ancestors[skip:, skip:]
            depths = self.inner_nodes.depths[skip:] - skip
            self._masks[key] = NodeMasks(ancestors, depths, window, dtype)
        return self._masks[key]

    def truncate(self, depth: int) -> Tree:
        """Return the tree down to `depth`; the same object every time."""
        if depth not in self._truncated:
            nodes = self.levels[depth].last  # number of nodes, the root included
            self._truncated[depth] = Tree(self.tree.paths[: nodes - 1]).to(self._device)
        return self._truncated[depth]
