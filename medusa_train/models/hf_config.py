"""What a model's own files say of it, under the names that families and versions give it; knows no weights."""

from __future__ import annotations

from typing import Any

from medusa_train.errors import BackboneError

#: Kinds of attention that a tree's mask can be laid over.
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


def rope_switch(config: Any) -> int | None:
    """The position from which a longrope model uses its long angles; the largest position of a pass decides."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer: the generation config's, else the tokenizer's."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)


def layer_types(config: Any) -> set[str]:
    """The kinds of attention among the layers.

    transformers lists them in `layer_types`; an older config without the list has windows everywhere where its class
    declares a `sliding_window` (Mistral, Phi-3), and none where the attribute is a stray of somebody's file.

    Raises:
        BackboneError: a kind that tree verification can't mask (state-space, chunked or linear attention).
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        windowed = getattr(config, "sliding_window", None) and hasattr(type(config)(), "sliding_window")
        kinds = {"sliding_attention" if windowed else "full_attention"}
    if unknown := kinds - KNOWN_LAYER_TYPES:
        raise BackboneError(f"{config.model_type}: layers of type {sorted(unknown)} can't be verified by a tree")
    return kinds


def logit_scale(config: Any) -> float:
    """Granite divides its logits, Cohere multiplies them."""
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    return (1.0 / divisor if divisor else 1.0) * (factor if factor else 1.0)


def context_length(config: Any) -> int:
    """Positions that a model was made for.

    Raises:
        BackboneError: its config does not say (ALiBi and state-space models, whose trees can't be verified here).
    """
    length = getattr(config, "max_position_embeddings", None)
    if not length:
        raise BackboneError(f"{config.model_type}: names no max_position_embeddings; only models with it are supported")
    return int(length)
