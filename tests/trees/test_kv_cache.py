"""The cache: pending and committed positions, compaction in place, bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.trees.kv_cache import TreeCache

LAYERS, HEADS, DIM = 3, 2, 4


def _states(numbers: list[int]) -> Tensor:
    """Keys [1, heads, q, dim] whose every entry names its position."""
    return torch.tensor(numbers, dtype=torch.float32)[None, None, :, None].expand(1, HEADS, -1, DIM)


def _write(cache: TreeCache, numbers: list[int]) -> list[tuple[Tensor, Tensor]]:
    states = _states(numbers)
    return [cache.update(states + 100 * layer, -states - 100 * layer, layer) for layer in range(LAYERS)]


@pytest.mark.parametrize("kept", [[0], [0, 1, 2], [0, 2, 3], [0, 1, 4], [0, 3], [0, 4], [0, 1, 2, 3, 4]])
def test_keep_moves_accepted_nodes_together_in_every_layer(kept: list[int]) -> None:
    cache = TreeCache(LAYERS, 12)
    _write(cache, [1, 2, 3])
    cache.commit(3)
    _write(cache, [10, 11, 12, 13, 14])
    assert cache.get_seq_length() == 3  # nothing of the pending nodes counts yet
    cache.keep(kept)
    expected = [1, 2, 3, *(10 + node for node in kept), 99]
    for layer, (keys, values) in enumerate(_write(cache, [99])):
        assert keys[0, 0, :, 0].tolist() == [n + 100 * layer for n in expected]
        assert values[0, 1, :, 3].tolist() == [-n - 100 * layer for n in expected]


@pytest.mark.parametrize("kept", [[0], [0, 1, 2], [0, 2, 3], [0, 1, 4]])
def test_a_tree_may_be_written_level_by_level(kept: list[int]) -> None:
    """The first layer in three passes, the others in one: what is kept is the same in all."""
    cache = TreeCache(LAYERS, 12)
    _write(cache, [1, 2, 3])
    cache.commit(3)
    for ahead, level in ((0, [10]), (1, [11, 12]), (3, [13, 14])):
        cache.pending_offset = ahead
        keys, _ = cache.update(_states(level), -_states(level), 0)
        assert keys[0, 0, :, 0].tolist() == [1, 2, 3, *range(10, level[-1] + 1)]
    cache.pending_offset = 0
    for layer in range(1, LAYERS):
        states = _states([10, 11, 12, 13, 14])
        cache.update(states + 100 * layer, -states - 100 * layer, layer)
    cache.keep(kept)
    expected = [1, 2, 3, *(10 + node for node in kept), 99]
    for layer, (keys, values) in enumerate(_write(cache, [99])):
        assert keys[0, 0, :, 0].tolist() == [n + 100 * layer for n in expected]
        assert values[0, 1, :, 3].tolist() == [-n - 100 * layer for n in expected]


def test_bounds_are_checked() -> None:
    cache = TreeCache(LAYERS, 4)
    _write(cache, [1, 2, 3])
    with pytest.raises(MedusaError, match="only 3 are pending"):
        cache.commit(4)
    with pytest.raises(MedusaError, match="node 3 to keep"):
        cache.keep([0, 3])
    cache.commit(3)
    with pytest.raises(MedusaError, match="holds 4 positions, 5 are needed"):
        _write(cache, [4, 5])
    cache.reset()
    assert cache.get_seq_length() == 0
    _write(cache, [4, 5])
