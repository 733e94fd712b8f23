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
    def guess_index(self) -> Tensor:
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
        for name in ("parents", "depths", "ranks", "guess_index", "ancestors"):
            moved.__dict__[name] = getattr(self, name).to(device)  # where `cached_property` keeps its value
        return moved

    def record(self, **meta: Any) -> dict[str, Any]:
        """`{"medusa_choices": [[0], [0, 0], ...], **meta}`: the content of tree.json, which TensorRT-LLM reads too."""
        return {"medusa_choices": [list(path) for path in self.paths], **meta}

    def save(self, path: Path, **meta: Any) -> None:
        """Write `record(**meta)` as JSON."""
        path.write_text(json.dumps(self.record(**meta), indent=1) + "\n", encoding="utf-8")

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
