"""Trees that differ between rows and steps; drafts that copy text propose such trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from medusa_train.trees.tree import Nodes


class RowTrees:
    """One tree per row, padded to the size of the largest one.

    Unlike `Tree`, which is built once, this is built in every step, so it holds only what
    verification reads. Padding nodes come after a row's nodes. They are children of the root that
    `row` does not list, so they are never accepted.

    Args:
        parents: for each row, the parent of every node; -1 for the root, which comes first. Parents
            come before children.
        device: device of the tensors.

    Attributes:
        size: number of nodes of the largest tree without the root, n.
        parents, depths: parent and depth of every node, long [B, n + 1].
        ancestors: bool [B, n + 1, n + 1]: row i is true at node i and its ancestors, the root
            included.
    """

    def __init__(self, parents: Sequence[Sequence[int]], device: torch.device) -> None:
        self._rows = [Nodes(list(row_parents)) for row_parents in parents]
        self.size = max(tree.size for tree in self._rows)

        # 1. parents and depths, padded with children of the root
        padded_parents: list[list[int]] = []
        padded_depths: list[list[int]] = []
        for tree in self._rows:
            padding = self.size - tree.size
            padded_parents.append(tree.parent_list + [0] * padding)
            padded_depths.append(tree.depth_list + [1] * padding)
        self.parents = torch.tensor(padded_parents, device=device)
        self.depths = torch.tensor(padded_depths, device=device)

        # 2. ancestors
        ancestors = np.stack([tree.ancestor_rows(self.size + 1) for tree in self._rows])
        self.ancestors = torch.from_numpy(ancestors).to(device)

    def row(self, index: int) -> Nodes:
        """Return the tree of a row, without padding."""
        return self._rows[index]


@dataclass
class TokenTree:
    """Draft tokens as a growing tree (a trie): continuations with a common prefix share its nodes.

    Attributes:
        tokens: token of every node, the root's first.
        parents: parent of every node; -1 for the root.
        counts: for every node, how many of the added continuations pass through it.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * len(self.tokens)
        self._children: dict[tuple[int, int], int] = {}  # node by parent and token
        edges = zip(self.parents[1:], self.tokens[1:], strict=True)
        for node, edge in enumerate(edges, start=1):
            self._children[edge] = node

    @property
    def size(self) -> int:
        """Number of nodes without the root."""
        return len(self.tokens) - 1

    def find(self, parent: int, token: int) -> int | None:
        """Return the child of `parent` with this token; None if there is none."""
        return self._children.get((parent, token))

    def child(self, parent: int, token: int) -> int:
        """Return the child of `parent` with this token; add it if there is none."""
        new_node = len(self.tokens)
        node = self._children.setdefault((parent, token), new_node)
        if node == new_node:
            self.tokens.append(token)
            self.parents.append(parent)
            self.counts.append(0)
        return node

    def add(self, continuation: Sequence[int]) -> None:
        """Add a continuation of the root, and add 1 to the counts of its nodes."""
        node = 0
        for token in continuation:
            node = self.child(node, token)
            self.counts[node] += 1

    def most_frequent(self, size: int) -> TokenTree:
        """Return the tree of the `size` most frequent nodes; ties go to the shallower node, then to
        the node added first.

        A node is never more frequent than its parent, so the parents of kept nodes are kept too.
        """
        if self.size <= size:
            return self
        depths = Nodes(self.parents).depth_list

        def rank(node: int) -> tuple[int, int, int]:
            return -self.counts[node], depths[node], node

        nodes = sorted(range(1, len(self.tokens)), key=rank)
        return self.subset(nodes[:size])

    def subset(self, nodes: Iterable[int]) -> TokenTree:
        """Return the tree of the root and `nodes`, which must include their parents."""
        kept_nodes = [0, *sorted(nodes)]
        index = {node: i for i, node in enumerate(kept_nodes)}
        tokens = [self.tokens[node] for node in kept_nodes]
        parents = [-1]
        for node in kept_nodes[1:]:
            parents.append(index[self.parents[node]])
        counts = [self.counts[node] for node in kept_nodes]
        return TokenTree(tokens, parents, counts)

    def merge(self, other: TokenTree) -> None:
        """Add the nodes of another tree with the same root; equal paths share their nodes."""
        nodes = [0]  # for each node of the other tree, its node in this tree
        for parent, token in zip(other.parents[1:], other.tokens[1:], strict=True):
            nodes.append(self.child(nodes[parent], token))
