"""What a run holds in memory on one device, from shapes alone; loads no weights and knows no data.

Weights, gradients and optimizer states are counted. Activations are an estimate, to tell settings that fit easily
from those that can't: kernels and the allocator add their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa_train.config.schema import TrainConfig
from medusa_train.losses.linear import block_rows, chunk_rows
from medusa_train.models.adapter import HEAD, linear_names
from medusa_train.models.drafts.kinds import DRAFTS

_MASTER = 4  # bytes of a trained number, and of its gradient: float32 in every recipe
# A number in NF4: 4 bits, a share of its block's 8-bit scale (64 numbers) and of the scales' float32 one (256 scales)
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
_ADAM = 2 * 4  # two float32 moments
_ADAM_8BIT = 2 * (1 + 4 / 256)  # two bytes, and a float32 scale for each 256 of either


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for, in the order to be shown in, and numbers of parameters."""

    parts: dict[str, int]
    frozen: int
    trained: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def estimate_memory(
    cfg: TrainConfig, model_config: Any, *, rows: int, width: int, dtype: torch.dtype, device: str
) -> Memory:
    """Add up what one device holds at the widest point of a training step, without ZeRO's partitioning.

    Args:
        cfg: recipe, heads, adapter, quantisation, optimizer.
        model_config: the backbone's transformers config.
        rows: rows of a micro-batch. width: tokens of its longest row.
        dtype: of the backbone's unquantised weights and of the products.
        device: its type, `cpu` or `cuda`; it sets how many logits exist at once.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=cfg.trust_remote_code)
    text = model_config.get_text_config()
    joint = _trained_in_place(cfg, model)
    adapter = _adapter_numbers(cfg, model)
    heads = DRAFTS[cfg.draft].count(model, **cfg.drafted.settings)
    trained = joint + adapter + heads
    frozen = sum(parameter.numel() for parameter in model.parameters()) - joint
    state = _ADAM_8BIT if "8bit" in cfg.optimizer else _ADAM
    parts = {
        "backbone, frozen": round(_weight_bytes(cfg, model, dtype)) - joint * dtype.itemsize,
        "backbone, trained": joint * _MASTER,
        "adapter": adapter * _MASTER,
        "heads": heads * _MASTER,
        "lm_head's rows that shared heads know": _shared_rows(cfg, text.hidden_size) * dtype.itemsize,
        "gradients": trained * _MASTER,
        f"optimizer states ({cfg.optimizer})": round(trained * state),
        "activations (estimate)": _activations(cfg, model, text, rows, width, dtype, device),
    }
    return Memory({name: size for name, size in parts.items() if size}, frozen, trained)


def _numbers(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _weight_bytes(cfg: TrainConfig, model: Any, dtype: torch.dtype) -> float:
    """Quantisation takes every linear layer but lm_head."""
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    quantised = _numbers(linear) if cfg.load_in_4bit or cfg.load_in_8bit else 0
    plain = _numbers(model.parameters()) - quantised
    return plain * dtype.itemsize + quantised * (_NF4 if cfg.load_in_4bit else 1)


def _trained_in_place(cfg: TrainConfig, model: Any) -> int:
    """Numbers of the backbone that joint training changes directly: all, or the last layers, final norm, lm_head."""
    if cfg.resolved().recipe == "medusa1" or cfg.adapter:
        return 0
    count = cfg.medusa_num_unfreeze_layers
    if not count:
        return _numbers(model.parameters())
    chosen = {id(p): p for layer in model.base_model.layers[-count:] for p in layer.parameters()}
    for module in (model.base_model.norm, model.get_output_embeddings()):
        chosen.update({id(p): p for p in module.parameters()})
    return _numbers(chosen.values())


def _adapter_numbers(cfg: TrainConfig, model: Any) -> int:
    if not cfg.adapter:
        return 0
    names = set(cfg.lora_target_modules or ())
    if cfg.lora_target_linear or not names:
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        names |= {name for name in linear_names(model) if not (tied and name == HEAD)}
    total = 0
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name in names and isinstance(module, nn.Linear):
            total += cfg.lora_r * (module.in_features + module.out_features)
        if name in (cfg.lora_modules_to_save or ()):
            total += _numbers(module.parameters())
    return total


def _activations(
    cfg: TrainConfig, model: Any, text: Any, rows: int, width: int, dtype: torch.dtype, device: str
) -> int:
    """What a micro-step adds at its widest point.

    The backbone's layers (one at a time where no graph is kept or activations are recomputed), copies of trained
    layers in the products' dtype, the heads' graph, the attention mask of packed rows, and what the losses hold.
    """
    tokens, item, hidden = rows * width, dtype.itemsize, text.hidden_size
    layer = tokens * item * _layer_width(text)
    depth = text.num_hidden_layers
    if cfg.resolved().recipe == "medusa1":
        body = layer
    elif cfg.gradient_checkpointing:
        body = layer + depth * tokens * hidden * item
    else:
        body = layer * depth
    copies = _trained_in_place(cfg, model) * item if item < _MASTER else 0
    heads = cfg.drafted.num_heads * (3 * cfg.drafted.blocks + 1) * tokens * hidden * item
    mask = rows * width * width * item if cfg.sample_packing else 0
    return body + copies + heads + mask + _losses(cfg, model, tokens, item, device)


def _shared_rows(cfg: TrainConfig, hidden: int) -> int:
    """Numbers of the rows of lm_head that heads over a reduced vocabulary copy once to share."""
    settings = cfg.drafted.settings
    return (settings.get("vocab_size") or 0) * hidden if settings.get("share_lm_head") else 0


def _losses(cfg: TrainConfig, model: Any, tokens: int, item: int, device: str) -> int:
    """A chunk's logits (and the teacher's), blocks of it in float32, a matrix in the products' dtype, and gradients.

    Matrices get their gradients in the forward pass. With gradient accumulation they lie beside the sums of earlier
    micro-steps until the backward pass; without it they become the gradients, which are counted elsewhere. Over a
    reduced vocabulary all is smaller, unless the backbone's own loss is there; of a teacher the rows are copied.
    """
    vocab, hidden = model.get_output_embeddings().weight.shape
    known = cfg.drafted.settings.get("vocab_size") or vocab
    rows_of_teacher = known * hidden * item if known < vocab and cfg.drafted.loss.soft else 0
    vocab = known if cfg.resolved().recipe == "medusa1" else vocab
    taught = cfg.medusa_self_distillation or cfg.drafted.loss.soft or cfg.medusa_distillation_regularization
    logits = (2 if taught else 1) * min(chunk_rows(vocab, device, item), tokens) * vocab * item
    blocks = 4 * min(block_rows(vocab, device), tokens) * vocab * _MASTER
    matrix = vocab * hidden * item if item < _MASTER else 0
    own = 0 if cfg.drafted.settings.get("share_lm_head") else cfg.drafted.num_heads
    beside = own if cfg.gradient_accumulation_steps > 1 else 0
    return logits + blocks + 2 * matrix + rows_of_teacher + beside * known * hidden * _MASTER


def _layer_width(text: Any) -> int:
    """Numbers per token that a decoder layer keeps for its backward pass: norms, q, k, v, attention, gated MLP."""
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    head_dim = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    attention = 2 * text.num_attention_heads * head_dim + 2 * kv_heads * head_dim
    return 6 * hidden + attention + 4 * inner
