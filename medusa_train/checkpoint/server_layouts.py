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

    input_norm.weight     with `norm_before_fc`; fc_norm.0|1|2.weight with `fc_norm`
    embed_tokens.weight   where the draft has embeddings of its own: a server takes the backbone's else
    target_hidden_size    width of the backbone where it is not the draft's hidden_size
    q_norm, k_norm        of the layer's attention, with model_type qwen3 (vLLM, speculators)
    lm_head.weight        missing in some files: a server takes the backbone's
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from medusa_train.checkpoint.reference_layout import (
    LM_HEAD_0,
    TOKEN_MAP,
    HeadTensors,
    checked_heads,
)
from medusa_train.checkpoint.resolve import EAGLE3, EAGLE3_QWEN3
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError
from medusa_train.io import warn_once

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.(weight|bias)")
#: In the state dict of a `MedusaDraft`.
_STATE_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")
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
        if (match := _STATE_BLOCK.fullmatch(name)) is not None:
            head, block, kind = match.groups()
            tensors[f"blocks.{head}.layers.{block}.{kind}"] = tensor
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
        for name in tensors:
            if _HEAD.fullmatch(name):
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
    mean = matrix.float().mean(0).to(matrix.dtype)  # [d]
    expanded = mean.repeat(vocab_size, 1)  # [V, d]
    expanded[token_map] = matrix
    return expanded


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
        if (match := _BLOCK.fullmatch(name)) is not None:
            head, block, kind = match.groups()
            state[f"blocks.{head}.{block}.linear.{kind}"] = tensor
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
        _clear_biases(state, source)
    return checked_heads(state, source)


def _clear_biases(state: dict[str, Tensor], source: str) -> None:
    """Give the blocks biases of zeros; vLLM's loader ignores those of the file, which is said."""
    weights = [name for name in state if name.startswith("blocks.") and name.endswith(".weight")]
    has_biases = False
    for name in weights:
        bias_name = name.removesuffix("weight") + "bias"
        bias = state.get(bias_name)
        if bias is not None and bool(bias.any()):
            has_biases = True
        state[bias_name] = state[name].new_zeros(len(state[name]))
    if has_biases:
        warn_once(
            f"{source}: the biases of the blocks are not used, as in vLLM, since config.json"
            " lacks medusa_fc_bias: true"
        )


def _apply_token_map(state: dict[str, Tensor], config: Mapping[str, Any], source: str) -> None:
    """Reduce the matrices to the rows of token_map, or remove an unused token_map, as the loader
    does.
    """
    tokens = state.pop(TOKEN_MAP, None)
    size = config.get(_REDUCED, config.get("truncated_vocab_size"))
    full_size = config.get("vocab_size")
    if not isinstance(size, int) or not isinstance(full_size, int) or size >= full_size:
        return
    expected = f"{source}: config.json says that the vocabulary has {size} tokens"
    if tokens is None:
        raise CheckpointError(f"{expected}, but there is no token_map")
    if len(tokens) != size:
        raise CheckpointError(f"{expected}, but token_map has {len(tokens)} tokens")
    for name in state:
        if _HEAD.fullmatch(name) and len(state[name]) > size:
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
    if LM_HEAD_0 not in state:
        raise CheckpointError(
            "the draft has no lm_head of its own, so there is nothing to convert: vLLM and SGLang"
            " take the backbone's; serve its files as they are"
        )
    # 1. Tensors with the same names.
    tensors = {}
    for name, tensor in state.items():
        if not name.startswith(("lm_heads.", TOKEN_MAP)):
            tensors[name] = tensor
    # 2. lm_head in the order of tokens, and which tokens they are. vLLM refuses that for a draft
    # that has all tokens.
    tokens = torch.arange(vocab_size)
    if TOKEN_MAP in state:
        tokens = state[TOKEN_MAP].cpu()  # [N]
    ordered, order = tokens.sort()
    tensors["lm_head.weight"] = state[LM_HEAD_0].cpu()[order]  # [N, d]
    if len(ordered) < vocab_size:
        tensors["d2t"] = ordered - torch.arange(len(ordered))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ordered, True)
    # 3. config.json
    norms: dict[str, Any] = {key: True for key in EAGLE3_NORMS if settings.get(key)}
    width = tensors["fc.weight"].shape[1] // len(settings["layers"])
    if width != layer["hidden_size"]:
        norms["target_hidden_size"] = width
    rope = dict(layer.get("rope_parameters") or {})
    architecture = EAGLE3
    model_type = "llama"
    if settings.get("qk_norm"):
        architecture = EAGLE3_QWEN3
        model_type = "qwen3"
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        **{key: layer[key] for key in LAYER_KEYS if layer.get(key) is not None},
        "rope_theta": rope.pop("rope_theta", 10000.0),  # older versions read this and rope_scaling
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(ordered),
        "tie_word_embeddings": False,
        "norm_before_residual": bool(settings.get("norm_before_residual")),
        **norms,
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
        problems = [norm for norm in ("norm_before_residual", "norm_before_fc") if config.get(norm)]
        if config.get("model_type") == "qwen3":
            problems.append("norms of queries and keys")
        if problems:
            raise CheckpointError(
                f"SGLang does not compute {problems[0]}; export --to vllm or speculators"
            )
        states = [layers - 1 for layers in config.pop(_STATES)]
        eagle = {_STATES: states, "use_aux_hidden_state": True}
        return tensors, {**config, "eagle_config": eagle}
    if to == "speculators":
        return _for_speculators(tensors, config, draft_tokens)
    return tensors, config


