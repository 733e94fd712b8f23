"""Map the weights of Medusa heads and EAGLE-3 drafts to and from the names and config.json that
servers read.

Medusa heads, in vLLM:

blocks.{i}.layers.{j}.weight|bias   residual block j of head i
lm_heads.{i}.weight                 lm_head of head i

Heads that share the backbone's lm_head ("version 2") set `original_lm_head: true` and store that
matrix once, as lm_heads.0.weight.

vLLM 0.32 has code for a reduced vocabulary (`truncated_vocab_size: N` < `vocab_size`, `token_map`
[N]) but cannot load
one: its weight loader asserts V rows, and its check after loading reports token_map as
uninitialized. Such heads are therefore written with V rows, see `expand_rows`; `medusa_vocab_size:
N` and `token_map`, which vLLM ignores, restore them here.

EAGLE-3, in vLLM, SGLang and speculators:

                              vLLM, SGLang         speculators
    fc, norm, lm_head         the same             the same
    decoder layer             midlayer.*           layers.0.*
    config of the layer       at the top           transformer_layer_config
    states after l layers     l (SGLang: l - 1)    l
    d2t [N]                   token of draft token i is i + d2t[i]; like t2d missing where the draft has all tokens
    t2d [V]                   whether the draft has the token

Embeddings are not written: servers take the backbone's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from medusa_train.checkpoint.reference_layout import (
    LM_HEAD_0,
    TOKEN_MAP,
    HeadTensors,
    checked_heads,
)
from medusa_train.checkpoint.resolve import EAGLE3
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.(weight|bias)")
_OUR_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")
_REDUCED = "medusa_vocab_size"
_OTHER_METHODS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Words in the path of a draft model by which vLLM chooses another method than the one that it was given."""


