"""Tensor names and config.json of EAGLE-3 drafts in files that vLLM, SGLang and speculators read.

                          vLLM, SGLang         speculators
fc, norm, lm_head         the same names       the same names
decoder layer             midlayer.*           layers.0.*
config of the layer       top level            transformer_layer_config
states after l layers     l (SGLang: l - 1)    l

d2t [N]               draft token i is token i + d2t[i]; missing if the draft has all tokens
t2d [V]               whether the draft has the token; missing if the draft has all tokens
input_norm.weight     only with `norm_before_fc`; fc_norm.0|1|2.weight only with `fc_norm`
embed_tokens.weight   only if the draft has its own embeddings; else servers use the target model's
target_hidden_size    width of the target model, if it differs from the draft's hidden_size
q_norm, k_norm        norms of the layer's attention, with model_type qwen3 (vLLM, speculators)
lm_head.weight        missing in some files: servers then use the target model's
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from medusa_train.checkpoint.medusa_layouts import LM_HEAD_0, TOKEN_MAP
from medusa_train.checkpoint.resolve import EAGLE3, EAGLE3_QWEN3, architectures_of
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.eagle3_layer import Eagle3Layer

_LAYER, _SPECULATORS_LAYER = "midlayer.", "layers.0."
_STATES = "eagle_aux_hidden_state_layer_ids"
#: Entries of the layer's config.json.
LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)
#: Flag of a norm that some trainers add -> older name of the flag.
EAGLE3_NORMS = {"norm_before_fc": None, "fc_norm": "use_aux_norm", "norm_output": None}


# Writing


def to_eagle3(
    state: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    layer: Mapping[str, Any],
    vocab_size: int,
    target_model_name: str,
    to: ExportTarget,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the config.json that the server `to` reads. The rows of lm_head are
    ordered by token id.

    Args:
        state, settings: state dict and settings of an `Eagle3Draft`.
        layer: its layer's entries of config.json, named as in a Llama model.
        vocab_size: V, vocabulary size of the target model. target_model_name: its name.

    Raises:
        CheckpointError: the draft has no lm_head; or it is exported to SGLang and has norms that
            SGLang does not compute.
    """
    if LM_HEAD_0 not in state:
        raise CheckpointError(
            "the draft has no lm_head of its own, so there is nothing to convert: vLLM and SGLang"
            " take the target model's; serve its files as they are"
        )
    is_qwen3 = bool(settings.get("qk_norm"))
    if to == "sglang":
        problems = [
            norm for norm in ("norm_before_residual", "norm_before_fc") if settings.get(norm)
        ]
        if is_qwen3:
            problems.append("norms of queries and keys")
        if problems:
            raise CheckpointError(
                f"SGLang does not compute {problems[0]}; export --to vllm or speculators"
            )
    # 1. Keep the names of tensors, except for the layer in speculators' files.
    tensors = {}
    for name, tensor in state.items():
        if not name.startswith(("lm_heads.", TOKEN_MAP)):
            if to == "speculators":
                name = name.replace(_LAYER, _SPECULATORS_LAYER, 1)
            tensors[name] = tensor
    # 2. Order lm_head by token id. Write d2t and t2d only for a reduced vocabulary: vLLM rejects
    # them for a draft that has all tokens.
    tokens = torch.arange(vocab_size)
    if TOKEN_MAP in state:
        tokens = state[TOKEN_MAP].cpu()  # [N]
    ordered, order = tokens.sort()
    tensors["lm_head.weight"] = state[LM_HEAD_0].cpu()[order]  # [N, d]
    if len(ordered) < vocab_size:
        tensors["d2t"] = ordered - torch.arange(len(ordered))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ordered, True)
    # 3. Build config.json from the entries of the layer and of the draft.
    layer_entries = {
        "architectures": [EAGLE3_QWEN3 if is_qwen3 else EAGLE3],
        "model_type": "qwen3" if is_qwen3 else "llama",
        **entries_in_files(layer),
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
    }
    norms: dict[str, Any] = {key: True for key in EAGLE3_NORMS if settings.get(key)}
    width = tensors["fc.weight"].shape[1] // len(settings["layers"])
    if width != layer["hidden_size"]:
        norms["target_hidden_size"] = width
    draft_entries = {
        "draft_vocab_size": len(ordered),
        "tie_word_embeddings": False,
        "norm_before_residual": bool(settings.get("norm_before_residual")),
        **norms,
        _STATES: list(settings["layers"]),
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
    }
    target_entry = {"base_model_name_or_path": target_model_name}
    if to == "vllm":
        return tensors, {**layer_entries, **draft_entries, **target_entry}
    if to == "sglang":
        states = [layers - 1 for layers in draft_entries.pop(_STATES)]
        eagle = {_STATES: states, "use_aux_hidden_state": True}
        return tensors, {**layer_entries, **draft_entries, **target_entry, "eagle_config": eagle}
    layer_entries["architectures"] = ["Qwen3ForCausalLM" if is_qwen3 else "LlamaForCausalLM"]
    draft_tokens = min(3, settings.get("num_heads", 3))
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens}
    return tensors, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **draft_entries,
        "transformer_layer_config": layer_entries,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_model_name, "architectures": []},
        },
        **target_entry,
    }