def _for_speculators(
    tensors: dict[str, Tensor], config: dict[str, Any], draft_tokens: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Rename the layer, and put its entries of config.json into one of their own."""
    renamed = {}
    for name, tensor in tensors.items():
        renamed[name.replace(_LAYER, _SPECULATORS_LAYER, 1)] = tensor
    at_the_top = {
        "draft_vocab_size",
        "tie_word_embeddings",
        "norm_before_residual",
        _STATES,
        "torch_dtype",
        "target_hidden_size",
        *EAGLE3_NORMS,
    }
    base_model = config["base_model_name_or_path"]
    draft = {}
    layer = {}
    for key, value in config.items():
        if key in at_the_top:
            draft[key] = value
        elif key != "base_model_name_or_path":
            layer[key] = value
    layer["architectures"] = ["LlamaForCausalLM"]
    if layer["model_type"] == "qwen3":
        layer["architectures"] = ["Qwen3ForCausalLM"]
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens}
    return renamed, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **draft,
        "transformer_layer_config": layer,
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

    The depth is not in the files, so `num_heads` keeps its default. Tensors and entries that are
    not read are named in one line.

    Raises:
        CheckpointError: tensors are missing, or belong to a layer of another kind; config.json
            describes no layer, or another than the tensors.
    """
    # 1. config.json
    layer = _part_of(config, "transformer_layer_config", source) or config
    eagle = _part_of(config, "eagle_config", source)
    whole = _layer_entries(layer, source)
    _refuse_other_layers(config, layer, eagle, source)
    settings: dict[str, Any] = {
        "layers": _state_layers(config, eagle, source),
        "norm_before_residual": bool(
            config.get("norm_before_residual", "speculators_model_type" in config)
        ),  # as vLLM
        "layer": {key: whole[key] for key in LAYER_KEYS if whole.get(key) is not None},
    }
    for key, older in EAGLE3_NORMS.items():
        if config.get(key) or eagle.get(key) or (older and config.get(older)):
            settings[key] = True

    # 2. names of tensors
    plain = {}
    for name, tensor in tensors.items():
        plain[name.removeprefix("model.").replace(_SPECULATORS_LAYER, _LAYER, 1)] = tensor
    has_norms = any(".q_norm." in name for name in plain)
    if layer.get("model_type") == "qwen3" and (has_norms or not _names_layer_of_llama(config)):
        settings["qk_norm"] = True
    expected = _eagle3_names(settings, whole)
    if "lm_head.weight" not in plain:
        expected.remove("lm_head.weight")  # the backbone's
    missing = sorted(expected - plain.keys())
    if missing:
        raise CheckpointError(f"{source}: incomplete, {', '.join(missing)} missing")
    unread = set()
    for name in sorted(plain.keys() - expected - {"t2d", "d2t", "embed_tokens.weight"}):
        if name not in _DERIVED:
            raise CheckpointError(f"{source}: {name}: {_why_unread(name)}")
        unread.add(name)
    state = {name: plain[name] for name in expected if name != "lm_head.weight"}
    if "lm_head.weight" in plain:
        state[LM_HEAD_0] = plain["lm_head.weight"]

    # 3. widths, embeddings and vocabulary
    _check_widths(plain, config, settings, whole, source)
    if "embed_tokens.weight" in plain:
        state["embed_tokens.weight"] = plain["embed_tokens.weight"]
        settings["own_embeddings"] = True
    tokens = _draft_tokens(plain, config, layer, source)
    if tokens is not None:
        settings |= {"vocab_size": len(tokens), TOKEN_MAP: tokens}
        state[TOKEN_MAP] = tokens

    # 4. what is left over
    unread |= _unread_entries(config, layer, eagle)
    if unread:
        warn_once(f"{source}: not read: {', '.join(sorted(unread))}")
    return state, settings


def _part_of(config: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    """Return the entries below a key of config.json; none where it is missing or null."""
    part = config.get(key)
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise CheckpointError(
            f"{source}: {key} {part!r} in config.json is not a mapping of entries"
        )
    return part


def _state_layers(
    config: Mapping[str, Any], eagle: Mapping[str, Any], source: str
) -> list[int] | None:
    """Return after how many layers the three states are read; None where they are not named."""
    named = config.get(_STATES)
    first = 1
    if eagle.get(_STATES):
        named = eagle[_STATES]
        first = 0
    if named is None:
        return None
    is_three = isinstance(named, list) and len(named) == 3
    # a bool is an int, too
    if not is_three or not all(type(number) is int and number >= first for number in named):
        raise CheckpointError(
            f"{source}: {_STATES} {named!r} in config.json are not three layers, counted from"
            f" {first}"
        )
    # servers collect the states from the first layer to the last, whatever their order here
    return sorted(number + 1 - first for number in named)


def layers_that_vllm_shifts(config: Mapping[str, Any]) -> list[int] | None:
    """Return the layers in eagle_config that vLLM 0.32 takes one too early; None where it reads
    what was trained, or no layers are named.

    In eagle_config layers are counted from 0 and their outputs are meant, as SGLang, SpecForge and
    Model Optimizer do. vLLM reads these numbers as it reads those at the top.
    """
    eagle = config.get("eagle_config")
    if config.get(_STATES) or not isinstance(eagle, Mapping):
        return None
    layers = eagle.get(_STATES)
    if not isinstance(layers, list) or not all(type(number) is int for number in layers):
        return None
    return layers or None


def _unread_entries(
    config: Mapping[str, Any], layer: Mapping[str, Any], eagle: Mapping[str, Any]
) -> set[str]:
    """Return the entries that are not read; null says nothing."""
    entries = set()
    for part in (config, layer):
        for key, value in part.items():
            if key not in _KNOWN_ENTRIES and value is not None:
                entries.add(key)
    for key, value in eagle.items():
        if key not in _KNOWN_EAGLE and value not in (None, _AS_COMPUTED.get(key)):
            entries.add(f"eagle_config.{key}")
    return entries


#: Norms that some trainers add, and older names of their flags.
EAGLE3_NORMS = {"norm_before_fc": None, "fc_norm": "use_aux_norm", "norm_output": None}
#: Tensors that follow from others, or are the backbone's.
_DERIVED = {
    "midlayer.self_attn.rotary_emb.inv_freq",
    "rotary_emb.inv_freq",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
}
_KNOWN_EAGLE = {*EAGLE3_NORMS, _STATES, "use_aux_hidden_state"}
#: Entries of NVIDIA's eagle_config, at values with which the draft is one that is computed here.
_AS_COMPUTED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}
#: Entries of config.json that are read, checked, or say nothing about what the draft computes.
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
    # of files and of training
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


def _layer_entries(layer: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the config.json of a Llama layer with these entries."""
    # servers read it so: what is missing has Llama's or Qwen3's defaults, not the backbone's
    # values
    keys = (*LAYER_KEYS, "rope_theta", "rope_scaling")
    named = {key: layer[key] for key in keys if layer.get(key) is not None}
    kind = Qwen3Config if layer.get("model_type") == "qwen3" else LlamaConfig
    try:
        whole: dict[str, Any] = kind(**named).to_dict()
    except Exception as error:  # of several kinds, as each check of transformers raises its own
        raise CheckpointError(
            f"{source}: not a valid configuration of an EAGLE-3 layer: {error}"
        ) from error
    return whole


def _refuse_other_layers(
    config: Mapping[str, Any], layer: Mapping[str, Any], eagle: Mapping[str, Any], source: str
) -> None:
    """Refuse entries of config.json by which the draft computes something else."""
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
        raise CheckpointError(f"{source}: EAGLE-3 drafts with {', '.join(problems)} can't be read")


def _names_layer_of_llama(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM builds Llama's layer, whatever model_type is: outside of speculators'
    files it chooses the layer by `architectures`.
    """
    architectures = config.get("architectures")
    if "speculators_model_type" in config or not isinstance(architectures, list):
        return False
    return any(str(name).startswith(("Llama", "Eagle3Llama")) for name in architectures)


def _eagle3_names(settings: Mapping[str, Any], layer: Mapping[str, Any]) -> set[str]:
    """The names of the tensors that a draft with these settings has."""
    names = {"fc.weight", "norm.weight", "lm_head.weight"}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        names.add(f"{_LAYER}{norm}.weight")
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        names.add(f"{_LAYER}self_attn.{projection}.weight")
        if layer.get("attention_bias"):
            names.add(f"{_LAYER}self_attn.{projection}.bias")
    if settings.get("qk_norm"):
        names |= {f"{_LAYER}self_attn.q_norm.weight", f"{_LAYER}self_attn.k_norm.weight"}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        names.add(f"{_LAYER}mlp.{projection}.weight")
        if layer.get("mlp_bias"):
            names.add(f"{_LAYER}mlp.{projection}.bias")
    if settings.get("norm_before_fc"):
        names.add("input_norm.weight")
    if settings.get("fc_norm"):
        names |= {f"fc_norm.{i}.weight" for i in range(3)}
    return names


#: Ends of the names of what FP8 weights have beside them; whole numbers are refused before.
_OF_QUANTIZED = ("_scale", "_scale_inv", "_zero_point")


def _why_unread(name: str) -> str:
    """Say why a draft with this tensor can't be read."""
    if re.match(r"(layers|midlayer)\.\d+\.", name):
        return "the draft has a second layer; drafts of one layer can be read"
    if ".q_norm." in name or ".k_norm." in name:
        return (
            "its attention norms queries and keys, which servers compute only where model_type is"
            " qwen3"
        )
    if name.startswith(("input_norm.", "fc_norm.")):
        return "a norm that config.json does not name (norm_before_fc, fc_norm)"
    if name.endswith(_OF_QUANTIZED):
        return "of quantized weights, which are not read; take the draft that is not quantized"
    if name.endswith(".bias"):
        return "a bias that config.json does not name (attention_bias, mlp_bias)"
    return "not a tensor of an EAGLE-3 draft"


def _check_widths(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    layer: Mapping[str, Any],
    source: str,
) -> None:
    """Check that config.json has the widths of fc, and that a narrower draft has embeddings."""
    size = layer["hidden_size"]
    rows, columns = tensors["fc.weight"].shape
    target = config.get("target_hidden_size") or columns // 3
    if (rows, columns) != (size, 3 * target):
        raise CheckpointError(
            f"{source}: fc.weight is [{rows}, {columns}], but config.json says hidden_size {size}"
            f" and three states of {target}"
        )
    for name, part in (("embed_tokens.weight", "embeddings"), ("lm_head.weight", "lm_head")):
        if target != size and name not in tensors:
            raise CheckpointError(
                f"{source}: {name} is missing; a draft of hidden_size {size} for a backbone of"
                f" {target} can't use the backbone's {part}"
            )


def _draft_tokens(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    source: str,
) -> Tensor | None:
    """Return the tokens [N] of lm_head's rows, by d2t or t2d; None where it has all tokens."""
    named = config.get("draft_vocab_size")
    if "lm_head.weight" not in tensors:
        if named in (None, layer.get("vocab_size")):
            return None
        raise CheckpointError(
            f"{source}: incomplete, lm_head.weight missing (the backbone's has all tokens, but"
            f" draft_vocab_size is {named})"
        )
    rows = len(tensors["lm_head.weight"])
    if named is not None and named != rows:
        raise CheckpointError(
            f"{source}: lm_head has {rows} rows, but draft_vocab_size is {named} in config.json"
        )
    size = layer.get("vocab_size")
    if size is None and "t2d" in tensors:
        size = len(tensors["t2d"])
    if size is not None and rows >= size:
        if "d2t" in tensors and bool(tensors["d2t"].any()):
            raise CheckpointError(
                f"{source}: d2t moves tokens, but lm_head has a row for each of {size} tokens"
            )
        return None
    if "d2t" in tensors:
        if len(tensors["d2t"]) != rows:
            raise CheckpointError(
                f"{source}: d2t has {len(tensors['d2t'])} tokens, lm_head {rows} rows"
            )
        return tensors["d2t"].long() + torch.arange(rows)
    if "t2d" in tensors:
        tokens = tensors["t2d"].nonzero()[:, 0]
        if len(tokens) == rows:
            return tokens
        raise CheckpointError(f"{source}: t2d has {len(tokens)} tokens, lm_head {rows} rows")
    if size is None:
        return None
    raise CheckpointError(
        f"{source}: lm_head has {rows} rows for {size} tokens, but d2t, which says which tokens"
        " they are, is missing"
    )
