"""Map the weights of an EAGLE-3 draft to and from the files that vLLM, SGLang and speculators read.

                              vLLM, SGLang         speculators
    fc, norm, lm_head         the same             the same
    decoder layer             midlayer.*           layers.0.*
    config of the layer       at the top           transformer_layer_config
    states after l layers     l (SGLang: l - 1)    l
    d2t [N]                   token of draft token i is i + d2t[i]
    t2d [V]                   whether the draft has the token

Embeddings are not written: servers take the backbone's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medusa_train.checkpoint.reference_layout import TOKEN_MAP
from medusa_train.checkpoint.resolve import EAGLE3
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError

_LAYER, _SPECULATORS_LAYER = "midlayer.", "layers.0."
_LM_HEAD = "lm_heads.0.weight"
_STATES = "eagle_aux_hidden_state_layer_ids"
#: Entries of the layer's config.json.
LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "rope_parameters", "attention_bias", "mlp_bias",
)  # fmt: skip


def to_eagle3(
    state: Mapping[str, Tensor], settings: Mapping[str, Any], layer: Mapping[str, Any], vocab_size: int, base_model: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and config.json as vLLM reads them; the rows of lm_head in the order of their tokens.

    Args:
        state, settings: of an `Eagle3Draft`.
        layer: config.json of its layer, as of a Llama model.
        vocab_size: V, of the backbone. base_model: its name.
    """
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(("lm_heads.", TOKEN_MAP))}
    tokens = state.get(TOKEN_MAP)
    tokens = torch.arange(vocab_size) if tokens is None else tokens.cpu()
    ordered, rows = tokens.sort()
    tensors["lm_head.weight"] = state[_LM_HEAD].cpu()[rows]
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
        states = config.pop(_STATES)
        eagle = {_STATES: [layers - 1 for layers in states], "use_aux_hidden_state": True}
        return tensors, {**config, "eagle_config": eagle}
    if to != "speculators":
        return tensors, config
    named = {name.replace(_LAYER, _SPECULATORS_LAYER, 1): tensor for name, tensor in tensors.items()}
    own = ("draft_vocab_size", "tie_word_embeddings", "norm_before_residual", _STATES, "torch_dtype")
    base_model = config["base_model_name_or_path"]
    layer = {key: value for key, value in config.items() if key not in own and key != "base_model_name_or_path"}
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

    The depth is not in the files, so `num_heads` keeps its default. Without d2t the draft has all tokens.

    Raises:
        CheckpointError: the files hold no lm_head, or d2t does not fit it.
    """
    layer = config.get("transformer_layer_config") or config
    state = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if plain not in ("t2d", "d2t", "embed_tokens.weight", "lm_head.weight"):
            state[plain.replace(_SPECULATORS_LAYER, _LAYER, 1)] = tensor
    if "lm_head.weight" not in tensors:
        raise CheckpointError(f"{source}: lm_head.weight is missing")
    state[_LM_HEAD] = tensors["lm_head.weight"]
    settings: dict[str, Any] = {
        "layers": config.get(_STATES),
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "layer": {key: layer[key] for key in LAYER_KEYS if layer.get(key) is not None},
    }
    if "rope_parameters" not in layer and "rope_theta" in layer:
        rope = {"rope_type": "default", **(layer.get("rope_scaling") or {}), "rope_theta": layer["rope_theta"]}
        settings["layer"]["rope_parameters"] = rope
    if (eagle := config.get("eagle_config")) and eagle.get(_STATES):
        settings["layers"] = [layers + 1 for layers in eagle[_STATES]]
    rows = len(state[_LM_HEAD])
    if "d2t" in tensors and rows < int(layer.get("vocab_size", 0)):
        if len(tensors["d2t"]) != rows:
            raise CheckpointError(f"{source}: d2t has {len(tensors['d2t'])} tokens, lm_head {rows} rows")
        settings |= {"vocab_size": rows, TOKEN_MAP: tensors["d2t"].long() + torch.arange(rows)}
        state[TOKEN_MAP] = settings[TOKEN_MAP]
    return state, settings
