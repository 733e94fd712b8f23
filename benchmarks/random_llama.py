"""Llamas of known shapes with random weights, made on the device in their dtype; times nothing.

Latency and memory do not depend on the values of weights, so a model of 7B parameters need not be downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_train.models.backbone import Backbone
from medusa_train.models.quantization import keep_trainable_kernels

#: hidden size, width of the MLP, layers, attention heads, heads of keys and values; 32,000 tokens each.
SHAPES = {
    "160M": (768, 3072, 12, 12, 12),
    "1B": (2048, 5632, 22, 32, 4),
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
}
VOCABULARY = 32000
CONTEXT = 8192
_BLOCK = 1_000_003  # random numbers that are drawn; a prime, so that rows of a matrix differ


def shape_config(name: str) -> LlamaConfig:
    """The configuration of one of `SHAPES`."""
    hidden, inner, layers, heads, kv_heads = SHAPES[name]
    return llama_config(hidden, inner, layers, heads, kv_heads)


def llama_config(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int = VOCABULARY
) -> LlamaConfig:
    """A Llama that never ends by itself, its matrices untied."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """A model whose parameters are allocated once, in `dtype` on `device`, and filled there."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)  # angles are no parameters
    generator = torch.Generator(device=device).manual_seed(0)
    block = torch.empty(_BLOCK, dtype=torch.float32, device=device).uniform_(-1.0, 1.0, generator=generator).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # norms
        else:
            _fill(parameter.view(-1), block, (3.0 / parameter.shape[1]) ** 0.5)
    return model.eval().requires_grad_(False)


def _fill(flat: torch.Tensor, block: torch.Tensor, scale: float) -> None:
    """The block again and again: copying is as fast as memory, drawing a number for each weight is not."""
    for start in range(0, len(flat), len(block)):
        part = flat[start : start + len(block)]
        part.copy_(block[: len(part)]).mul_(scale)


def random_backbone(config: LlamaConfig, dtype: torch.dtype, device: torch.device, name: str) -> Backbone:
    """`random_model` as a backbone; it has no tokenizer."""
    return Backbone(random_model(config, dtype, device), None, name)


def quantize_nf4(model: Any) -> None:
    """Replace every linear layer but lm_head by its 4-bit form, one after the other, as loading with NF4 would.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if not isinstance(linear, nn.Linear) or linear is model.get_output_embeddings():
                continue
            weight = linear.weight.data
            with torch.device("meta"):
                packed = Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    compute_dtype=weight.dtype,
                    compress_statistics=True,
                    quant_type="nf4",
                )
            packed.weight = Params4bit(
                weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=packed
            )
            setattr(module, name, packed.to(weight.device))  # moving it packs it, on a device where it lies as well
    model.is_loaded_in_4bit = True  # by which PEFT knows
    keep_trainable_kernels(model)
