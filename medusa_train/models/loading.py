"""Load a causal language model from a directory or the Hugging Face hub as a `Backbone`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from medusa_train.config.paths import looks_like_path, resolve_path
from medusa_train.errors import BackboneError
from medusa_train.hub import hub_is_unreachable
from medusa_train.models.backbone import Backbone
from medusa_train.models.compatibility import check_architecture, check_model
from medusa_train.models.precision import default_device, parse_dtype
from medusa_train.models.quantization import Quantization, keep_trainable_kernels, quantized_loading


def load_backbone(
    name: str,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
) -> Backbone:
    """Load a model and its tokenizer, frozen and in eval mode, and check that trees can be verified with it.

    Args:
        name: a directory or the name of a model on the hub.
        dtype: dtype of the weights, "auto" included; with `quantization` the dtype of the matrix products.
        device: by default the GPU, or the CPU without one.

    Raises:
        BackboneError: the model cannot be found or read, or its architecture is not supported.
    """
    source, config = resolve_backbone(name, trust_remote_code=trust_remote_code)
    device = default_device() if device is None else torch.device(device)
    dtype = parse_dtype(dtype, device)
    # sdpa cannot soft-cap attention scores; eager can, and takes an additive mask as well
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    offline = hub_is_unreachable()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=offline)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation="eager" if capped else "sdpa",
            trust_remote_code=trust_remote_code,
            local_files_only=offline,
            **quantized_loading(quantization, dtype, device),
        )
    except (OSError, ValueError, ImportError) as error:
        raise BackboneError(f"base_model {name}: loading failed: {error}") from error
    if quantization is None:
        model = model.to(device)
    else:
        keep_trainable_kernels(model)
    backbone = Backbone(model, tokenizer, name)
    check_model(backbone)
    return backbone


def resolve_backbone(name: str, *, trust_remote_code: bool = False) -> tuple[str, Any]:
    """Find a model by directory or hub name and read its config, without loading weights.

    Returns:
        The argument for `from_pretrained`, and the transformers config.

    Raises:
        BackboneError: the directory does not exist, the hub has no such model or cannot be reached, or the
            architecture is not supported.
    """
    local = resolve_path(name)
    source = str(local) if local is not None else name
    if local is None and looks_like_path(name):
        raise BackboneError(f"base_model {name}: no such directory")
    if local is not None and not (local / "config.json").is_file():
        raise BackboneError(f"base_model {name}: not a model directory: no config.json")
    try:
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=hub_is_unreachable()
        )
    except (OSError, ValueError) as error:
        if local is not None:
            raise BackboneError(f"base_model {name}: cannot read config.json: {error}") from error
        raise BackboneError(
            f"base_model {name}: not a local directory, and not available from the Hugging Face hub "
            f"(no network, a misspelt name, or a gated model without a token).\n"
            f"Download it where there is a network (`hf download {name} --local-dir models/{Path(name).name}`) "
            f"and set base_model: models/{Path(name).name}"
        ) from error
    check_architecture(config, name)
    return source, config
