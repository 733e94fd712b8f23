"""vLLM's layout: names, config, what its loader would do, and round trips that keep every bit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_heads, write_heads, write_weights
from medusa_train.checkpoint.medusa_layouts import (
    from_files,
    method_in_path,
    names_in_files,
    to_vllm,
    with_own_lm_heads,
)
from medusa_train.errors import CheckpointError
from tests.checkpoint.others import D, V, reference_tensors, vllm_config, vllm_tensors, write
from tests.checkpoint.vllm_rules import loader_problems


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return set(left) == set(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


@pytest.mark.parametrize(("heads", "blocks"), [(1, 0), (5, 1), (12, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_ours_vllm_ours_reference_is_equal_to_the_bit(
    tmp_path: Path, heads: int, blocks: int, dtype: torch.dtype
) -> None:
    tensors = reference_tensors(heads, blocks, dtype)
    config = {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": "some/model",
    }
    write_heads(
        read_heads(write(tmp_path / "a", tensors, config, "medusa_lm_head.safetensors")),
        tmp_path / "ours",
    )
    write_weights(tmp_path / "vllm", VLLM_WEIGHTS, *to_vllm(read_heads(tmp_path / "ours")))
    write_heads(read_heads(tmp_path / "vllm"), tmp_path / "again")
    write_heads(read_heads(tmp_path / "again"), tmp_path / "last", pickled=True)
    assert same(load_file(tmp_path / "last" / "medusa_lm_head.safetensors"), tensors)
    assert same(torch.load(tmp_path / "last" / "medusa_lm_head.pt", weights_only=True), tensors)
    assert json.loads((tmp_path / "last" / "config.json").read_text()) == config


def test_names_and_config_are_vllm_s() -> None:
    tensors, config = to_vllm(
        replace(from_files(reference_tensors(3, 2)), target_model_name="some/model")
    )
    assert same(tensors, vllm_tensors(3, 2))
    assert config == vllm_config(3, 2, base_model_name_or_path="some/model")
    assert loader_problems(tensors, config) == []


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/runs/mine/export/vllm", None),
        ("/runs/Eagle-llama/export", "eagle"),
        ("owner/llama-EAGLE3-medusa", "eagle3"),
        ("/dflash/heads", "dflash"),
        ("dspark", "dspark"),
        ("/home/eagle/runs", None),
    ],
)
def test_words_in_the_path_choose_another_method(path: str, method: str | None) -> None:
    assert method_in_path(path) == method


def test_heads_that_share_the_target_model_s_lm_head(tmp_path: Path) -> None:
    tensors = {name: t for name, t in reference_tensors(3, 1).items() if "linear" in name}
    heads, lm_head = from_files(tensors), torch.randn(V, D)
    with pytest.raises(CheckpointError, match="share"):
        to_vllm(heads)
    written, config = to_vllm(heads, lm_head)
    assert config["original_lm_head"] is True
    assert torch.equal(written["lm_heads.0.weight"], lm_head)
    assert "lm_heads.1.weight" not in written
    assert loader_problems(written, config) == []
    write_weights(tmp_path, VLLM_WEIGHTS, written, config)
    again = read_heads(tmp_path)
    assert again.shared
    assert same(names_in_files(again.state, 1), tensors)
    copied = with_own_lm_heads(heads, lm_head, None)
    assert not copied.shared
    assert set(names_in_files(copied.state, 1)) == set(reference_tensors(3, 1))
    assert loader_problems(*to_vllm(copied)) == []
    biased = with_own_lm_heads(heads, lm_head, torch.arange(V))
    for i in range(3):
        assert torch.equal(biased.state[f"lm_heads.{i}.bias"], torch.arange(V))


def test_directories_of_vllm_s_own_conversion_are_read(tmp_path: Path) -> None:
    prefixed = {f"medusa_heads.{name}": tensor for name, tensor in vllm_tensors().items()}
    heads = read_heads(write(tmp_path, prefixed, vllm_config(num_heads=2), "model.safetensors"))
    assert same(names_in_files(heads.state, 1), reference_tensors())
    assert heads.target_model_name is None
    assert heads.num_heads == 3


def test_blocks_without_bias_get_zeros_as_vllm_computes_them() -> None:
    for tensors in (
        {name: t for name, t in vllm_tensors().items() if not name.endswith(".bias")},
        vllm_tensors(),
    ):
        heads = from_files(tensors, vllm_config(medusa_fc_bias=False), "vllm")
        assert not heads.state["blocks.1.0.linear.bias"].any()
        assert torch.equal(
            heads.state["blocks.1.0.linear.weight"], vllm_tensors()["blocks.1.layers.0.weight"]
        )


def test_unexpected_tensors_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"^fc\.weight is not a weight"):
        from_files({**vllm_tensors(), "fc.weight": torch.zeros(1)}, vllm_config(), "vllm")


def test_missing_and_misshapen_tensors_are_named() -> None:
    complete = vllm_tensors()
    for name in ("blocks.1.layers.0.weight", "lm_heads.1.weight"):
        missing = {key: tensor for key, tensor in complete.items() if key != name}
        for tensors in (missing, {**missing, name: torch.zeros(2, 3)}):
            with pytest.raises(CheckpointError, match=re.escape(name)):
                from_files(tensors, vllm_config(), "vllm")
