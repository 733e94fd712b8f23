"""Hidden states on disk: files of several processes, full disks and damaged values."""

import errno
from pathlib import Path
from unittest.mock import Mock

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
    )


def values(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, tokens, 3, generator=torch.Generator().manual_seed(seed)).to(
        torch.bfloat16
    )


def test_states_are_read_by_the_next_process(tmp_path):
    first = StateStore(tmp_path / "new" / "cache", FORMAT)
    assert not (tmp_path / "new").exists()  # nothing is stored yet
    for key, length in (("a", 4), ("b", 1)):
        first.write(key, values(length, length))
    assert first.path("a").stat().st_size == FORMAT.size(4) + 4 == 4 * 2 * 3 * 2 + 4
    for store in (first, StateStore(first.directory, FORMAT)):
        assert torch.equal(store.read("a", 4), values(4, 4))
        assert torch.equal(store.read("b", 1), values(1, 1))
        assert "c" not in store
        assert store.read("c", 1) is None
        assert store.damaged == 0


def test_processes_read_what_the_others_store(tmp_path):
    one, other = (StateStore(tmp_path, FORMAT) for _ in range(2))
    for number in range(3):
        one.write(f"one-{number}", values(2, number))
        other.write(f"other-{number}", values(3, number))
        assert torch.equal(other.read(f"one-{number}", 2), values(2, number))
        assert torch.equal(one.read(f"other-{number}", 3), values(3, number))


@pytest.mark.parametrize("fails", ["open", "replace"])
def test_a_file_that_cannot_be_written_is_not_there(tmp_path, monkeypatch, fails):
    """As on a full disk; nothing of it is left, and other files stay."""
    store = StateStore(tmp_path, FORMAT)
    store.write("a", values(4))
    with monkeypatch.context() as patched:
        patched.setattr(Path, fails, Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            store.write("b", values(2))
    assert [path.name for path in tmp_path.iterdir()] == ["a.states"]
    assert torch.equal(store.read("a", 4), values(4))


@pytest.mark.parametrize("damage", ["bit", "cut", "longer"])
def test_damaged_files_are_counted_and_replaced(tmp_path, damage):
    store = StateStore(tmp_path, FORMAT)
    store.write("a", values(4))
    store.write("b", values(2))
    path = store.path("b")
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[5] ^= 1
    elif damage == "cut":  # values may be lost in a power cut
        del content[-3:]
    else:
        content += b"1"
    path.write_bytes(content)
    assert store.read("b", 2) is None
    assert store.damaged == 1
    assert "b" not in store
    assert torch.equal(store.read("a", 4), values(4))
    store.write("b", values(2, 9))
    assert torch.equal(StateStore(tmp_path, FORMAT).read("b", 2), values(2, 9))


def test_documents_are_known_by_their_tokens():
    one, same, other = example(1, 2, 3), example(1, 2, 3), example(1, 2)
    assert document_key(one) == document_key(same) != document_key(other)
    assert document_key(one) != document_key(one, "beyond")
    assert sorted(distinct_documents([one, other, same]).values()) == [2, 3]
