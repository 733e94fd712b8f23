"""Keys and values in slots: the one cache of decoding, for the backbone's layers and for a draft's.

Row b holds its committed positions in columns 0 .. length - 1. The nodes of a tree are written
right behind them, node i to column length + i:

    row 0   c c c c c c c r n n n        c committed, r root, n nodes of the tree
    row 1   c c c c c r n n n . .        . never written, or left over: masked

Before the next step `compact` moves the accepted nodes to columns length, length + 1, ...
What lies behind them is overwritten by the next tree, and masked until then. How many positions of
a row are committed is counted by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_train.errors import MedusaError

#: The first memory of `Slots` has this number of columns, and steps of fixed shape read a multiple
#: of it.
KEY_BLOCK = 256


class Slots:
    """Keys and values of several layers, `[layers, 2, rows, kv_heads, columns, head_dim]`.

    Memory is allocated when the first prompt is written. CUDA graphs replay with the addresses that
    they were captured with, so there are buffers of 1, 2, 4, ... blocks of columns that are kept: a
    longer text is copied into the next buffer, and the next answer begins in the first one again.
    Where the length is known beforehand, `make_room` reserves one buffer for it.

    Args:
        num_layers: layers whose keys and values are stored.
        capacity: the most positions that a row can have.
        block: columns of the first buffer.

    Attributes:
        rows: allocated rows.
        resets: how often all was dropped so far. Those who share the slots see by it whether what
            they wrote is still there.
    """

    def __init__(self, num_layers: int, capacity: int, block: int = KEY_BLOCK) -> None:
        self.capacity = -(-capacity // block) * block
        self.block = block
        self.rows = 1
        self.resets = 0
        self._num_layers = num_layers
        self._reserved = 0
        self._storage: Tensor | None = None
        self._buffers: dict[int, Tensor] = {}

    @property
    def is_allocated(self) -> bool:
        """Whether something was written so far."""
        return self._storage is not None

    def like(self, num_layers: int) -> Slots:
        """Return empty slots of other layers for as many rows and positions."""
        other = Slots(num_layers, self.capacity, self.block)
        other.rows = self.rows
        other._reserved = self._reserved
        return other

    def make_room(self, rows: int, positions: int) -> None:
        """Make room for `rows` rows, and take no buffer with less than `positions` positions until
        `reset`.

        For more rows than before memory moves, so that what was captured on the old one is invalid.
        """
        self._reserved = max(self._reserved, positions)
        if rows <= self.rows:
            return
        self.rows = rows
        if self._storage is not None:
            before = self._storage
            self._storage = self._new_buffer(before, before.shape[4])
            self._storage[:, :, : before.shape[2]] = before
            self._buffers = {before.shape[4] - 1: self._storage}

    def prompts(self, first: int, count: int, length: int = 0) -> PromptCache:
        """Return the cache for a pass over the prompts of `count` rows from row `first` on.

        Args:
            length: positions that these rows hold already and that the pass continues.
        """
        return PromptCache(self, self._num_layers, slice(first, first + count), length)

    def allocate(self, keys: Tensor, positions: int) -> Tensor:
        """Return the storage with room for `positions`; keys [B, kv_heads, q, head_dim] give the
        sizes of the first one.
        """
        if self._storage is None:
            length = self._buffer_length(max(positions, self._reserved))
            like = keys.new_empty(self._num_layers, 2, 0, keys.shape[1], 0, keys.shape[3])
            self._storage = self._new_buffer(like, length + 1)
            self._buffers[length] = self._storage
        return self.storage(positions)

    def reset(self) -> None:
        """Return to the first buffer; what is stored no longer counts."""
        self.resets += 1
        self._reserved = 0
        if self._buffers:
            self._storage = self._buffers[min(self._buffers)]

    def settle(self, positions: int) -> None:
        """Keep one buffer, with room for `positions`, for all that follows: smaller ones would only
        take memory.
        """
        self._reserved = max(self._reserved, positions)
        storage = self.storage(positions)
        self._buffers = {storage.shape[4] - 1: storage}

    def copy_row(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` positions of row `source` to row `target`."""
        if self._storage is not None:
            self._storage[:, :, target, :, :positions] = self._storage[:, :, source, :, :positions]

    def storage(self, positions: int) -> Tensor:
        """Return the buffer for `positions`, [layers, 2, rows, kv_heads, columns, head_dim], with
        all that was stored before.

        It has one column more than passes read, see `models.compiled.compiled_capacity`.

        Raises:
            MedusaError: the capacity is exceeded, or nothing was written yet.
        """
        positions = max(positions, self._reserved)
        if self._storage is None or positions > self.capacity:
            capacity = 0 if self._storage is None else self.capacity
            raise MedusaError(f"the cache holds {capacity} positions, {positions} are needed")
        columns = self._storage.shape[4]
        if positions < columns:
            return self._storage
        length = self._buffer_length(positions)
        if length not in self._buffers:
            self._buffers[length] = self._new_buffer(self._storage, length + 1)
        larger = self._buffers[length]
        larger[:, :, :, :, :columns] = self._storage
        self._storage = larger
        # reserved for a batch or an answer, which never returns to a smaller buffer
        if positions == self._reserved:
            self._buffers = {length: larger}
        return larger

    def _new_buffer(self, like: Tensor, columns: int) -> Tensor:
        """Return zeros, since masked columns are read before they are written, and 0 * NaN is NaN."""
        layers, two, _, heads, _, dim = like.shape
        return like.new_zeros(layers, two, self.rows, heads, columns, dim)

    def _buffer_length(self, positions: int) -> int:
        """Return the columns of the buffer for `positions`: a power of two, or 5 to 8 eighths of it
        if they are reserved.
        """
        length = self.block
        while length < positions:
            length *= 2
        if positions == self._reserved:  # no larger one follows, and half of it would be empty
            step = max(self.block, length // 8)
            length = -(-positions // step) * step
        return min(length, self.capacity)


def compact(storage: Tensor, starts: Tensor, path: Tensor) -> None:
    """Move the accepted nodes of the first B rows right behind the root of their tree: column
    starts + path[i] to column starts + i.

        before   c c c r 1 2 3 4      path 0 2 4
        after    c c c r 2 4 . .

    Shapes and addresses do not depend on the paths, so shorter paths are padded at the end; what
    their padding moves must be overwritten later.

    Args:
        storage: [layers, 2, rows, kv_heads, columns, head_dim], changed in place.
        starts: long [B], columns of the roots. path: long [B, D + 1], increasing from 0; the root
            is not moved.
    """
    targets = torch.arange(1, path.shape[1], device=path.device) + starts[:, None]  # [B, D]
    sources = path[:, 1:] + starts[:, None]  # [B, D]
    if storage.shape[2] == 1:  # index_select copies first, so source and target may overlap
        storage.index_copy_(4, targets[0], storage.index_select(4, sources[0]))
        return
    rows = torch.arange(len(starts), device=path.device)[:, None]
    storage[:, :, rows, :, targets] = storage[:, :, rows, :, sources]


class PromptCache(Cache):
    """The cache of transformers' interface for passes over prompts, on the memory of `Slots`.

    A pass writes its q positions after those before it and reads exactly these, so that the model's
    own causal mask applies. Shorter prompts of a pass are padded behind.
    """

    def __init__(self, slots: Slots, num_layers: int, rows: slice, length: int = 0) -> None:
        # the layers refer to this and not to the cache: in a circle, memory would stay until Python
        # looks for circles
        self._pass = _PromptPass(slots, rows, length, length)
        super().__init__(layers=[_PromptLayer(self._pass, layer) for layer in range(num_layers)])

    @property
    def length(self) -> int:
        """Positions before the next pass."""
        return self._pass.length

    def commit(self) -> None:
        """Let the next pass follow the positions of the last one."""
        self._pass.length = self._pass.written


@dataclass
class _PromptPass:
    """Where a pass over prompts writes: rows, positions before it, and positions after the last
    one.
    """

    slots: Slots
    rows: slice
    length: int
    written: int


class _PromptLayer(CacheLayerMixin):
    """One layer of a `PromptCache`."""

    is_sliding = False  # all positions are stored; masks apply sliding windows

    def __init__(self, place: _PromptPass, index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._place = place
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `Slots` allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write q positions, [B, kv_heads, q, head_dim] each, and return all so far,
        [B, kv_heads, length + q, head_dim] each.

        Raises:
            MedusaError: keys and values differ in shape, or the capacity is exceeded.
        """
        if key_states.shape != value_states.shape:
            raise MedusaError(
                "keys and values, which share one tensor, differ in shape:"
                f" {list(key_states.shape)} and {list(value_states.shape)}"
            )
        place = self._place
        end = place.length + key_states.shape[2]
        storage = place.slots.allocate(key_states, end)
        keys, values = storage[self._index, :, place.rows, :, :end]
        keys[:, :, place.length :] = key_states
        values[:, :, place.length :] = value_states
        place.written = end
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._place.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._place.length

    def get_max_length(self) -> int:
        return self._place.slots.capacity


class SlotCache(Cache):
    """The cache of transformers' interface for one pass that writes to given columns.

    Args:
        storage: per layer [2, rows, kv_heads, columns, head_dim].
        slots: columns that new keys and values are written to, long [q] for a single row, [B, q]
            for the first B rows; or the first of q columns of a single row.
        key_length: columns that are read.
    """

    def __init__(self, storage: Sequence[Tensor], slots: Tensor | int, key_length: int) -> None:
        super().__init__(layers=[_SlotLayer(layer, slots, key_length) for layer in storage])


class _SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache`.

    Keys and values are written at once: if memory is written twice, torch.compile copies all of it
    instead.
    """

    is_sliding = False

    def __init__(self, storage: Tensor, slots: Tensor | int, key_length: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._storage = storage
        self._slots = slots
        self._key_length = key_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory is allocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        storage = self._storage
        if isinstance(self._slots, int):
            keys, values = storage.narrow(3, 0, self._key_length)
            end = self._slots + key_states.shape[2]
            keys[:, :, self._slots : end] = key_states
            values[:, :, self._slots : end] = value_states
            return keys, values
        states = torch.stack([key_states, value_states])
        if self._slots.dim() == 1:
            storage.index_copy_(3, self._slots, states)
        else:
            rows = torch.arange(len(key_states), device=storage.device)[:, None]
            storage[:, rows, :, self._slots] = states.permute(1, 3, 0, 2, 4)
            storage = storage.narrow(1, 0, len(key_states))
        # sliced here: strides of a slice made by the caller would become constants, different for
        # each capacity
        keys, values = storage.narrow(3, 0, self._key_length)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._key_length, 0

    def get_seq_length(self) -> int:
        # only read where no mask is given: for a single row that writes slices
        return self._slots if isinstance(self._slots, int) else 0

    def get_max_length(self) -> int:
        return self._key_length


@dataclass(frozen=True)
class NodeSlots:
    """Where the n + 1 nodes of B rows stand: the inputs of a verification pass but for tokens.

    Attributes:
        positions: position ids, long [B, n + 1].
        masks: by layer type, sliding windows applied, additive [B, 1, n + 1, key_length]; None: a
            single row's root, which sees all columns that are read.
        slots: columns that the nodes are written to, long [B, n + 1].
        first: the first of them, where a single row writes slices; else None.
        storage: of the backbone's slots, [layers, 2, rows, kv_heads, columns, head_dim], columns >
            key_length, of which the first B rows are used.
        key_length: number of columns that attention reads.
    """

    positions: Tensor
    masks: Mapping[str, Tensor] | None
    slots: Tensor
    first: int | None
    storage: Tensor
    key_length: int

    def head(self, count: int) -> NodeSlots:
        """Return the first `count` nodes."""
        masks = self.masks
        if masks is not None:
            masks = {kind: mask[:, :, :count] for kind, mask in masks.items()}
        return replace(
            self, positions=self.positions[:, :count], masks=masks, slots=self.slots[:, :count]
        )

    def cache(self, first: int = 0, last: int | None = None) -> SlotCache:
        """Return the cache for a pass over the nodes first .. last - 1."""
        if self.first is not None:
            return SlotCache(self.storage.unbind(), self.first + first, self.key_length)
        return slot_cache(self.storage, self.slots[:, first:last], self.key_length)


def slot_cache(storage: Tensor, slots: Tensor, key_length: int) -> SlotCache:
    """Return a cache that writes to `slots`, long [B, q], of the first B rows of a storage [layers,
    2, rows, ...].
    """
    single = storage.shape[2] == 1
    return SlotCache(storage.unbind(), slots[0] if single else slots, key_length)
