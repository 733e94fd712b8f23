"""Key-value caches at fixed addresses, for steps that are captured as CUDA graphs and replayed.

A CUDA graph replays its kernels with the addresses and shapes that it was captured with. So memory
is allocated in buckets of fixed length and kept: a longer text is copied into the next bucket, and
the next answer starts in the first one again. A tensor gives the positions that a pass writes to.
Passes read a fixed number of columns, of which those beyond the text are masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import SlotCache, slot_cache
from medusa_train.trees.kv_cache import TreeCache, check_shapes

#: Passes read a multiple of this number of columns; there is one graph for each multiple.
KEY_BLOCK = 256


class StaticCache:
    """Keys and values in one of several buckets, of 1, 2, 4, ... blocks of columns; together less
    than twice the last.

    Prompts are written through `prompt_cache`, steps of fixed shape write to slots of `storage`.
    How many positions of a row are filled is counted by the caller.

    Args:
        capacity: maximum number of positions; memory is allocated only as needed.
        block: columns in the first bucket.
    """

    def __init__(self, num_layers: int, capacity: int, block: int = KEY_BLOCK) -> None:
        self.capacity = -(-capacity // block) * block
        self.block = block
        self.rows = 1
        self._num_layers = num_layers
        self._reserved = 0
        self._storage: Tensor | None = None
        self._buckets: dict[int, Tensor] = {}

    @classmethod
    def for_backbone(cls, backbone: Backbone, capacity: int) -> StaticCache:
        """Return an empty cache of at least `capacity` positions for the steps of a backbone."""
        return cls(backbone.num_layers, max(capacity, backbone.max_context + KEY_BLOCK))

    @property
    def is_allocated(self) -> bool:
        """Whether something was written so far."""
        return self._storage is not None

    def make_room(self, rows: int, positions: int) -> None:
        """Make room for `rows` rows, and take no bucket with less than `positions` positions until
        `reset`.

        For more rows than before memory moves, so that what was captured on the old one is invalid.
        """
        self._reserved = max(self._reserved, positions)
        if rows <= self.rows:
            return
        self.rows = rows
        if self._storage is not None:
            before = self._storage
            self._storage = self._new_bucket(before, before.shape[4])
            self._storage[:, :, : before.shape[2]] = before
            self._buckets = {before.shape[4] - 1: self._storage}

    def prompt_cache(self, first: int, count: int) -> TreeCache:
        """Return an empty cache for the prompts of `count` rows from row `first` on; its memory is
        part of this one.
        """
        return _PromptCache(self, self._num_layers, first, count)

    def allocate(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return the storage for prompts with these keys and values, [B, kv_heads, q, head_dim], in
        each layer.
        """
        check_shapes(keys, values)
        if self._storage is None:
            length = self.bucket_length(max(keys.shape[2], self._reserved))
            like = keys.new_empty(self._num_layers, 2, 0, keys.shape[1], 0, keys.shape[3])
            self._storage = self._buckets[length] = self._new_bucket(like, length + 1)
        return self.storage(keys.shape[2])

    def reset(self) -> None:
        """Return to the first bucket."""
        self._reserved = 0
        if self._buckets:
            self._storage = self._buckets[min(self._buckets)]

    def settle(self, positions: int) -> None:
        """Keep one bucket, with room for `positions`, for all that follows: smaller ones would only
        take memory.
        """
        self._reserved = max(self._reserved, positions)
        storage = self.storage(positions)
        self._buckets = {storage.shape[4] - 1: storage}

    def copy_row(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` positions of row `source` to row `target`."""
        if self._storage is not None:
            self._storage[:, :, target, :, :positions] = self._storage[:, :, source, :, :positions]

    def key_length(self, positions: int) -> int:
        """Return how many columns a pass reads that needs `positions`: a multiple of the block."""
        return -(-positions // self.block) * self.block

    def storage(self, positions: int) -> Tensor:
        """Return the bucket for `positions`, [layers, 2, rows, kv_heads, length + 1, head_dim],
        with all earlier ones.

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
        length = self.bucket_length(positions)
        if length not in self._buckets:
            self._buckets[length] = self._new_bucket(self._storage, length + 1)
        self._buckets[length][:, :, :, :, :columns] = self._storage
        self._storage = self._buckets[length]
        if positions == self._reserved:  # of a batch, which never returns to the smaller ones
            self._buckets = {length: self._storage}
        return self._storage

    def _new_bucket(self, like: Tensor, columns: int) -> Tensor:
        """Return zeros, since masked columns are read before they are written, and 0 * NaN is NaN."""
        layers, two, _, heads, _, dim = like.shape
        return like.new_zeros(layers, two, self.rows, heads, columns, dim)

    def bucket_length(self, positions: int) -> int:
        """Return the columns of the bucket for `positions`: a power of two, or 5 to 8 eighths if
        they are reserved.
        """
        length = self.block
        while length < positions:
            length *= 2
        if positions == self._reserved:  # no larger one follows, and half of it would be empty
            step = max(self.block, length // 8)
            length = -(-positions // step) * step
        return min(length, self.capacity)


class _PromptCache(TreeCache):
    """The prompts of some rows of a `StaticCache`, in one pass; shorter ones are padded behind."""

    def __init__(self, cache: StaticCache, num_layers: int, first: int, count: int) -> None:
        super().__init__(num_layers, cache.capacity)
        self._cache = cache
        self._rows = slice(first, first + count)

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Take the rows' part of the static cache."""
        self._storage = self._cache.allocate(keys, values)[:, :, self._rows]
        self.capacity = self._storage.shape[4] - 1

    def commit_rows(self, lengths: Sequence[int]) -> None:
        """Commit the longest prompt; the padding of the others is masked later, and overwritten."""
        self.commit(max(lengths))
        # the session lives on, and would keep a bucket that the batch outgrows
        self._storage = None


def move_columns(storage: Tensor, starts: Tensor, path: Tensor) -> None:
    """Move the columns starts + path[i] of the first rows to starts + i: the compaction of an
    accepted path.

    Shapes and addresses are fixed, so paths are padded at the end; what their padding copies must
    be overwritten later.

    Args:
        storage: [layers, 2, rows, kv_heads, columns, head_dim], changed in place.
        starts: long [B], B <= rows. path: long [B, D + 1], increasing from 0; the first column is
            not moved.
    """
    targets = torch.arange(1, path.shape[1], device=path.device) + starts[:, None]
    sources = path[:, 1:] + starts[:, None]
    if storage.shape[2] == 1:  # index_select copies first, so source and target may overlap
        storage.index_copy_(4, targets[0], storage.index_select(4, sources[0]))
        return
    rows = torch.arange(len(starts), device=path.device)[:, None]
    storage[:, :, rows, :, targets] = storage[:, :, rows, :, sources]


@dataclass(frozen=True)
class SlotPass:
    """Inputs of a pass over n + 1 nodes of B rows, apart from their tokens.

    Attributes:
        positions: position ids, long [B, n + 1].
        masks: by layer type, sliding windows applied, additive [B, 1, n + 1, key_length].
        slots: columns of the cache that the nodes are written to, long [B, n + 1].
        storage: of the backbone's cache, [layers, 2, rows, kv_heads, columns, head_dim] with
            columns > key_length, of which the first B rows are used.
        key_length: number of columns that attention reads.
    """

    positions: Tensor
    masks: Mapping[str, Tensor]
    slots: Tensor
    storage: Tensor
    key_length: int

    def cache(self, first: int = 0, last: int | None = None) -> SlotCache:
        """Return the cache for a pass over the nodes first .. last - 1."""
        return slot_cache(self.storage, self.slots[:, first:last], self.key_length)
