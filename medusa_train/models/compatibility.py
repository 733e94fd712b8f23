"""Check that an architecture is supported: its logits can be reproduced and token trees verified in
one pass.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from medusa_train.errors import BackboneError
from medusa_train.models.backbone import Backbone
from medusa_train.models.finite import describe_not_finite
from medusa_train.models.hf_config import SUPPORTED_LAYER_TYPES, has_experts
from medusa_train.trees.transformers_adapters import prompt_cache
from medusa_train.trees.tree import Tree

#: Config keys of layers that carry a recurrent state instead of keys and values.
_RECURRENT_KEYS = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "layers_block_type",
    "block_types",
)
#: What is missing for kinds of layers, in transformers' names.
_LAYER_PROBLEMS = {
    "recurrent state": ("linear_attention", "hybrid", "hybrid_sliding", "conv", "mamba", "mamba2"),
    "chunked attention": ("chunked_attention",),
    "sparse attention": (
        "indexed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ),
}
_EXPLANATIONS = {
    "recurrent state": (
        "a layer's state summarizes one sequence, and cannot branch into a token tree"
    ),
    "chunked attention": "tree masks are not limited to the chunk of a token",
    "sparse attention": "the tokens that a layer selects depend on the row, and trees have several",
    "attention sinks": (
        "a learned logit joins every softmax, which scaled_dot_product_attention cannot add"
    ),
    "latent attention": "keys and values of different sizes do not fit the tree cache",
    "cross-attention": "layers attend to the states of an image, which are not passed on",
}
#: Model types whose attention has sinks; their configs do not say so.
_SINK_MODELS = {"gpt_oss", "mimo_v2_flash", "flint", "granite_swa", "granitemoe_swa", "deepseek_v4"}
#: Sizes of the small copy of a mixture of experts that is probed, by config key.
_SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
}
_SMALL |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
_SMALL |= dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 32
)
_FORWARD_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values")
_FAMILIES = (
    "Llama, Mistral, Qwen2 and 3, Gemma 2 and 3 (text), Phi-3, OLMo 2, SmolLM3, Granite and similar"
    " models"
)


def check_architecture(config: Any, name: str) -> None:
    """Raise BackboneError, with every reason, if a config's architecture is not supported; before
    weights load.
    """
    if reasons := list(_config_problems(config)):
        names = getattr(config, "architectures", None)
        raise BackboneError(
            _refusal(name, names[0] if names else f"architecture {config.model_type!r}", reasons)
        )


def check_model(backbone: Backbone) -> None:
    """Probe a loaded model; raise BackboneError if its logits or tree passes would be wrong, or its
    weights are not finite.
    """
    reason = _forward_problem(backbone)
    if reason is None:
        problem = _not_finite(backbone)
        if problem is not None:
            raise BackboneError(f"base_model {backbone.name}: {problem}")
        reason = _model_problem(backbone)
    if reason is not None:
        raise BackboneError(_refusal(backbone.name, type(backbone.model).__name__, [reason]))


def _refusal(name: str, architecture: str, reasons: list[str]) -> str:
    lines = "".join(f"\n  {reason}" for reason in reasons)
    return (
        f"base_model {name}: {architecture} is not supported:{lines}\n"
        f"Supported: {_FAMILIES}; see docs/reference/models.md"
    )


def _config_problems(config: Any) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    has_remote_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not has_remote_code:
        yield (
            "the installed transformers has no causal language model of this type; a newer"
            " version may"
        )
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported; drafts need a decoder-only model"
    missing = sorted(_missing_features(config, text))
    yield from (f"{feature}: {_EXPLANATIONS[feature]}" for feature in missing)
    if missing:
        return  # the checks below would report consequences
    if not getattr(text, "max_position_embeddings", None):
        yield (
            "no max_position_embeddings in its config: position ids of tree nodes would be ignored"
        )
    if getattr(text, "alibi", False):
        yield "ALiBi attention: distances within the row are wrong between the branches of a tree"
    if getattr(text, "use_bidirectional_attention", False):
        yield "bidirectional attention: a position attends to later tokens"
    if (size := _value(text, "global_head_dim")) and size != _value(text, "head_dim"):
        yield "layers with heads of different sizes do not fit the cache"
    if unsupported := sorted(set(getattr(text, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES):
        yield f"layers of type {', '.join(unsupported)} do not support tree attention"
    # loading takes sdpa, except for capped scores
    if not _class_flag(config, "_supports_sdpa", True) and not getattr(
        text, "attn_logit_softcapping", None
    ):
        yield (
            "the installed transformers cannot run its attention by scaled_dot_product_attention"
            " (sdpa)"
        )


def _missing_features(config: Any, text: Any) -> set[str]:
    """Return the features of an architecture that are not implemented here, keys of
    `_EXPLANATIONS`.
    """
    types = set(_value(text, "layer_types") or ())
    features = {feature for feature, kinds in _LAYER_PROBLEMS.items() if types & set(kinds)}
    recurrent = _class_flag(config, "_is_stateful", False) or any(
        _value(text, key) for key in _RECURRENT_KEYS
    )
    # Granite 4.0 has dense models of that class
    if recurrent and not (types and types <= SUPPORTED_LAYER_TYPES):
        features.add("recurrent state")
    if _value(text, "kv_lora_rank"):
        features.add("latent attention")
    if {config.model_type, text.model_type} & _SINK_MODELS:
        features.add("attention sinks")
    if _value(text, "cross_attention_layers"):
        features.add("cross-attention")
    return features


def _value(config: Any, key: str) -> Any:
    """Return a value of a config; True for one that differs between the layers, which transformers
    does not return.
    """
    try:
        return getattr(config, key, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
        return True


def _class_flag(config: Any, name: str, default: bool) -> bool:
    """Return a flag of the model class of a config; `default` if transformers has no such class
    (remote code).
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return default
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], name, default))


