"""The one KV cache of decoding, for the layers of the target model and of a draft.

Row b holds its committed positions in columns 0 .. length - 1. The nodes of a tree are written
right behind them, node i to column length + i:

    row 0   c c c c c c c r n n n        c committed, r last token, n nodes below it
    row 1   c c c c c r n n n . .        . never written, or left over: masked

The last token is the tree's root, node 0, and stays in column length. Before the next step
`compact` moves the nodes accepted below it to columns length + 1, length + 2, ... What is behind
them is overwritten by the next tree, and masked until then. How many positions of a row are
committed is counted by the caller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.errors import MedusaError

#: Columns of the first buffer of `KVCache`; steps of fixed shape read a multiple of it.
KEY_BLOCK = 256

#: Dimensions of the keys and values [layers, 2, rows, kv_heads, columns, head_dim].
ROWS = 2
HEADS = 3
COLUMNS = 4
WIDTH = 5


class KVCache:
    """Keys and values of several layers, `[layers, 2, rows, kv_heads, columns, head_dim]`.

    Memory is allocated when the first prompt is written. Where layers differ in their heads, it has
    the most and the widest of all layers, and a smaller layer reads its part. CUDA graphs replay
    with the addresses that they were captured with, so there are buffers of 1, 2, 4, ... blocks of
    columns that are kept: a longer text is copied into the next buffer, and the next answer begins
    in the first one again. Where the length is known beforehand, `make_room` reserves one buffer for
    it.

    Passes write through `trees.transformers_adapters`.

    Args:
        num_layers: layers whose keys and values are stored.
        capacity: the most positions that a row can have.
        block: columns of the first buffer.

    Attributes:
        num_layers, block: as given.
        capacity: rounded up to whole blocks.
        rows: allocated rows.
        resets: how often all was dropped so far. Those who share it see by it whether what
            they wrote is still there.
    """

    def __init__(self, num_layers: int, capacity: int, block: int = KEY_BLOCK) -> None:
        self.num_layers = num_layers
        self.capacity = -(-capacity // block) * block
        self.block = block
        self.rows = 1
        self.resets = 0
        self._reserved = 0  # positions that the next buffer must have room for
        self._buffer: Tensor | None = None  # the current one
        self._buffers: dict[int, Tensor] = {}  # all that are kept, by the columns that passes read

    @property
    def is_allocated(self) -> bool:
        """Whether something was written so far."""
        return self._buffer is not None

    def like(self, num_layers: int) -> KVCache:
        """Return an empty KV cache of other layers for as many rows and positions."""
        other = KVCache(num_layers, self.capacity, self.block)
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
        if self._buffer is not None:
            self._enlarge(self._buffer, heads=0, width=0)

    def allocate(self, keys: Tensor, values: Tensor, positions: int) -> Tensor:
        """Return the storage with room for `positions` of a layer with these keys and values,
        [B, kv_heads, q, head_dim] each.
        """
        heads = keys.shape[1]
        width = max(keys.shape[3], values.shape[3])
        if self._buffer is None:
            length = self._buffer_length(max(positions, self._reserved))
            like = keys.new_empty(self.num_layers, 2, 0, heads, 0, width)
            self._buffer = self._new_buffer(like, length + 1)
            self._buffers[length] = self._buffer
        # a later layer of the first prompt may have more heads, or wider ones
        elif heads > self._buffer.shape[HEADS] or width > self._buffer.shape[WIDTH]:
            self._enlarge(self._buffer, heads, width)
        return self.storage(positions)

    def _enlarge(self, before: Tensor, heads: int, width: int) -> None:
        """Move memory to a buffer of `rows` rows and of heads of at least these sizes."""
        layers, two, rows, heads_before, columns, width_before = before.shape
        heads = max(heads, heads_before)
        width = max(width, width_before)
        self._buffer = before.new_zeros(layers, two, self.rows, heads, columns, width)
        self._buffer[:, :, :rows, :heads_before, :, :width_before] = before
        self._buffers = {columns - 1: self._buffer}

    def reset(self) -> None:
        """Return to the first buffer; what is stored no longer counts."""
        self.resets += 1
        self._reserved = 0
        if self._buffers:
            shortest = min(self._buffers)
            self._buffer = self._buffers[shortest]

    def settle(self, positions: int) -> None:
        """Keep one buffer, with room for `positions`, for all that follows: smaller ones would only
        take memory.
        """
        self._reserved = max(self._reserved, positions)
        storage = self.storage(positions)
        self._buffers = {storage.shape[COLUMNS] - 1: storage}

    def copy_row(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` positions of row `source` to row `target`."""
        if self._buffer is not None:
            self._buffer[:, :, target, :, :positions] = self._buffer[:, :, source, :, :positions]

    def storage(self, positions: int) -> Tensor:
        """Return the buffer for `positions`, [layers, 2, rows, kv_heads, columns, head_dim], with
        all that was stored before.

        It has one column more than passes read, see `models.compiled.compiled_capacity`.

        Raises:
            MedusaError: the capacity is exceeded, or nothing was written yet.
        """
        positions = max(positions, self._reserved)
        if self._buffer is None:
            raise MedusaError(f"the cache holds 0 positions, {positions} are needed")
        if positions > self.capacity:
            raise MedusaError(f"the cache holds {self.capacity} positions, {positions} are needed")
        # 1. the current buffer, where it is large enough
        columns = self._buffer.shape[COLUMNS]
        if positions < columns:
            return self._buffer
        # 2. else a larger one, with what is stored
        length = self._buffer_length(positions)
        if length not in self._buffers:
            self._buffers[length] = self._new_buffer(self._buffer, length + 1)
        larger = self._buffers[length]
        larger[:, :, :, :, :columns] = self._buffer
        self._buffer = larger
        # 3. one that is reserved for a batch or an answer never returns to a smaller one
        if positions == self._reserved:
            self._buffers = {length: larger}
        return larger

    def _new_buffer(self, like: Tensor, columns: int) -> Tensor:
        """Return zeros, since masked columns are read before they are written, and 0 * NaN is NaN.

        Args:
            like: gives all sizes but rows and columns, and the dtype and device.
        """
        layers, two, _, heads, _, dim = like.shape
        return like.new_zeros(layers, two, self.rows, heads, columns, dim)

    def _buffer_length(self, positions: int) -> int:
        """Return how many columns of the buffer for `positions` passes read: a power of two of
        blocks, or 5 to 8 eighths of it if they are reserved.
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
        starts: long [B], columns of the roots. path: long [B, P], increasing from 0; the root
            is not moved.
    """
    targets = torch.arange(1, path.shape[1], device=path.device) + starts[:, None]  # [B, P - 1]
    sources = path[:, 1:] + starts[:, None]  # [B, P - 1]
    if storage.shape[ROWS] == 1:
        # a copy, so source and target may overlap
        moved = storage.index_select(COLUMNS, sources[0])
        storage.index_copy_(COLUMNS, targets[0], moved)
        return
    rows = torch.arange(len(starts), device=path.device)[:, None]
    storage[:, :, rows, :, targets] = storage[:, :, rows, :, sources]
