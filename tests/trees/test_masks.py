"""Masks: packed rows give the states of single documents, and tree nodes attend to their ancestors."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from medusa_train.data.batch import IGNORE_INDEX, Batch, collate, shift_labels
from medusa_train.data.examples import Example
from medusa_train.models.backbone import Backbone
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.masks import additive_mask, document_mask, mask_of_slots, mask_with_prefix
from medusa_train.trees.tree import Tree
from tests.families import random_backbone

FAMILIES = ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma2"]
# longer than every family's window; the second row ends in padding
LENGTHS = [[13, 9, 11], [17, 4]]


def documents(seed: int = 0) -> list[list[Example]]:
    draw = torch.Generator().manual_seed(seed)

    def example(length: int) -> Example:
        tokens = torch.randint(2, 61, (length,), generator=draw, dtype=torch.int32)
        return Example(tokens, torch.arange(length) >= length // 3, "", "", f"{length}")

    return [[example(length) for length in row] for row in LENGTHS]


def run(backbone: Backbone, batch: Batch) -> Tensor:
    mask = document_mask(batch.segments, backbone.dtype)
    with torch.no_grad():
        return backbone.run(batch.tokens, positions=batch.positions, mask=mask).hidden


def loss(backbone: Backbone, hidden: Tensor, batch: Batch, k: int) -> Tensor:
    targets = shift_labels(batch.labels, k, batch.segments)
    logits = backbone.logits(hidden).flatten(0, 1)
    return cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def test_the_document_mask_written_out() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]]), torch.bfloat16)
    assert mask is not None
    assert mask.dtype == torch.bfloat16
    assert mask.shape == (2, 1, 6, 6)
    assert set(mask.flatten().tolist()) == {0.0, float("-inf")}
    seen = [
        ["".join(".x"[value == 0] for value in row) for row in rows[0]] for rows in mask.tolist()
    ]
    assert seen[0] == ["x.....", "xx....", "..x...", "..xx..", "....x.", "....xx"]
    assert seen[1] == ["x.....", "xx....", "xxx...", "xxxx..", "xxxxx.", "xxxxxx"]


def test_rows_of_one_document_need_no_mask() -> None:
    assert document_mask(torch.tensor([[0, 0, -1], [0, 0, 0]]), torch.float32) is None
    assert document_mask(torch.full((1, 3), -1), torch.float32) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_give_the_states_of_single_documents(family: str) -> None:
    backbone = random_backbone(family, dtype=torch.float32)
    rows = documents()
    packed = collate(rows)
    hidden = run(backbone, packed)
    assert hidden.isfinite().all()
    alone = [collate([[example]]) for row in rows for example in row]
    states = [run(backbone, batch) for batch in alone]
    for row, lengths in enumerate(LENGTHS):
        for segment in range(len(lengths)):
            state = states[sum(map(len, LENGTHS[:row])) + segment]
            torch.testing.assert_close(
                hidden[row, packed.segments[row] == segment], state[0], rtol=1e-5, atol=1e-5
            )
    for k in range(3):
        expected = sum(
            loss(backbone, state, batch, k) for state, batch in zip(states, alone, strict=True)
        )
        torch.testing.assert_close(loss(backbone, hidden, packed, k), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_row_of_padding_has_finite_states(family: str) -> None:
    backbone = random_backbone(family, dtype=torch.float32)
    batch = collate(documents())
    batch.segments[1] = -1
    assert run(backbone, batch).isfinite().all()
    assert torch.equal(
        shift_labels(batch.labels, 0, batch.segments)[1, -2:], torch.full((2,), IGNORE_INDEX)
    )


def seen(mask: torch.Tensor) -> torch.Tensor:
    assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
    return mask[0, 0] == 0


def expected(tree: Tree, prefix: int, upto: int) -> torch.Tensor:
    out = torch.zeros(tree.size + 1, upto, dtype=torch.bool)
    out[:, :prefix] = True
    out[:, prefix : prefix + tree.size + 1] = tree.ancestors
    return out


def test_nodes_attend_to_the_prefix_their_ancestors_and_themselves() -> None:
    tree, cache = Tree.cartesian([2, 2]), TreeCache(1, 40)
    block = additive_mask(tree.ancestors, torch.float32)
    for cache.length in (0, 3, 13):
        end = cache.length + tree.size + 1
        assert torch.equal(seen(mask_with_prefix(cache, block)), expected(tree, cache.length, end))
        fixed = mask_of_slots(cache, block, 32)
        assert torch.equal(seen(fixed), expected(tree, cache.length, 32))
        assert not fixed.is_contiguous()
