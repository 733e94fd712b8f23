"""Files of tensors and of JSON, flushed to the disk and read back with checksums. Knows nothing of what is in them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_train.checkpoint.disk import sync
from medusa_train.errors import CheckpointError


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


def read_tensors(path: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU, or of it only what begins with one of `prefixes`.

    Raises:
        CheckpointError: missing, truncated or no safetensors file.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefixes)}  # noqa: SIM118
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
        raise CheckpointError(
            f"{path}: refused, it can't be read as plain tensors: {_what_failed(error)}\n"
            "A .pt file may carry code that runs on loading; only files of plain tensors are read here."
        ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path}: holds something other than named tensors")
    return {str(name): value for name, value in loaded.items()}


def _what_failed(error: Exception) -> str:
    """torch's reason, one sentence, without its advice to load the file all the same."""
    text = " ".join(str(error).split()).partition("Check the documentation")[0]
    for before in ("trusted source.", "WeightsUnpickler error:"):
        text = text.rpartition(before)[2]
    return text.partition(". ")[0].strip(" .") or type(error).__name__


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
