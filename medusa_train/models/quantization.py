"""Load backbones in 4 or 8 bits with bitsandbytes."""

from __future__ import annotations

from typing import Any, Literal

import torch

from medusa_train.errors import BackboneError

Quantization = Literal["nf4", "int8"]


def quantized_loading(quantization: Quantization | None, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """Return the arguments for `from_pretrained` that quantize while loading; empty without `quantization`.

    NF4 uses double quantization (QLoRA, "QLoRA Finetuning"). lm_head is not quantized.

    Args:
        dtype: dtype of the matrix products.

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
    """Return a parameter of a module in floating point, dequantized if needed; None if there is no such parameter."""
    weight = getattr(module, name, None)
    if not isinstance(weight, torch.nn.Parameter):
        return None
    if type(weight) is torch.nn.Parameter:
        return weight.detach()
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    dequantized: torch.Tensor = dequantize_bnb_weight(weight, getattr(module, "state", None))
    return dequantized.detach()


def keep_trainable_kernels(model: Any) -> None:
    """Prevent 4-bit layers from switching to the inference-only kernel for CPUs with AVX512-bf16.

    A forward pass in eval mode repacks the weights in place for that kernel. It has no autograd, so adapters trained
    afterwards would get wrong gradients, with only a warning.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
