"""Caches at fixed addresses keep their content through buckets; masks by lookup equal those built
by columns.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.inference.static.cache import StaticCache, move_columns
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.masks import (
    MaskTable,
    additive_mask,
    apply_sliding_window,
    mask_with_prefix,
)
from medusa_train.trees.tree import Tree

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
LAYERS, HEADS, DIM, BLOCK = 2, 3, 4, 8


def write(cache: StaticCache, first: int, lengths: Sequence[int], start: int = 0) -> Tensor:
    """Write random prompts to rows from `first` on; returns the keys [layers, rows, heads, longest,
    dim].
    """
    prompts = cache.prompt_cache(first, len(lengths))
    states = torch.randn(LAYERS, len(lengths), HEADS, max(lengths), DIM)
    for layer, keys in enumerate(states):
        prompts.write(layer, keys, -keys)
    prompts.commit_rows(lengths)
    assert prompts.length == max(lengths)
    return states


def test_a_longer_text_moves_to_the_next_bucket_and_addresses_stay() -> None:
    torch.manual_seed(0)
    cache = StaticCache(LAYERS, 50, BLOCK)
    keys = write(cache, 0, [12])
    assert cache.storage(12).shape == (LAYERS, 2, 1, HEADS, 2 * BLOCK + 1, DIM)
    storage = cache.storage(33)
    assert storage.shape == (
        LAYERS,
        2,
        1,
        HEADS,
        56 + 1,
        DIM,
    )  # 64 would exceed the capacity, 50 rounded up
    assert torch.equal(storage[:, 0, :, :, :12], keys)
    assert torch.equal(storage[:, 1, :, :, :12], -keys)
    cache.reset()
    again = write(cache, 0, [6])
    addresses = [cache.storage(positions).data_ptr() for positions in (6, 8, 9, 16, 17, 32, 33)]
    assert len(set(addresses)) == 3  # the first bucket was one for 12 positions
    assert addresses[-1] == storage.data_ptr()
    assert torch.equal(cache.storage(6)[:, 0, :, :, :6], again)
    with pytest.raises(MedusaError, match="holds 56 positions, 57 are needed"):
        cache.storage(57)
    with pytest.raises(MedusaError, match="holds 0 positions"):
        StaticCache(LAYERS, 50).storage(1)
    with pytest.raises(MedusaError, match="differ in shape"):
        cache.prompt_cache(0, 1).write(
            0, torch.zeros(1, HEADS, 2, DIM), torch.zeros(1, HEADS, 2, DIM + 1)
        )
    prompt = cache.prompt_cache(0, 1)
    with pytest.raises(MedusaError, match="holds 56 positions, 60 are needed"):
        prompt.write(0, *torch.zeros(2, 1, HEADS, 60, DIM))


def test_rows_join_move_and_get_more_memory() -> None:
    torch.manual_seed(0)
    cache = StaticCache(LAYERS, 50, BLOCK)
    cache.make_room(2, 20)
    first = write(cache, 0, [5, 3])
    storage = cache.storage(1)
    assert storage.shape == (LAYERS, 2, 2, HEADS, 24 + 1, DIM)  # room was made before
    cache.make_room(3, 10)
    assert cache.rows == 3
    joined = write(cache, 2, [7])
    storage = cache.storage(1)
    assert storage.shape == (LAYERS, 2, 3, HEADS, 24 + 1, DIM)
    assert torch.equal(storage[:, 0, :2, :, :5], first)
    assert torch.equal(storage[:, 0, 2, :, :7], joined[:, 0])
    cache.copy_row(2, 0, 7)
    assert torch.equal(storage[:, 1, 0, :, :7], -joined[:, 0])
    assert torch.equal(storage[:, 0, 1, :, :5], first[:, 1])
    cache.make_room(3, 40)
    larger = cache.storage(1)
    assert larger.shape == (LAYERS, 2, 3, HEADS, 40 + 1, DIM)
    assert torch.equal(larger[:, :, :, :, :25], storage)
    cache.reset()
    assert cache.storage(1).data_ptr() == larger.data_ptr()  # what rows outgrow is freed
    cache.settle(35)
    cache.reset()
    assert cache.storage(1).data_ptr() == larger.data_ptr()


def test_what_passes_read_grows_by_blocks() -> None:
    assert [
        StaticCache(LAYERS, 50, BLOCK).key_length(positions) for positions in (1, 8, 9, 17)
    ] == [8, 8, 16, 24]


@pytest.mark.parametrize(("rows", "allocated"), [(1, 1), (3, 3), (1, 3), (2, 3)])
def test_accepted_paths_are_compacted(rows: int, allocated: int) -> None:
    torch.manual_seed(0)
    storage = torch.randn(LAYERS, 2, allocated, HEADS, 20, DIM)
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
    assert torch.equal(storage[:, :, rows:], before[:, :, rows:])


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6])
def test_looked_up_masks_equal_those_of_columns(window: int | None) -> None:
    """With windows smaller and larger than the tree's depth, and prefixes shorter and longer than
    the window.
    """
    block, cache = additive_mask(TREE.ancestors, torch.float64), TreeCache(1, 24)
    lengths = torch.tensor([0, 1, 4, 11])
    masks = MaskTable(TREE.ancestors, TREE.depths, window, torch.float64).at(lengths, 24)
    assert masks.shape == (4, 1, TREE.size + 1, 24)
    assert masks.stride(2) % 8 == 0
    for mask, prefix in zip(masks, lengths.tolist(), strict=True):
        end = prefix + TREE.size + 1
        cache.length = prefix
        expected = mask_with_prefix(cache, block)
        expected = apply_sliding_window(expected, prefix + TREE.depths[None], prefix, window)
        assert torch.equal(mask[None, ..., :end], expected)
        assert bool((mask[..., end:] == float("-inf")).all())