def to_vllm(
    heads: HeadTensors, lm_head: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Rename heads' tensors to vLLM's names, and build its config.json; `lm_head` [V, d]: for heads
    that share it.

    Biases of the lm_heads are dropped, since vLLM cannot store them. A reduced vocabulary is
    expanded.
    """
    tensors = {}
    for name, tensor in heads.state.items():
        if match := _OUR_BLOCK.fullmatch(name):
            tensors[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif name.endswith(".weight") or name == TOKEN_MAP:
            tensors[name] = tensor
    if heads.shared:
        if lm_head is None:
            raise CheckpointError(
                "the heads share the backbone's lm_head, which vLLM's layout contains"
            )
        tensors[LM_HEAD_0] = lm_head
    vocab_size = tensors[LM_HEAD_0].shape[0]
    if heads.token_map is not None:
        if heads.shared:
            tensors[LM_HEAD_0] = tensors[LM_HEAD_0][heads.token_map]
        elif heads.vocab_size is None:
            raise CheckpointError(
                "the heads have a token_map, but config.json has no vocab_size (of all tokens)"
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
        # no other key may contain "num" and "heads" (or "layers"): the loader would read it as one
        # of these two
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

    The row of every other token is the mean of the N rows. Its logit is the mean of their logits,
    which is never above the greatest of them, whatever the hidden state; without a bias, rows of
    zeros or of large numbers have no such bound.
    """
    rows = matrix.float().mean(0).to(matrix.dtype).repeat(vocab_size, 1)
    rows[token_map] = matrix
    return rows


def from_vllm(tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> HeadTensors:
    """Rename tensors with vLLM's names to a `MedusaDraft`'s; heads and blocks are counted from the
    names.

    Blocks without a bias (`medusa_fc_bias: false`) get a bias of zeros. A token_map is used only if
    `medusa_vocab_size` is set or `truncated_vocab_size` is less than `vocab_size`; its rows are
    then selected from full matrices.
    """
    state: dict[str, Tensor] = {}
    for full_name, tensor in tensors.items():
        name = full_name.replace("medusa_heads.", "")  # as vLLM's loader does
        if match := _BLOCK.fullmatch(name):
            state[f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
        elif _HEAD.fullmatch(name) or name == TOKEN_MAP:
            state[name] = tensor
        else:
            raise CheckpointError(
                f"{source}: {full_name} is not a weight of Medusa heads in vLLM's layout"
            )
    if config.get("original_lm_head") is True:
        state.pop(LM_HEAD_0, None)
    _apply_token_map(state, config, source)
    if not config.get("medusa_fc_bias", False):
        weights = [
            name for name in state if name.startswith("blocks.") and name.endswith(".weight")
        ]
        for name in weights:  # the loader ignores biases of the file in this case
            state[name.removesuffix("weight") + "bias"] = state[name].new_zeros(len(state[name]))
    return checked_heads(state, source)


def _apply_token_map(state: dict[str, Tensor], config: Mapping[str, Any], source: str) -> None:
    """Reduce the matrices to the rows of token_map, or remove an unused token_map, as the loader
    does.
    """
    size, full = config.get(_REDUCED, config.get("truncated_vocab_size")), config.get("vocab_size")
    tokens = state.pop(TOKEN_MAP, None)
    if not isinstance(size, int) or not isinstance(full, int) or size >= full:
        return
    if tokens is None or len(tokens) != size:
        problem = (
            "there is no token_map" if tokens is None else f"token_map has {len(tokens)} tokens"
        )
        raise CheckpointError(
            f"{source}: config.json says that the vocabulary has {size} tokens, but {problem}"
        )
    for name in [name for name in state if _HEAD.fullmatch(name)]:
        if len(state[name]) > size:
            state[name] = state[name][tokens.long()]
    state[TOKEN_MAP] = tokens


def method_in_path(path: str) -> str | None:
    """Return the method that vLLM would choose by the path or name of the heads alone; None if it
    takes `medusa`.
    """
    return next((method for word, method in _OTHER_METHODS.items() if word in path.lower()), None)


def with_own_lm_heads(heads: HeadTensors, lm_head: Tensor, bias: Tensor | None) -> HeadTensors:
    """Give each head a copy of the shared lm_head (weight [V, d], bias [V]), for formats that
    cannot share it.
    """
    state = dict(heads.state)
    for i in range(heads.num_heads):
        state[f"lm_heads.{i}.weight"] = lm_head
        if bias is not None:
            state[f"lm_heads.{i}.bias"] = bias
    return HeadTensors(heads.num_heads, heads.num_layers, state, heads.base_model)


# EAGLE-3

_LAYER, _SPECULATORS_LAYER = "midlayer.", "layers.0."
_STATES = "eagle_aux_hidden_state_layer_ids"
#: Entries of the layer's config.json.
LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "rope_parameters", "attention_bias", "mlp_bias",
)  # fmt: skip


def to_eagle3(
    state: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    layer: Mapping[str, Any],
    vocab_size: int,
    base_model: str,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and config.json as vLLM reads them; the rows of lm_head in the order of their
    tokens.

    Args:
        state, settings: of an `Eagle3Draft`.
        layer: config.json of its layer, as of a Llama model.
        vocab_size: V, of the backbone. base_model: its name.
    """
    tensors = {
        name: tensor
        for name, tensor in state.items()
        if not name.startswith(("lm_heads.", TOKEN_MAP))
    }
    tokens = state.get(TOKEN_MAP)
    tokens = torch.arange(vocab_size) if tokens is None else tokens.cpu()
    ordered, rows = tokens.sort()
    tensors["lm_head.weight"] = state[LM_HEAD_0].cpu()[rows]
    if len(ordered) < vocab_size:  # vLLM refuses them for a draft that has all tokens
        tensors["d2t"] = ordered - torch.arange(len(ordered))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ordered, True)
    rope = dict(layer.get("rope_parameters") or {})
    config = {
        "architectures": [EAGLE3],
        "model_type": "llama",
        **{key: layer[key] for key in LAYER_KEYS if layer.get(key) is not None},
        "rope_theta": rope.pop("rope_theta", 10000.0),  # older versions read this and rope_scaling
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(ordered),
        "tie_word_embeddings": False,
        "norm_before_residual": bool(settings.get("norm_before_residual")),
        _STATES: list(settings["layers"]),
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "base_model_name_or_path": base_model,
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    return tensors, config


def for_target(
    tensors: dict[str, Tensor], config: dict[str, Any], to: ExportTarget, draft_tokens: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Change what vLLM reads into what `to` reads, where they differ."""
    if to == "sglang":
        if config["norm_before_residual"]:
            raise CheckpointError(
                "SGLang does not compute norm_before_residual; export --to vllm or speculators"
            )
        eagle = {
            _STATES: [layers - 1 for layers in config.pop(_STATES)],
            "use_aux_hidden_state": True,
        }
        return tensors, {**config, "eagle_config": eagle}
    if to != "speculators":
        return tensors, config
    named = {
        name.replace(_LAYER, _SPECULATORS_LAYER, 1): tensor for name, tensor in tensors.items()
    }
    own = (
        "draft_vocab_size",
        "tie_word_embeddings",
        "norm_before_residual",
        _STATES,
        "torch_dtype",
    )
    base_model = config["base_model_name_or_path"]
    layer = {
        key: value
        for key, value in config.items()
        if key not in own and key != "base_model_name_or_path"
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens}
    return named, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **{key: config[key] for key in own},
        "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": base_model, "architectures": []},
        },
        "base_model_name_or_path": base_model,
    }


