"""Tensor names and config.json of DFlash drafts in the layout that vLLM, SGLang and TensorRT-LLM
read. Its authors (z-lab), SpecForge and DeepSpec write this layout.

config.json           config of a Qwen3 model with the draft's layers
dflash_config         mask_token_id; target_layer_ids: layers whose outputs are read, counted from 0
block_size            K + 1
layer_types           sliding_attention: causal blocks with a window; full_attention: bidirectional
tensors               fc, hidden_norm, layers, norm, with the names of `DFlashDraft`

Embeddings and lm_head are the target model's. A draft with a Markov bias has DSpark's layout, which
only vLLM reads; it adds `markov_head.markov_w1` and `markov_w2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from medusa_train.checkpoint.eagle3_layouts import entries_in_files, layer_entries, part_of
from medusa_train.checkpoint.medusa_layouts import TOKEN_MAP
from medusa_train.checkpoint.resolve import DFLASH, DSPARK
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError

#: Our names of the Markov bias's matrices -> their names in DSpark's layout.
_MARKOV = {
    "markov.embedding.weight": "markov_head.markov_w1.weight",
    "markov.output.weight": "markov_head.markov_w2.weight",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
#: The servers' default for files without block_size.
_BLOCK_SIZE = 16


def to_dflash(
    state: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    layer: Mapping[str, Any],
    num_target_layers: int,
    vocab_size: int,
    target_model_name: str,
    to: ExportTarget,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the config.json that servers read.

    Args:
        state, settings: state dict and settings of a `DFlashDraft`.
        layer: the layer's entries of config.json, named as in a Llama model.
        num_target_layers, vocab_size: number of layers and of tokens of the target model.
        target_model_name: name of the target model.

    Raises:
        CheckpointError: the draft has a reduced vocabulary; or it has a Markov bias and is not
            exported to vLLM.
    """
    if TOKEN_MAP in state:
        raise CheckpointError(
            "a DFlash draft with a reduced vocabulary (dflash.vocab_size) can't be exported:"
            " servers read the target model's lm_head, and SGLang ignores other tensors silently"
        )
    has_bias = any(name in state for name in _MARKOV)
    if has_bias and to != "vllm":
        raise CheckpointError(
            "SGLang does not compute a Markov bias (dflash.markov_rank): export --to vllm"
        )
    tensors = {_MARKOV.get(name, name): tensor for name, tensor in state.items()}
    window = settings["window"]
    num_layers = settings["num_layers"]
    config: dict[str, Any] = {
        "architectures": [DSPARK if has_bias else DFLASH],
        "model_type": "qwen3",
        **entries_in_files(layer),
        "num_hidden_layers": num_layers,
        "layer_types": [_SLIDING if window else _FULL] * num_layers,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "block_size": settings["max_draft_tokens"] + 1,
        "num_target_layers": num_target_layers,
        "dflash_config": {
            "mask_token_id": settings["mask_token_id"],
            "target_layer_ids": [number - 1 for number in settings["layers"]],
        },
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "base_model_name_or_path": target_model_name,
    }
    if has_bias:
        config |= {"markov_rank": settings["markov_rank"], "sample_from_anchor": False}
    return tensors, config


def from_dflash(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Return the state dict and the settings of a `DFlashDraft` from files in this layout, and the
    names of tensors that are not read.

    DSpark files are read only if `to_dflash` wrote them. In these, a block's first token predicts
    nothing; in DSpark's own files it predicts the next token.

    Raises:
        CheckpointError: config.json has no mask token or layers, or describes another attention.
    """
    # 1. Read the block's settings.
    dflash_config = part_of(config, "dflash_config")
    block = block_size(config)
    mask_token = dflash_config.get("mask_token_id", config.get("mask_token_id"))
    num_layers = config.get("num_hidden_layers")
    for name, value in (("mask_token_id", mask_token), ("num_hidden_layers", num_layers)):
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{name} {value!r} in config.json is not a whole number")
    layer_ids = dflash_config.get("target_layer_ids")
    if not isinstance(layer_ids, list) or not all(type(n) is int and n >= 0 for n in layer_ids):
        raise CheckpointError(
            f"target_layer_ids {layer_ids!r} in config.json are not layers, counted from 0"
        )
    # 2. Check the attention mask.
    window = _window(config)
    causal = config.get("is_causal", dflash_config.get("causal"))
    if causal is not None and bool(causal) != (window > 0):
        raise CheckpointError(
            f"DFlash drafts with causal {causal!r} and a window of {window or None} can't be read"
        )
    if config.get("attention_bias"):
        raise CheckpointError("DFlash drafts with biases (attention_bias) can't be read")
    # 3. Rename the tensors, and drop copies of the target model's.
    names = {new: name for name, new in _MARKOV.items()}
    state = {names.get(name, name): tensor for name, tensor in tensors.items()}
    unread = sorted(name for name in state if name.startswith(("embed_tokens.", "lm_head.")))
    for name in unread:
        del state[name]
    rank = 0
    if "markov.embedding.weight" in state:
        rank = state["markov.embedding.weight"].shape[1]
    settings = {
        "max_draft_tokens": block - 1,
        "num_layers": num_layers,
        "layers": [number + 1 for number in layer_ids],
        "window": window,
        "mask_token_id": mask_token,
        "markov_rank": rank,
        "layer": layer_entries(config),
    }
    return state, settings, unread


def block_size(config: Mapping[str, Any]) -> int:
    """Return the block size in a config.json: K + 1, the last token and K draft tokens."""
    size = part_of(config, "dflash_config").get("block_size")
    size = size or config.get("block_size", _BLOCK_SIZE)
    if type(size) is not int or size < 2:
        raise CheckpointError(f"block_size {size!r} in config.json is not a number from 2 on")
    return size


def _window(config: Mapping[str, Any]) -> int:
    """Return the attention window in positions; 0: no window."""
    kinds = config.get("layer_types") or [_FULL]
    if not isinstance(kinds, list) or kinds.count(kinds[0]) < len(kinds):
        raise CheckpointError(
            "DFlash drafts with layers of several kinds of attention can't be read"
        )
    if kinds[0] == _FULL:
        return 0
    window = config.get("sliding_window")
    if kinds[0] != _SLIDING or type(window) is not int or window < 1:
        raise CheckpointError(
            f"layer_types {kinds[0]!r} with a sliding_window of {window!r} can't be read"
        )
    return window
