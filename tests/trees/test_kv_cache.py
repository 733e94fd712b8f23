"""Key-value caches: pending and committed positions, compaction in place, rows of different
lengths, bounds.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.trees.kv_cache import BatchCache, TreeCache

LAYERS, HEADS, DIM = 3, 2, 4
CPU = torch.device("cpu")


def keys_of(numbers: Sequence[Sequence[int]]) -> Tensor:
    """Keys [B, heads, q, dim] whose entries all equal the number of their position."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, DIM)


def write(cache: TreeCache, numbers: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Write a single row to all layers, with 100 added per layer; return all keys and values by
    layer.
    """
    states = keys_of([numbers])
    return [
        cache.update(states + 100 * layer, -states - 100 * layer, layer) for layer in range(LAYERS)
    ]


def check_contents(cache: TreeCache, expected: list[int]) -> None:
    """Write another position, and compare what all layers hold with `expected` and it."""
    for layer, (keys, values) in enumerate(write(cache, [99])):
        assert keys[0, 0, :, 0].tolist() == [n + 100 * layer for n in [*expected, 99]]
        assert values[0, 1, :, 3].tolist() == [-n - 100 * layer for n in [*expected, 99]]


@pytest.mark.parametrize(
    "kept", [[0], [0, 1, 2], [0, 2, 3], [0, 1, 4], [0, 3], [0, 4], [0, 1, 2, 3, 4]]
)
def test_keep_compacts_accepted_nodes_in_every_layer(kept: list[int]) -> None:
    cache = TreeCache(LAYERS, 12)
    write(cache, [1, 2, 3])
    cache.commit(3)
    write(cache, [10, 11, 12, 13, 14])
    assert cache.get_seq_length() == 3  # pending nodes do not count
    cache.keep_rows([kept])
    check_contents(cache, [1, 2, 3, *(10 + node for node in kept)])


@pytest.mark.parametrize("kept", [[0], [0, 1, 2], [0, 2, 3], [0, 1, 4]])
def test_a_tree_can_be_written_level_by_level(kept: list[int]) -> None:
    """The first layer in three passes, the others in one: all keep the same positions."""
    cache = TreeCache(LAYERS, 12)
    write(cache, [1, 2, 3])
    cache.commit(3)
    for offset, level in ((0, [10]), (1, [11, 12]), (3, [13, 14])):
        cache.pending_offset = offset
        keys, _ = cache.update(keys_of([level]), -keys_of([level]), 0)
        assert keys[0, 0, :, 0].tolist() == [1, 2, 3, *range(10, level[-1] + 1)]
    cache.pending_offset = 0
    for layer in range(1, LAYERS):
        states = keys_of([[10, 11, 12, 13, 14]])
        cache.update(states + 100 * layer, -states - 100 * layer, layer)
    cache.keep_rows([kept])
    check_contents(cache, [1, 2, 3, *(10 + node for node in kept)])


def test_bounds_are_checked() -> None:
    cache = TreeCache(LAYERS, 4)
    write(cache, [1, 2, 3])
    with pytest.raises(MedusaError, match="only 3 are pending"):
        cache.commit(4)
    with pytest.raises(MedusaError, match="node 3 to keep"):
        cache.keep_rows([[0, 3]])
    cache.commit(3)
    with pytest.raises(MedusaError, match="holds 4 positions, 5 are needed"):
        write(cache, [4, 5])
    with pytest.raises(MedusaError, match="holds 4 positions, 5 are needed"):
        cache.reserve(2)
    cache.reset()
    assert cache.get_seq_length() == 0
    write(cache, [4, 5])


# Batches


def write_rows(cache: BatchCache, numbers: list[list[int]]) -> list[list[int]]:
    """Write rows to all layers, with 1000 added per layer; return what the last layer holds, per
    row.
    """
    states = keys_of(numbers)
    for layer in range(LAYERS):
        keys, values = cache.update(states + 1000 * layer, -states, layer)
    assert torch.equal(keys[:, 0, :, 0], keys[:, 1, :, 2])
    written = keys != 0  # positions after a row's end may never have been written
    assert torch.equal(values[written], (1000 * (LAYERS - 1) - keys)[written])
    return (keys[:, 0, :, 0] - 1000 * (LAYERS - 1)).int().tolist()


def committed(cache: BatchCache, numbers: list[list[int]]) -> list[list[int]]:
    """Return each row's committed positions, read while `numbers` are written after them."""
    padding = cache.padding_mask(CPU).tolist()
    rows = write_rows(cache, numbers)
    return [
        [n for n, masked in zip(row, row_padding, strict=False) if not masked]
        for row, row_padding in zip(rows, padding, strict=True)
    ]


def prompts(numbers: list[list[int]], capacity: int = 8) -> BatchCache:
    """Build a cache that holds these rows, right-padded."""
    cache = BatchCache(LAYERS, capacity)
    write_rows(cache, [row + [77] * (max(map(len, numbers)) - len(row)) for row in numbers])
    cache.commit_rows([len(row) for row in numbers])
    return cache


def test_rows_grow_by_the_nodes_they_keep_and_padding_is_masked() -> None:
    cache = prompts([[1, 2, 3, 4], [11, 12], [21, 22, 23]], capacity=16)
    assert cache.length == 4
    assert cache.padding_mask(CPU).int().tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]
    assert committed(cache, [[5, 6, 7], [15, 16, 17], [25, 26, 27]]) == [
        [1, 2, 3, 4],
        [11, 12],
        [21, 22, 23],
    ]
    cache.keep_rows([[0], [0, 1, 2], [0, 2]])
    assert (cache.lengths, cache.length) == ([5, 5, 5], 5)
    assert committed(cache, [[0] * 3] * 3) == [
        [1, 2, 3, 4, 5],
        [11, 12, 15, 16, 17],
        [21, 22, 23, 25, 27],
    ]
    cache.keep_rows([[0, 1], [0], [0]])
    assert cache.lengths == [7, 6, 6]


