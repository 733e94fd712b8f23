"""The layout of Medusa heads that vLLM loads: its names, its config.json, and the rules of its loader.

Knows no files and no model. blocks.{i}.layers.{j}.weight|bias, lm_heads.{i}.weight; heads on the backbone's own lm_head
("version 2") say `original_lm_head: true` and carry that one matrix as lm_heads.0.weight. Heads over a reduced
vocabulary say `truncated_vocab_size: N`, less than `vocab_size`, and carry token_map [N] beside matrices of N rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medusa_train.checkpoint.reference import TOKEN_MAP, HeadTensors, complete_heads
from medusa_train.errors import CheckpointError

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.(weight|bias)")
_OURS = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")
_SHARED = "lm_heads.0.weight"


def to_vllm(heads: HeadTensors, lm_head: Tensor | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The very same tensors under vLLM's names, and its config.json.

    Biases of the unembeddings stay out: vLLM has no place for them.

    Args:
        heads: what to write. lm_head: the backbone's matrix [V, d], for heads that share it.

    Raises:
        CheckpointError: heads that share lm_head, and none is given; or a reduced vocabulary, and nothing says of how
            many tokens.
    """
    tensors = {}
    for name, tensor in heads.state.items():
        if match := _OURS.fullmatch(name):
            tensors[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif name.endswith(".weight") or name == TOKEN_MAP:
            tensors[name] = tensor
    if heads.shared:
        if lm_head is None:
            raise CheckpointError("the heads share the backbone's lm_head, which vLLM wants beside them")
        tensors[_SHARED] = lm_head
    vocab_size = tensors[_SHARED].shape[0]
    if heads.token_map is not None:
        if heads.shared:
            tensors[_SHARED] = tensors[_SHARED][heads.token_map]
        elif heads.vocab_size is None:
            raise CheckpointError(
                "config.json does not say to how many tokens (vocab_size) the heads' token_map points"
            )
        else:
            vocab_size = heads.vocab_size
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": tensors[_SHARED].shape[0],
        # no other key may hold "num" and "heads" (or "layers"): the loader would take it for one of these two
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "medusa_fc_bias": True,
        "base_model_name_or_path": heads.base_model,
    }
    if heads.shared:
        config["original_lm_head"] = True
    return tensors, config


def from_vllm(tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> HeadTensors:
    """Read vLLM's names; the numbers of heads and blocks are those of the tensors.

    Blocks without a bias (`medusa_fc_bias: false`) get a bias of zeros, which is the same. A token_map counts only
    where `truncated_vocab_size` is less than `vocab_size`; of whole matrices beside it its rows are taken.

    Raises:
        CheckpointError: unknown, missing or misshapen tensors, or a token_map that is missing or of another size.
    """
    state: dict[str, Tensor] = {}
    for full_name, tensor in tensors.items():
        name = full_name.replace("medusa_heads.", "")  # as vLLM's loader does
        if match := _BLOCK.fullmatch(name):
            state[f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
        elif _HEAD.fullmatch(name) or name == TOKEN_MAP:
            state[name] = tensor
        else:
            raise CheckpointError(f"{source}: {full_name} is no weight of Medusa heads in vLLM's layout")
    if config.get("original_lm_head") is True:
        state.pop(_SHARED, None)
    _reduce(state, config, source)
    if not config.get("medusa_fc_bias", False):
        weights = [name for name in state if name.startswith("blocks.") and name.endswith(".weight")]
        for name in weights:  # the loader drops biases then, whether the file has them or not
            state[name.removesuffix("weight") + "bias"] = state[name].new_zeros(len(state[name]))
    return complete_heads(state, source)


def _reduce(state: dict[str, Tensor], config: Mapping[str, Any], source: str) -> None:
    """Make of the matrices and token_map what the loader would: a reduced vocabulary, or none."""
    size = _reduced_size(config)
    tokens = state.pop(TOKEN_MAP, None)
    if size is None:
        return
    if tokens is None or len(tokens) != size:
        found = "there is no token_map" if tokens is None else f"token_map has {len(tokens)}"
        raise CheckpointError(f"{source}: config.json says truncated_vocab_size: {size}, but {found}")
    for name in [name for name in state if _HEAD.fullmatch(name)]:
        if len(state[name]) > size:
            state[name] = state[name][tokens.long()]
    state[TOKEN_MAP] = tokens


def _reduced_size(config: Mapping[str, Any]) -> int | None:
    """N; None where the heads know all tokens."""
    size, whole = config.get("truncated_vocab_size"), config.get("vocab_size")
    return size if isinstance(size, int) and isinstance(whole, int) and size < whole else None


def loader_problems(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[str]:
    """What vLLM's loader would do with a directory other than load all of it, in words; empty: it loads as it is.

    The rules are those of vLLM's `MedusaConfig.from_pretrained` and `Medusa.load_weights`: keys that hold "num" and
    "heads" or "layers" are renamed, unknown tensors dropped and missing ones left as they happen to be, in silence.
    """
    seen = config_as_loaded(config)
    problems = []
    for wanted, found in (("model_type", "medusa"), ("architectures", ["MedusaModel"])):
        if config.get(wanted) != found:
            problems.append(f"config.json: {wanted} is {config.get(wanted)!r}, not {found!r}")
    for key in ("num_heads", "num_hidden_layers"):
        if seen.get(key) != config.get(key):
            problems.append(f"config.json: {key} becomes {seen.get(key)!r} by the renaming of a like-named key")
    if problems:
        return problems
    expected = expected_tensors(seen)
    names = {name.replace("medusa_heads.", ""): tensor for name, tensor in tensors.items()}
    problems += [f"{name}: dropped in silence" for name in sorted(set(names) - set(expected))]
    problems += [f"{name}: missing, it would stay random" for name in sorted(set(expected) - set(names))]
    for name in sorted(set(names) & set(expected)):
        if tuple(names[name].shape) != expected[name]:
            problems.append(f"{name}: {list(names[name].shape)}, expected {list(expected[name])}")
    return problems


def config_as_loaded(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json after vLLM's renaming of keys."""
    seen = dict(config)
    for key in config:
        if "num" in key and "heads" in key:
            seen["num_heads"] = seen.pop(key)
        elif "num" in key and "layers" in key:
            seen["num_hidden_layers"] = seen.pop(key)
    return seen


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that vLLM's Medusa model makes from a config as it reads it."""
    width, rows = config["hidden_size"], config["truncated_vocab_size"]
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            expected[f"blocks.{i}.layers.{j}.weight"] = (width, width)
            if config.get("medusa_fc_bias", False):
                expected[f"blocks.{i}.layers.{j}.bias"] = (width,)
        if i == 0 or not config.get("original_lm_head", False):
            expected[f"lm_heads.{i}.weight"] = (rows, width)
    if rows < config["vocab_size"]:
        expected[TOKEN_MAP] = (rows,)
    return expected


def copy_lm_head(heads: HeadTensors, lm_head: Tensor, bias: Tensor | None) -> HeadTensors:
    """Heads that share the backbone's lm_head, as heads with a copy of it each: for readers that know no sharing."""
    state = dict(heads.state)
    for i in range(heads.num_heads):
        state[f"lm_heads.{i}.weight"] = lm_head.detach().to(torch.device("cpu"))
        if bias is not None:
            state[f"lm_heads.{i}.bias"] = bias.detach().to(torch.device("cpu"))
    return HeadTensors(heads.num_heads, heads.num_layers, state, heads.base_model)