def from_eagle3(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], source: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state dict and the settings of an `Eagle3Draft`, of files in one of these layouts.

    The depth is not in the files, so `num_heads` keeps its default. Without d2t the draft has all
    tokens. Raises CheckpointError if tensors are missing or config.json describes no layer.
    """
    layer = config.get("transformer_layer_config") or config
    # servers read it so: what is missing has Llama's defaults, not the backbone's values
    named = {
        key: layer[key]
        for key in (*LAYER_KEYS, "rope_theta", "rope_scaling")
        if layer.get(key) is not None
    }
    try:
        whole = LlamaConfig(**named).to_dict()
    except Exception as error:  # of several kinds, as each check of transformers raises its own
        raise CheckpointError(
            f"{source}: not a valid configuration of an EAGLE-3 layer: {error}"
        ) from error
    eagle = config.get("eagle_config") or {}
    if norms := [
        key
        for key in ("norm_before_fc", "fc_norm", "norm_output")
        if config.get(key) or eagle.get(key)
    ]:
        raise CheckpointError(f"{source}: EAGLE-3 drafts with {', '.join(norms)} are not supported")
    state = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if plain not in ("t2d", "d2t", "embed_tokens.weight", "lm_head.weight"):
            state[plain.replace(_SPECULATORS_LAYER, _LAYER, 1)] = tensor
    if "lm_head.weight" not in tensors:
        raise CheckpointError(f"{source}: lm_head.weight is missing")
    state[LM_HEAD_0] = tensors["lm_head.weight"]
    settings: dict[str, Any] = {
        "layers": config.get(_STATES),
        "norm_before_residual": bool(
            config.get("norm_before_residual", "speculators_model_type" in config)
        ),  # as vLLM
        "layer": {key: whole[key] for key in LAYER_KEYS if whole.get(key) is not None},
    }
    if eagle.get(_STATES):
        settings["layers"] = [layers + 1 for layers in eagle[_STATES]]
    rows = len(state[LM_HEAD_0])
    if "d2t" in tensors and rows < int(layer.get("vocab_size", 0)):
        if len(tensors["d2t"]) != rows:
            raise CheckpointError(
                f"{source}: d2t has {len(tensors['d2t'])} tokens, lm_head {rows} rows"
            )
        settings |= {"vocab_size": rows, TOKEN_MAP: tensors["d2t"].long() + torch.arange(rows)}
        state[TOKEN_MAP] = settings[TOKEN_MAP]
    return state, settings