def _forward_problem(backbone: Backbone) -> str | None:
    """Return which arguments a model's forward lacks, in words; None if it has all."""
    parameters = inspect.signature(type(backbone.body).forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    missing = [name for name in _FORWARD_ARGUMENTS if name not in parameters]
    return f"its forward takes no {', '.join(missing)}" if missing else None


def _model_problem(backbone: Backbone) -> str | None:
    """Return what a model computes otherwise than drafts and trees need; None: nothing."""
    if not _reproduces_logits(backbone):
        return (
            "its logits are not lm_head(hidden), with or without soft cap and scale; trained heads"
            " would be wrong"
        )
    # in half precision rounding may route a token to another expert, so only a copy in float32 can
    # be compared
    probed = (
        backbone if backbone.is_exact or not has_experts(backbone.config) else _small_copy(backbone)
    )
    if not _verifies_trees(probed):
        return (
            "its output for a token depends on siblings of its ancestors in the same pass: the 4-D"
            " attention mask or the position ids are ignored"
        )
    return None


@torch.no_grad()
def _not_finite(backbone: Backbone) -> str | None:
    """Return what is wrong with a model whose logits are NaN or infinite; None if they are finite."""
    probe = torch.arange(min(4, backbone.vocab_size), device=backbone.device)[None]
    if bool(torch.isfinite(backbone.logits(backbone.run(probe).hidden)).all()):
        return None
    problem = describe_not_finite(backbone.model.named_parameters())
    if problem is not None:
        return f"{problem}: the file is damaged; fetch or copy it again"
    return (
        f"its logits are not finite in {str(backbone.dtype).removeprefix('torch.')}, though its"
        " weights are: load it in bfloat16 or float32"
    )


@torch.no_grad()
def _reproduces_logits(backbone: Backbone) -> bool:
    probe = torch.arange(min(4, backbone.vocab_size), device=backbone.device)[None]
    expected = backbone.model(input_ids=probe, use_cache=False).logits.float()
    logits = backbone.logits(backbone.run(probe).hidden).float()
    return torch.allclose(
        logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max().clamp(min=1.0))
    )


def _small_copy(backbone: Backbone) -> Backbone:
    """Return a model of the same class and attention on the CPU, two layers of few experts, random
    in float32.
    """
    config = copy.deepcopy(backbone.model.config)
    text = config.get_text_config()
    for key in _SMALL.keys() & set(text.to_dict()):
        setattr(text, key, _SMALL[key])
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    config.eos_token_id = config.pad_token_id = config.bos_token_id = None
    config.quantization_config = None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = type(backbone.model)(config).float()
        for parameter in model.parameters():
            # as large as those of trained models, so that a token depends on the others
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return Backbone(model.eval().requires_grad_(False), backbone.tokenizer, backbone.name)


@torch.no_grad()
def _verifies_trees(backbone: Backbone) -> bool:
    """Return whether a tree node gets the hidden state that it has in a row with its ancestors
    only.

    prefix 0 1 2 | root 3 | siblings 4, 5 | 6, a child of 5       row: 0 1 2 3 5 6
    """
    if backbone.max_context < 8:
        return True
    tree = Tree.from_paths([(0,), (1,), (1, 0)])
    tokens = (
        torch.arange(7, device=backbone.device)
        * max(1, backbone.vocab_size // 8)
        % backbone.vocab_size
    )
    expected = backbone.run(tokens[[0, 1, 2, 3, 5, 6]][None]).hidden[0, -1]
    slots = backbone.new_slots()
    backbone.run(tokens[None, :3], cache=prompt_cache(slots, 0, 1))
    depths = tree.depths.to(backbone.device)
    masks = backbone.node_masks(tree.ancestors.to(backbone.device), depths)
    lengths = torch.tensor([3], device=backbone.device)
    nodes = backbone.place_nodes(depths, masks, lengths, slots.storage(7), 7)
    hidden = backbone.run_nodes(tokens[None, 3:], nodes)[0].hidden[0, -1]
    return backbone.agrees(hidden, expected)
