"""Committed positions that a draft's layers have not read yet, since they also read the token after each position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from medusa_train.models.drafts.layers import LayerCache, concat_rows, gather_paths
from medusa_train.trees.kv_cache import RowPaths, TreeCache

T = TypeVar("T", bound="UnreadRows")


@dataclass
class UnreadRows:
    """The committed positions of B rows that await the next root, the token after their last one.

    Attributes:
        hidden: [B, m, d], the states that the layers read, padded after each row's own.
        following: long [B, m], the token after each position; for a row's last one it is the next root, not known yet.
        paths: nodes that they were, as many per row as it has positions.
        caches: keys and values of each layer before these positions.
        read: whether `propose` has run the layers over these positions.
    """

    hidden: Tensor
    following: Tensor
    paths: RowPaths
    caches: list[LayerCache]
    read: bool = False

    def next(self: T, states: Tensor, tokens: Tensor, paths: Sequence[Sequence[int]]) -> T:
        """Return the accepted nodes of the last pass as the unread positions, after these ones were read.

        Args:
            states: [B, n + 1, d] at all nodes. tokens: long [B, n + 1]. paths: the accepted nodes, the root first.
        """
        paths = RowPaths.of(paths, tokens.device)
        following = tokens.gather(1, paths.nodes.roll(-1, dims=1))  # that of the last node is replaced by the next root
        return replace(self, hidden=gather_paths(states, paths), following=following, paths=paths, read=False)

    def with_roots(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens after each position, long [B, m], and the index of each row's last position, long [B]."""
        rows = torch.arange(len(roots), device=roots.device)
        last = self.paths.counts - 1
        return self.following.index_put((rows, last), roots), last

    def select_rows(self: T, rows: Sequence[int]) -> T:
        """Return the positions of `rows`."""
        index, caches = list(rows), [cache.select_rows(rows) for cache in self.caches]
        hidden, following, paths = self.hidden[index], self.following[index], self.paths.select(rows)
        return replace(self, hidden=hidden, following=following, paths=paths, caches=caches)

    def append_rows(self: T, other: T, cache: TreeCache) -> T:
        """Return the positions of both, whose prompts were read; see `Proposer.append_rows`."""
        caches = zip(self.caches, other.caches, strict=True)
        return replace(
            self,
            hidden=concat_rows(self.hidden, other.hidden),
            following=concat_rows(self.following, other.following),
            paths=RowPaths([*self.paths, *other.paths], self.paths.device),
            caches=[mine.append_rows(theirs, cache.capacity) for mine, theirs in caches],
        )

    def without_prompts(self: T, read: Callable[[T, RowPaths], object]) -> T:
        """Read unread prompts but for their last positions, which need the roots, so that rows can be appended.

        Args:
            read: runs the layers over all positions and keeps the first of each row, as many as its path has nodes.
        """
        if not self.caches or not self.caches[0].is_empty:
            return self
        before = RowPaths([range(len(path) - 1) for path in self.paths], self.paths.device)
        read(self, before)  # the last position with any token as the following one
        last = RowPaths([[len(path)] for path in before], self.paths.device)
        hidden, following = gather_paths(self.hidden, last), gather_paths(self.following, last)
        return replace(self, hidden=hidden, following=following, paths=last)
