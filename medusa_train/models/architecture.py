"""Decide from a model's config, before loading weights, whether drafts can be trained for it and
whether it can verify token trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from medusa_train.errors import TargetModelError
from medusa_train.models.hf_config import SUPPORTED_LAYER_TYPES, layer_types

#: Config keys of layers that carry a recurrent state instead of keys and values.
_RECURRENT_KEYS = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "layers_block_type",
    "block_types",
)
#: Reasons why token trees cannot be verified, with the layer types (transformers' names) they apply
#: to.
_TREE_UNSUPPORTED_REASONS = {
    "recurrent state: a layer's state summarizes one sequence, and cannot branch into a token tree": (
        "linear_attention",
        "hybrid",
        "hybrid_sliding",
        "conv",
        "mamba",
        "mamba2",
    ),
    "chunked attention: tree masks are not limited to the chunk of a token": ("chunked_attention",),
    "sparse attention: the tokens that a layer selects depend on the row, and trees have several": (
        "indexed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ),
}
_FAMILIES = (
    "Llama, Mistral, Qwen2 and 3, Gemma 2 to 4 (text), gpt-oss, DeepSeek-V3, Phi-3, OLMo 2,"
    " SmolLM3, Granite and similar models"
)


def auto_class(config: Any) -> Any:
    """Return the transformers auto class that loads a model: the multimodal one only if there is no
    causal-LM class for its config.
    """
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_known and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def attention_of(config: Any) -> str:
    """Return the attention implementation to load a model with: sdpa, or eager for soft-capped
    scores (Gemma 2) and sinks (gpt-oss), which sdpa lacks.
    """
    is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if is_capped or not _class_flag(config, "_supports_sdpa", True) else "sdpa"


def tree_unsupported_reason(config: Any) -> str | None:
    """Return why token trees of a model cannot be verified; None if they can.

    Drafts for such a model can still be trained, with one document per row.
    """
    text = config.get_text_config(decoder=True)
    types = set(layer_types(text))
    for unsupported_reason, kinds in _TREE_UNSUPPORTED_REASONS.items():
        if types & set(kinds):
            return unsupported_reason
    is_recurrent = _class_flag(config, "_is_stateful", False) or any(
        getattr(text, key, None) for key in _RECURRENT_KEYS
    )
    # Granite 4.0's stateful class also has purely dense models; their `layer_types` say so
    if is_recurrent and not getattr(text, "layer_types", None):
        return next(iter(_TREE_UNSUPPORTED_REASONS))
    unsupported = sorted(types - SUPPORTED_LAYER_TYPES)
    return f"layers of type {', '.join(unsupported)}" if unsupported else None


def describe_without_trees(config: Any, name: str) -> str | None:
    """Describe that a draft for a model can be trained but not decoded with here; None if decoding
    works too.
    """
    unsupported_reason = tree_unsupported_reason(config)
    if unsupported_reason is None:
        return None
    return (
        f"base_model {name}: its token trees cannot be verified here ({unsupported_reason}). A"
        " draft for it can be trained and exported; servers decode with it: medusa-eval --serve,"
        " medusa-selfdistill --server-url"
    )


def check_decodes(config: Any, name: str) -> None:
    """Raise TargetModelError if token trees of a model cannot be verified."""
    problem = describe_without_trees(config, name)
    if problem is not None:
        raise TargetModelError(problem)


def check_architecture(config: Any, name: str) -> None:
    """Raise TargetModelError, with every reason, if drafts for a model cannot be trained."""
    try:
        reasons = list(_problems(config))
    except Exception as error:  # an unknown kind of config can fail anywhere
        reasons = [describe_exception(error)]
    if reasons:
        names = getattr(config, "architectures", None)
        raise not_supported(
            name, names[0] if names else f"architecture {config.model_type!r}", reasons
        )


def describe_exception(error: Exception) -> str:
    """Describe an error that an unknown kind of model raised."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__} in transformers or in a check of this model: {first_line}"


def not_supported(name: str, architecture: str, reasons: list[str]) -> TargetModelError:
    """Return the error for a model that is not supported."""
    lines = "".join(f"\n  {reason}" for reason in reasons)
    return TargetModelError(
        f"base_model {name}: {architecture} is not supported:{lines}\n"
        f"Supported: {_FAMILIES}; see docs/reference/models.md"
    )


def _problems(config: Any) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    has_remote_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if _model_class(config) is None and not has_remote_code:
        yield "the installed transformers has no language model of this type that writes text"
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported; drafts need a decoder-only model"
    if getattr(text, "cross_attention_layers", None):
        yield "cross-attention: layers attend to the states of an image, which are not passed on"
        return  # the checks below would report consequences
    if not getattr(text, "max_position_embeddings", None):
        yield "no max_position_embeddings in its config, so the length of its context is unknown"
    if getattr(text, "alibi", False):
        yield "ALiBi attention: distances within the row are wrong between the branches of a tree"
    # the value "vision" is fine: bidirectional only between the tokens of an image (Gemma 4)
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        yield "bidirectional attention: a position attends to later tokens"


def _model_class(config: Any) -> Any:
    """Return the model class of a config; None if transformers has no such class (remote code)."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def _class_flag(config: Any, name: str, default: bool) -> bool:
    """Return a flag of the model class of a config."""
    return bool(getattr(_model_class(config), name, default))
