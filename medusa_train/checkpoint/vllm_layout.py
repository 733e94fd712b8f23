"""Map the weights of Medusa heads to and from vLLM's names and config.json.

blocks.{i}.layers.{j}.weight|bias   residual block j of head i
lm_heads.{i}.weight                 lm_head of head i

Heads that share the backbone's lm_head ("version 2") set `original_lm_head: true` and store that matrix once, as
lm_heads.0.weight.

vLLM 0.32 has code for a reduced vocabulary (`truncated_vocab_size: N` < `vocab_size`, `token_map` [N]) but cannot load
one: its weight loader asserts V rows, and its check after loading reports token_map as uninitialized. Such heads are
therefore written with V rows, see `expand_rows`; `medusa_vocab_size: N` and `token_map`, which vLLM ignores, restore
them here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medusa_train.checkpoint.reference_layout import TOKEN_MAP, HeadTensors, checked_heads
from medusa_train.errors import CheckpointError

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.(weight|bias)")
_OURS = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")
_SHARED = "lm_heads.0.weight"
_REDUCED = "medusa_vocab_size"
_OTHER_METHODS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Words in the path of a draft model by which vLLM chooses another method than the one that it was given."""


def to_vllm(heads: HeadTensors, lm_head: Tensor | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Rename the tensors of heads to vLLM's names, and build its config.json.

    Biases of the lm_heads are dropped, since vLLM cannot store them. A reduced vocabulary is expanded.

    Args:
        heads: what to convert.
        lm_head: the backbone's lm_head weight [V, d], for heads that share it.

    Raises:
        CheckpointError: the heads share an lm_head that is not given; or their vocabulary is reduced and the full
            vocabulary's size is unknown.
    """
    tensors = {}
    for name, tensor in heads.state.items():
        if match := _OURS.fullmatch(name):
            tensors[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif name.endswith(".weight") or name == TOKEN_MAP:
            tensors[name] = tensor
    if heads.shared:
        if lm_head is None:
            raise CheckpointError("the heads share the backbone's lm_head, which vLLM's layout contains")
        tensors[_SHARED] = lm_head
    vocab_size = tensors[_SHARED].shape[0]
    if heads.token_map is not None:
        if heads.shared:
            tensors[_SHARED] = tensors[_SHARED][heads.token_map]
        elif heads.vocab_size is None:
            raise CheckpointError(
                "the heads have a token_map, but config.json has no vocab_size (size of the full vocabulary)"
            )
        else:
            vocab_size = heads.vocab_size
        for name in [name for name in tensors if _HEAD.fullmatch(name)]:
            tensors[name] = expand_rows(tensors[name], heads.token_map, vocab_size)
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size,
        # no other key may contain "num" and "heads" (or "layers"): the loader would read it as one of these two
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "medusa_fc_bias": True,
        "base_model_name_or_path": heads.base_model,
    }
    if heads.shared:
        config["original_lm_head"] = True
    if heads.token_map is not None:
        config[_REDUCED] = len(heads.token_map)
    return tensors, config


def expand_rows(matrix: Tensor, token_map: Tensor, vocab_size: int) -> Tensor:
    """Expand an lm_head over a reduced vocabulary, [N, d], to [V, d] with the same argmax.

    The row of every other token is the mean of the N rows. Its logit is the mean of their logits, which is never above
    the greatest of them, whatever the hidden state; without a bias, rows of zeros or of large numbers have no such
    bound.
    """
    mean = matrix.float().mean(0).to(matrix.dtype)
    rows = mean.repeat(vocab_size, 1)
    rows[token_map] = matrix
    return rows


def from_vllm(tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> HeadTensors:
    """Rename tensors with vLLM's names to a `MedusaDraft`'s; heads and blocks are counted from the names.

    Blocks without a bias (`medusa_fc_bias: false`) get a bias of zeros. A token_map is used only if `medusa_vocab_size`
    is set or `truncated_vocab_size` is less than `vocab_size`; its rows are then selected from full matrices.

    Args:
        tensors: by name, as read from the files.
        config: content of config.json.
        source: name of the file for error messages.

    Raises:
        CheckpointError: unknown or missing tensors, tensors of a wrong shape, or a token_map that is missing or has
            another size.
    """
    state: dict[str, Tensor] = {}
    for full_name, tensor in tensors.items():
        name = full_name.replace("medusa_heads.", "")  # as vLLM's loader does
        if match := _BLOCK.fullmatch(name):
            state[f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
        elif _HEAD.fullmatch(name) or name == TOKEN_MAP:
            state[name] = tensor
        else:
            raise CheckpointError(f"{source}: {full_name} is not a weight of Medusa heads in vLLM's layout")
    if config.get("original_lm_head") is True:
        state.pop(_SHARED, None)
    _apply_token_map(state, config, source)
    if not config.get("medusa_fc_bias", False):
        weights = [name for name in state if name.startswith("blocks.") and name.endswith(".weight")]
        for name in weights:  # the loader ignores biases of the file in this case
            state[name.removesuffix("weight") + "bias"] = state[name].new_zeros(len(state[name]))
    return checked_heads(state, source)


def _apply_token_map(state: dict[str, Tensor], config: Mapping[str, Any], source: str) -> None:
    """Reduce the matrices to the rows of token_map, or remove an unused token_map, as the loader does."""
    size = _reduced_size(config)
    tokens = state.pop(TOKEN_MAP, None)
    if size is None:
        return
    if tokens is None or len(tokens) != size:
        problem = "there is no token_map" if tokens is None else f"token_map has {len(tokens)} tokens"
        raise CheckpointError(f"{source}: config.json says that the vocabulary has {size} tokens, but {problem}")
    for name in [name for name in state if _HEAD.fullmatch(name)]:
        if len(state[name]) > size:
            state[name] = state[name][tokens.long()]
    state[TOKEN_MAP] = tokens


def _reduced_size(config: Mapping[str, Any]) -> int | None:
    """Return N; None for the full vocabulary."""
    size, full = config.get(_REDUCED, config.get("truncated_vocab_size")), config.get("vocab_size")
    return size if isinstance(size, int) and isinstance(full, int) and size < full else None


def method_in_path(path: str) -> str | None:
    """Return the method that vLLM would choose by the path or name of the heads alone; None if it takes `medusa`."""
    return next((method for word, method in _OTHER_METHODS.items() if word in path.lower()), None)


def copy_lm_head(heads: HeadTensors, lm_head: Tensor, bias: Tensor | None) -> HeadTensors:
    """Give each head a copy of the shared lm_head (weight [V, d], bias [V]), for formats that cannot share it."""
    state = dict(heads.state)
    for i in range(heads.num_heads):
        state[f"lm_heads.{i}.weight"] = lm_head.detach().to(torch.device("cpu"))
        if bias is not None:
            state[f"lm_heads.{i}.bias"] = bias.detach().to(torch.device("cpu"))
    return HeadTensors(heads.num_heads, heads.num_layers, state, heads.base_model)
