"""Rows of unlike length in one cache: gaps, compaction at each row's own end, rows that leave."""

from __future__ import annotations

import pytest
import torch

from medusa_train.errors import MedusaError
from medusa_train.trees.kv_cache import BatchCache

LAYERS, HEADS, DIM = 2, 2, 3


def _write(cache: BatchCache, numbers: list[list[int]]) -> list[list[int]]:
    """Write keys that name their positions; returns what the last layer then holds, column by column."""
    states = torch.tensor(numbers, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, DIM)
    for layer in range(LAYERS):
        keys, values = cache.update(states + 1000 * layer, -states, layer)
    assert torch.equal(keys[:, 0, :, 0], keys[:, 1, :, 2])
    written = keys != 0  # not so where memory has grown behind a row's end
    assert torch.equal(values[written], (1000 * (LAYERS - 1) - keys)[written])
    return (keys[:, 0, :, 0] - 1000 * (LAYERS - 1)).int().tolist()


def _held(cache: BatchCache, numbers: list[list[int]]) -> list[list[int]]:
    """What each row's committed positions are, seen while `numbers` are written behind them."""
    gaps = cache.padding_mask(torch.device("cpu")).tolist()
    rows = _write(cache, numbers)
    return [
        [n for n, gap in zip(row, gap_row, strict=False) if not gap] for row, gap_row in zip(rows, gaps, strict=True)
    ]


def test_rows_grow_by_what_they_keep_and_nobody_sees_the_gaps() -> None:
    cache = BatchCache(LAYERS, 16)
    _write(cache, [[1, 2, 3, 4], [11, 12, 0, 0], [21, 22, 23, 0]])
    cache.commit_rows([4, 2, 3])
    assert cache.length == 4
    assert cache.padding_mask(torch.device("cpu")).int().tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]
    assert _held(cache, [[5, 6, 7], [15, 16, 17], [25, 26, 27]]) == [[1, 2, 3, 4], [11, 12], [21, 22, 23]]
    cache.keep_rows([[0], [0, 1, 2], [0, 2]])
    assert (cache.lengths, cache.length) == ([5, 5, 5], 5)
    held = _held(cache, [[0] * 3] * 3)
    assert held == [[1, 2, 3, 4, 5], [11, 12, 15, 16, 17], [21, 22, 23, 25, 27]]
    cache.keep_rows([[0, 1], [0], [0]])
    assert cache.lengths == [7, 6, 6]


def test_rows_that_are_done_leave_in_place() -> None:
    cache = BatchCache(LAYERS, 8)
    _write(cache, [[1, 2, 3], [11, 0, 0], [21, 22, 0], [31, 32, 33]])
    cache.commit_rows([3, 1, 2, 3])
    cache.select_rows([3, 1, 2])
    assert (cache.lengths, cache.length) == ([3, 1, 2], 3)
    assert _held(cache, [[4], [14], [24]]) == [[31, 32, 33], [11], [21, 22]]
    cache.keep_rows([[0], [0], [0]])
    cache.select_rows([1, 2])
    assert cache.lengths == [2, 3]
    assert _held(cache, [[5], [5]]) == [[11, 14], [21, 22, 24]]
    with pytest.raises(ValueError, match="rows can only move to lower indices"):
        cache.select_rows([1, 0])


def _prompts(numbers: list[list[int]], capacity: int = 8) -> BatchCache:
    """A cache that holds these rows, padded behind."""
    cache = BatchCache(LAYERS, capacity)
    longest = max(map(len, numbers))
    _write(cache, [row + [77] * (longest - len(row)) for row in numbers])
    cache.commit_rows([len(row) for row in numbers])
    return cache


def test_rows_join_in_the_places_of_those_that_left_and_nobody_sees_what_these_held() -> None:
    cache = _prompts([[1, 2, 3, 4, 5], [11, 12, 13, 14], [21, 22]])
    memory = cache._storage
    assert memory is not None
    cache.select_rows([2])
    others = _prompts([[31], [41, 42, 43]], capacity=3)
    cache.append_rows(others, 8)
    assert (cache.lengths, cache.length) == ([2, 1, 3], 3)
    assert cache._storage is not None
    assert cache._storage.data_ptr() == memory.data_ptr()
    assert _held(cache, [[23], [32], [44]]) == [[21, 22], [31], [41, 42, 43]]
    cache.keep_rows([[0], [0], [0]])
    assert _held(cache, [[24, 25], [33, 34], [45, 46]]) == [[21, 22, 23], [31, 32], [41, 42, 43, 44]]
    cache.keep_rows([[0, 1], [0], [1]])
    assert _held(cache, [[0], [0], [0]]) == [[21, 22, 23, 24, 25], [31, 32, 33], [41, 42, 43, 44, 46]]
    assert others.lengths == [1, 3]


@pytest.mark.parametrize("capacity", [8, 300], ids=["rows", "rows and columns"])
def test_memory_grows_for_rows_that_join(capacity: int) -> None:
    cache = _prompts([[1, 2, 3], [11, 12]])
    cache.append_rows(_prompts([[21, 22, 23, 24], [31]], capacity=4), capacity)
    assert cache.capacity == (8 if capacity == 8 else 512)
    assert _held(cache, [[4], [13], [25], [32]]) == [[1, 2, 3], [11, 12], [21, 22, 23, 24], [31]]
    cache.keep_rows([[0]] * 4)
    cache.select_rows([3, 1])
    cache.append_rows(_prompts([[41] * 6]), 8)
    assert _held(cache, [[33], [14], [42]]) == [[31, 32], [11, 12, 13], [41] * 6]


def test_rows_join_between_passes_only() -> None:
    cache = _prompts([[1, 2]])
    _write(cache, [[3]])
    with pytest.raises(ValueError, match="1 positions are pending"):
        cache.append_rows(_prompts([[4]]), 8)
    cache.keep_rows([[0]])
    with pytest.raises(ValueError, match="nothing was written to the cache whose rows"):
        cache.append_rows(BatchCache(LAYERS, 8), 8)
    with pytest.raises(ValueError, match="to which rows are appended"):
        BatchCache(LAYERS, 8).append_rows(_prompts([[4]]), 8)


def test_rows_may_leave_before_anything_was_written() -> None:
    cache = BatchCache(LAYERS, 8)
    cache.lengths = [0, 0, 0]
    cache.select_rows([2, 1])
    assert (cache.lengths, cache.length) == ([0, 0], 0)
    _write(cache, [[1, 2], [11, 0]])
    cache.commit_rows([2, 1])
    assert _held(cache, [[3], [12]]) == [[1, 2], [11]]


def test_bounds_are_checked() -> None:
    cache = BatchCache(LAYERS, 4)
    _write(cache, [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(MedusaError, match="only 3 are pending"):
        cache.commit_rows([4, 1])
    cache.commit_rows([3, 1])
    with pytest.raises(MedusaError, match="holds 4 positions, 5 are needed"):
        _write(cache, [[1, 2], [3, 4]])
    _write(cache, [[1], [2]])
    with pytest.raises(MedusaError, match="node 1 to keep"):
        cache.keep_rows([[0], [0, 1]])
