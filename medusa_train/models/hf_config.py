"""Read properties of a model from its transformers config: their names differ between model
families and versions.
"""

from __future__ import annotations

from typing import Any

from medusa_train.errors import TargetModelError

#: Kinds of attention that a tree mask can be applied to.
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return a checkpoint's quantization settings from its config; None if it has none."""
    settings: Any = getattr(config, "quantization_config", None)
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    values: dict[str, Any] | None = settings
    return values


def decoder_of(model: Any) -> Any:
    """Return a model's decoder without lm_head; for a multimodal model, its text decoder.

    Raises:
        TargetModelError: it has no such part (Qwen3-Omni, which also speaks).
    """
    decoder = model.base_model
    if decoder is model:  # Llama 4's `base_model_prefix` is not the name of its decoder
        decoder = getattr(model, "model", None)
    if decoder is None:
        raise TargetModelError(
            f"{type(model).__name__} is not supported: it has no decoder `model`"
        )
    return getattr(decoder, "language_model", decoder)


def final_norm(body: Any) -> Any:
    """Return the norm after the last layer of a decoder; None if it has none of the known names."""
    names = (
        "norm",
        "norm_f",
        "final_layernorm",
        "embedding_norm",
    )  # Llama, Nemotron-H, Falcon-H1, LFM2
    return next((getattr(body, name) for name in names if hasattr(body, name)), None)


def context_length(config: Any) -> int:
    """Return the number of positions of a model's context.

    With linear or YaRN scaling, `max_position_embeddings` is usually the length before scaling, so
    it is multiplied by the factor, as in vLLM.

    Raises:
        TargetModelError: no max_position_embeddings (ALiBi, state-space models).
    """
    length = getattr(config, "max_position_embeddings", None)
    if not length:
        raise TargetModelError(
            f"{config.model_type}: no max_position_embeddings in its config; only models with it"
            " work"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("linear", "yarn"):
        length_before = rope.get("original_max_position_embeddings") or length
        length = max(length, rope["factor"] * length_before)
    return int(length)


def layer_types(config: Any) -> list[str]:
    """Return the kind of attention of each decoder layer.

    transformers lists them in `layer_types`. Without this list, every layer has a sliding window if
    the config class declares `sliding_window` (Mistral, Phi-3). A stray `sliding_window` in the
    config.json of another class is ignored.
    """
    count = config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if not types:
        has_window = bool(getattr(config, "sliding_window", None))
        if has_window and hasattr(type(config)(), "sliding_window"):
            types = ["sliding_attention"] * count
        else:
            types = ["full_attention"] * count
    return list(types[:count])


def largest(config: Any, key: str) -> int | None:
    """Return a size of the layers, the largest if layers differ; None without this key.

    Sizes of layers that differ are a list (Gemma 3n's intermediate_size), or are in a config per
    layer (Gemma 4's head_dim).
    """
    configs = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes: list[int] = []
    for layer in configs:
        size = getattr(layer, key, None) or []
        sizes += size if isinstance(size, list) else [size]
    return max(sizes, default=None)


def head_dim(config: Any) -> int:
    """Return the size of an attention head; the largest if layers differ."""
    return largest(config, "head_dim") or config.hidden_size // config.num_attention_heads


def key_value_heads(config: Any) -> int:
    """Return the number of key-value heads of a layer; the largest if layers differ."""
    return largest(config, "num_key_value_heads") or config.num_attention_heads


def logit_scale(config: Any) -> float:
    """Return the factor on the logits: Granite divides by `logits_scaling`, Cohere multiplies by
    `logit_scale`.
    """
    scale = 1.0
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        scale = 1.0 / divisor
    factor = getattr(config, "logit_scale", None)
    if factor:
        scale *= factor
    return scale


def rope_switch(config: Any) -> int | None:
    """Return the position from which a longrope model uses its long factors; None for other models.

    The largest position in a forward pass decides for the whole pass.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )


def length_dependent_rope(config: Any) -> str | None:
    """Return the rope type of a model whose rotary angles change with the length of the text; None
    for other models.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # models with sliding windows have rope parameters for each layer type
    layer_type_parameters = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in [rope, *layer_type_parameters]:
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            return str(parameters["rope_type"])
    return None


def has_experts(config: Any) -> bool:
    """Return whether the model is a mixture of experts. Rounding may then route a token to another
    expert.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(config, name, None) for name in names)


def check_exit_layer(layers: int, num_layers: int, name: str, key: str = "exit_layer") -> None:
    """Raise TargetModelError unless 1 <= `layers` (the value of `key`) < `num_layers`."""
    if not 0 < layers < num_layers:
        raise TargetModelError(
            f"{key} {layers}: {name} has {num_layers} layers; use 1 to {num_layers - 1}"
        )
