"""The draft vocabulary: what occurs most among the supervised tokens, and every end of a turn."""

import pytest
import torch

from medusa_train.data.batch import Example
from medusa_train.data.draft_vocabulary import (
    DraftVocabulary,
    coverage,
    frequent_tokens,
    token_counts,
)
from medusa_train.data.examples import EncodedDataset
from medusa_train.data.report import DataReport
from medusa_train.errors import ConfigError


def text(*rows: tuple[list[int], str]) -> EncodedDataset:
    """Conversations; of each token whether it is supervised (+) or not (-)."""
    examples = [
        Example(
            torch.tensor(ids, dtype=torch.int32),
            torch.tensor([c == "+" for c in mask]),
            str(i),
            "x",
        )
        for i, (ids, mask) in enumerate(rows)
    ]
    return EncodedDataset(examples, DataReport(64))


def test_only_supervised_tokens_count() -> None:
    assert token_counts(text(([5, 5, 7, 1], "--++"), ([7, 2, 2], "-++")), 9).tolist() == [
        0,
        1,
        2,
        0,
        0,
        0,
        0,
        1,
        0,
    ]


def test_the_most_frequent_and_special_ones_are_taken_and_of_equals_the_smaller_ids() -> None:
    counts = torch.tensor([3, 0, 5, 1, 1, 0, 9, 1])
    assert frequent_tokens(counts, 3).tolist() == [0, 2, 6]
    assert frequent_tokens(counts, 5).tolist() == [0, 2, 3, 4, 6]
    assert frequent_tokens(counts, 7).tolist() == [
        0,
        1,
        2,
        3,
        4,
        6,
        7,
    ]  # more than occur: filled up by id
    assert frequent_tokens(counts, 3, special=[7, 1, 1000]).tolist() == [2, 6, 7]  # 7 occurs
    assert frequent_tokens(torch.ones(5000, dtype=torch.long), 1000).tolist() == list(range(1000))
    with pytest.raises(ConfigError, match=r"hydra\.vocab_size: 1 is less than the 2 special"):
        frequent_tokens(counts, 1, special=[3, 4], key="hydra.vocab_size")
    assert coverage(torch.tensor([3, 0, 5, 2]), torch.tensor([0, 2])) == pytest.approx(0.8)


def test_rows_beyond_the_distinct_tokens_are_described() -> None:
    train, validation = text(([5, 5, 7, 1], "--++")), text(([7, 2], "++"))
    line = (
        "6 of 9 tokens, covering 100.00% of training targets and 100.00% of validation targets; 2"
        " distinct tokens"
    )
    other = (
        "occur in training targets, the other 4 rows are filled with unused tokens of the"
        " lowest ids"
    )
    token_map = frequent_tokens(token_counts(train, 9), 6)
    vocabulary = DraftVocabulary(token_map, 9, "hydra.vocab_size")
    assert vocabulary.describe(train, validation) == [f"{line} {other}"]
    line, warning = DraftVocabulary(token_map[:1], 9, "hydra.vocab_size").describe(train, text())
    assert line == (
        "1 of 9 tokens, covering 0.00% of training targets; 2 distinct tokens occur in training"
        " targets, the other 1 rows are filled with unused tokens of the lowest ids"
    )
    assert warning.endswith("Set a larger hydra.vocab_size")
