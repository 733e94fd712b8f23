"""A preallocated key-value cache with pending tree nodes and in-place compaction; knows no model and no tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_train.errors import MedusaError


class _Layer(CacheLayerMixin):
    """One layer's window onto the cache's single storage tensor, in the form that transformers asks for."""

    is_sliding = False  # everything is kept; windows are a matter of the mask

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cache.allocate(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return self._cache.capacity


class TreeCache(Cache):
    """Keys and values of all layers in one tensor `[layers, 2, batch, kv_heads, capacity, head_dim]`.

    A forward pass writes its q tokens behind the committed ones, where they stay *pending*: `length` does not
    move. Afterwards `commit(q)` takes all of them (prefill), or `keep(nodes)` takes the accepted ones and drops
    the rest. One tensor for all layers makes the compaction one small copy instead of two per layer.

    Args:
        num_layers: decoder layers of the backbone.
        capacity: positions to allocate: prompt + new tokens + tree.

    Attributes:
        length: committed positions.
        pending_offset: number of pending positions that the next pass keeps, for trees written level by level; 0: the
            next pass overwrites what is pending.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.pending_offset = 0
        self._pending = 0
        self._storage: Tensor | None = None
        self._num_layers = num_layers
        super().__init__(layers=[_Layer(self, i) for i in range(num_layers)])

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make the storage to fit `keys` and `values` [batch, kv_heads, q, head_dim] of the first layer."""
        if keys.shape != values.shape:
            raise MedusaError(
                f"keys {list(keys.shape)} and values {list(values.shape)} of unlike shapes are not supported"
            )
        batch, heads, _, dim = keys.shape
        # zeros: a pass may look at what was never written through a mask, and garbage times 0 can be NaN
        self._storage = keys.new_zeros(self._num_layers, 2, batch, heads, self.capacity, dim)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put q pending positions behind the committed ones and `pending_offset` pending ones.

        Returns:
            All keys and values so far, [.., length + pending_offset + q, ..] each.

        Raises:
            MedusaError: they do not fit into the capacity.
        """
        if self._storage is None:
            self.allocate(keys, values)
        assert self._storage is not None
        start = self.length + self.pending_offset
        end = start + keys.shape[2]
        if end > self.capacity:
            raise MedusaError(f"the cache holds {self.capacity} positions, {end} are needed")
        self._pending = end - self.length
        stored = self._storage[layer, :, :, :, :end]
        stored[0, :, :, start:] = keys
        stored[1, :, :, start:] = values
        return stored[0], stored[1]

    def reserve(self, count: int) -> Tensor:
        """The memory [layers, 2, batch, kv_heads, capacity, head_dim] for a pass that writes `count` positions itself.

        They stand behind the committed ones, pending as after `write`.

        Raises:
            MedusaError: they do not fit into the capacity, or nothing was ever written.
        """
        end = self.length + count
        if self._storage is None or end > self.capacity:
            raise MedusaError(f"the cache holds {self.capacity if self._storage is not None else 0} positions of {end}")
        self._pending = count
        return self._storage

    def commit(self, count: int) -> None:
        """Take the first `count` pending positions over as they lie."""
        if count > self._pending:
            raise MedusaError(f"{count} positions to commit, only {self._pending} are pending")
        self.length += count
        self._pending = 0

    def keep(self, nodes: Sequence[int]) -> None:
        """Take over the pending positions `nodes` (increasing), moved together in place; drop the others."""
        count = len(nodes)
        if count and nodes[-1] >= self._pending:
            raise MedusaError(f"node {nodes[-1]} to keep, only {self._pending} are pending")
        start = next((i for i, node in enumerate(nodes) if node != i), count)
        if start < count:
            assert self._storage is not None
            moved = torch.tensor(nodes[start:], device=self._storage.device) + self.length
            # index_select copies first, so source and target may overlap
            kept = self._storage.index_select(4, moved)
            self._storage[:, :, :, :, self.length + start : self.length + count] = kept
        self.length += count
        self._pending = 0

    def commit_rows(self, lengths: Sequence[int]) -> None:
        """`commit` for the single row, with the signature of `BatchCache.commit_rows`."""
        self.commit(lengths[0])

    def keep_rows(self, paths: Sequence[Sequence[int]]) -> None:
        """`keep` for the single row, with the signature of `BatchCache.keep_rows`."""
        self.keep(paths[0])

    def row_lengths(self, device: torch.device) -> int | Tensor:
        """Committed positions per row: a number for the single row, which costs no transfer; else long [B, 1]."""
        return self.length

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        self.length = 0
        self._pending = 0


_BLOCK = 256  # positions; memory that has to grow does so by whole blocks, so that it seldom has to


