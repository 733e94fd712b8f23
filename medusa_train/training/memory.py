"""Estimate the memory of a training step from the configuration, without weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError
from medusa_train.io import describe_size
from medusa_train.losses.chunks import block_rows, chunk_rows
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.hf_config import head_dim, key_value_heads
from medusa_train.models.lora import LM_HEAD, linear_names
from medusa_train.training.backbone_recipe import unfrozen_modules
from medusa_train.training.deepspeed_config import DEFAULT, read_deepspeed, stage_of
from medusa_train.training.optim import EIGHT_BIT

# Bytes per parameter
_TRAINED = 4  # weight of a trained parameter, and its gradient: float32 in every recipe
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, an 8-bit scale per 64 weights, a float32 scale per 256 scales
_ADAM = 2 * 4  # two float32 moments
_ADAM_8BIT = 2 * (1 + 4 / 256)  # two moments in one byte each, a float32 scale per 256


@dataclass(frozen=True)
class Memory:
    """A memory estimate.

    Attributes:
        parts: bytes by purpose, in display order.
        frozen, trained: numbers of parameters.
        weights: bytes of the trained weights. checkpoint: of a checkpoint, optimizer states included.
    """

    parts: dict[str, int]
    frozen: int
    trained: int
    weights: int
    checkpoint: int

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts.values())


def estimate_memory(
    cfg: TrainConfig, model_config: Any, *, rows: int, width: int, dtype: torch.dtype, device: str
) -> Memory:
    """Estimate the peak memory of a training step on one device, without ZeRO.

    Args:
        cfg: recipe, heads, adapter, quantization, optimizer.
        model_config: the backbone's transformers config.
        rows: rows of a micro-batch. width: tokens of its longest row.
        dtype: compute dtype, also of the backbone's unquantized weights.
        device: `cpu` or `cuda`, which sets the chunk size of the logits.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=cfg.trust_remote_code)
    text = model_config.get_text_config()
    joint = _count_unfrozen(cfg, model)
    adapter = _count_adapter(cfg, model)
    heads = DRAFTS[cfg.draft].count_parameters(model, **cfg.draft_config.settings)
    trained = joint + adapter + heads
    frozen = sum(parameter.numel() for parameter in model.parameters()) - joint
    state = _ADAM_8BIT if "8bit" in cfg.optimizer else _ADAM
    parts = {
        "backbone, frozen": round(weight_bytes(cfg, model, dtype)) - joint * dtype.itemsize,
        "backbone, trained": joint * _TRAINED,
        "adapter": adapter * _TRAINED,
        "heads": heads * _TRAINED,
        "lm_head rows of the draft vocabulary (shared)": _shared_rows(cfg, text.hidden_size) * dtype.itemsize,
        "gradients": trained * _TRAINED,
        f"optimizer states ({cfg.optimizer})": round(trained * state),
        "activations (estimate)": _activations(cfg, model, text, heads, rows, width, dtype, device),
    }
    weights = trained * _TRAINED
    return Memory(
        {name: size for name, size in parts.items() if size}, frozen, trained, weights, weights + round(trained * state)
    )


def check_8bit_states(cfg: TrainConfig, model_config: Any, processes: int) -> None:
    """Refuse an 8-bit optimizer whose states ZeRO would have to partition, before anything is loaded.

    Raises:
        ConfigError: says how much memory the states of the alternatives take.
    """
    configured = read_deepspeed(cfg)
    stage = stage_of(DEFAULT if configured is None else configured)
    if cfg.optimizer not in EIGHT_BIT or stage == 0 or (processes == 1 and configured is None):
        return
    trained = estimate_memory(cfg, model_config, rows=1, width=1, dtype=torch.float32, device="cpu").trained
    default = " (the default of several processes)" if configured is None else ""
    raise ConfigError(
        f"optimizer: {cfg.optimizer}: ZeRO stage {stage}{default} cannot partition 8-bit states. Set optimizer: "
        f"adamw_torch, whose partitioned float32 states take {describe_size(trained * _ADAM // processes)} in each of "
        f"{processes} processes, or zero_optimization.stage: 0 in deepspeed, where every process has all 8-bit states: "
        f"{describe_size(round(trained * _ADAM_8BIT))}"
    )


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def weight_bytes(cfg: TrainConfig, model: Any, dtype: torch.dtype) -> float:
    """Return the bytes of all weights; quantization applies to every linear layer except lm_head."""
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    quantized = _count(linear) if cfg.load_in_4bit or cfg.load_in_8bit else 0
    plain = _count(model.parameters()) - quantized
    return plain * dtype.itemsize + quantized * (_NF4 if cfg.load_in_4bit else 1)


