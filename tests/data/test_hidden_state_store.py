"""Hidden states on disk: entries, shards of several processes, torn tails and damaged values."""

import json
from pathlib import Path

import pytest
import torch

from medusa_train.data.batch import Example
from medusa_train.data.hidden_state_store import StateFormat, StateStore, document_key
from medusa_train.training.hidden_states import distinct_documents

FORMAT = StateFormat(states=2, width=3, dtype=torch.bfloat16)


def example(*tokens: int) -> Example:
    return Example(
        torch.tensor(tokens, dtype=torch.int32),
        torch.ones(len(tokens), dtype=torch.bool),
        "",
        "",
        "",
    )


def values(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, tokens, 3, generator=torch.Generator().manual_seed(seed)).to(
        torch.bfloat16
    )


def only(directory: Path, suffix: str) -> Path:
    (path,) = directory.glob(f"*{suffix}")
    return path


def test_entries_are_read_by_the_next_process(tmp_path):
    first = StateStore(tmp_path / "new" / "cache", FORMAT)
    assert not (tmp_path / "new").exists()  # nothing is stored yet
    for key, length in (("a", 4), ("b", 1)):
        first.append(key, values(length, length))
    assert only(first.directory, ".states").stat().st_size == FORMAT.size(5) == 5 * 2 * 3 * 2
    for store in (first, StateStore(first.directory, FORMAT)):
        assert torch.equal(store.read("a", 4), values(4, 4))
        assert torch.equal(store.read("b", 1), values(1, 1))
        assert "c" not in store
        assert store.read("c", 1) is None
        assert store.damaged == 0


def test_processes_read_what_the_others_store(tmp_path):
    one, other = (StateStore(tmp_path, FORMAT, rank) for rank in (0, 1))
    for number in range(3):
        one.append(f"one-{number}", values(2, number))
        other.append(f"other-{number}", values(3, number))
        assert f"one-{number}" not in other
        one.refresh()
        other.refresh()
        assert torch.equal(other.read(f"one-{number}", 2), values(2, number))
        assert torch.equal(one.read(f"other-{number}", 3), values(3, number))
    assert len(list(tmp_path.glob("*.states"))) == 2


def test_a_killed_process_leaves_complete_entries(tmp_path):
    """The tail of its values has no line, or half a line; what the next process stores is read
    after both.
    """
    killed = StateStore(tmp_path, FORMAT)
    killed.append("a", values(4))
    with only(tmp_path, ".states").open("ab") as tail, only(tmp_path, ".jsonl").open("ab") as line:
        tail.write(b"\1" * 7)
        line.write(b'{"key": "b", "tok')
    for _ in range(2):
        resumed = StateStore(tmp_path, FORMAT)
        resumed.append("c", values(2))
        assert torch.equal(resumed.read("a", 4), values(4))
        assert torch.equal(StateStore(tmp_path, FORMAT).read("c", 2), values(2))
        assert resumed.read("b", 1) is None
        assert resumed.damaged == 0


@pytest.mark.parametrize("damage", ["bit", "cut", "length", "gone"])
def test_damaged_entries_are_counted_and_replaced(tmp_path, damage):
    store = StateStore(tmp_path, FORMAT)
    store.append("a", values(4))
    store.append("b", values(2))
    path, index = only(tmp_path, ".states"), only(tmp_path, ".jsonl")
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[FORMAT.size(4) + 5] ^= 1
        path.write_bytes(content)
    elif damage == "cut":  # after a power cut values may be lost whose lines were written
        path.write_bytes(content[:-3])
    elif damage == "gone":
        path.unlink()
    else:
        lines = index.read_text().splitlines()
        lines[1] = json.dumps({**json.loads(lines[1]), "tokens": 1})
        index.write_text("\n".join([*lines, "no JSON", '{"key": "c"}', ""]))
    store = StateStore(tmp_path, FORMAT)
    assert store.damaged == (2 if damage == "length" else 0)
    assert store.read("b", 2) is None
    assert "b" not in store
    assert (store.read("a", 4) is None) == (damage == "gone")
    assert store.damaged == {"length": 3, "gone": 2}.get(damage, 1)
    store.append("b", values(2, 9))
    # the newest shard counts
    assert torch.equal(StateStore(tmp_path, FORMAT).read("b", 2), values(2, 9))


def test_documents_are_known_by_their_tokens():
    one, same, other = example(1, 2, 3), example(1, 2, 3), example(1, 2)
    assert document_key(one) == document_key(same) != document_key(other)
    assert document_key(one) != document_key(one, "beyond")
    assert sorted(distinct_documents([one, other, same]).values()) == [2, 3]
