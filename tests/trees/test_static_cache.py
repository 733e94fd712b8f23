"""Caches at fixed addresses keep their content through buckets; masks by lookup equal those built by columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.trees.masks import MaskTable, TreeMask, additive_mask, apply_sliding_window
from medusa_train.trees.static_cache import StaticCache, move_columns
from medusa_train.trees.tree import Tree

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
LAYERS, HEADS, DIM, BLOCK = 2, 3, 4, 8


def write(cache: StaticCache, count: int) -> Tensor:
    """Write `count` random positions to all layers and commit them; returns the keys [layers, 1, heads, count, dim]."""
    states = torch.randn(LAYERS, 1, HEADS, count, DIM)
    for layer, keys in enumerate(states):
        cache.write(layer, keys, -keys)
    cache.commit(count)
    return states


def test_a_longer_text_moves_to_the_next_bucket_and_addresses_stay() -> None:
    torch.manual_seed(0)
    cache = StaticCache(LAYERS, 50, BLOCK)
    first, second, third = write(cache, 5), write(cache, 7), write(cache, 21)
    storage = cache.storage(33)
    assert storage.shape == (LAYERS, 2, 1, HEADS, 56 + 1, DIM)  # 64 would exceed the capacity, 50 rounded up
    keys = torch.cat([first, second, third], dim=3)
    assert torch.equal(storage[:, 0, :, :, :33], keys)
    assert torch.equal(storage[:, 1, :, :, :33], -keys)
    cache.reset()
    again = write(cache, 6)
    addresses = [cache.storage(positions).data_ptr() for positions in (6, 8, 9, 16, 17, 32, 33)]
    assert len(set(addresses)) == 4
    assert addresses[-1] == storage.data_ptr()
    assert torch.equal(cache.storage(6)[:, 0, :, :, :6], again)
    with pytest.raises(MedusaError, match="holds 56 positions, 57 are needed"):
        cache.storage(57)
    with pytest.raises(MedusaError, match="holds 0 positions"):
        StaticCache(LAYERS, 50).storage(1)


def test_what_passes_read_grows_by_blocks() -> None:
    cache = StaticCache(LAYERS, 50, BLOCK)
    assert [cache.key_length(positions) for positions in (1, 8, 9, 17)] == [8, 8, 16, 24]


def test_reserved_positions_have_room() -> None:
    cache = StaticCache(LAYERS, 50, BLOCK)
    states = write(cache, 7)
    assert cache.reserve(3).shape[4] == 2 * BLOCK + 1
    assert torch.equal(cache.reserve(3)[:, 0, :, :, :7], states)


@pytest.mark.parametrize("rows", [1, 3])
def test_accepted_paths_are_compacted(rows: int) -> None:
    torch.manual_seed(0)
    storage = torch.randn(LAYERS, 2, rows, HEADS, 20, DIM)
    before = storage.clone()
    starts = torch.tensor([4, 9, 0][:rows])
    paths = [[0, 2, 5], [0, 1, 0], [0, 3, 4]][:rows]
    move_columns(storage, starts, torch.tensor(paths))
    for row, path in enumerate(paths):
        start = int(starts[row])
        for i, node in enumerate(path):
            assert torch.equal(storage[:, :, row, :, start + i], before[:, :, row, :, start + node])
        assert torch.equal(storage[:, :, row, :, :start], before[:, :, row, :, :start])
        assert torch.equal(storage[:, :, row, :, start + 3 :], before[:, :, row, :, start + 3 :])


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6])
def test_looked_up_masks_equal_those_of_columns(window: int | None) -> None:
    """With windows smaller and larger than the tree's depth, and prefixes shorter and longer than the window."""
    block = additive_mask(TREE.ancestors, torch.float64)
    lengths = torch.tensor([0, 1, 4, 11])
    masks = MaskTable(TREE.ancestors, TREE.depths, window, torch.float64).at(lengths, 24)
    assert masks.shape == (4, 1, TREE.size + 1, 24)
    assert masks.stride(2) % 8 == 0
    for mask, prefix in zip(masks, lengths.tolist(), strict=True):
        end = prefix + TREE.size + 1
        expected = TreeMask(block, 24).at(prefix)
        expected = apply_sliding_window(expected, prefix + TREE.depths[None], prefix, window)
        assert torch.equal(mask[None, ..., :end], expected)
        assert bool((mask[..., end:] == float("-inf")).all())
