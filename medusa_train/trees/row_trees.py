"""Trees that differ between rows and steps, as drafts that copy text propose them, and tokens run
beside a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medusa_train.trees.tree import Nodes, Tree


class RowTrees:
    """One tree per row, padded to the nodes of the largest one.

    Unlike `Tree`, which is built once, this is built in every step, so it holds only what
    verification reads. Padding comes after a row's nodes and counts as children of the root that
    `row` does not list, so it is never accepted.

    Args:
        parents: per row the parent of every node; -1 for the root, which comes first. Parents come
            before children.

    Attributes:
        size: nodes of the largest tree without the root, n. max_depth: of the deepest tree.
        parents, depths: long [B, n + 1].
        ancestors: bool [B, n + 1, n + 1]: row i is true at node i and its ancestors, the root
            included.
    """

    def __init__(self, parents: Sequence[Sequence[int]], device: torch.device) -> None:
        self._rows = [_RowTree(row) for row in parents]
        self.size = max(row.size for row in self._rows)
        self.max_depth = max(max(row.depth_list) for row in self._rows)
        shape = len(parents), self.size + 1
        self.parents = torch.tensor(
            [[*row, *[0] * (shape[1] - len(row))] for row in parents], device=device
        )
        self.depths = torch.tensor(
            [row.depth_list + [1] * (self.size - row.size) for row in self._rows], device=device
        )
        ancestors = np.zeros((*shape, shape[1]), dtype=np.bool_)
        ancestors[:, range(shape[1]), range(shape[1])] = True
        ancestors[:, :, 0] = True
        for mask, row in zip(ancestors, self._rows, strict=True):
            for node, parent in enumerate(row.parent_list[1:], start=1):
                mask[node] |= mask[parent]
        self.ancestors = torch.from_numpy(ancestors).to(device)

    def row(self, index: int) -> Nodes:
        """Return the tree of a row, without padding."""
        return self._rows[index]


class _RowTree(Nodes):
    def __init__(self, parents: Sequence[int]) -> None:
        self.parent_list = list(parents)


@dataclass
class TokenTree:
    """Guessed tokens as a tree that grows: equal continuations share their nodes.

    Attributes:
        tokens: of every node, the root's first. parents: of every node; -1 for the root.
        counts: how many of the added continuations pass through a node.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * len(self.tokens)
        edges = zip(self.parents[1:], self.tokens[1:], strict=True)
        self._children = {edge: node for node, edge in enumerate(edges, start=1)}

    @property
    def size(self) -> int:
        """Number of nodes without the root."""
        return len(self.tokens) - 1

    def find(self, parent: int, token: int) -> int | None:
        """Return the child of `parent` with this token; None if there is none."""
        return self._children.get((parent, token))

    def child(self, parent: int, token: int) -> int:
        """Return the child of `parent` with this token, added if there is none."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.counts.append(0)
        return node

    def add(self, continuation: Sequence[int]) -> None:
        """Add a continuation of the root, and count its nodes."""
        node = 0
        for token in continuation:
            node = self.child(node, token)
            self.counts[node] += 1

    def most_frequent(self, size: int) -> TokenTree:
        """Return the tree of the `size` most frequent nodes; ties go to the shallower, then to the
        one added first.

        A node is never more frequent than its parent, so parents are kept with their children.
        """
        if self.size <= size:
            return self
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        order = sorted(
            range(1, len(self.tokens)), key=lambda node: (-self.counts[node], depths[node], node)
        )
        return self.subset(order[:size])

    def subset(self, nodes: Iterable[int]) -> TokenTree:
        """Return the tree of the root and `nodes`, which must include their parents."""
        kept = [0, *sorted(nodes)]
        index = {node: i for i, node in enumerate(kept)}
        parents = [-1, *(index[self.parents[node]] for node in kept[1:])]
        return TokenTree(
            [self.tokens[node] for node in kept], parents, [self.counts[node] for node in kept]
        )

    def merge(self, other: TokenTree) -> None:
        """Add the nodes of another tree below the same root; equal children are one node."""
        nodes = [0]
        for parent, token in zip(other.parents[1:], other.tokens[1:], strict=True):
            nodes.append(self.child(nodes[parent], token))


class BranchLayout(Nodes):
    """Positions and mask of a lookahead branch: tokens below the root of every row, beside its
    tree.

        committed  root  tree  branch        x attends to, . does not,
        x x x x x   x     a     .    node    a attends to its ancestors and itself
        x x x x x   x     .     a    branch

    Branch tokens are never accepted, and their keys and values are dropped after the pass.

    Args:
        parents: of every branch token the index of its parent among them, or -1 for the root;
            parents come first.
        outputs: the draft reads the backbone's logits at this many of them, the last ones.

    Attributes:
        size: number of branch tokens, m. max_depth: of the deepest one; the root has depth 0.
        depths: long [m].
        ancestors: bool [m, m]: row i is true at branch token i and its ancestors, without the root.
    """

    def __init__(self, parents: Sequence[int], outputs: int, device: torch.device) -> None:
        self.parent_list = [-1, *(parent + 1 for parent in parents)]  # the root is node 0
        self.outputs = outputs
        self.max_depth = max(self.depth_list)
        self.depths = torch.tensor(self.depth_list[1:], device=device)
        ancestors = torch.eye(self.size, dtype=torch.bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                ancestors[row] |= ancestors[parent]
        self.ancestors = ancestors.to(device)


class LookaheadBranch(NamedTuple):
    """The branch of one proposal: its tokens, long [B, m], and the layout of every row."""

    tokens: Tensor
    layout: BranchLayout


class TreeAndBranch:
    """The nodes of a tree, or of one tree per row of the batch, followed by branch tokens: what one
    pass computes.

    Attributes:
        size: without the root, n + m. max_depth: of the deepest one.
        depths: long [1 or B, n + 1 + m].
        ancestors: bool [1 or B, n + 1 + m, n + 1 + m]: row i is true where i attends to.
    """

    def __init__(self, tree: Tree | RowTrees, branch: BranchLayout) -> None:
        nodes, self.size = tree.size + 1, tree.size + branch.size
        self.max_depth = max(tree.max_depth, branch.max_depth)
        depths = torch.atleast_2d(tree.depths)
        self.depths = torch.cat([depths, branch.depths.expand(len(depths), -1)], dim=1)
        self.ancestors = branch.ancestors.new_zeros(len(depths), self.size + 1, self.size + 1)
        self.ancestors[:, :nodes, :nodes] = tree.ancestors
        self.ancestors[:, :, 0] = True
        self.ancestors[:, nodes:, nodes:] = branch.ancestors
