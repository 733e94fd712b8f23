"""Key-value caches that hold the nodes of a tree as pending positions and compact the accepted ones
in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_train.errors import MedusaError

#: Positions by which a `BatchCache` grows at once, since growing copies all keys and values.
_GROWTH = 256


class RowPaths(list[Sequence[int]]):
    """Accepted nodes of each row, increasing, moved to the device once for the caches and drafts
    that read them.

    Attributes:
        device: of the tensors.
    """

    def __init__(self, rows: Iterable[Sequence[int]], device: torch.device) -> None:
        super().__init__(rows)
        self.device = device

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device) -> RowPaths:
        """Return `rows`, which may be such paths already."""
        return rows if isinstance(rows, cls) else cls(rows, device)

    @property
    def nodes(self) -> Tensor:
        """Long [B, D + 1]; shorter paths repeat their last node."""
        return self._on_device[:, 1:]

    @property
    def counts(self) -> Tensor:
        """Number of nodes of each row, long [B]."""
        return self._on_device[:, 0]

    def ranges(self) -> RowPaths:
        """Return nodes 0 .. len(path) - 1 of each row; shorter rows are padded with later nodes."""
        out = RowPaths([range(len(path)) for path in self], self.device)
        nodes = torch.arange(max(map(len, self)), device=self.device).expand(len(self), -1)
        out._on_device = torch.cat([self.counts[:, None], nodes], dim=1)
        return out

    def select(self, rows: Sequence[int]) -> RowPaths:
        """Return the paths of `rows`, on the device at once."""
        out = RowPaths([self[row] for row in rows], self.device)
        out._on_device = self._on_device[list(rows)]
        return out

    @cached_property
    def _on_device(self) -> Tensor:
        longest = max(map(len, self))
        rows = [
            [len(path), *path, *[path[-1] if path else 0] * (longest - len(path))] for path in self
        ]
        return torch.tensor(rows, device=self.device)


def check_shapes(keys: Tensor, values: Tensor) -> None:
    """Raise `MedusaError` unless keys and values, which share one tensor, have the same shape."""
    if keys.shape != values.shape:
        raise MedusaError(
            f"keys and values differ in shape: {list(keys.shape)} and {list(values.shape)}"
        )


class TreeCache(Cache):
    """Keys and values of all layers in one tensor `[layers, 2, batch, kv_heads, capacity,
    head_dim]`.

    A forward pass writes its q positions after the committed ones, where they are *pending*:
    `length` does not change. Afterwards `commit(q)` commits all of them (prefill), or `keep_rows`
    commits the accepted nodes and drops the others. With one tensor for all layers the compaction
    is one small copy instead of two per layer.

    Args:
        num_layers: decoder layers of the backbone.
        capacity: positions to allocate: prompt + new tokens + tree.

    Attributes:
        length: number of committed positions.
        pending_offset: number of pending positions that the next pass keeps, for trees written
            level by level; 0: the next pass overwrites what is pending.
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
        """Allocate the storage for `keys` and `values` [batch, kv_heads, q, head_dim] of the first
        layer.
        """
        check_shapes(keys, values)
        batch, heads, _, dim = keys.shape
        # zeros, since masked positions may be read before they are written, and 0 * NaN is NaN
        self._storage = keys.new_zeros(self._num_layers, 2, batch, heads, self.capacity, dim)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write q pending positions after the committed ones and `pending_offset` pending ones.

        Returns: All keys and values so far, [batch, kv_heads, length + pending_offset + q,
            head_dim] each.

        Raises:
            MedusaError: the capacity is exceeded.
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
        """Mark `count` positions as pending and return the storage, for a pass that writes to it
        directly.

        Returns:
            [layers, 2, batch, kv_heads, capacity, head_dim].

        Raises:
            MedusaError: the capacity is exceeded, or the storage is not allocated yet.
        """
        end = self.length + count
        if self._storage is None or end > self.capacity:
            capacity = 0 if self._storage is None else self.capacity
            raise MedusaError(f"the cache holds {capacity} positions, {end} are needed")
        self._pending = count
        return self._storage

    def pending_columns(self, device: torch.device) -> Tensor:
        """Return the columns of the pending positions after `reserve`, long [count]."""
        return torch.arange(self.length, self.length + self._pending, device=device)

    def commit(self, count: int) -> None:
        """Commit the first `count` pending positions and drop the others."""
        if count > self._pending:
            raise MedusaError(f"{count} positions to commit, only {self._pending} are pending")
        self.length += count
        self._pending = 0

    def keep_rows(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the pending positions `paths[0]` (increasing), compacted in place, and drop the
        others.
        """
        nodes = paths[0]
        count = len(nodes)
        if count and nodes[-1] >= self._pending:
            raise MedusaError(f"node {nodes[-1]} to keep, only {self._pending} are pending")
        start = next((i for i, node in enumerate(nodes) if node != i), count)
        if start < count:
            assert self._storage is not None
            moved = RowPaths.of(paths, self._storage.device).nodes[0, start:] + self.length
            # index_select copies first, so source and target may overlap
            self._storage[:, :, :, :, self.length + start : self.length + count] = (
                self._storage.index_select(4, moved)
            )
        self.length += count
        self._pending = 0

    def drop(self) -> None:
        """Drop all pending positions."""
        self._pending = 0

    def commit_rows(self, lengths: Sequence[int]) -> None:
        """`commit` for the single row, with the signature of `BatchCache.commit_rows`."""
        self.commit(lengths[0])

    def row_lengths(self, device: torch.device) -> int | Tensor:
        """Return the committed positions: an int for the single row, which costs no transfer; else
        long [B, 1].
        """
        return self.length

    def single_layer(self) -> TreeCache:
        """Return an empty cache of one layer for the same rows, as large, for a layer of a draft."""
        return TreeCache(1, self.capacity)

    def reset(self) -> None:
        """Drop all positions, and keep the storage."""
        self.length = 0
        self.pending_offset = 0  # a pass that was interrupted leaves its own
        self._pending = 0


class BatchCache(TreeCache):
    """A `TreeCache` whose row b holds `lengths[b]` committed positions, at columns 0 .. lengths[b]
    - 1.

        row 0  c c c c c c c c p p p       c committed, p pending, - padding (`padding_mask`)
        row 1  c c c c c - - - p p p
                               ^ length

    Pending positions are at the same columns in all rows, after the longest row, so that a pass
    writes them in one piece. Accepted ones move to the end of their row. Storage of removed rows is
    reused for rows added later.

    Args:
        num_layers, capacity: as in `TreeCache`.
        rows: rows to allocate, so that others can be appended without copying the first ones.

    Attributes:
        lengths: number of committed positions of each row; `length` is the largest.
    """

    def __init__(self, num_layers: int, capacity: int, rows: int = 0) -> None:
        super().__init__(num_layers, capacity)
        self.lengths: list[int] = []
        self._rows = rows
        self._in_place = False  # each row's pending position follows its committed ones
        # all allocated rows; `_storage` is a view of the first ones
        self._memory: Tensor | None = None
        # lengths, and the same on the device, long [B]
        self._ends: tuple[list[int], Tensor] | None = None

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Allocate the storage, see `TreeCache.allocate`."""
        count = len(keys)
        most = max(self._rows, count)
        super().allocate(keys[:1].expand(most, -1, -1, -1), values[:1].expand(most, -1, -1, -1))
        assert self._storage is not None
        self._memory, self._storage = self._storage, self._storage[:, :, :count]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write pending positions after the longest row, see `TreeCache.write`."""
        self._in_place = False
        return super().write(layer, keys, values)

    def reserve(self, count: int) -> Tensor:
        """Mark `count` positions of each row as pending, at `pending_columns`, and return the
        memory of all rows.

        See `TreeCache.reserve`. A single pending position follows its row, so that it need not be
        moved there.
        """
        super().reserve(count)
        self._in_place = count == 1
        assert self._memory is not None
        return self._memory

    def pending_columns(self, device: torch.device) -> Tensor:
        """Return the columns of the pending positions of each row after `reserve`, long [B, count]."""
        if self._in_place:
            return self.row_lengths(device)
        return super().pending_columns(device).expand(len(self.lengths), -1).contiguous()

    def commit_rows(self, lengths: Sequence[int]) -> None:
        """Commit the first `lengths[b]` pending positions of each row, for right-padded prompts.

        Raises:
            MedusaError: a length exceeds the number of pending positions.
        """
        if max(lengths) > self._pending:
            raise MedusaError(
                f"{max(lengths)} positions to commit, only {self._pending} are pending"
            )
        self.lengths = list(lengths)
        self.length = max(lengths)
        self._pending = 0

    def keep_rows(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the pending positions `paths[b]` (increasing) of each row, and drop the others.

        Raises:
            MedusaError: a node is not pending.
        """
        last = max(path[-1] for path in paths)
        if last >= self._pending:
            raise MedusaError(f"node {last} to keep, only {self._pending} are pending")
        assert self._storage is not None
        device = self._storage.device
        paths, ends = RowPaths.of(paths, device), self.row_lengths(device)
        before, counts = self.lengths, [len(path) for path in paths]
        if not self._in_place and any(
            self.length + node != length + i
            for path, length in zip(paths, before, strict=True)
            for i, node in enumerate(path)
        ):
            self._move(paths, ends)
        self.lengths = [length + count for length, count in zip(before, counts, strict=True)]
        self.length = max(self.lengths)
        self._pending = 0
        # a number for all rows, as in plain decoding, needs no transfer
        self._ends = (
            self.lengths,
            ends[:, 0] + (counts[0] if len(set(counts)) == 1 else paths.counts),
        )

    def _move(self, paths: RowPaths, ends: Tensor) -> None:
        """Copy the pending columns `paths` of each row to columns `ends` [B, 1] and on; padding to
        padding.
        """
        assert self._storage is not None
        count = max(map(len, paths))
        rows = torch.arange(len(paths), device=ends.device)[:, None]
        columns = ends + torch.arange(count, device=ends.device)
        # the source is copied first, so source and target may overlap
        if count == 1 and paths.count(paths[0]) == len(paths):
            # the same column in all rows, as in plain decoding: a slice takes half the time
            kept = (
                self._storage[:, :, :, :, self.length + paths[0][0], None]
                .clone()
                .permute(2, 4, 0, 1, 3, 5)
            )
        else:
            kept = self._storage[:, :, rows, :, paths.nodes + self.length]
        self._storage[:, :, rows, :, columns] = kept

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in place: row i becomes the former row `rows[i]`, and `rows[i]` >= i.

        Raises:
            ValueError: a row would move to a higher index.
        """
        ends = (
            None if self._storage is None else self.row_lengths(self._storage.device)[:, 0].clone()
        )
        for row, source in enumerate(rows):
            if source < row:
                raise ValueError(f"rows[{row}] = {source}: rows can only move to lower indices")
            if source != row and self._storage is not None and ends is not None:
                used = self.lengths[source]
                self._storage[:, :, row, :, :used] = self._storage[:, :, source, :, :used]
                ends[row] = ends[source]
        self.lengths = [self.lengths[source] for source in rows]
        if self._storage is not None and ends is not None:
            self._storage = self._storage[:, :, : len(rows)]
            self._ends = self.lengths, ends[: len(rows)]
        self.length = max(self.lengths, default=0)

    def append_rows(self, other: BatchCache, capacity: int) -> None:
        """Append copies of the committed positions of `other`'s rows, and make room for `capacity`
        positions.

        Raises:
            ValueError: positions are pending in this cache, or nothing was ever written to one of
                the two.
        """
        if self._pending:
            raise ValueError(
                f"{self._pending} positions are pending; keep or drop them before rows are appended"
            )
        if other._storage is None:
            raise ValueError("nothing was written to the cache whose rows are appended")
        rows, used = len(self.lengths), other.length
        memory = self._grow(rows + len(other.lengths), max(capacity, used))
        self._storage = memory[:, :, : rows + len(other.lengths)]
        self._storage[:, :, rows:, :, :used] = other._storage[:, :, :, :, :used]
        self.lengths = [*self.lengths, *other.lengths]
        self.length = max(self.lengths)

    def _grow(self, rows: int, capacity: int) -> Tensor:
        """Return memory for that many rows and positions, reallocated if needed, with the committed
        ones copied.
        """
        if self._memory is None:
            raise ValueError("nothing was written to the cache to which rows are appended")
        layers, two, allocated, heads, _, dim = self._memory.shape
        if rows <= allocated and capacity <= self.capacity:
            return self._memory
        if capacity > self.capacity:
            self.capacity = -(-capacity // _GROWTH) * _GROWTH
        memory = self._memory.new_zeros(
            layers, two, max(rows, allocated), heads, self.capacity, dim
        )
        used = len(self.lengths)
        memory[:, :, :used, :, : self.length] = self._memory[:, :, :used, :, : self.length]
        self._memory = memory
        return memory

    def single_layer(self) -> BatchCache:
        """Return an empty cache of one layer for the same rows, see `TreeCache.single_layer`."""
        cache = BatchCache(1, self.capacity, max(self._rows, len(self.lengths)))
        cache.lengths = [0] * len(self.lengths)
        return cache

    def row_lengths(self, device: torch.device) -> Tensor:
        """Return the committed positions of each row, long [B, 1]."""
        if self._ends is None or self._ends[0] != self.lengths:
            self._ends = self.lengths, torch.tensor(self.lengths, device=device)
        return self._ends[1][:, None]

    def padding_mask(self, device: torch.device) -> Tensor:
        """Return a bool mask [B, length], true at the padding between a row's end and `length`."""
        return torch.arange(self.length, device=device) >= self.row_lengths(device)


class _Layer(CacheLayerMixin):
    """One layer of a `TreeCache` in transformers' interface."""

    is_sliding = False  # all positions are stored; the attention mask applies sliding windows

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        # in a circle, the memory would stay until Python looks for circles
        self._reference = weakref.ref(cache)
        self._index = index

    @property
    def _cache(self) -> Any:
        return self._reference()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cache.allocate(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return self._cache.capacity
