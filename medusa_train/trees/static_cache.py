"""Key-value caches at fixed addresses, for steps that are captured as CUDA graphs and replayed.

A CUDA graph replays its kernels with the addresses and shapes that it was captured with. So memory is allocated in
buckets of fixed length and kept: a longer text is copied into the next bucket, and the next answer starts in the first
one again. A tensor gives the positions that a pass writes to. Passes read a fixed number of columns, of which those
beyond the text are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_train.errors import MedusaError
from medusa_train.trees.kv_cache import TreeCache

#: Passes read a multiple of this number of columns; there is one graph for each multiple.
KEY_BLOCK = 256


class StaticCache(TreeCache):
    """A `TreeCache` whose storage is one of several buckets, of 1, 2, 4, ... blocks; together less than twice the last.

    Passes may write as in a `TreeCache` (prefill), or to slots of `storage` (steps of fixed shape).

    Args:
        num_layers: decoder layers. capacity: maximum number of positions; memory is allocated only as needed.
        block: columns in the first bucket.
    """

    def __init__(self, num_layers: int, capacity: int, block: int = KEY_BLOCK) -> None:
        super().__init__(num_layers, -(-capacity // block) * block)
        self.block = block
        self._buckets: dict[int, Tensor] = {}

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Allocate the bucket for the first q positions, see `TreeCache.allocate`; buckets are kept by `reset`."""
        capacity, self.capacity = self.capacity, self._bucket_length(keys.shape[2]) + 1
        super().allocate(keys, values)
        assert self._storage is not None
        self._buckets[self.capacity - 1] = self._storage
        self.capacity = capacity

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write pending positions, see `TreeCache.write`, in the bucket that has room for them."""
        if self._storage is not None:
            self.storage(self.length + self.pending_offset + keys.shape[2])
        return super().write(layer, keys, values)

    def reserve(self, count: int) -> Tensor:
        """Mark positions as pending, see `TreeCache.reserve`, in the bucket that has room for them."""
        if self._storage is not None:
            self.storage(self.length + count)
        return super().reserve(count)

    def reset(self) -> None:
        """Drop all positions and return to the first bucket."""
        super().reset()
        if self._buckets:
            self._storage = self._buckets[min(self._buckets)]

    def key_length(self, positions: int) -> int:
        """Return how many columns a pass reads that needs `positions`: a multiple of the block."""
        return -(-positions // self.block) * self.block

    def storage(self, positions: int) -> Tensor:
        """Return the bucket for `positions`, [layers, 2, rows, kv_heads, length + 1, head_dim], with all earlier ones.

        It has one column more than passes read, see `models.compiled.compiled_capacity`.

        Raises:
            MedusaError: the capacity is exceeded, or nothing was written yet.
        """
        if self._storage is None or positions > self.capacity:
            capacity = 0 if self._storage is None else self.capacity
            raise MedusaError(f"the cache holds {capacity} positions, {positions} are needed")
        columns = self._storage.shape[4]
        if positions < columns:
            return self._storage
        length = self._bucket_length(positions)
        if length not in self._buckets:
            # zeros, since masked columns are read before they are written, and 0 * NaN is NaN
            shape = *self._storage.shape[:4], length + 1, self._storage.shape[5]
            self._buckets[length] = self._storage.new_zeros(shape)
        self._buckets[length][:, :, :, :, :columns] = self._storage
        self._storage = self._buckets[length]
        return self._storage

    def _bucket_length(self, positions: int) -> int:
        length = self.block
        while length < positions:
            length *= 2
        return min(length, self.capacity)


def move_columns(storage: Tensor, starts: Tensor, path: Tensor) -> None:
    """Move the columns starts + path[i] of each row to starts + i: the compaction of an accepted path.

    Shapes and addresses are fixed, so paths are padded at the end; what their padding copies must be overwritten later.

    Args:
        storage: [layers, 2, rows, kv_heads, columns, head_dim], changed in place.
        starts: long [rows]. path: long [rows, D + 1], increasing from 0; the first column is not moved.
    """
    targets = torch.arange(1, path.shape[1], device=path.device) + starts[:, None]
    sources = path[:, 1:] + starts[:, None]
    if len(starts) == 1:  # index_select copies first, so source and target may overlap
        storage.index_copy_(4, targets[0], storage.index_select(4, sources[0]))
        return
    rows = torch.arange(len(starts), device=path.device)[:, None]
    storage[:, :, rows, :, targets] = storage[:, :, rows, :, sources]


class SlotCache(Cache):
    """The storage of all layers as transformers' cache for one pass that writes to given slots.

    Args:
        storage: per layer [2, rows, kv_heads, capacity, head_dim].
        slots: positions at which new keys and values are written, long [q], or [B, q] for the first B rows.
        key_length: number of positions that attention reads.
    """

    def __init__(self, storage: Sequence[Tensor], slots: Tensor, key_length: int) -> None:
        super().__init__(layers=[_SlotLayer(layer, slots, key_length) for layer in storage])


class _SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache`.

    Keys and values are written at once: if memory is written twice, torch.compile copies all of it instead.
    """

    is_sliding = False

    def __init__(self, storage: Tensor, slots: Tensor, key_length: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._storage = storage
        self._slots = slots
        self._key_length = key_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; the memory is allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        storage = self._storage
        states = torch.stack([key_states, value_states])
        if self._slots.dim() == 1:
            storage.index_copy_(3, self._slots, states)
        else:
            rows = torch.arange(len(key_states), device=storage.device)[:, None]
            storage[:, rows, :, self._slots] = states.permute(1, 3, 0, 2, 4)
            storage = storage.narrow(1, 0, len(key_states))
        # sliced here: strides of a slice made by the caller would become constants, different for each capacity
        keys, values = storage.narrow(3, 0, self._key_length)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._key_length, 0

    def get_seq_length(self) -> int:
        return 0  # only used to derive positions and masks, which are given

    def get_max_length(self) -> int:
        return self._key_length
