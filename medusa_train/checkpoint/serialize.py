"""Write and read tensors and nested states as safetensors and JSON files, without pickle."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medusa_train.errors import CheckpointError
from medusa_train.io import parse_json, sync

#: Names of dtypes in safetensors files.
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> int:
    """Write a safetensors file and flush it to disk; return the CRC-32 of its bytes.

    Tensors may be on any device, be views, or share storage; the values of each name are written in
    full. Tensors are written one after the other, so that only one is copied at a time. The
    checksum is computed while writing, without a second pass over the file.
    """
    # 1. Build the header: name, dtype, shape and offsets of each tensor. The header is padded to 8
    # bytes and the widest dtypes come first, so every tensor is aligned.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        start = end
        end += tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    # 2. Write the header's length in 8 bytes, the header, and the values.
    start_of_file = len(encoded).to_bytes(8, "little") + encoded
    checksum = zlib.crc32(start_of_file)
    with path.open("wb") as file:
        file.write(start_of_file)
        for name in ordered:
            plain = tensors[name].detach().cpu().contiguous().reshape(-1)
            values = plain.view(torch.uint8).numpy().data
            file.write(values)
            checksum = zlib.crc32(values, checksum)
    sync(path)
    return checksum


def write_pickled_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a `.pt` file of named tensors, for programs that read only this format."""
    content = io.BytesIO()  # if torch wrote the file, a full disk would show as "unexpected pos"
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, content)
    path.write_bytes(content.getbuffer())


def write_json(path: Path, value: Any) -> int:
    """Write JSON (with NaN and Infinity in Python's notation) and flush it to disk; return the
    CRC-32 of its bytes.
    """
    content = (json.dumps(value, indent=1) + "\n").encode()
    path.write_bytes(content)
    sync(path)
    return zlib.crc32(content)


def read_tensors(path: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Read a safetensors file's tensors whose names begin with one of `prefixes`, to the CPU."""
    try:
        with safe_open(str(path), framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefixes)]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error


def read_pickled_tensors(path: Path) -> dict[str, Tensor]:
    """Read named tensors from a `.pt` file without running code from it (`weights_only=True`)."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler and zip reader may raise any type
        raise CheckpointError(
            f"{path}: rejected, cannot be read as plain tensors: {_reason(error)}\nA .pt file can"
            " contain code that runs on loading; only files of plain tensors are read."
        ) from error
    is_mapping = isinstance(loaded, Mapping)
    if not is_mapping or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path}: holds something other than named tensors")
    return {str(name): value for name, value in loaded.items()}


def _reason(error: Exception) -> str:
    """Shorten torch's message to its reason, without the advice to load the file with
    weights_only=False.
    """
    text = " ".join(str(error).split()).partition("Check the documentation")[0]
    for before in ("trusted source.", "WeightsUnpickler error:"):
        text = text.rpartition(before)[2]
    return text.partition(". ")[0].strip(" .") or type(error).__name__


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"
_TAGS = {_TENSOR, _TUPLE, _PAIRS}


def split_tensors(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into named tensors and a JSON value that refers to them; `join_tensors`
    is the inverse.

    `{"lr": 0.1, "betas": (0.9, 0.95), 0: tensor}` becomes `{"0": tensor}` and
    `{"__pairs__": [["lr", 0.1], ["betas", {"__tuple__": [0.9, 0.95]}], [0, {"__tensor__": "0"}]]}`.

    Args:
        state: mappings (keys str, int, float, bool or None), lists, tuples, tensors, str, int,
            float, bool, None.

    Raises:
        TypeError: a value or key has another type; the message contains its path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _split(state, (), tensors)


def join_tensors(tensors: Mapping[str, Tensor], value: Any) -> Any:
    """Rebuild the state that was passed to `split_tensors`."""
    if isinstance(value, list):
        return [join_tensors(tensors, item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        name = value[_TENSOR]
        if name not in tensors:
            raise CheckpointError(f"the saved state refers to a missing tensor {name!r}")
        return tensors[name]
    if _TUPLE in value:
        return tuple(join_tensors(tensors, item) for item in value[_TUPLE])
    if _PAIRS in value:
        return {key: join_tensors(tensors, item) for key, item in value[_PAIRS]}
    return {key: join_tensors(tensors, item) for key, item in value.items()}


def _split(state: Any, path: tuple[object, ...], tensors: dict[str, Tensor]) -> Any:
    """Return the JSON value of the state at `path`, and add its tensors to `tensors`."""
    if isinstance(state, Tensor):
        name = "/".join(map(str, path)) or "tensor"
        while name in tensors:  # {"a/b": .., "a": {"b": ..}}
            name += "+"
        tensors[name] = state
        return {_TENSOR: name}
    if state is None or isinstance(state, str | int | float):
        return state
    where = "/".join(map(str, path)) or "state"
    if isinstance(state, list | tuple):
        items = [_split(item, (*path, i), tensors) for i, item in enumerate(state)]
        return {_TUPLE: items} if isinstance(state, tuple) else items
    if not isinstance(state, Mapping):
        raise TypeError(f"{where}: a {type(state).__name__} cannot be saved without pickle")
    pairs = []
    for key, item in state.items():
        if not (key is None or isinstance(key, str | int | float)):
            raise TypeError(f"{where}: a key of type {type(key).__name__} cannot be saved")
        pairs.append([key, _split(item, (*path, key), tensors)])
    if all(isinstance(key, str) for key in state) and not _TAGS & set(state):
        return dict(pairs)
    return {_PAIRS: pairs}  # JSON objects have only string keys
