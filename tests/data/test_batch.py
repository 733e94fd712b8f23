import torch

from medusa_train.data.batch import collate
from medusa_train.data.examples import Example
from medusa_train.data.targets import IGNORE


def example(first: int, length: int, learnt: int) -> Example:
    """Tokens first, first + 1, ...; the last `learnt` of them are supervised."""
    tokens = torch.arange(first, first + length, dtype=torch.int32)
    return Example(tokens, torch.arange(length) >= length - learnt, "", "", f"from {first}")


def test_rows_of_one_document_each() -> None:
    batch = collate([[example(10, 3, 1)], [example(20, 5, 2)]], pad_id=777)
    assert batch.tokens.tolist() == [[10, 11, 12, 777, 777], [20, 21, 22, 23, 24]]
    assert batch.labels.tolist() == [[IGNORE, IGNORE, 12, IGNORE, IGNORE], [IGNORE, IGNORE, IGNORE, 23, 24]]
    assert batch.segments.tolist() == [[0, 0, 0, -1, -1], [0] * 5]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.records == ["from 10", "from 20"]
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.positions, batch.segments)} == {torch.int64}
    moved = batch.to("meta")
    assert moved.labels.device.type == "meta"
    assert moved.records == batch.records


def test_rows_of_several_documents() -> None:
    batch = collate([[example(10, 3, 2), example(20, 2, 1)], [example(30, 4, 1), example(40, 2, 2)]], pad_id=7)
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21, 7], [30, 31, 32, 33, 40, 41]]
    assert batch.labels.tolist() == [
        [IGNORE, 11, 12, IGNORE, 21, IGNORE],
        [IGNORE, IGNORE, IGNORE, 33, 40, 41],
    ]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 1, 1]]
    assert batch.records == ["from 10", "from 20", "from 30", "from 40"]
