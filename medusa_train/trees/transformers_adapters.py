"""Adapters that let transformers' models write to a `KVCache`; each pass gets its own adapter.

`PromptCache` is for passes over prompts, `NodeCache` for passes over the nodes of a tree. The other
inputs of a pass over nodes are in `NodeInputs`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_train.trees.kv_cache import HEADS, ROWS, WIDTH, KVCache


class PromptCache(Cache):
    """A transformers cache for a pass over prompts, on the memory of a `KVCache`.

    The pass writes its q positions after the `length` positions that the rows hold, and reads
    exactly these length + q, so that the model's own causal mask applies. Shorter prompts of a pass
    are right-padded.

    Args:
        kv_cache: where keys and values are stored.
        first: row of the first prompt.
        count: number of prompts, in consecutive rows.
        length: number of positions that these rows hold already.
    """

    def __init__(self, kv_cache: KVCache, first: int, count: int, length: int = 0) -> None:
        rows = slice(first, first + count)
        # layers do not refer to this cache: a reference cycle would hold the memory until Python's
        # garbage collector runs
        layers = [
            _PromptLayer(kv_cache, index, rows, length) for index in range(kv_cache.num_layers)
        ]
        super().__init__(layers=layers)
        self.length = length

    def positions(self, states: Tensor) -> Tensor:
        """Return the positions of new states [B, q, ...], long [B, q]."""
        positions = torch.arange(states.shape[1], device=states.device) + self.length
        return positions.expand(len(states), -1)


class _Layer(CacheLayerMixin, ABC):
    """One layer of a cache, on memory that may have wider heads, or more heads, than this layer."""

    is_sliding = False  # all positions are stored; masks apply sliding windows

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `KVCache` allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write q positions, and return the S positions that attention reads.

        Latent attention has values narrower than keys; layers of Gemma 4 differ in their heads.

        Args:
            key_states, value_states: [B, kv_heads, q, head_dim]; head_dim may differ between them.

        Returns:
            Keys and values, [B, kv_heads, S, head_dim], with the heads of the arguments.

        Raises:
            MedusaError: the capacity is exceeded.
        """
        storage = self._allocated(key_states, value_states)
        padded_keys = _padded(key_states, storage)
        padded_values = _padded(value_states, storage)
        keys, values = self._write(storage, padded_keys, padded_values)
        return _part_of(keys, key_states), _part_of(values, value_states)

    @abstractmethod
    def _allocated(self, key_states: Tensor, value_states: Tensor) -> Tensor:
        """Return the memory of this layer, [2, rows, kv_heads, columns, head_dim]."""

    @abstractmethod
    def _write(
        self, storage: Tensor, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write q positions, [B, kv_heads, q, head_dim] each, padded to the memory's heads; return
        the keys and values that attention reads.
        """


def _padded(states: Tensor, storage: Tensor) -> Tensor:
    """Zero-pad states [B, kv_heads, q, head_dim] to the number and width of the storage's heads."""
    heads = storage.shape[HEADS - 1] - states.shape[1]
    width = storage.shape[WIDTH - 1] - states.shape[3]
    return pad(states, (0, width, 0, 0, 0, heads)) if heads or width else states


def _part_of(stored: Tensor, states: Tensor) -> Tensor:
    """Cut `stored` [B, kv_heads, S, head_dim] to the number and width of the heads of `states`."""
    return stored[:, : states.shape[1], :, : states.shape[3]]


class _PromptLayer(_Layer):
    """One layer of a `PromptCache`."""

    def __init__(self, kv_cache: KVCache, index: int, rows: slice, length: int) -> None:
        super().__init__()
        self._kv_cache = kv_cache
        self._index = index
        self._rows = rows
        self._length = length

    def _allocated(self, key_states: Tensor, value_states: Tensor) -> Tensor:
        end = self._length + key_states.shape[2]
        return self._kv_cache.allocate(key_states, value_states, end)[self._index]

    def _write(
        self, storage: Tensor, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        end = self._length + key_states.shape[2]
        keys, values = storage[:, self._rows, :, :end]  # [B, kv_heads, S, head_dim] each
        keys[:, :, self._length :] = key_states
        values[:, :, self._length :] = value_states
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._kv_cache.capacity


class NodeCache(Cache):
    """A transformers cache for one pass that writes to given columns.

    Args:
        storage: memory of each layer, [2, rows, kv_heads, columns, head_dim].
        columns: columns of the new keys and values, long [q] for a single row, [B, q] for the first
            B rows. An int is the first of q columns of a single row.
        key_length: number of columns that attention reads.
    """

    def __init__(self, storage: Sequence[Tensor], columns: Tensor | int, key_length: int) -> None:
        super().__init__(layers=[_NodeLayer(layer, columns, key_length) for layer in storage])


class _NodeLayer(_Layer):
    """One layer of a `NodeCache`.

    Keys and values are written by one operation: torch.compile copies all of the memory if it is
    written twice.
    """

    def __init__(self, storage: Tensor, columns: Tensor | int, key_length: int) -> None:
        super().__init__()
        self._storage = storage
        self._columns = columns
        self._key_length = key_length

    def _allocated(self, key_states: Tensor, value_states: Tensor) -> Tensor:
        return self._storage

    def _write(
        self, storage: Tensor, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        # 1. a single row writes slices
        if isinstance(self._columns, int):
            read = storage.narrow(3, 0, self._key_length)
            keys = read[0]  # [1, kv_heads, key_length, head_dim]
            values = read[1]
            start = self._columns
            end = start + key_states.shape[2]
            keys[:, :, start:end] = key_states
            values[:, :, start:end] = value_states
            return keys, values
        # 2. or columns in a tensor, for memory of a single row
        states = torch.stack([key_states, value_states])  # [2, B, kv_heads, q, head_dim]
        if self._columns.dim() == 1:
            storage.index_copy_(3, self._columns, states)
        # 3. or different columns in each row
        else:
            rows = torch.arange(len(key_states), device=storage.device)[:, None]  # [B, 1]
            storage[:, rows, :, self._columns] = states.permute(1, 3, 0, 2, 4)
            storage = storage.narrow(1, 0, len(key_states))
        # slice here: torch.compile would make the strides of a caller's slice constants, which
        # differ between capacities
        keys, values = storage.narrow(3, 0, self._key_length)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._key_length, 0

    def get_seq_length(self) -> int:
        # transformers reads it only without a mask: for a single row that writes slices
        return self._columns if isinstance(self._columns, int) else 0

    def get_max_length(self) -> int:
        return self._key_length


#: A cache for one pass.
PassCache = PromptCache | NodeCache


def node_cache(storage: Tensor, columns: Tensor, key_length: int) -> NodeCache:
    """Return a cache that writes to `columns`, long [B, q], of the first B rows of a storage
    [layers, 2, rows, ...].
    """
    if storage.shape[ROWS] == 1:
        columns = columns[0]
    return NodeCache(storage.unbind(), columns, key_length)


@dataclass(frozen=True)
class NodeInputs:
    """Inputs of a verification pass over the n + 1 nodes of B rows, in addition to their tokens.

    Attributes:
        positions: position ids, long [B, n + 1].
        masks: additive mask of each layer type, sliding windows applied, [B, 1, n + 1, key_length].
            None: the pass is a single row's root, which attends to all columns that are read.
        columns: columns that the nodes are written to, long [B, n + 1].
        first_column: the first of these columns if a single row writes slices; else None.
        storage: memory of the target model's KV cache, [layers, 2, rows, kv_heads, columns,
            head_dim], with more columns than key_length. The first B rows are used.
        key_length: number of columns that attention reads.
    """

    positions: Tensor
    masks: Mapping[str, Tensor] | None
    columns: Tensor
    first_column: int | None
    storage: Tensor
    key_length: int

    def first_nodes(self, count: int) -> NodeInputs:
        """Return the inputs of the first `count` nodes."""
        masks = self.masks
        if masks is not None:
            masks = {kind: mask[:, :, :count] for kind, mask in masks.items()}
        positions = self.positions[:, :count]
        columns = self.columns[:, :count]
        return replace(self, positions=positions, masks=masks, columns=columns)

    def cache(self, first: int = 0, last: int | None = None) -> NodeCache:
        """Return the cache for a pass over the nodes first .. last - 1."""
        if self.first_column is not None:
            layers = self.storage.unbind()
            return NodeCache(layers, self.first_column + first, self.key_length)
        return node_cache(self.storage, self.columns[:, first:last], self.key_length)
