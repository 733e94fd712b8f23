"""The KV cache of decoding, for the layers of the target model and of a draft.

Row b holds its committed positions in columns 0 .. length - 1. The nodes of a tree are written
right after them, node i to column length + i:

    row 0   c c c c c c c r n n n        c: committed, r: last token, n: nodes below it
    row 1   c c c c c r n n n . .        .: never written, or left over; masked

The last token is the tree's root, node 0, and stays in column length. Before the next step,
`compact` moves the accepted nodes below it to columns length + 1, length + 2, ... The columns after
them are masked until the next tree overwrites them. The caller counts the committed positions of
each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.rounding import round_up

#: Number of columns of the first buffer of `KVCache`; steps of fixed shape read a multiple of it.
KEY_BLOCK = 256

#: Dimension indices of the keys and values [layers, 2, rows, kv_heads, columns, head_dim].
ROWS = 2
HEADS = 3
COLUMNS = 4
WIDTH = 5


class KVCache:
    """Keys and values of several layers, `[layers, 2, rows, kv_heads, columns, head_dim]`.

    Memory is allocated when the first prompt is written. If layers differ in their heads, it has
    the largest number and width of heads of all layers, and a smaller layer uses a part of it. CUDA
    graphs replay with the addresses that they were captured with, so buffers of 1, 2, 4, ... blocks
    of columns are kept: a growing text is copied into the next buffer, and the next answer starts
    in the first buffer again. If the length is known beforehand, `make_room` reserves one buffer
    for it.

    Passes write through `trees.transformers_adapters`.

    Args:
        num_layers: number of layers whose keys and values are stored.
        capacity: maximum number of positions of a row.
        block: number of columns of the first buffer.

    Attributes:
        num_layers: number of layers whose keys and values are stored.
        block: number of columns of the first buffer.
        capacity: maximum number of positions of a row: the argument, rounded up to whole blocks.
        rows: number of allocated rows.
        resets: number of calls of `reset` so far. If several owners share the cache, each can tell
            whether its own keys and values are still there.
    """

    def __init__(self, num_layers: int, capacity: int, block: int = KEY_BLOCK) -> None:
        self.num_layers = num_layers
        self.capacity = round_up(capacity, block)
        self.block = block
        self.rows = 1
        self.resets = 0
        self._reserved = 0  # positions that the next buffer must have room for
        self._buffer: Tensor | None = None  # the current buffer
        self._buffers: dict[int, Tensor] = {}  # all kept buffers, by how many columns passes read

    @property
    def is_allocated(self) -> bool:
        """Whether something was written so far."""
        return self._buffer is not None

    def like(self, num_layers: int) -> KVCache:
        """Return an empty KV cache for `num_layers` layers, with as many rows and positions."""
        other = KVCache(num_layers, self.capacity, self.block)
        other.rows = self.rows
        other._reserved = self._reserved
        return other

    def make_room(self, rows: int, positions: int) -> None:
        """Make room for `rows` rows, and use no buffer with fewer than `positions` positions until
        `reset`.

        More rows than before need new memory: graphs that were captured on the old memory become
        invalid.
        """
        self._reserved = max(self._reserved, positions)
        if rows <= self.rows:
            return
        self.rows = rows
        if self._buffer is not None:
            self._enlarge(self._buffer, heads=0, width=0)

    def allocate(self, keys: Tensor, values: Tensor, positions: int) -> Tensor:
        """Return the storage, with room for `positions` positions and for the heads of these keys
        and values of a layer, [B, kv_heads, q, head_dim] each.
        """
        heads = keys.shape[1]
        width = max(keys.shape[3], values.shape[3])
        if self._buffer is None:
            length = self._buffer_length(max(positions, self._reserved))
            like = keys.new_empty(self.num_layers, 2, 0, heads, 0, width)
            self._buffer = self._new_buffer(like, length)
            self._buffers[length] = self._buffer
        # a later layer of the first prompt may have more heads, or wider ones
        elif heads > self._buffer.shape[HEADS] or width > self._buffer.shape[WIDTH]:
            self._enlarge(self._buffer, heads, width)
        return self.storage(positions)

    def _enlarge(self, before: Tensor, heads: int, width: int) -> None:
        """Copy a buffer to a new one with `self.rows` rows and at least this number and width of
        heads.
        """
        layers, two, rows, heads_before, columns, width_before = before.shape
        heads = max(heads, heads_before)
        width = max(width, width_before)
        self._buffer = before.new_zeros(layers, two, self.rows, heads, columns, width)
        self._buffer[:, :, :rows, :heads_before, :, :width_before] = before
        self._buffers = {columns - 1: self._buffer}

    def reset(self) -> None:
        """Return to the first buffer, and treat all stored keys and values as dropped."""
        self.resets += 1
        self._reserved = 0
        if self._buffers:
            shortest = min(self._buffers)
            self._buffer = self._buffers[shortest]

    def settle(self, positions: int) -> None:
        """From now on keep a single buffer with room for `positions`: smaller ones would only take
        memory.
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
        all keys and values that were stored before.

        It has one column more than passes read, see `models.compiled.compiled_capacity`.

        Raises:
            MedusaError: the capacity is exceeded, or nothing has been written yet.
        """
        positions = max(positions, self._reserved)
        if self._buffer is None:
            raise MedusaError(f"the cache holds 0 positions, {positions} are needed")
        if positions > self.capacity:
            raise MedusaError(f"the cache holds {self.capacity} positions, {positions} are needed")
        # 1. the current buffer, if it is large enough
        columns = self._buffer.shape[COLUMNS]
        if positions < columns:
            return self._buffer
        # 2. else a larger buffer, with a copy of the stored columns
        length = self._buffer_length(positions)
        if length not in self._buffers:
            self._buffers[length] = self._new_buffer(self._buffer, length)
        larger = self._buffers[length]
        larger[:, :, :, :, :columns] = self._buffer
        self._buffer = larger
        # 3. with a reserved length, smaller buffers are not needed again
        if positions == self._reserved:
            self._buffers = {length: larger}
        return larger

    def _new_buffer(self, like: Tensor, length: int) -> Tensor:
        """Return zeros: masked columns are read before they are written, and 0 * NaN is NaN.

        Args:
            like: gives all sizes except rows and columns, the dtype and the device.
            length: number of columns that passes read; the buffer has one more.
        """
        layers, two, _, heads, _, dim = like.shape
        return like.new_zeros(layers, two, self.rows, heads, length + 1, dim)

    def _buffer_length(self, positions: int) -> int:
        """Return how many columns passes read in the buffer for `positions`: a power of two times
        `block`. A reserved length is rounded up to a multiple of an eighth of that.
        """
        length = self.block
        while length < positions:
            length *= 2
        if positions == self._reserved:  # the final buffer: up to half of it would stay empty
            step = max(self.block, length // 8)
            length = round_up(positions, step)
        return min(length, self.capacity)


def compact(storage: Tensor, starts: Tensor, path: Tensor) -> None:
    """Move the accepted nodes of the first B rows right after the root of their tree: from column
    starts + path[i] to column starts + i.

        before   c c c r 1 2 3 4      path 0 2 4
        after    c c c r 2 4 . .

    Shapes and addresses do not depend on the paths, so shorter paths are right-padded. The columns
    that padding entries write to must be overwritten later.

    Args:
        storage: [layers, 2, rows, kv_heads, columns, head_dim], changed in place.
        starts: columns of the roots, long [B].
        path: accepted nodes, long [B, P], increasing from 0; the root is not moved.
    """
    targets = torch.arange(1, path.shape[1], device=path.device) + starts[:, None]  # [B, P - 1]
    sources = path[:, 1:] + starts[:, None]  # [B, P - 1]
    if storage.shape[ROWS] == 1:
        # index_select copies, so sources and targets may overlap
        moved = storage.index_select(COLUMNS, sources[0])
        storage.index_copy_(COLUMNS, targets[0], moved)
        return
    rows = torch.arange(len(starts), device=path.device)[:, None]
    storage[:, :, rows, :, targets] = storage[:, :, rows, :, sources]
