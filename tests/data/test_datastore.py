"""Datastores: lookups against a plain search, sampling, and files."""

import json
import random
from pathlib import Path

import pytest

from medusa_train.data.datastore import Datastore, read_datastore
from medusa_train.errors import DataError
from medusa_train.io import warn_once


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def plain_search(documents: list[list[int]], recent: list[int], length: int) -> list[list[int]]:
    """What follows the longest end of `recent`, by looking at every position."""
    for n in range(len(recent), 0, -1):
        ngram = recent[len(recent) - n :]
        places = [
            (doc, i + n)
            for doc in documents
            for i in range(len(doc) - n + 1)
            if doc[i : i + n] == ngram
        ]
        if places:
            return sorted(copy for doc, end in places if (copy := doc[end : end + length]))
    return []


@pytest.mark.parametrize("order", [6, 40])
def test_continuations_are_those_of_a_plain_search(order: int) -> None:
    rng = random.Random(3)
    documents = [[rng.randrange(4) for _ in range(rng.randrange(60))] for _ in range(12)] + [
        [2] * 30
    ]
    datastore = Datastore(documents, order)
    assert datastore.size == sum(map(len, documents))
    for _ in range(200):
        recent = [rng.randrange(5) for _ in range(rng.randrange(1, 7))]
        assert sorted(datastore.continuations(recent, 5, 10_000)) == plain_search(
            documents, recent, 5
        )


def test_few_continuations_are_in_proportion() -> None:
    copies = Datastore([[1, 2]] * 60 + [[1, 3]] * 30, 4).continuations([1], 1, 9)
    assert (copies.count([2]), copies.count([3])) == (6, 3)


def test_no_more_continuations_are_returned_than_asked_for() -> None:
    datastore = Datastore([[1, 2]] * 7, 2)
    found = [len(datastore.continuations([1], 1, count)) for count in (1, 2, 4, 7, 9)]
    assert found == [1, 2, 4, 7, 7]


def test_chats_give_their_answers_and_other_files_their_text(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "xyz"}, {"role": "assistant", "content": "abc"}]
    bad = json.dumps({"messages": turns[1:]})  # skipped
    chats.write_text(f"{bad}\n{json.dumps({'messages': turns})}\n", encoding="utf-8")
    datastore = read_datastore(chats, Letters(), 8)
    assert datastore.size == 3
    assert datastore.continuations([ord("a")], 4, 3) == [[ord("b"), ord("c")]]
    assert datastore.continuations([ord("x")], 4, 3) == []
    text = tmp_path / "notes.txt"
    text.write_text("xyz", encoding="utf-8")
    assert read_datastore(text, Letters(), 8).continuations([ord("y")], 4, 3) == [[ord("z")]]
    assert "3 tokens" in read_datastore(text, Letters(), 8).describe()
    text.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"notes\.txt: has no text"):
        read_datastore(text, Letters(), 8)
    with pytest.raises(DataError, match="cannot be read as text"):
        read_datastore(tmp_path, Letters(), 8)


def test_what_a_datastore_does_not_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b c"}]
    path = tmp_path / "chats.jsonl"
    records = [{"messages": turns, "wxyz": 1}, {"messages": "no list"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    warn_once.cache_clear()
    read_datastore(path, Letters(), 2)
    shown = [record.message for record in caplog.records]
    assert shown[0].startswith(f"{path}: 1 invalid records skipped, the first: {path}:2: ")
    assert shown[1] == f"{path}: not read: columns wxyz (1)"
