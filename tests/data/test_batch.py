import random

import pytest
import torch

from medusa_train.data.batch import IGNORE_INDEX, Example, collate, pack, shift_labels

X = IGNORE_INDEX


def example(first: int, length: int, supervised: int) -> Example:
    """Tokens first, first + 1, ...; the last `supervised` of them are supervised."""
    tokens = torch.arange(first, first + length, dtype=torch.int32)
    return Example(tokens, torch.arange(length) >= length - supervised, "", f"from {first}")


def test_rows_of_several_documents() -> None:
    batch = collate(
        [[example(10, 3, 2), example(20, 2, 1)], [example(30, 4, 1), example(40, 2, 2)]]
    )
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21, 0], [30, 31, 32, 33, 40, 41]]
    assert batch.labels.tolist() == [[X, 11, 12, X, 21, X], [X, X, X, 33, 40, 41]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 1, 1]]
    assert batch.records == ["from 10", "from 20", "from 30", "from 40"]
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.positions, batch.segments)} == {
        torch.int64
    }
    moved = batch.to("meta")
    assert moved.labels.device.type == "meta"
    assert moved.records == batch.records


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The same by its definition, in n * rows steps."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[index] <= capacity:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


def test_by_hand() -> None:
    assert pack([4, 7, 3, 6], 10) == [[1, 2], [3, 0]]
    assert pack([], 10) == []
    for lengths in ([3, 11], [0, 3]):
        with pytest.raises(ValueError, match="must have 1 to 10 tokens"):
            pack(lengths, 10)


@pytest.mark.parametrize("seed", range(20))
def test_every_document_stands_in_the_first_row_with_room(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(1, 40)
    lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 70))]
    assert pack(lengths, capacity) == first_fit_decreasing(lengths, capacity)


def test_every_shift_agrees_with_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 50, (3, 12), generator=generator)
    labels[torch.rand(3, 12, generator=generator) < 0.3] = X
    segments = torch.tensor([[0] * 12, [0] * 5 + [1] * 7, [0, 1, 1, 1, 2, 2, 2, 2, 2, -1, -1, -1]])
    before = labels.clone()
    for k in range(15):
        out = shift_labels(labels, k, segments)
        for b in range(3):
            for t in range(12):
                ahead = t + k + 1
                reached = ahead < 12 and segments[b, t] == segments[b, ahead]
                assert out[b, t] == (labels[b, ahead] if reached else X), (k, b, t)
    assert torch.equal(labels, before)
