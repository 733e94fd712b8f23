"""What layers of a draft keep while decoding: keys and values, and committed positions that they
have not read yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from medusa_train.trees.kv_cache import BatchCache, RowPaths, TreeCache
from medusa_train.trees.masks import additive_mask, mask_with_prefix

T = TypeVar("T", bound="UnreadRows")


class DecodingLayer(Protocol):
    """A layer with a `LayerCache`."""

    def extend(
        self, states: Tensor, positions: Tensor, cache: TreeCache, mask: Tensor | None = None
    ) -> Tensor:
        """Run q further positions, see `DraftLayer.extend`."""


class LayerCache:
    """The cache of a `DraftLayer` over B rows; it holds exactly the committed positions of each.

    The first `append` is the prefill of the whole prompts; accepted nodes follow after each
    verification pass.

    Args:
        cache: empty, from `TreeCache.single_layer`.
    """

    def __init__(self, cache: TreeCache) -> None:
        self._cache = cache

    @property
    def is_empty(self) -> bool:
        """Whether no row has a committed position."""
        return not self._cache.length

    def append(self, layer: DecodingLayer, states: Tensor, paths: RowPaths) -> Tensor:
        """Run `layer` over q further positions of each row, [B, q, d] -> [B, q, d], and keep the
        first len(paths[b]).

        Args:
            paths: of 1 .. q nodes, in the first call 0 .. q; later positions are padding, in the
                input and in the result.
        """
        cache, q = self._cache, states.shape[1]
        positions = torch.arange(q, device=states.device)[None] + cache.row_lengths(states.device)
        if not cache.length:
            out = layer.extend(states, positions, cache)
            cache.commit_rows([len(path) for path in paths])
            return out
        mask = None
        # rows end at different columns, which the default mask would not respect
        if isinstance(cache, BatchCache):
            mask = mask_with_prefix(cache, states.new_full((q, q), float("-inf")).triu(1))
        out = layer.extend(states, positions, cache, mask)
        cache.keep_rows(paths.ranges())
        return out

    def run_level(
        self, layer: DecodingLayer, states: Tensor, depth: int, visible: Tensor
    ) -> Tensor:
        """Run `layer` over m nodes of a tree, [B, m, ...] -> [B, m, d]; their keys wait for the
        next levels.

        Args:
            depth: of the nodes below the last committed position.
            visible: bool [m, p + m], or [B, m, p + m] if rows differ: which of the p nodes of
                earlier levels, and of these, each attends to.
        """
        cache, (m, columns) = self._cache, visible.shape[-2:]
        positions = cache.row_lengths(states.device) + torch.full(
            (1, m), depth - 1, device=states.device
        )
        mask = mask_with_prefix(cache, additive_mask(visible, states.dtype))
        cache.pending_offset = columns - m
        out = layer.extend(states, positions, cache, mask)
        cache.pending_offset = 0
        return out

    def drop_levels(self) -> None:
        """Drop the nodes of `run_level`."""
        self._cache.drop()

    def select_rows(self, rows: Sequence[int]) -> LayerCache:
        """Keep `rows` only, see `BatchCache.select_rows`."""
        assert isinstance(self._cache, BatchCache)
        self._cache.select_rows(rows)
        return self

    def append_rows(self, other: LayerCache, capacity: int) -> LayerCache:
        """Append the rows of `other`, see `BatchCache.append_rows`; something was appended to both
        before.
        """
        assert isinstance(self._cache, BatchCache)
        assert isinstance(other._cache, BatchCache)
        self._cache.append_rows(other._cache, capacity)
        return self


def gather_paths(states: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Return the states [B, q, d] at each row's nodes, of [B, n + 1, d]; shorter paths are padded
    at the end.
    """
    longest = max(len(path) for path in paths)
    if len(paths) == 1 and paths[0][-1] == longest - 1:
        return states[:, :longest]
    return states[
        torch.arange(len(paths), device=states.device)[:, None],
        RowPaths.of(paths, states.device).nodes,
    ]


def concat_rows(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate the rows of two tensors [B, q, ...]; the rows of the narrower one are padded with
    0 at the end.
    """
    out = first.new_zeros(
        len(first) + len(second), max(first.shape[1], second.shape[1]), *first.shape[2:]
    )
    out[: len(first), : first.shape[1]] = first
    out[len(first) :, : second.shape[1]] = second
    return out


@dataclass
class UnreadRows:
    """The committed positions of B rows that await the next root, the token after their last one.

    Attributes:
        hidden: [B, m, d], the states that the layers read, padded after each row's own.
        following: long [B, m], the token after each position; for a row's last one it is the next
            root, not known yet.
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
        """Return the accepted nodes of the last pass as the unread positions, after these ones were
        read.

        Args:
            states: [B, n + 1, d] at all nodes. tokens: long [B, n + 1]. paths: the accepted nodes,
                the root first.
        """
        paths = RowPaths.of(paths, tokens.device)
        # that of the last node is replaced by the next root
        following = tokens.gather(1, paths.nodes.roll(-1, dims=1))
        return replace(
            self, hidden=gather_paths(states, paths), following=following, paths=paths, read=False
        )

    def with_roots(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens after each position, long [B, m], and the index of each row's last
        position, long [B].
        """
        rows = torch.arange(len(roots), device=roots.device)
        last = self.paths.counts - 1
        return self.following.index_put((rows, last), roots), last

    def select_rows(self: T, rows: Sequence[int]) -> T:
        """Return the positions of `rows`."""
        index, caches = list(rows), [cache.select_rows(rows) for cache in self.caches]
        hidden, following, paths = (
            self.hidden[index],
            self.following[index],
            self.paths.select(rows),
        )
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

    def read_prompts(self: T, read: Callable[[T, RowPaths], object]) -> T:
        """Read unread prompts up to their last positions, which need the roots, so that rows can be
        appended.

        Args:
            read: runs the layers over all positions and keeps the first of each row, as many as its
                path has nodes.
        """
        if not self.caches or not self.caches[0].is_empty:
            return self
        before = RowPaths([range(len(path) - 1) for path in self.paths], self.paths.device)
        read(self, before)  # the last position with any token as the following one
        last = RowPaths([[len(path)] for path in before], self.paths.device)
        hidden, following = gather_paths(self.hidden, last), gather_paths(self.following, last)
        return replace(self, hidden=hidden, following=following, paths=last)
