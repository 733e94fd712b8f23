"""Tell whether a backbone's weights are those of an earlier run, by the sizes and a sample of their
files.

The digest does not depend on the directory, so a model that moved stays the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from transformers.utils.hub import cached_file

from medusa_train.config.paths import resolve_path

#: Samples of each file, and bytes of each; the first begins the file, with its header.
SAMPLES, SAMPLE_BYTES = 64, 4096
#: Endings of weight files, in the order in which transformers prefers them.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def fingerprint_backbone(base_model: str) -> str | None:
    """Return a digest of the weights of a directory, or of a hub name whose files are in the cache.

    None where there are no files to read.
    """
    directory = resolve_path(base_model)
    if directory is None:
        config = cached_file(
            base_model,
            "config.json",
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if config is None:
            return None
        directory = Path(config).parent
    for pattern in _WEIGHTS:
        files = sorted(directory.glob(pattern))
        if files:
            break
    else:
        return None
    # by content: shards keep their order, whatever their names
    parts = sorted(_sample(path) for path in files)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _sample(path: Path) -> str:
    """Return a digest of the size of a file and of samples at equal distances."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for position in _positions(size):
            file.seek(position)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _positions(size: int) -> Iterator[int]:
    last = max(size - SAMPLE_BYTES, 0)
    for number in range(SAMPLES):
        yield last * number // (SAMPLES - 1)
