"""Masks: packed rows give the states of single documents, and tree nodes attend to their ancestors."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from medusa_train.data.batch import IGNORE_INDEX, Batch, collate, shift_labels
from medusa_train.data.examples import Example
from medusa_train.models.backbone import Backbone
from medusa_train.trees.masks import NodeMasks, causal_mask, document_mask
from medusa_train.trees.row_trees import RowTrees
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


TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
CHAIN = Tree.chain(6)


def seen_by_hand(tree: Tree, length: int, columns: int, window: int | None) -> Tensor:
    """What each node attends to: committed columns, itself and its ancestors, within the window."""
    out = torch.zeros(tree.size + 1, columns, dtype=torch.bool)
    for node in range(tree.size + 1):
        position = length + tree.depth_list[node]
        for column in range(length):
            out[node, column] = window is None or position - column < window
        for ancestor in tree.path_nodes(node):
            distance = tree.depth_list[node] - tree.depth_list[ancestor]
            out[node, length + ancestor] = window is None or distance < window
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6])
def test_nodes_attend_to_the_prefix_their_ancestors_and_themselves(window: int | None) -> None:
    """With windows smaller and larger than the tree's depth, and prefixes shorter and longer than
    the window.
    """
    lengths = torch.tensor([0, 1, 4, 11])
    mask = NodeMasks(TREE.ancestors, TREE.depths, window, torch.float64).at(lengths, 24)
    assert (mask.shape, mask.dtype) == ((4, 1, TREE.size + 1, 24), torch.float64)
    assert mask.stride(2) % 8 == 0
    assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(mask[row, 0] == 0, seen_by_hand(TREE, length, 24, window))


@pytest.mark.parametrize("window", [None, 1, 3, 6, 400])
def test_the_mask_of_a_known_length_is_a_slice_with_the_same_values(window: int | None) -> None:
    """While the text grows beyond the table, and for shorter texts after that."""
    masks = NodeMasks(TREE.ancestors, TREE.depths, window, torch.float64)
    for length in (0, 1, 5, 300, 301, 800, 2):
        for key_length in (length + 1, length + TREE.size + 1, length + TREE.size + 2):
            mask = masks.after(length, key_length)
            assert mask.shape == (1, 1, TREE.size + 1, key_length)
            assert torch.equal(mask, masks.at(torch.tensor([length]), key_length))
            assert mask.data_ptr() == masks.after(length, key_length).data_ptr()


@pytest.mark.parametrize("window", [None, 2, 6])
def test_rows_with_trees_of_their_own(window: int | None) -> None:
    trees = RowTrees([TREE.parent_list, CHAIN.parent_list], torch.device("cpu"))
    lengths = torch.tensor([3, 9])
    mask = NodeMasks(trees.ancestors, trees.depths, window, torch.float32).at(lengths, 20)
    for row, tree in enumerate((TREE, CHAIN)):
        assert torch.equal(mask[row, 0] == 0, seen_by_hand(tree, int(lengths[row]), 20, window))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_positions_of_a_path_attend_up_to_their_own_column(window: int | None) -> None:
    columns = torch.tensor([[0, 1, 2], [5, 6, 7]])
    mask = causal_mask(columns, 10, window, torch.bfloat16)
    assert (mask.shape, mask.dtype) == ((2, 1, 3, 10), torch.bfloat16)
    for row, own_columns in enumerate(columns.tolist()):
        for i, own in enumerate(own_columns):
            first = 0 if window is None else max(0, own - window + 1)
            expected = [first <= column <= own for column in range(10)]
            assert (mask[row, 0, i] == 0).tolist() == expected
