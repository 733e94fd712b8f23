"""Nested states split into tensors and JSON, and put together again: equal to the bit."""

import copy
import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.checkpoint.serialize import (
    _DTYPE_NAMES,
    join_tensors,
    read_tensors,
    split_tensors,
    write_json,
    write_pickled_tensors,
    write_tensors,
)
from medusa_train.checksums import checksum
from medusa_train.errors import CheckpointError
from tests.full_disk import full_disk


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and [(type(k), k) for k in left] == [(type(k), k) for k in right]
            and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or (left != left and right != right))


def through_json(state: Any) -> Any:
    tensors, value = split_tensors(state)
    return join_tensors(tensors, json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        torch.arange(3),
        {
            "a": {0: torch.ones(2), 1: torch.zeros(())},
            "betas": (0.9, 0.95),
            "list": [1, (2, [3.5])],
        },
        {"0": "text", 0: "number", None: True, 1.5: False},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"__tensor__": "not a tensor", "__tuple__": [1], "__pairs__": []},
        {"odd": [0.1, 1e-308, math.inf, math.nan, 2**80, "\u2028 \ud7ff"]},
        {
            "types": [
                torch.ones(2, dtype=t)
                for t in (torch.bfloat16, torch.uint8, torch.int64, torch.bool)
            ]
        },
        (3, tuple(range(5)), None),
    ],
)
def test_round_trip(state: Any) -> None:
    assert same(through_json(state), state)


@pytest.mark.parametrize("bad", [{"a": [object()]}, {"a": {1, 2}}, {("k",): 1}, {"a": print}])
def test_values_that_need_pickle_are_refused_with_their_path(bad: Any) -> None:
    with pytest.raises(TypeError, match="cannot be saved"):
        split_tensors(bad)


def test_a_missing_tensor_is_named() -> None:
    tensors, value = split_tensors({"moment": torch.ones(1)})
    assert list(tensors) == ["moment"]
    with pytest.raises(CheckpointError, match="moment"):
        join_tensors({}, value)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_resumes_bit_exactly(kind: type[torch.optim.Optimizer]) -> None:
    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        options = {"amsgrad": True} if kind is torch.optim.AdamW else {"momentum": 0.9}
        groups = [
            {"params": list(layer.parameters()), "lr": 1e-2 / (n + 1)}
            for n, layer in enumerate(model)
        ]
        return model, kind(groups, **options)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.full((3, 4), 0.1 * (step + 1))).square().sum().backward()
            optimizer.step()

    model, optimizer = start()
    train(model, optimizer, 3)
    saved = copy.deepcopy(
        through_json({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    )
    assert same(saved["optimizer"], optimizer.state_dict())
    train(model, optimizer, 4)
    other, resumed = start()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, 4)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_files_are_read_by_safetensors_and_their_checksum_is_right(tmp_path: Path) -> None:
    """Views, shared storage, scalars, empty tensors and every dtype; each wider than the blocks
    written at a time.
    """
    shared = torch.randn(1100, 300)
    tensors = {str(t): torch.ones(3, dtype=t) for t in _DTYPE_NAMES}
    tensors |= {
        "a": shared,
        "b": shared,
        "t": shared.t(),
        "rows": shared[::2],
        "one": torch.tensor(2.5),
    }
    tensors |= {"none": torch.zeros(0, 4), "wide": torch.ones(1).expand(5)}
    value = write_tensors(tmp_path / "x.safetensors", tensors)
    assert (
        value
        == checksum(tmp_path / "x.safetensors")
        == zlib.crc32((tmp_path / "x.safetensors").read_bytes())
    )
    for loaded in (load_file(tmp_path / "x.safetensors"), read_tensors(tmp_path / "x.safetensors")):
        assert set(loaded) == set(tensors)
        assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    assert write_json(tmp_path / "y.json", {"a": [1, "ü"]}) == checksum(tmp_path / "y.json")


def test_a_full_disk_is_named_by_the_zip_writer_of_torch_too(tmp_path: Path) -> None:
    with full_disk(60_000), pytest.raises(OSError, match="File too large"):
        write_pickled_tensors(tmp_path / "heads.pt", {"a": torch.zeros(100_000)})