def _count_unfrozen(cfg: TrainConfig, model: Any) -> int:
    """Count the backbone parameters that joint training unfreezes: all, or the last layers, final norm and lm_head."""
    if cfg.resolved().recipe == "medusa1" or cfg.adapter:
        return 0
    count = cfg.medusa_num_unfreeze_layers
    if not count:
        return _count(model.parameters())
    chosen = {id(p): p for module in unfrozen_modules(model, count) for p in module.parameters()}
    return _count(chosen.values())


def _adapted_names(cfg: TrainConfig, model: Any) -> set[str]:
    """Return the names of the linear layers that an adapter changes, without their paths."""
    names = set(cfg.lora_target_modules or ())
    if cfg.lora_target_linear or not names:
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        names |= {name for name in linear_names(model) if not (tied and name == LM_HEAD)}
    return names


def _adapted_inputs(cfg: TrainConfig, model: Any) -> int:
    """Sum the input sizes of the decoder layers' adapted linear layers; lm_head is not one of them."""
    names = _adapted_names(cfg, model) - {LM_HEAD}
    layers = (m for path, m in model.named_modules() if path.rpartition(".")[2] in names)
    return sum(module.in_features for module in layers if isinstance(module, nn.Linear))


def _dequantized(cfg: TrainConfig, model: Any, item: int) -> int:
    """Return the bytes of the largest quantized matrix, of which a product takes a copy in the compute dtype."""
    head = model.get_output_embeddings()
    if not (cfg.load_in_4bit or cfg.load_in_8bit):
        return 0
    return max(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head) * item


def _count_adapter(cfg: TrainConfig, model: Any) -> int:
    if not cfg.adapter:
        return 0
    names = _adapted_names(cfg, model)
    total = 0
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name in names and isinstance(module, nn.Linear):
            total += cfg.lora_r * (module.in_features + module.out_features)
        if name in (cfg.lora_modules_to_save or ()):
            total += _count(module.parameters())
    return total


def _activations(
    cfg: TrainConfig, model: Any, text: Any, trained_heads: int, rows: int, width: int, dtype: torch.dtype, device: str
) -> int:
    """Estimate what a micro-batch adds at its peak, beside all gradients.

    Activations of the backbone's layers (their inputs alone if it recomputes them), copies of trained layers in the
    compute dtype, the attention mask of packed rows (for soft-capped scores only), and what comes one after the other:
    one layer that is not kept, the backbone's loss, and a head with its loss.

    Args:
        trained_heads: parameters of the heads.
    """
    tokens, item, hidden = rows * width, dtype.itemsize, text.hidden_size
    states = tokens * hidden * item
    layer = tokens * _layer_bytes(cfg, model, text, item, device)
    alive = 1 if DRAFTS[cfg.draft].independent_heads else cfg.draft_config.num_heads  # heads at a time
    heads = alive * (3 * cfg.draft_config.blocks_per_head + 1) * states
    if rank := cfg.draft_config.settings.get("markov_rank"):
        heads += states + tokens * rank * item  # a head's states with the embeddings of its Markov bias
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    mask = rows * width * width * item if cfg.sample_packing and capped else 0
    single = _dequantized(cfg, model, item)
    later = heads + _heads_loss(cfg, model, tokens, item, device)
    if cfg.resolved().recipe == "medusa1":
        return mask + max(single + layer, states + later)
    unfrozen = _count_unfrozen(cfg, model)
    if cfg.gradient_accumulation_steps == 1:  # else the gradients of the micro-batch before are there all the time
        later = max(later, _backbone_loss(cfg, model, tokens, item, device) - trained_heads * _TRAINED)
        lm_head = model.get_output_embeddings().weight.numel() if unfrozen else 0
        later -= (unfrozen - lm_head + _count_adapter(cfg, model)) * _TRAINED
    else:
        later = max(later, _backbone_loss(cfg, model, tokens, item, device))
    # a layer below those that are trained keeps nothing
    depth = (not cfg.adapter and cfg.medusa_num_unfreeze_layers) or text.num_hidden_layers
    if cfg.gradient_checkpointing:
        inputs = depth * tokens * hidden * (_TRAINED if unfrozen else item)
        return mask + inputs + max(single + layer, states + later)
    copies = unfrozen * item if item < _TRAINED else 0
    return mask + depth * layer + copies + max(single, states + later)


