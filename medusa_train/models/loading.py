"""Finds a causal LM in a directory or on the hub, and loads it with its tokenizer; runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from medusa_train.config.paths import looks_like_path, resolve_path
from medusa_train.errors import BackboneError
from medusa_train.hub import hub_is_unreachable
from medusa_train.models.compatibility import check_architecture
from medusa_train.models.quantization import Quantization, keep_trainable_kernels, quantized_loading


def resolve_backbone(name: str, *, trust_remote_code: bool = False) -> tuple[str, Any]:
    """Find the backbone `name`, a directory or a hub name, and read its config without loading weights.

    Returns:
        What `from_pretrained` takes, and the transformers config.

    Raises:
        BackboneError: no such directory, the hub has no such model or can't be reached, or it is of an architecture
            that can't be used here.
    """
    local = resolve_path(name)
    where = str(local) if local is not None else name
    if local is None and looks_like_path(name):
        raise BackboneError(f"base_model {name}: no such directory")
    if local is not None and not (local / "config.json").is_file():
        raise BackboneError(f"base_model {name}: the directory holds no config.json, so it is no model")
    try:
        config = AutoConfig.from_pretrained(
            where, trust_remote_code=trust_remote_code, local_files_only=hub_is_unreachable()
        )
    except (OSError, ValueError) as error:
        if local is not None:
            raise BackboneError(f"base_model {name}: config.json can't be used: {error}") from error
        raise BackboneError(
            f"base_model {name}: neither a directory here nor to be had from the Hugging Face hub "
            f"(no network, a misspelt name, or a gated model without a token).\n"
            f"Download it where there is a network (`hf download {name} --local-dir models/{Path(name).name}`) "
            f"and set base_model: models/{Path(name).name}"
        ) from error
    check_architecture(config, name)
    return where, config


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device | None,
    quantization: Quantization | None,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer; see `Backbone.load`.

    Raises:
        BackboneError: it can't be found or read.
    """
    where, config = resolve_backbone(name, trust_remote_code=trust_remote_code)
    # sdpa has no soft cap on attention scores; eager does, and takes our additive mask as it is
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        offline = hub_is_unreachable()
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, local_files_only=offline)
        model: Any = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=dtype,
            attn_implementation="eager" if capped else "sdpa",
            trust_remote_code=trust_remote_code,
            local_files_only=offline,
            **quantized_loading(quantization, dtype, device),
        )
    except (OSError, ValueError, ImportError) as error:
        raise BackboneError(f"base_model {name}: can't be loaded: {error}") from error
    if quantization is None:
        return model.to(device), tokenizer
    keep_trainable_kernels(model)
    return model, tokenizer


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """A dtype by its name, as users write it."""
    return name if isinstance(name, torch.dtype) else getattr(torch, name)
