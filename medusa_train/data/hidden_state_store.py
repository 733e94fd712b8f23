"""Store hidden states of documents on disk: a file per document, written atomically.

The file KEY.states holds the values [states, T, d], without padding, and their CRC-32. Processes
that share a directory need no locks: each sees the files of the others.
"""

from __future__ import annotations

import secrets
import zlib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from medusa_train.data.batch import Example


@dataclass(frozen=True)
class StateFormat:
    """Shape and dtype of the states of a token: `states` vectors (after the final norm, ...) of
    `width` values each.
    """

    states: int
    width: int
    dtype: torch.dtype

    def size(self, tokens: int) -> int:
        """Return the size in bytes of the states of `tokens` tokens."""
        return tokens * self.states * self.width * self.dtype.itemsize


def document_key(example: Example, context: str = "") -> str:
    """Return a digest of a document's tokens and of `context`.

    Hidden states depend on the tokens; `context` describes anything else that they depend on.
    """
    return sha256(context.encode() + example.tokens.numpy().tobytes()).hexdigest()[:32]


class StateStore:
    """The hidden states of documents in one directory, by `document_key`.

    Args:
        directory: created by the first `write`.
        format: shape and dtype of the states, the same for every document in the directory.

    Attributes:
        damaged: number of files that could not be read or whose checksum did not match.
    """

    def __init__(self, directory: Path, format: StateFormat) -> None:
        self.directory, self.format = directory, format
        self.damaged = 0

    def path(self, key: str) -> Path:
        """Return the path of a document's file."""
        return self.directory / f"{key}.states"

    def __contains__(self, key: str) -> bool:
        return self.path(key).exists()

    def read(self, key: str, tokens: int) -> Tensor | None:
        """Return the states [states, tokens, d] of a document, on the CPU; None if there is no
        intact file.

        A damaged file is counted and deleted, so that its document can be stored again.
        """
        spec = self.format
        values = torch.empty(spec.states, tokens, spec.width, dtype=spec.dtype)
        memory = _memory(values)
        try:
            with self.path(key).open("rb") as file:
                file.readinto(memory)
                if file.read() == _checksum(memory):
                    return values
        except FileNotFoundError:
            return None
        except OSError:
            pass
        self.damaged += 1
        self.path(key).unlink(missing_ok=True)
        return None

    def write(self, key: str, values: Tensor) -> None:
        """Store a document's states, contiguous [states, T, d] on the CPU; an OSError leaves
        other documents intact.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        content = _memory(values)
        temporary = self.path(key).with_suffix(f".{secrets.token_hex(8)}")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.write(_checksum(content))
            temporary.replace(self.path(key))
        finally:
            temporary.unlink(missing_ok=True)


def _memory(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data


def _checksum(content: memoryview) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")
