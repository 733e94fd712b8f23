"""CRC-32 of files, and of safetensors files that contain their own checksum.

The checksum in a safetensors file covers all bytes of the file, with zeros in place of the checksum
itself. It is in the file's metadata (`"crc32": "0a1b2c3d"`), so that file and checksum are replaced
together. Other programs can still read the file.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from medusa_train.errors import CheckpointError
from medusa_train.io import parse_json, replace_file, warn_once

#: Name of the metadata entry, and its value before the checksum is known.
NAME = "crc32"
EMPTY = "0" * 8
_ENTRY = f'"{NAME}":"'.encode()
_BLOCK = 1 << 20  # bytes at a time
_LENGTH = 8  # bytes of the length field before the header
_MAX_HEADER = 100_000_000  # as in safetensors


def add_checksum(path: Path) -> None:
    """Add a checksum to a safetensors file, which is replaced atomically.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it is not a safetensors file.
    """

    def write(target: Path) -> None:
        with path.open("rb") as source, target.open("wb") as file:
            header = parse_json(source.read(int.from_bytes(source.read(_LENGTH), "little")))
            header["__metadata__"] = {**header.get("__metadata__", {}), NAME: EMPTY}
            described = json.dumps(header, separators=(",", ":")).encode()
            described += b" " * (-len(described) % 8)  # tensors stay aligned
            file.write(len(described).to_bytes(_LENGTH, "little") + described)
            shutil.copyfileobj(source, file, _BLOCK)
        write_checksum(target)

    replace_file(path, write)


def write_checksum(path: Path) -> None:
    """Write the checksum of a safetensors file in place of its `EMPTY` one, and flush
    it to disk.
    """
    position = _position(path)
    assert position is not None
    value = checksum(path, position)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(f"{value:08x}".encode())
        file.flush()
        os.fsync(file.fileno())


def check(path: Path, *, expected_here: bool = True) -> None:
    """Compare a safetensors file with its checksum. Files of other programs have none; if it is
    `expected_here`, one warning says so.

    Raises:
        CheckpointError: they differ, or the file cannot be read.
    """
    try:
        position = _position(path)
        if position is None:
            if expected_here:
                warn_once(
                    f"{path}: has no checksum (written by an earlier version or another program):"
                    " damage would not be noticed"
                )
            return
        with path.open("rb") as file:
            file.seek(position)
            expected = file.read(len(EMPTY))
        actual = f"{checksum(path, position):08x}".encode()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if actual != expected:
        raise CheckpointError(
            f"{path}: damaged: its checksum is {actual.decode()},"
            f" {expected.decode(errors='replace')} was written; copy the file again, or train again"
        )


def _position(path: Path) -> int | None:
    """Return the byte offset of a file's checksum; None if it has none, or no readable header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if length > min(_MAX_HEADER, path.stat().st_size):
            return None
        header = file.read(length)
    try:
        value: Any = parse_json(header)
        metadata = value.get("__metadata__") or {}
        has_checksum = NAME in metadata
    except (ValueError, AttributeError):
        return None
    entry_start = header.find(_ENTRY)
    return _LENGTH + entry_start + len(_ENTRY) if has_checksum and entry_start >= 0 else None


def checksum(path: Path, position: int | None = None) -> int:
    """Return the CRC-32 of a file's bytes, with zeros for its own checksum at `position`."""
    value = 0
    with path.open("rb") as file:
        if position is not None:
            value = zlib.crc32(file.read(position) + EMPTY.encode())
            file.seek(position + len(EMPTY))
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
