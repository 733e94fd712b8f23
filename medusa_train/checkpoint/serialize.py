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

from medusa_train.errors import CheckpointError
from medusa_train.io import sync


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


_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"
_MARKS = {_TENSOR, _TUPLE, _PAIRS}


def pack(state: Any, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into named tensors and a JSON value that says where they belong.

    `{"lr": 0.1, "betas": (0.9, 0.95), 0: tensor}` becomes `{"0": tensor}` and
    `{"__pairs__": [["lr", 0.1], ["betas", {"__tuple__": [0.9, 0.95]}], [0, {"__tensor__": "0"}]]}`.

    Args:
        state: mappings (keys str, int, float, bool or None), lists, tuples, tensors, str, int, float, bool, None.
        prefix: put before the tensors' names.

    Raises:
        TypeError: anything else, with its place.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(state, prefix, tensors)


def unpack(tensors: Mapping[str, Tensor], value: Any) -> Any:
    """Put together what `pack` split: equal in structure, types of keys and every bit of the tensors.

    Raises:
        CheckpointError: a tensor is missing.
    """
    if isinstance(value, list):
        return [unpack(tensors, item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        name = value[_TENSOR]
        if name not in tensors:
            raise CheckpointError(f"the saved state refers to a tensor {name!r} that is not there")
        return tensors[name]
    if _TUPLE in value:
        return tuple(unpack(tensors, item) for item in value[_TUPLE])
    if _PAIRS in value:
        return {key: unpack(tensors, item) for key, item in value[_PAIRS]}
    return {key: unpack(tensors, item) for key, item in value.items()}


def _pack(state: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(state, Tensor):
        name = place or "tensor"
        while name in tensors:  # {"a/b": .., "a": {"b": ..}}
            name += "+"
        tensors[name] = state
        return {_TENSOR: name}
    if state is None or isinstance(state, str | int | float):
        return state
    if isinstance(state, Mapping):
        return _pack_mapping(state, place, tensors)
    if isinstance(state, list | tuple):
        items = [_pack(item, _join(place, i), tensors) for i, item in enumerate(state)]
        return items if isinstance(state, list) else {_TUPLE: items}
    raise TypeError(f"{place or 'state'}: a {type(state).__name__} can't be saved without pickle")


def _pack_mapping(state: Mapping[Any, Any], place: str, tensors: dict[str, Tensor]) -> Any:
    for key in state:
        if not (key is None or isinstance(key, str | int | float)):
            raise TypeError(f"{place or 'state'}: a key of type {type(key).__name__} can't be saved")
    pairs = [(key, _pack(item, _join(place, key), tensors)) for key, item in state.items()]
    if all(isinstance(key, str) for key in state) and not _MARKS & set(state):
        return dict(pairs)
    return {_PAIRS: [[key, item] for key, item in pairs]}  # JSON objects have string keys only


def _join(place: str, key: object) -> str:
    return f"{place}/{key}" if place else str(key)
