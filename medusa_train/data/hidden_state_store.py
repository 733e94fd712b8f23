"""Store hidden states of documents on disk: append-only shards of raw values, each entry with a
checksum.

A shard is two files, named by the time at which a process began to write it:

    NAME.states   the values of its entries, one after the other: [states, T, d] each, without padding
    NAME.jsonl    a line per entry: {"key": ..., "tokens": T, "offset": in bytes, "crc32": of the values}

An entry's line is written after its values, so a killed process leaves complete entries and at most
one tail without a line. Shards are never appended to again nor rewritten, so processes that share a
directory need no locks. Where several shards have an entry for a key, the newest counts.
"""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from medusa_train.data.batch import Example
from medusa_train.io import parse_json
from medusa_train.json_lines import JsonLinesFile, complete_lines

_INDEX, _VALUES = ".jsonl", ".states"


@dataclass(frozen=True)
class StateFormat:
    """Shape and dtype of the states of a token: `states` vectors (after the final norm, ...) of
    `width` values each.
    """

    states: int
    width: int
    dtype: torch.dtype

    def size(self, tokens: int) -> int:
        """Return the bytes of `tokens` tokens."""
        return tokens * self.states * self.width * self.dtype.itemsize


def document_key(example: Example, context: str = "") -> str:
    """Digest a document's tokens, on which alone its hidden states depend, and `context`, if
    anything else matters.
    """
    return sha256(context.encode() + example.tokens.numpy().tobytes()).hexdigest()[:32]


class StateStore:
    """The hidden states of documents in one directory, by `document_key`.

    Args:
        directory: created by the first `append`.
        format: of every entry in the directory.
        rank: of this process, for the names of its shards.

    Attributes:
        damaged: number of entries that could not be read, or did not have the values of their
            checksum.
    """

    def __init__(self, directory: Path, format: StateFormat, rank: int = 0) -> None:
        self.directory, self.format = directory, format
        self.damaged = 0
        self._rank = rank
        self._entries: dict[str, _Entry] = {}
        self._indexed: dict[Path, int] = {}  # bytes of each index file that were read
        self._shard: _ShardWriter | None = None
        self._readers: dict[Path, BufferedReader] = {}
        self.refresh()

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def refresh(self) -> None:
        """Read the entries that other processes have added since the last time."""
        for path in sorted(self.directory.glob(f"*{_INDEX}")):
            if self._shard is not None and path == self._shard.index.path:
                continue
            for offset, line in complete_lines(path, self._indexed.get(path, 0)):
                self._indexed[path] = offset + len(line)
                try:
                    record = parse_json(line)
                    numbers = (int(record["tokens"]), int(record["offset"]), int(record["crc32"]))
                    self._entries[str(record["key"])] = _Entry(path.with_suffix(_VALUES), *numbers)
                except (ValueError, TypeError, KeyError):
                    self.damaged += 1

    def read(self, key: str, tokens: int) -> Tensor | None:
        """Return the states [states, tokens, d] of a document, on the CPU; None if there is no
        intact entry.

        A damaged entry is counted and forgotten, so that its document can be stored again.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        values = torch.empty(self.format.states, tokens, self.format.width, dtype=self.format.dtype)
        if entry.tokens == tokens and self._read(entry, values):
            return values
        self.damaged += 1
        del self._entries[key]
        return None

    def append(self, key: str, values: Tensor) -> None:
        """Store a document's states, contiguous [states, T, d] on the CPU; an OSError leaves
        earlier ones intact.
        """
        if self._shard is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._shard = _ShardWriter(
                self.directory / f"{time.time_ns()}-{self._rank}-{os.getpid()}"
            )
        self._entries[key] = self._shard.append(key, values)

    def _read(self, entry: _Entry, values: Tensor) -> bool:
        """Read an entry into `values`; return whether it is intact."""
        content = _bytes_of(values)
        try:
            if entry.path not in self._readers:
                self._readers[entry.path] = entry.path.open("rb")
            reader = self._readers[entry.path]
            reader.seek(entry.offset)
            size = reader.readinto(content)
        except OSError:
            return False
        return size == len(content) and zlib.crc32(content) == entry.crc32


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    tokens: int
    offset: int
    crc32: int


class _ShardWriter:
    """The shard that this process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_suffix(_VALUES)
        self._size = 0
        self._values: BinaryIO = self.path.open("xb", buffering=0)
        self.index = JsonLinesFile(path.with_suffix(_INDEX))

    def append(self, key: str, values: Tensor) -> _Entry:
        content = _bytes_of(values)
        entry = _Entry(self.path, values.shape[1], self._size, zlib.crc32(content))
        self._values.seek(self._size)
        written = 0
        while written < len(content):
            written += self._values.write(content[written:])
        self._size += written
        self.index.append(
            {"key": key, "tokens": entry.tokens, "offset": entry.offset, "crc32": entry.crc32}
        )
        return entry


def _bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data
