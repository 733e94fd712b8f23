import pytest
import torch

from medusa_train.data.targets import IGNORE_INDEX, shift_labels

X = IGNORE_INDEX


def test_shift_by_hand_on_one_document() -> None:
    labels = torch.tensor([[X, X, 12, 13, 14]])
    assert shift_labels(labels, 0).tolist() == [[X, 12, 13, 14, X]]
    assert shift_labels(labels, 1).tolist() == [[12, 13, 14, X, X]]
    assert shift_labels(labels, 3).tolist() == [[14, X, X, X, X]]


def test_shift_by_hand_across_documents_and_padding() -> None:
    labels = torch.tensor([[1, 2, 3, 4, 5, 6, X], [7, 8, 9, X, X, X, X]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 0, 0, -1, -1, -1, -1]])
    assert shift_labels(labels, 0, segments).tolist() == [[2, 3, X, 5, 6, X, X], [8, 9, X, X, X, X, X]]
    assert shift_labels(labels, 1, segments).tolist() == [[3, X, X, 6, X, X, X], [9, X, X, X, X, X, X]]
    assert shift_labels(labels, 2, segments).tolist() == [[X] * 7, [X] * 7]


def test_a_document_of_one_token_gives_and_takes_nothing() -> None:
    labels = torch.tensor([[1, 2, 3, 4]])
    segments = torch.tensor([[0, 1, 2, 2]])
    assert shift_labels(labels, 0, segments).tolist() == [[X, X, 4, X]]


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


def test_longer_than_the_row_and_negative() -> None:
    assert shift_labels(torch.tensor([[1, 2]]), 5).tolist() == [[X, X]]
    with pytest.raises(ValueError, match="0 or more"):
        shift_labels(torch.tensor([[1, 2]]), -1)