def entries_in_files(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json that describe a layer. Its rope is also written under the
    names that older versions of transformers read.
    """
    entries = {key: layer[key] for key in LAYER_KEYS if layer.get(key) is not None}
    rope = dict(layer.get("rope_parameters") or {})
    entries["rope_theta"] = rope.pop("rope_theta", 10000.0)
    if rope.get("rope_type", "default") != "default":
        entries["rope_scaling"] = rope
    return entries


# Reading


def from_eagle3(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Return the state dict and the settings of an `Eagle3Draft` from files in one of these
    layouts, and the names of tensors and entries that are not read.

    The files do not contain the depth, so `num_heads` keeps its default.

    Raises:
        CheckpointError: tensors are missing or belong to another kind of layer; or config.json
            describes no layer, or does not match the tensors.
    """
    # 1. Read config.json.
    layer = part_of(config, "transformer_layer_config") or config
    eagle = part_of(config, "eagle_config")
    entries = layer_entries(layer)
    _reject_other_layers(config, layer, eagle)
    settings: dict[str, Any] = {
        "layers": _state_layers(config, eagle),
        # the same default as in vLLM
        "norm_before_residual": bool(
            config.get("norm_before_residual", "speculators_model_type" in config)
        ),
        "layer": entries,
    }
    for key, older in EAGLE3_NORMS.items():
        if config.get(key) or eagle.get(key) or (older and config.get(older)):
            settings[key] = True

    # 2. Rename the tensors.
    plain = {}
    for name, tensor in tensors.items():
        plain[name.removeprefix("model.").replace(_SPECULATORS_LAYER, _LAYER, 1)] = tensor
    has_norms = any(".q_norm." in name for name in plain)
    if layer.get("model_type") == "qwen3" and (has_norms or not _names_layer_of_llama(config)):
        settings["qk_norm"] = True
    expected = _tensor_names(settings)
    missing = sorted(expected - plain.keys())
    if missing:
        raise CheckpointError(f"incomplete, {', '.join(missing)} missing")
    optional = {"t2d", "d2t", "embed_tokens.weight", "lm_head.weight"}
    unread = plain.keys() - expected - optional
    for name in sorted(unread - _DERIVED):
        reason = next(why for pattern, why in _WHY_UNREAD.items() if re.match(pattern, name))
        raise CheckpointError(f"{name}: {reason}")
    state = {name: plain[name] for name in expected}
    if "lm_head.weight" in plain:
        state[LM_HEAD_0] = plain["lm_head.weight"]

    # 3. Check the widths, and read embeddings and vocabulary.
    _check_widths(plain, config, entries["hidden_size"])
    if "embed_tokens.weight" in plain:
        state["embed_tokens.weight"] = plain["embed_tokens.weight"]
        settings["own_embeddings"] = True
    tokens = _draft_tokens(plain, config.get("draft_vocab_size"), layer.get("vocab_size"))
    if tokens is not None:
        settings |= {"vocab_size": len(tokens), TOKEN_MAP: tokens}
        state[TOKEN_MAP] = tokens
    return state, settings, sorted(unread | _unread_entries(config, layer, eagle))


def part_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the entries below a key of config.json; empty if the key is missing or null."""
    part = config.get(key) or {}
    if not isinstance(part, Mapping):
        raise CheckpointError(f"{key} {part!r} in config.json is not a mapping of entries")
    return part


def _state_layers(config: Mapping[str, Any], eagle: Mapping[str, Any]) -> list[int] | None:
    """Return after how many layers each of the three states is read; None if config.json does not
    say it.
    """
    numbers = config.get(_STATES)
    first_number = 1
    if eagle.get(_STATES):
        numbers = eagle[_STATES]
        first_number = 0
    if numbers is None:
        return None
    is_three = isinstance(numbers, list) and len(numbers) == 3
    # `type` and not isinstance, because a bool is an int
    if not is_three or not all(
        type(number) is int and number >= first_number for number in numbers
    ):
        raise CheckpointError(
            f"{_STATES} {numbers!r} in config.json are not three layers, counted from"
            f" {first_number}"
        )
    # servers collect the states in the order of layers, whatever the order in the file
    return sorted(number + 1 - first_number for number in numbers)


def layers_that_vllm_shifts(config: Mapping[str, Any]) -> list[int] | None:
    """Return the layers in eagle_config that vLLM 0.32 reads one layer too early; None if it reads
    the layers that were trained, or if there are no layers in config.json.

    In eagle_config, l means the output of layer l, counted from 0. SGLang, SpecForge and Model
    Optimizer use this convention. vLLM treats the number like the one at the top level, which means
    the state after l layers.
    """
    if config.get(_STATES):
        return None
    return part_of(config, "eagle_config").get(_STATES) or None


def layer_entries(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `LAYER_KEYS` entries of a layer's config.json.

    Missing entries get Llama's or Qwen3's defaults, as in servers, not the target model's values.
    """
    keys = (*LAYER_KEYS, "rope_theta", "rope_scaling")
    present = {key: layer[key] for key in keys if layer.get(key) is not None}
    kind = Qwen3Config if layer.get("model_type") == "qwen3" else LlamaConfig
    try:
        entries: dict[str, Any] = kind(**present).to_dict()
    except Exception as error:  # transformers' checks raise many exception types
        raise CheckpointError(f"not a valid configuration of a layer: {error}") from error
    return {key: entries[key] for key in LAYER_KEYS if entries.get(key) is not None}


def _reject_other_layers(
    config: Mapping[str, Any], layer: Mapping[str, Any], eagle: Mapping[str, Any]
) -> None:
    """Reject entries of config.json that make the draft compute something that is not supported."""
    problems = []
    layers = layer.get("num_hidden_layers")
    if layers not in (None, 1):
        problems.append(f"num_hidden_layers {layers} (one layer is read)")
    windows = "sliding_attention" in (layer.get("layer_types") or ())
    if windows or (layer.get("use_sliding_window") and layer.get("sliding_window")):
        problems.append(f"a sliding window of {layer.get('sliding_window')}")
    if config.get("logit_scale") not in (None, 1):
        problems.append(f"logit_scale {config['logit_scale']}")
    if layer.get("qkv_bias") not in (None, bool(layer.get("attention_bias"))):
        problems.append("qkv_bias without attention_bias")
    if eagle.get("use_aux_hidden_state") is False:
        problems.append("use_aux_hidden_state false (three states are read)")
    if problems:
        raise CheckpointError(f"EAGLE-3 drafts with {', '.join(problems)} can't be read")


def _names_layer_of_llama(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM builds Llama's layer, whatever model_type is: except for speculators'
    files, it chooses the layer by `architectures`.
    """
    names = architectures_of(config)
    is_llama = any(name.startswith(("Llama", "Eagle3Llama")) for name in names)
    return is_llama and "speculators_model_type" not in config


def _tensor_names(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that every draft with these settings has."""
    names = {"fc.weight", "norm.weight"}
    with torch.device("meta"):
        config = LlamaConfig(**settings["layer"])
        module = Eagle3Layer(config, qk_norm=settings.get("qk_norm", False))
    names |= {_LAYER + name for name in module.state_dict()}
    if settings.get("norm_before_fc"):
        names.add("input_norm.weight")
    if settings.get("fc_norm"):
        names |= {f"fc_norm.{i}.weight" for i in range(3)}
    return names


def _check_widths(tensors: Mapping[str, Tensor], config: Mapping[str, Any], size: int) -> None:
    """Check that fc has the widths in config.json. If draft and target model differ in width, check
    that the draft has its own embeddings and lm_head.
    """
    shape = list(tensors["fc.weight"].shape)
    target = config.get("target_hidden_size") or shape[-1] // 3
    if shape != [size, 3 * target]:
        raise CheckpointError(
            f"fc.weight is {shape}, but config.json says hidden_size {size} and three states of"
            f" {target}"
        )
    for name, part in (("embed_tokens.weight", "embeddings"), ("lm_head.weight", "lm_head")):
        if target != size and name not in tensors:
            raise CheckpointError(
                f"{name} is missing; a draft of hidden_size {size} for a target model of {target}"
                f" can't use the target model's {part}"
            )


def _draft_tokens(
    tensors: Mapping[str, Tensor], draft_vocab_size: Any, vocab_size: Any
) -> Tensor | None:
    """Return the tokens [N] of lm_head's rows, from d2t or t2d; None if it has all tokens.

    Args:
        draft_vocab_size, vocab_size: entries of config.json.
    """
    # 1. Count the rows of lm_head.
    if "lm_head.weight" not in tensors:
        if draft_vocab_size in (None, vocab_size):
            return None
        raise CheckpointError(
            "incomplete, lm_head.weight missing (the target model's has all tokens, but"
            f" draft_vocab_size is {draft_vocab_size})"
        )
    rows = len(tensors["lm_head.weight"])
    if draft_vocab_size not in (None, rows):
        raise CheckpointError(
            f"lm_head has {rows} rows, but draft_vocab_size is {draft_vocab_size} in config.json"
        )
    # 2. Find their tokens.
    d2t = tensors.get("d2t")
    t2d = tensors.get("t2d")
    if vocab_size is None and t2d is not None:
        vocab_size = len(t2d)
    if vocab_size is not None and rows >= vocab_size:
        if d2t is not None and bool(d2t.any()):
            raise CheckpointError(
                f"d2t moves tokens, but lm_head has a row for each of {vocab_size} tokens"
            )
        return None
    if d2t is not None:
        name = "d2t"
        tokens = d2t.long() + torch.arange(len(d2t))
    elif t2d is not None:
        name = "t2d"
        tokens = t2d.nonzero()[:, 0]
    elif vocab_size is None:
        return None
    else:
        raise CheckpointError(
            f"lm_head has {rows} rows for {vocab_size} tokens, but d2t, which says which tokens"
            " they are, is missing"
        )
    if len(tokens) != rows:
        raise CheckpointError(f"{name} has {len(tokens)} tokens, lm_head {rows} rows")
    return tokens


# What is not read

#: Tensors that are computed from others, or copied from the target model.
_DERIVED = {
    "midlayer.self_attn.rotary_emb.inv_freq",
    "rotary_emb.inv_freq",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
}
_KNOWN_EAGLE = {*EAGLE3_NORMS, _STATES, "use_aux_hidden_state"}
#: Entries of NVIDIA's eagle_config -> the only value that this package computes.
_AS_COMPUTED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}
#: Entries of config.json that are read, checked, or do not affect what the draft computes.
_KNOWN_ENTRIES = {
    *LAYER_KEYS,
    *EAGLE3_NORMS,
    *_KNOWN_EAGLE,
    "use_aux_norm",
    "rope_theta",
    "rope_scaling",
    "transformer_layer_config",
    "eagle_config",
    "norm_before_residual",
    "target_hidden_size",
    "draft_vocab_size",
    "vocab_size",
    "num_hidden_layers",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "logit_scale",
    "qkv_bias",
    "base_model_name_or_path",
    "speculators_model_type",
    "speculators_config",
    "speculators_version",
    "tie_word_embeddings",
    # entries about files and training
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "initializer_range",
    "attention_dropout",
    "embed_requires_grad",
    "pretraining_tp",
    "max_window_layers",
    "auto_map",
    "has_no_defaults_at_init",
    "_name_or_path",
}
#: Pattern of a tensor's name -> why the tensor is not read. The first match counts.
_WHY_UNREAD = {
    r"(layers|midlayer)\.\d+\.": "the draft has a second layer; drafts of one layer can be read",
    r".*\.[qk]_norm\.": (
        "its attention norms queries and keys, which servers compute only where model_type is qwen3"
    ),
    r"(input_norm|fc_norm)\.": "a norm that config.json does not name (norm_before_fc, fc_norm)",
    # scales of FP8 weights; integer weights were rejected before
    r".*(_scale|_scale_inv|_zero_point)$": (
        "of quantized weights, which are not read; take the draft that is not quantized"
    ),
    r".*\.bias$": "a bias that config.json does not name (attention_bias, mlp_bias)",
    "": "not a tensor of an EAGLE-3 draft",
}


def _unread_entries(
    config: Mapping[str, Any], layer: Mapping[str, Any], eagle: Mapping[str, Any]
) -> set[str]:
    """Return the entries that are not read; null values are ignored."""
    entries = set()
    for key, value in (*config.items(), *layer.items()):
        if key not in _KNOWN_ENTRIES and value is not None:
            entries.add(key)
    for key, value in eagle.items():
        if key not in _KNOWN_EAGLE and value not in (None, _AS_COMPUTED.get(key)):
            entries.add(f"eagle_config.{key}")
    return entries
