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
        ahead: pending positions that stay before those of the next pass; 0: a pass writes over what is pending. A tree
            that grows level by level is written so.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.ahead = 0
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
        """Put q pending positions behind the committed ones and `ahead` pending ones.

        Returns:
            All keys and values so far, [.., length + ahead + q, ..] each.

        Raises:
            MedusaError: they do not fit into the capacity.
        """
        if self._storage is None:
            self.allocate(keys, values)
        assert self._storage is not None
        start = self.length + self.ahead
        end = start + keys.shape[2]
        if end > self.capacity:
            raise MedusaError(f"the cache holds {self.capacity} positions, {end} are needed")
        self._pending = end - self.length
        stored = self._storage[layer, :, :, :, :end]
        stored[0, :, :, start:] = keys
        stored[1, :, :, start:] = values
        return stored[0], stored[1]

    def expect(self, count: int) -> Tensor:
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

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        self.length = 0
        self._pending = 0
