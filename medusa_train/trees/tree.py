"""The tree of guesses as paths, parents, depths and a mask; knows nothing of models, tokens or acceptance."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.errors import CheckpointError, DataError
from medusa_train.io import replace_text

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """A prefix-closed set of paths of top-k ranks (Medusa, section 2.1.2, "Tree Attention").

    A path `(0, 2)` is: the best guess of head 1, then the third-best guess of head 2. The root (the backbone's
    own next token) is not listed in `paths` and has index 0 in every tensor; node i >= 1 is `paths[i - 1]`.
    Paths are kept sorted by depth and then by rank, so a parent always stands before its children.
    """

    paths: tuple[Ranks, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Build a tree from `paths`, in any order.

        Raises:
            DataError: a path is empty, holds a negative rank, or its parent is missing.
        """
        unique = {tuple(int(rank) for rank in path) for path in paths}
        for path in unique:
            if not path or min(path) < 0:
                raise DataError(f"tree path {list(path)} is no path: ranks start at 0 and the root is not listed")
            if path[:-1] and path[:-1] not in unique:
                raise DataError(f"tree path {list(path)} has no parent: add {list(path[:-1])} to the tree")
        return cls(tuple(sorted(unique, key=lambda path: (len(path), path))))

    @classmethod
    def cartesian(cls, choices: Sequence[int]) -> Tree:
        """The dense tree with the best `choices[k]` guesses of head k+1 under every node of depth k."""
        levels = range(1, len(choices) + 1)
        return cls.from_paths(
            path for level in levels for path in itertools.product(*(range(s) for s in choices[:level]))
        )

    @classmethod
    def chain(cls, length: int) -> Tree:
        """The top-1 guesses of the first `length` heads, one below the other."""
        return cls.cartesian([1] * length)

    @classmethod
    def empty(cls) -> Tree:
        """No guesses at all: plain decoding."""
        return cls(())

    @property
    def size(self) -> int:
        """Number of nodes without the root."""
        return len(self.paths)

    @cached_property
    def max_depth(self) -> int:
        """Number of heads that the tree reads; 0 for the empty tree."""
        return max((len(path) for path in self.paths), default=0)

    @cached_property
    def width(self) -> int:
        """How many of the best guesses of a head the tree reads at most (largest rank + 1)."""
        return max((max(path) for path in self.paths), default=-1) + 1

    @cached_property
    def parent_list(self) -> list[int]:
        """Parent of every node, the root first with -1; length n + 1."""
        index = {path: i for i, path in enumerate(((), *self.paths))}
        return [-1, *(index[path[:-1]] for path in self.paths)]

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of every node, best rank first; length n + 1."""
        below: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parent_list[1:], start=1):
            below[parent].append(node)
        return below

    def path_nodes(self, node: int) -> list[int]:
        """The nodes from the root (0) down to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parent_list[node]
        return nodes[::-1]

    @cached_property
    def parents(self) -> Tensor:
        """`parent_list` as a long tensor [n + 1]."""
        return torch.tensor(self.parent_list)

    @cached_property
    def depths(self) -> Tensor:
        """Depth of every node, long [n + 1]; the root has 0. A node's position id is prefix length + depth."""
        return torch.tensor([0, *(len(path) for path in self.paths)])

    @cached_property
    def ranks(self) -> Tensor:
        """Rank of every node among its head's guesses, long [n + 1]; the root has 0."""
        return torch.tensor([0, *(path[-1] for path in self.paths)])

    @cached_property
    def candidate_index(self) -> Tensor:
        """For every node below the root its place in the flat [max_depth x width] table of best guesses, long [n]."""
        return (self.depths[1:] - 1) * self.width + self.ranks[1:]

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool [n + 1, n + 1]: row i is true at node i itself and at every ancestor, the root included."""
        mask = torch.eye(self.size + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parent_list[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def to(self, device: torch.device) -> Tree:
        """The same tree with its tensors on `device`, for a loop that reads them at every step."""
        moved = Tree(self.paths)
        for name in ("parents", "depths", "ranks", "candidate_index", "ancestors"):
            moved.__dict__[name] = getattr(self, name).to(device)  # where `cached_property` keeps its value
        return moved

    def record(self, **meta: Any) -> dict[str, Any]:
        """`{"medusa_choices": [[0], [0, 0], ...], **meta}`: the content of tree.json, which TensorRT-LLM reads too."""
        return {"medusa_choices": [list(path) for path in self.paths], **meta}

    def save(self, path: Path, **meta: Any) -> None:
        """Write `record(**meta)` as JSON."""
        replace_text(path, json.dumps(self.record(**meta), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Tree:
        """Read a tree.json, or a bare JSON list of paths.

        Raises:
            CheckpointError: the file is missing, no JSON, or holds no tree.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            paths = record["medusa_choices"] if isinstance(record, dict) else record
            return cls.from_paths(paths)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such tree file") from None
        except (ValueError, KeyError, TypeError, DataError) as error:
            raise CheckpointError(f"{path}: not a tree file ({error}); expected medusa_choices: [[0], ...]") from error


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, and how the next depth hangs on them.

    Attributes:
        first, last: the nodes are first .. last - 1.
        inner: places within the level of the nodes that have children, long [m]; None: all of them.
        inner_first, inner_last: their places among all inner nodes of the tree.
        width: how many of the best guesses below an inner node the tree reads at most.
        parents: for every node of the next level the place of its parent in `inner`, long [next].
        candidates: for every node of the next level its place in the flat [m x width] table of guesses, long [next].
    """

    first: int
    last: int
    inner: Tensor | None
    inner_first: int
    inner_last: int
    width: int
    parents: Tensor
    candidates: Tensor


class TreeLevels:
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

    def truncate(self, depth: int) -> Tree:
        """The tree's first `depth` levels below the root; the same object every time."""
        if depth not in self._cut:
            paths = self.tree.paths[: self.levels[depth].last - 1]
            self._cut[depth] = Tree(paths).to(self._device)
        return self._cut[depth]
