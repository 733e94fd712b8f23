"""Passes write where they should, and read what they should."""

import pytest
import torch

from medusa_train.trees.kv_cache import KVCache
from medusa_train.trees.transformers_adapters import NodeInputs, PromptCache, node_cache
from tests.trees.test_kv_cache import BLOCK, DIM, HEADS, LAYERS, write


def test_a_prompt_goes_on_behind_what_is_known() -> None:
    torch.manual_seed(0)
    kv_cache = KVCache(LAYERS, 50, BLOCK)
    first = write(kv_cache, 0, [6])
    cache = PromptCache(kv_cache, 0, 1, 4)  # the last two positions are written again
    states = torch.randn(1, HEADS, 5, DIM)
    keys, values = cache.update(states, -states, 1)
    assert keys.shape == (1, HEADS, 9, DIM)
    assert torch.equal(keys[:, :, :4], first[1][:, :, :4])
    assert torch.equal(values[:, :, 4:], -states)
    assert (cache.get_seq_length(), cache.get_mask_sizes(5, 0)) == (4, (9, 0))


@pytest.mark.parametrize("rows", [1, 3])
def test_nodes_are_written_to_their_columns(rows: int) -> None:
    torch.manual_seed(0)
    storage = torch.randn(LAYERS, 2, rows, HEADS, 20, DIM)
    before = storage.clone()
    active = min(rows, 2)
    columns = torch.tensor([[5, 6, 7], [9, 10, 11]][:active])
    keys, values = torch.randn(2, active, HEADS, 3, DIM)
    read, _ = node_cache(storage, columns, 16).update(keys, values, 1)
    assert read.shape == (active, HEADS, 16, DIM)
    for row in range(active):
        assert torch.equal(storage[1, 0, row, :, columns[row]], keys[row])
        assert torch.equal(storage[1, 1, row, :, columns[row]], values[row])
        assert torch.equal(
            storage[1, :, row, :, : columns[row, 0]], before[1, :, row, :, : columns[row, 0]]
        )
    assert torch.equal(storage[0], before[0])
    assert torch.equal(storage[:, :, active:], before[:, :, active:])


def test_a_single_row_writes_slices_and_tells_its_length() -> None:
    """Without a mask transformers derives positions from the length."""
    torch.manual_seed(0)
    storage = torch.randn(LAYERS, 2, 1, HEADS, 20, DIM)
    indexed = storage.clone()
    columns = torch.tensor([[5]])
    nodes = NodeInputs(columns, None, columns, 5, storage, 6)
    keys, values = torch.randn(2, 1, HEADS, 1, DIM)
    read = nodes.cache().update(keys, values, 0)
    expected = node_cache(indexed, columns, 6).update(keys, values, 0)
    for mine, theirs in zip(read, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(storage, indexed)
    assert nodes.cache().get_seq_length() == 5
