"""The checksum within a file: every flipped bit is found, and other programs read the file."""

import random
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from medusa_train import checksums
from medusa_train.errors import CheckpointError
from medusa_train.io import warn_once

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "model.safetensors"
    save_file(TENSORS, target, metadata={"format": "pt"})
    checksums.add_checksum(target)
    return target


def test_a_file_with_a_checksum_holds_the_same_tensors(path: Path) -> None:
    checksums.check(path)
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    before = path.read_bytes()
    checksums.add_checksum(path)  # again
    assert path.read_bytes() == before


def test_every_flipped_bit_is_found(path: Path) -> None:
    content = path.read_bytes()
    source = random.Random(0)
    start = content.find(b"crc32") + 8  # within it, the checksum itself is wrong
    places = [*source.sample(range(8, len(content)), 60), start, len(content) - 1]
    found = 0
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << source.randrange(8)
        path.write_bytes(damaged)
        # a header whose entry has another name has no checksum: then the tensors are whole
        try:
            checksums.check(path)
        except CheckpointError:
            found += 1
            continue
        try:
            loaded = load_file(path)
        except SafetensorError:  # the header is none any more
            found += 1
            continue
        assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert found > len(places) // 2


def test_a_shortened_file_is_found(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged: its checksum is"):
        checksums.check(path)


def test_a_file_without_one_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "older.safetensors"
    save_file(TENSORS, target)
    warn_once.cache_clear()
    for _ in range(2):
        checksums.check(target)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"{target}: has no checksum")
    target.write_bytes(b"no safetensors file")
    checksums.check(target)  # what reads it says what is wrong
    with pytest.raises(CheckpointError, match="cannot be read"):
        checksums.check(tmp_path / "missing.safetensors")
