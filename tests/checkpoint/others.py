"""Heads as other programs write them, and run directories without weights, as files."""

import json
import os
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from medusa_train.trees.tree import Tree

D, V = 6, 11
#: The weights of a model without heads.
TARGET_MODEL = {"model.embed_tokens.weight": torch.ones(V, D), "lm_head.weight": torch.ones(V, D)}


def reference_tensors(
    heads: int = 3, blocks: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random heads under the public code's names."""
    generator = torch.Generator().manual_seed(heads * 10 + blocks)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = random(D, D)
            tensors[f"{i}.{j}.linear.bias"] = random(D)
        tensors[f"{i}.{blocks}.weight"] = random(V, D)
    return tensors


def vllm_tensors(heads: int = 3, blocks: int = 1) -> dict[str, Tensor]:
    """The same under vLLM's names."""
    names = {}
    for name, tensor in reference_tensors(heads, blocks).items():
        head, block, *rest = name.split(".")
        linear = rest[0] == "linear"
        names[
            f"blocks.{head}.layers.{block}.{rest[1]}" if linear else f"lm_heads.{head}.weight"
        ] = tensor
    return names


def vllm_config(heads: int = 3, blocks: int = 1, **keys: object) -> dict[str, object]:
    """A config.json as vLLM's conversion scripts write it."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": D,
        "vocab_size": V,
        "truncated_vocab_size": V,
        "num_heads": heads,
        "num_hidden_layers": blocks,
        "medusa_fc_bias": True,
        **keys,
    }


def write(
    directory: Path, tensors: dict[str, Tensor], config: dict[str, object], name: str
) -> Path:
    """A directory with one safetensors file called `name` and a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / name), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def fake_run(directory: Path, written: float = 0.0, tree: bool = True, **config: object) -> Path:
    """A run directory with an empty heads file, modified at `written`."""
    (directory / "heads").mkdir(parents=True)
    heads = directory / "heads" / "medusa_lm_head.safetensors"
    heads.write_bytes(b"")
    os.utime(heads, (written, written))
    (directory / "config.yaml").write_text(yaml.safe_dump({"base_model": "some/model", **config}))
    if tree:
        Tree.chain(2).save(directory / "tree.json")
    return directory