def _shared_rows(cfg: TrainConfig, hidden: int) -> int:
    """Count the parameters of lm_head that heads with a reduced vocabulary copy once and share."""
    settings = cfg.draft_config.settings
    return (settings.get("vocab_size") or 0) * hidden if settings.get("share_lm_head") else 0


def _backbone_loss(cfg: TrainConfig, model: Any, tokens: int, item: int, device: str) -> int:
    """Estimate the buffers of the backbone's own loss, with a teacher or without one."""
    vocab, hidden = model.get_output_embeddings().weight.shape
    taught = bool(cfg.medusa_self_distillation or cfg.medusa_distillation_regularization)
    return _loss_buffers(vocab, hidden, tokens, item, device, taught=taught)


def _heads_loss(cfg: TrainConfig, model: Any, tokens: int, item: int, device: str) -> int:
    """Estimate the buffers of one head's loss.

    A reduced vocabulary makes them smaller; the teacher's rows for it are copied. The LK loss needs the teacher's whole
    distribution all the same.
    """
    loss = cfg.heads_loss
    lm_head_rows, hidden = model.get_output_embeddings().weight.shape
    draft_vocab = cfg.draft_config.settings.get("vocab_size") or lm_head_rows
    taught, lk = bool(loss.soft_targets), loss.lk_eta is not None
    vocab = lm_head_rows if lk and taught else draft_vocab
    teacher_rows = draft_vocab * hidden * item if draft_vocab < lm_head_rows and taught else 0
    blocks = 7 if lk or loss.dpace else None
    return _loss_buffers(vocab, hidden, tokens, item, device, taught=taught, blocks=blocks) + teacher_rows


def _loss_buffers(
    vocab: int, hidden: int, tokens: int, item: int, device: str, *, taught: bool, blocks: int | None = None
) -> int:
    """Estimate a loss's buffers: a chunk of logits (and the teacher's), float32 blocks of it, and lm_head.

    One lm_head at a time is cast to the compute dtype; its gradient is added to `.grad`, which is counted elsewhere. A
    GPU with more free memory takes larger chunks.

    Args:
        blocks: tensors of one block; None: logits and log-probabilities, and the teacher's, with its probabilities.
    """
    logits = (2 if taught else 1) * min(chunk_rows(vocab, device, item), tokens) * vocab * item
    block = min(block_rows(vocab, device), tokens) * vocab * _TRAINED
    matrix = vocab * hidden * item if item < _TRAINED else 0
    if blocks is None:
        blocks = 4 if taught else 2
        blocks -= item == _TRAINED  # these logits need no copy
    return logits + blocks * block + matrix


def _layer_bytes(cfg: TrainConfig, model: Any, text: Any, item: int, device: str) -> int:
    """Count the bytes per token that a decoder layer keeps: norms, q, k, v, attention, gated MLP.

    In float32 several operations keep the same tensor. In half precision the norms keep float32 copies, every LoRA
    branch and every trained linear layer keeps its own copy of its input, and trained norms their float32 output.
    Dropout keeps a mask: of bytes on a GPU, in float32 on a CPU.
    """
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    attention = 2 * (text.num_attention_heads + key_value_heads(text)) * head_dim(text)
    adapted = _adapted_inputs(cfg, model) // text.num_hidden_layers if cfg.adapter else 0
    norms, inputs = 4 * hidden, 2 * hidden + inner
    if item < _TRAINED and cfg.adapter:
        inputs = adapted
    elif item < _TRAINED and cfg.resolved().recipe == "medusa2":
        norms, inputs = 8 * hidden, 5 * hidden + inner
    masks = adapted * (1 if device == "cuda" else _TRAINED) if cfg.lora_dropout else 0
    return (norms + attention + 3 * inner + inputs) * item + masks
