"""Files that reach the disk whole: fsync, rename, checksums. Knows nothing of what is in them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_train.errors import CheckpointError

WRITE_ERRORS = (OSError, SafetensorError)
"""What writing raises when the disk is full; safetensors has an error of its own for it."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and flush it to the disk; tensors on any device, views and shared storage included."""
    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        # the format keeps no aliases: two names for one storage become two tensors
        if value.untyped_storage().data_ptr() in storages:
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        plain[name] = value
    save_file(plain, str(path), metadata={"format": "pt"})
    path.chmod(0o666 & ~_umask())  # safetensors makes it readable for its owner only
    sync(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON (with NaN and Infinity as Python has them) and flush it to the disk."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    sync(path)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path` and rename it: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU.

    Raises:
        CheckpointError: missing, truncated or no safetensors file.
    """
    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: can't be read as safetensors: {error}") from error


def read_pickled_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors from a `.pt` file of others without running code from it (`weights_only`).

    Raises:
        CheckpointError: missing, damaged, or it holds anything but named tensors.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler or zip reader stumbled over
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path}: refused, it can't be read as plain tensors: {reason[0]}\n"
            "A .pt file may carry code that runs on loading; only files of plain tensors are read here."
        ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path}: holds something other than named tensors")
    return {str(name): value for name, value in loaded.items()}


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CheckpointError: missing or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error


def checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def sync(path: Path) -> None:
    """Flush a file's or a directory's own entry to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
