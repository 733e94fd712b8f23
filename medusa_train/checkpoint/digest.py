"""Digests of weight files, to detect that a model or heads changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from medusa_train.config.paths import resolve_path
from medusa_train.models.model_files import model_directory

#: Number of blocks that are read, evenly spread over each file. Reading a whole model would take
#: minutes on a slow disk.
BLOCKS = 64
BLOCK_BYTES = 1 << 16
#: Names of weight files, in the order in which transformers prefers them.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def digest_files(files: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and some blocks of files. Their directory does not matter.

    Raises:
        OSError: a file cannot be read.
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


def digest_target_model(target_model: str) -> str | None:
    """Return the digest of a model's weights; None if neither its directory nor the hub's cache has
    weight files.
    """
    directory = model_directory(str(resolve_path(target_model) or target_model))
    for pattern in _WEIGHTS:
        files = list(directory.glob(pattern))
        if files:
            return digest_files(files)
    return None
