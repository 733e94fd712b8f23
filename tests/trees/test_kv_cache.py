"""A KV cache keeps its content through buffers, rows and compaction."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.trees.kv_cache import KVCache, compact
from medusa_train.trees.transformers_adapters import NodeCache, PromptCache

LAYERS, HEADS, DIM, BLOCK = 2, 3, 4, 8


def write(kv_cache: KVCache, first: int, lengths: Sequence[int], start: int = 0) -> Tensor:
    """Write random prompts to rows from `first` on; returns the keys [layers, rows, heads, longest,
    dim].
    """
    cache = PromptCache(kv_cache, first, len(lengths), start)
    states = torch.randn(LAYERS, len(lengths), HEADS, max(lengths), DIM)
    for layer, keys in enumerate(states):
        cache.update(keys, -keys, layer)
    return states


def test_a_longer_text_moves_to_the_next_bucket_and_addresses_stay() -> None:
    torch.manual_seed(0)
    kv_cache = KVCache(LAYERS, 50, BLOCK)
    keys = write(kv_cache, 0, [12])
    assert kv_cache.storage(12).shape == (LAYERS, 2, 1, HEADS, 2 * BLOCK + 1, DIM)
    storage = kv_cache.storage(33)
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
    kv_cache.reset()
    again = write(kv_cache, 0, [6])
    addresses = [kv_cache.storage(positions).data_ptr() for positions in (6, 8, 9, 16, 17, 32, 33)]
    assert len(set(addresses)) == 3  # the first bucket was one for 12 positions
    assert addresses[-1] == storage.data_ptr()
    assert torch.equal(kv_cache.storage(6)[:, 0, :, :, :6], again)
    with pytest.raises(MedusaError, match="holds 56 positions, 57 are needed"):
        kv_cache.storage(57)
    with pytest.raises(MedusaError, match="holds 0 positions"):
        KVCache(LAYERS, 50).storage(1)
    with pytest.raises(MedusaError, match="holds 56 positions, 60 are needed"):
        PromptCache(kv_cache, 0, 1).update(*torch.zeros(2, 1, HEADS, 60, DIM), 0)


def test_room_is_made_for_one_answer() -> None:
    kv_cache = KVCache(LAYERS, 50, BLOCK)
    write(kv_cache, 0, [6])
    kv_cache.make_room(1, 40)
    kv_cache.reset()
    assert kv_cache.storage(6).shape[4] == BLOCK + 1


def test_layers_differ_in_the_number_and_width_of_their_heads() -> None:
    """Keys and values are returned as they were written, by prompts and by nodes of trees."""
    torch.manual_seed(0)
    kv_cache = KVCache(3, 50, BLOCK)
    sizes = [(1, 4, 4), (1, 3, 2), (2, 6, 6)]  # heads, and the width of keys and of values
    layers = [(torch.randn(1, h, 7, k), torch.randn(1, h, 7, v)) for h, k, v in sizes]
    prompt = PromptCache(kv_cache, 0, 1)
    for index, layer in enumerate(layers):
        read = prompt.update(*(states[:, :, :5] for states in layer), index)
        assert all(map(torch.equal, read, (states[:, :, :5] for states in layer)))
    assert kv_cache.storage(5).shape[3:] == (2, BLOCK + 1, 6)
    for columns in (5, torch.tensor([5, 6]), torch.tensor([[5, 6]])):
        cache = NodeCache(kv_cache.storage(7).clone().unbind(), columns, 7)
        for index, layer in enumerate(layers):
            read = cache.update(*(states[:, :, 5:] for states in layer), index)
            assert all(map(torch.equal, read, layer))


def test_rows_join_move_and_get_more_memory() -> None:
    torch.manual_seed(0)
    kv_cache = KVCache(LAYERS, 50, BLOCK)
    kv_cache.make_room(2, 20)
    first = write(kv_cache, 0, [5, 3])
    storage = kv_cache.storage(1)
    assert storage.shape == (LAYERS, 2, 2, HEADS, 24 + 1, DIM)  # room was made before
    kv_cache.make_room(3, 10)
    assert kv_cache.rows == 3
    joined = write(kv_cache, 2, [7])
    storage = kv_cache.storage(1)
    assert storage.shape == (LAYERS, 2, 3, HEADS, 24 + 1, DIM)
    assert torch.equal(storage[:, 0, :2, :, :5], first)
    assert torch.equal(storage[:, 0, 2, :, :7], joined[:, 0])
    kv_cache.copy_row(2, 0, 7)
    assert torch.equal(storage[:, 1, 0, :, :7], -joined[:, 0])
    assert torch.equal(storage[:, 0, 1, :, :5], first[:, 1])
    kv_cache.make_room(3, 40)
    larger = kv_cache.storage(1)
    assert larger.shape == (LAYERS, 2, 3, HEADS, 40 + 1, DIM)
    assert torch.equal(larger[:, :, :, :, :25], storage)
    kv_cache.reset()
    assert kv_cache.storage(1).data_ptr() == larger.data_ptr()  # what rows outgrow is freed
    kv_cache.settle(35)
    kv_cache.reset()
    assert kv_cache.storage(1).data_ptr() == larger.data_ptr()


@pytest.mark.parametrize(("rows", "allocated"), [(1, 1), (3, 3), (1, 3), (2, 3)])
def test_accepted_paths_are_compacted(rows: int, allocated: int) -> None:
    torch.manual_seed(0)
    storage = torch.randn(LAYERS, 2, allocated, HEADS, 20, DIM)
    before = storage.clone()
    starts = torch.tensor([4, 9, 0][:rows])
    paths = [[0, 2, 5], [0, 1, 0], [0, 3, 4]][:rows]
    compact(storage, starts, torch.tensor(paths))
    for row, path in enumerate(paths):
        start = int(starts[row])
        for i, node in enumerate(path):
            assert torch.equal(storage[:, :, row, :, start + i], before[:, :, row, :, start + node])
        assert torch.equal(storage[:, :, row, :, :start], before[:, :, row, :, :start])
        assert torch.equal(storage[:, :, row, :, start + 3 :], before[:, :, row, :, start + 3 :])
    assert torch.equal(storage[:, :, rows:], before[:, :, rows:])
