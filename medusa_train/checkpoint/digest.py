"""A hash of files of weights, by which they are told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

#: Blocks read from each file, spread over it: reading a whole backbone takes minutes on a slow disk.
BLOCKS = 64
BLOCK_BYTES = 1 << 16


def digest_files(files: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and parts of files.

    Raises:
        OSError: one cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}{size}".encode())
        block_bytes = min(BLOCK_BYTES, -(-size // BLOCKS))
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * size // BLOCKS)
                digest.update(file.read(block_bytes))
    return digest.hexdigest()
