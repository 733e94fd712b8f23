"""Token trees: their paths, parents, depths and ancestor mask, and the tree.json file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_train.errors import CheckpointError, DataError
from medusa_train.io import parse_json, replace_text

#: A path from the root: the rank of each node among its siblings' top-k candidates.
Ranks = tuple[int, ...]


class Nodes:
    """A rooted tree, given by the parent of every node.

    Attributes:
        parent_list: parent of every node, length n + 1; -1 for the root, node 0. Parents come
            before their children.
    """

    def __init__(self, parent_list: list[int]) -> None:
        self.parent_list = parent_list

    @property
    def size(self) -> int:
        """Number of nodes without the root."""
        return len(self.parent_list) - 1

    @cached_property
    def depth_list(self) -> list[int]:
        """Depth of every node, length n + 1; 0 for the root."""
        depths = [0]
        for parent in self.parent_list[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of every node in increasing order, length n + 1."""
        children: list[list[int]] = [[] for _ in self.parent_list]
        for node, parent in enumerate(self.parent_list[1:], start=1):
            children[parent].append(node)
        return children

    def ancestor_rows(self, count: int) -> NDArray[np.bool_]:
        """Return a mask [count, count], on the host: row i is true at node i and its ancestors, the
        root included. Nodes after those of this tree are padding: children of the root.
        """
        mask = np.eye(count, dtype=np.bool_)
        mask[:, 0] = True
        for node, parent in enumerate(self.parent_list[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def path_nodes(self, node: int) -> list[int]:
        """Return the nodes from the root (0) to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parent_list[node]
        return nodes[::-1]


@dataclass(frozen=True)
class Tree(Nodes):
    """A prefix-closed set of paths of top-k ranks (Medusa, "Tree Attention").

    The path `(0, 2)` is the most likely token of head 1 followed by the third most likely token of
    head 2. The root (the last token) is not listed in `paths` and has index 0 in every tensor; node
    i >= 1 is `paths[i - 1]`. Paths are sorted by depth and then by rank, so parents come before
    their children.
    """

    paths: tuple[Ranks, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Build a tree from paths in any order.

        Raises:
            DataError: a path is empty, has a negative rank, or lacks its parent.
        """
        # 1. remove duplicate paths
        unique: set[Ranks] = set()
        for path in paths:
            unique.add(tuple(int(rank) for rank in path))
        # 2. check that the paths form a tree
        for ranks in unique:
            if not ranks or min(ranks) < 0:
                raise DataError(
                    f"invalid tree path {list(ranks)}: ranks start at 0 and the root is not listed"
                )
            parent = ranks[:-1]
            if parent and parent not in unique:
                raise DataError(
                    f"tree path {list(ranks)} has no parent: add {list(parent)} to the tree"
                )
        # 3. sort by depth, then by rank
        ordered = sorted(unique, key=lambda ranks: (len(ranks), ranks))
        return cls(tuple(ordered))

    @classmethod
    def cartesian(cls, choices: Sequence[int]) -> Tree:
        """Build the dense tree with the top `choices[k]` candidates of head k + 1 under every node
        of depth k.
        """
        ranks = [range(count) for count in choices]  # ranks of each head
        paths: list[Ranks] = []
        for depth in range(1, len(choices) + 1):
            paths.extend(itertools.product(*ranks[:depth]))
        return cls.from_paths(paths)

    @classmethod
    def chain(cls, length: int) -> Tree:
        """Build a chain of the top-1 candidates of the first `length` heads."""
        return cls.cartesian([1] * length)

    @classmethod
    def empty(cls) -> Tree:
        """Build the tree without nodes below the root, for plain decoding."""
        return cls(())

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node, which is the number of heads used; 0 for the empty tree."""
        return max((len(path) for path in self.paths), default=0)

    @cached_property
    def width(self) -> int:
        """Number of top-k candidates used per head (largest rank + 1); 0 for the empty tree."""
        largest = max((max(path) for path in self.paths), default=-1)
        return largest + 1

    @cached_property
    def parent_list(self) -> list[int]:  # type: ignore[override]
        """Parent of every node, length n + 1; -1 for the root."""
        node_of: dict[Ranks, int] = {(): 0}
        parents = [-1]
        for node, path in enumerate(self.paths, start=1):
            node_of[path] = node
            parents.append(node_of[path[:-1]])
        return parents

    def row(self, index: int) -> Nodes:
        """Return this tree, which is the tree of every row; see `RowTrees.row`."""
        return self

    @cached_property
    def parents(self) -> Tensor:
        """`parent_list` as a long tensor [n + 1]."""
        return torch.tensor(self.parent_list)

    @cached_property
    def depths(self) -> Tensor:
        """Depth of every node, long [n + 1]; 0 for the root.

        Position ids are prefix length + depth.
        """
        return torch.tensor(self.depth_list)

    @cached_property
    def ranks(self) -> Tensor:
        """Rank of every node among its head's candidates, long [n + 1]; 0 for the root."""
        ranks = [path[-1] for path in self.paths]
        return torch.tensor([0, *ranks])

    @cached_property
    def candidate_index(self) -> Tensor:
        """Index of every node below the root into the flat [max_depth x width] table of candidates,
        long [n].
        """
        heads = self.depths[1:] - 1  # [n], the first head is 0
        return heads * self.width + self.ranks[1:]

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool [n + 1, n + 1]: row i is true at node i and its ancestors, the root included."""
        return torch.from_numpy(self.ancestor_rows(self.size + 1))

    def to(self, device: torch.device) -> Tree:
        """Return the tree with its tensors on `device`, for loops that read them at every step."""
        moved = Tree(self.paths)
        for name in ("parents", "depths", "ranks", "candidate_index", "ancestors"):
            # `cached_property` stores its value in `__dict__`
            moved.__dict__[name] = getattr(self, name).to(device)
        return moved

    def record(self, **meta: Any) -> dict[str, Any]:
        """Return the content of tree.json: `{"medusa_choices": [[0], [0, 0], ...]}`, with `meta` as
        further keys. TensorRT-LLM reads it too.
        """
        return {"medusa_choices": [list(path) for path in self.paths], **meta}

    def save(self, path: Path, **meta: Any) -> None:
        """Write `record(**meta)` to a tree.json file."""
        replace_text(path, json.dumps(self.record(**meta), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Tree:
        """Read a tree.json, or a bare JSON list of paths.

        Raises:
            CheckpointError: the file is missing, not JSON, or not a tree.
        """
        try:
            record = parse_json(path.read_text(encoding="utf-8"))
            paths = record
            if isinstance(record, dict):
                paths = record.get("medusa_choices")
            if not isinstance(paths, list) or not all(isinstance(ranks, list) for ranks in paths):
                raise ValueError("its paths are not a list of lists")
            for ranks in paths:
                for rank in ranks:
                    if type(rank) is not int:  # such as 1.5, true or infinity
                        raise ValueError(f"{rank!r} is not a rank")
            num_unique = len(set(map(tuple, paths)))
            if num_unique < len(paths):
                raise ValueError(f"{len(paths)} paths, of which {num_unique} are different")
            return cls.from_paths(paths)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such tree file") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, DataError) as error:
            raise CheckpointError(
                f"{path}: not a tree file ({error}); expected medusa_choices: [[0], ...]"
            ) from error
