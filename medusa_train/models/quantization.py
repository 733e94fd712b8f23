"""Backbones in 4 or 8 bits through bitsandbytes; knows no draft, no adapter and no training."""

from __future__ import annotations

from typing import Any, Literal

import torch

from medusa_train.errors import BackboneError

Quantization = Literal["nf4", "int8"]


def quantized_loading(quantization: Quantization | None, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """Arguments for `from_pretrained` that quantise while loading; none without `quantization`.

    NF4 with double quantisation, as QLoRA has it; `dtype` is what the products run in. lm_head stays as it is.

    Raises:
        BackboneError: bitsandbytes is not installed.
    """
    if quantization is None:
        return {}
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise BackboneError("load_in_4bit and load_in_8bit need bitsandbytes: pip install bitsandbytes") from error
    from transformers import BitsAndBytesConfig

    if quantization == "nf4":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=True,
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    return {"quantization_config": config, "device_map": {"": device}}


def plain_weight(module: Any, name: str = "weight") -> torch.Tensor | None:
    """A module's parameter in floating point, dequantised if need be; None where it has none of this name."""
    weight = getattr(module, name, None)
    if not isinstance(weight, torch.nn.Parameter):
        return None
    if type(weight) is torch.nn.Parameter:
        return weight.detach()
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    plain: torch.Tensor = dequantize_bnb_weight(weight, getattr(module, "state", None))
    return plain.detach()


def keep_trainable_kernels(model: Any) -> None:
    """Keep 4-bit layers away from the inference-only kernel of CPUs with AVX512-bf16.

    An `eval()` forward there repacks the weights in place; training afterwards runs through a kernel without
    autograd, and adapters below get wrong gradients, with no more than a warning.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
