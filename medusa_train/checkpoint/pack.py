"""Any nested state as flat tensors and plain JSON, and back exactly; knows no optimizer, file or pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from medusa_train.errors import CheckpointError

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