class BatchCache(TreeCache):
    """A `TreeCache` whose row b holds `lengths[b]` committed positions, at columns 0 .. lengths[b] - 1.

        row 0  a a a a a a a a P P P       a committed, P pending, - neither: nobody may attend to these columns
        row 1  b b b b b - - - P P P       (`padding_mask`)
                               ^ length

    Pending positions stand behind the longest row, at the same columns in all, so that a pass writes them in one piece.
    What is kept of them moves to the end of its own row. The memory of rows that have left is kept for those that join.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(num_layers, capacity)
        self.lengths: list[int] = []
        self._memory: Tensor | None = None  # of which `_storage` is the first rows

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make the storage, see `TreeCache.allocate`."""
        super().allocate(keys, values)
        self._memory = self._storage

    def commit_rows(self, lengths: Sequence[int]) -> None:
        """Take the first `lengths[b]` pending positions of each row over as they lie: prompts, padded behind.

        Raises:
            MedusaError: a prompt is longer than what was written.
        """
        if max(lengths) > self._pending:
            raise MedusaError(f"{max(lengths)} positions to commit, only {self._pending} are pending")
        self.lengths = list(lengths)
        self.length = max(lengths)
        self._pending = 0

    def keep_rows(self, paths: Sequence[Sequence[int]]) -> None:
        """Take over the pending positions `paths[b]` (increasing) of each row, and drop the others.

        Raises:
            MedusaError: a node is not pending.
        """
        last = max(path[-1] for path in paths)
        if last >= self._pending:
            raise MedusaError(f"node {last} to keep, only {self._pending} are pending")
        # Rows that keep less copy their last node again and again: it lands behind their end, where nobody reads.
        count = max(len(path) for path in paths)
        source = [[self.length + path[min(i, len(path) - 1)] for i in range(count)] for path in paths]
        target = [[own + i for i in range(count)] for own in self.lengths]
        if source != target:
            self._move(source, target)
        self.lengths = [own + len(path) for own, path in zip(self.lengths, paths, strict=True)]
        self.length = max(self.lengths)
        self._pending = 0

    def _move(self, source: list[list[int]], target: list[list[int]]) -> None:
        assert self._storage is not None
        device = self._storage.device
        rows = torch.arange(len(source), device=device)[:, None]
        there = torch.tensor(target, device=device)  # [B, count]
        # copied first, so source and target may overlap
        if len(source[0]) == 1 and source.count(source[0]) == len(source):
            # one column of all rows, as in plain decoding, takes half the time as a slice
            kept = self._storage[:, :, :, :, source[0][0], None].clone().permute(2, 4, 0, 1, 3, 5)
        else:
            kept = self._storage[:, :, rows, :, torch.tensor(source, device=device)]
        self._storage[:, :, rows, :, there] = kept

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with `rows` alone; row i becomes what was row rows[i].

        In place: a row may only move to the place of one that is given up or has moved before (rows[i] >= i). Before
        anything was written there is nothing to move.
        """
        for row, was in enumerate(rows):
            if was < row:
                raise ValueError(f"row {was} can't move up to {row}")
            if was != row and self._storage is not None:
                used = self.lengths[was]
                self._storage[:, :, row, :, :used] = self._storage[:, :, was, :, :used]
        if self._storage is not None:
            self._storage = self._storage[:, :, : len(rows)]
        self.lengths = [self.lengths[was] for was in rows]
        self.length = max(self.lengths, default=0)

    def append_rows(self, other: BatchCache, capacity: int) -> None:
        """Let the rows of `other` follow one's own, with copies of what they have committed.

        Args:
            other: of the same backbone; it is not changed. capacity: positions that a row needs from now on.

        Raises:
            ValueError: positions are pending here, where the next pass would look for them; or nothing was ever written
                in either.
        """
        if self._pending:
            raise ValueError(f"{self._pending} positions are pending; keep or drop them before rows join")
        if other._storage is None:
            raise ValueError("nothing was written in the cache whose rows are to join")
        rows, used = len(self.lengths), other.length
        memory = self._grow(rows + len(other.lengths), max(capacity, used))
        self._storage = memory[:, :, : rows + len(other.lengths)]
        self._storage[:, :, rows:, :, :used] = other._storage[:, :, :, :, :used]
        self.lengths = [*self.lengths, *other.lengths]
        self.length = max(self.lengths)

    def _grow(self, rows: int, capacity: int) -> Tensor:
        """The memory for so many rows of so many positions, with what is there in its place."""
        if self._memory is None:
            raise ValueError("nothing was written in the cache that rows are to join")
        layers, two, held, heads, _, dim = self._memory.shape
        if rows <= held and capacity <= self.capacity:
            return self._memory
        if capacity > self.capacity:
            self.capacity = -(-capacity // _BLOCK) * _BLOCK
        grown = self._memory.new_zeros(layers, two, max(rows, held), heads, self.capacity, dim)
        own = len(self.lengths)
        grown[:, :, :own, :, : self.length] = self._memory[:, :, :own, :, : self.length]
        self._memory = grown
        return grown

    def row_lengths(self, device: torch.device) -> Tensor:
        """Committed positions per row, long [B, 1]."""
        return torch.tensor(self.lengths, device=device)[:, None]

    def padding_mask(self, device: torch.device) -> Tensor:
        """Where nobody may look: bool [B, length], true behind each row's own end."""
        ends = torch.tensor(self.lengths, device=device)
        return torch.arange(self.length, device=device) >= ends[:, None]