def test_rows_are_removed_in_place() -> None:
    cache = prompts([[1, 2, 3], [11], [21, 22], [31, 32, 33]])
    cache.select_rows([3, 1, 2])
    assert (cache.lengths, cache.length) == ([3, 1, 2], 3)
    assert committed(cache, [[4], [14], [24]]) == [[31, 32, 33], [11], [21, 22]]
    cache.keep_rows([[0], [0], [0]])
    cache.select_rows([1, 2])
    assert cache.lengths == [2, 3]
    assert committed(cache, [[5], [5]]) == [[11, 14], [21, 22, 24]]
    with pytest.raises(ValueError, match="rows can only move to lower indices"):
        cache.select_rows([1, 0])


def test_appended_rows_reuse_the_memory_of_removed_ones() -> None:
    cache = prompts([[1, 2, 3, 4, 5], [11, 12, 13, 14], [21, 22]])
    storage = cache._storage
    assert storage is not None
    cache.select_rows([2])
    others = prompts([[31], [41, 42, 43]], capacity=3)
    cache.append_rows(others, 8)
    assert (cache.lengths, cache.length) == ([2, 1, 3], 3)
    assert cache._storage is not None
    assert cache._storage.data_ptr() == storage.data_ptr()
    assert committed(cache, [[23], [32], [44]]) == [[21, 22], [31], [41, 42, 43]]
    cache.keep_rows([[0], [0], [0]])
    assert committed(cache, [[24, 25], [33, 34], [45, 46]]) == [
        [21, 22, 23],
        [31, 32],
        [41, 42, 43, 44],
    ]
    cache.keep_rows([[0, 1], [0], [1]])
    assert committed(cache, [[0], [0], [0]]) == [
        [21, 22, 23, 24, 25],
        [31, 32, 33],
        [41, 42, 43, 44, 46],
    ]
    assert others.lengths == [1, 3]


@pytest.mark.parametrize("capacity", [8, 300], ids=["rows", "rows and columns"])
def test_memory_grows_for_appended_rows(capacity: int) -> None:
    cache = prompts([[1, 2, 3], [11, 12]])
    cache.append_rows(prompts([[21, 22, 23, 24], [31]], capacity=4), capacity)
    assert cache.capacity == (8 if capacity == 8 else 512)
    assert committed(cache, [[4], [13], [25], [32]]) == [
        [1, 2, 3],
        [11, 12],
        [21, 22, 23, 24],
        [31],
    ]
    cache.keep_rows([[0]] * 4)
    cache.select_rows([3, 1])
    cache.append_rows(prompts([[41] * 6]), 8)
    assert committed(cache, [[33], [14], [42]]) == [[31, 32], [11, 12, 13], [41] * 6]


def test_rows_are_appended_between_passes_only() -> None:
    cache = prompts([[1, 2]])
    write_rows(cache, [[3]])
    with pytest.raises(ValueError, match="1 positions are pending"):
        cache.append_rows(prompts([[4]]), 8)
    cache.keep_rows([[0]])
    with pytest.raises(ValueError, match="nothing was written to the cache whose rows"):
        cache.append_rows(BatchCache(LAYERS, 8), 8)
    with pytest.raises(ValueError, match="to which rows are appended"):
        BatchCache(LAYERS, 8).append_rows(prompts([[4]]), 8)


def test_rows_can_be_removed_before_anything_is_written() -> None:
    cache = BatchCache(LAYERS, 8)
    cache.lengths = [0, 0, 0]
    cache.select_rows([2, 1])
    assert (cache.lengths, cache.length) == ([0, 0], 0)
    write_rows(cache, [[1, 2], [11, 0]])
    cache.commit_rows([2, 1])
    assert committed(cache, [[3], [12]]) == [[1, 2], [11]]


def test_bounds_of_batches_are_checked() -> None:
    cache = BatchCache(LAYERS, 4)
    write_rows(cache, [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(MedusaError, match="only 3 are pending"):
        cache.commit_rows([4, 1])
    cache.commit_rows([3, 1])
    with pytest.raises(MedusaError, match="holds 4 positions, 5 are needed"):
        write_rows(cache, [[1, 2], [3, 4]])
    write_rows(cache, [[1], [2]])
    with pytest.raises(MedusaError, match="node 1 to keep"):
        cache.keep_rows([[0], [0, 1]])
