"""Estimate what a run costs, without weights: memory and arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_train.config.schema import TrainConfig
from medusa_train.losses.chunked_loss import block_size, chunk_size, gpu_bytes
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.hf_config import decoder_of, head_dim, key_value_heads, quantization_of
from medusa_train.models.loading import model_without_weights
from medusa_train.models.lora import LM_HEAD, default_targets
from medusa_train.training.backbone_recipe import unfrozen_modules
from medusa_train.training.draft_cost import draft_cost

#: Dense bfloat16 operations per second of one GPU, by the vendor's data sheets: name with memory
# -> rate.
GPUS = {
    "RTX 4090, 24 GB": 165e12,
    "L40S, 48 GB": 362e12,
    "H100, 80 GB": 989e12,
    "A100, 80 GB": 312e12,
}


class Rate(NamedTuple):
    """How much of a GPU's rate a recipe reaches.

    Attributes:
        recipe: in words.
        share: of `GPUS`.
        tokens: per second, measured on one H100 at 7B shape (benchmarks/results/gpu.json); None: this
            recipe was not measured, and the share is that of the nearest one that was.
    """

    recipe: str
    share: float
    tokens: int | None = None

    def describe(self) -> str:
        """Say in a line what it is and where it comes from."""
        measured = "not measured: that of the nearest recipe"
        if self.tokens is not None:
            measured = f"measured on an H100 at 7B shape, {self.tokens:,} tokens/s"
        return f"{self.recipe}: {self.share:.0%} of the matrix rate, {measured}"


_FROZEN = Rate("Medusa-1", 0.38, 20_898)
_QLORA = Rate("Medusa-2 with QLoRA", 0.27, 5_846)
#: By recipe, see `rate_of`.
RATES = {
    "medusa1": _FROZEN,
    "medusa1 quantized": Rate("Medusa-1 on a quantized backbone", _FROZEN.share),
    "other draft": Rate("drafts other than Medusa", _FROZEN.share),
    "qlora": _QLORA,
    "lora": Rate("Medusa-2 with LoRA", _QLORA.share),
    "layers": Rate("Medusa-2 with trained layers", _QLORA.share),
}

# Bytes per parameter
_TRAINED = 4  # weight of a trained parameter, and its gradient: float32 in every recipe
# 4 bits, an 8-bit scale per 64 weights, a float32 scale per 256 scales
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
ADAM = 2 * 4  # two float32 moments
ADAM_8BIT = 2 * (1 + 4 / 256)  # two moments in one byte each, a float32 scale per 256

# bytes of a GPU that torch's allocator does not count
_CUDA_CONTEXT = 1 << 30
_NCCL_BUFFERS = 1 << 30


@dataclass(frozen=True)
class Memory:
    """A memory estimate.

    Attributes:
        parts: bytes by purpose, in display order.
        frozen, trained: numbers of parameters.
        weights: bytes of the trained weights. checkpoint: of a checkpoint, optimizer states
            included.
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


class Estimate:
    """What a configuration costs, from the shapes of its draft and of a backbone with a
    transformers config.
    """

    def __init__(self, cfg: TrainConfig, model_config: Any) -> None:
        self._cfg = cfg
        self._text = model_config.get_text_config()
        self._model = model_without_weights(model_config, trust_remote_code=cfg.trust_remote_code)
        self._section = cfg.draft_config
        self._cost = draft_cost(self._section, self._text.hidden_size)
        self._settings = self._section.settings
        self._lm_head: Tensor = self._model.get_output_embeddings().weight
        #: Tokens that a head predicts: all, or a reduced vocabulary.
        self._draft_vocab: int = self._settings.get("vocab_size") or self._lm_head.shape[0]
        self._heads = self._count_heads()
        #: `auto`, which depends on a device, counts as true.
        self._recomputes = bool(self._cfg.gradient_checkpointing)

    def memory(self, *, rows: int, width: int, dtype: torch.dtype, device: str) -> Memory:
        """Estimate the peak memory of a training step on one device, without ZeRO.

        Args:
            rows: rows of a micro-batch. width: tokens of its longest row.
            dtype: compute dtype, also of the backbone's unquantized weights.
        """
        optimizer = self._cfg.optimizer
        joint = self._unfrozen
        has_8bit_states = "8bit" in optimizer and device != "cpu"
        bytes_of_states = ADAM_8BIT if has_8bit_states else ADAM
        states = round(self.trained * bytes_of_states)
        frozen = _count(self._model.parameters()) - joint
        shared_rows = 0  # of lm_head, which heads with a reduced vocabulary copy once and share
        if self._settings.get("share_lm_head") and self._settings.get("vocab_size"):
            shared_rows = self._draft_vocab * self._text.hidden_size
        parts = {
            "backbone, frozen": round(self._backbone_bytes(dtype)) - joint * dtype.itemsize,
            "backbone, trained": joint * _TRAINED,
            "adapter": self._adapter * _TRAINED,
            "heads": self._heads * _TRAINED,
            "lm_head rows of the draft vocabulary (shared)": shared_rows * dtype.itemsize,
            "gradients": self.trained * _TRAINED,
            f"optimizer states ({optimizer})": states,
            "activations (estimate)": self._activations(rows, width, dtype.itemsize, device),
        }
        weights = self.trained * _TRAINED
        return Memory(
            {k: v for k, v in parts.items() if v}, frozen, self.trained, weights, weights + states
        )

    @cached_property
    def trained(self) -> int:
        """Number of trained parameters: heads, adapter and unfrozen layers."""
        return self._unfrozen + self._adapter + self._heads

    def operations(self, *, tokens: int, supervised: int, width: int, epochs: float) -> float:
        """Estimate the floating-point operations of a run.

        A matrix product takes two operations per weight and token. A pass forward through the
        backbone is one of them, a backward pass two, or one where the weights themselves are not
        trained. Heads run on all tokens, their lm_heads on supervised ones, and soft targets take
        the backbone's logits there, of the draft's vocabulary.

        Args:
            tokens, supervised: of an epoch. epochs: their number.
            width: tokens of a row; on average a token attends to half of them.
        """
        cfg = self._cfg
        text = self._text
        # 1. One pass forward through the backbone's layers: `layers`, Falcon's `h`.
        children = decoder_of(self._model).children()
        lists = [module for module in children if isinstance(module, nn.ModuleList)]
        layers = sum(map(self._used, max(lists, key=len).parameters()))
        attention = (
            4 * text.num_hidden_layers * text.num_attention_heads * head_dim(text) * width / 2
        )
        forward = tokens * (2 * layers + attention)
        # 2. The draft, forward and backward.
        attention_of_layer = attention / text.num_hidden_layers
        in_draft = self._heads_operations(tokens, supervised, attention_of_layer) * epochs
        # 3. A frozen backbone: forward passes alone, one where their states are stored.
        if cfg.recipe == "medusa1":
            passes = epochs
            if cfg.cache_hidden_states:
                passes = min(epochs, 1)
            return forward * passes + in_draft
        # 4. A trained one: also the teacher's pass, those backward, and its lm_head.
        backward = 1 if cfg.adapter else 2
        trained_share = self._trained_depth / text.num_hidden_layers
        passed_again = trained_share * (self._recomputes + backward)
        in_layers = forward * (1 + self._has_teacher + passed_again)
        lm_head_passes = 1 + self._has_teacher + backward
        in_lm_head = 2 * self._lm_head.numel() * supervised * lm_head_passes
        return (in_layers + in_lm_head) * epochs + in_draft

    def _used(self, weight: Tensor) -> float:
        """Count the elements of a backbone's parameter that a token is multiplied by: of experts,
        those it goes to.
        """
        experts = getattr(self._text, "num_experts_per_tok", None)
        if weight.dim() != 3 or not experts:
            return weight.numel()
        return weight.numel() * (experts / weight.shape[0])

    @property
    def _trained_depth(self) -> int:
        """Last layers that keep activations for gradients: one below those that are trained keeps
        nothing.
        """
        if self._cfg.adapter or not self._cfg.medusa_num_unfreeze_layers:
            return int(self._text.num_hidden_layers)
        return self._cfg.medusa_num_unfreeze_layers

    def _heads_operations(self, tokens: int, supervised: int, attention: float) -> float:
        """Estimate the operations of an epoch in the draft; `attention` is what a layer's takes per
        token.
        """
        section = self._section
        hidden = self._text.hidden_size
        cost = self._cost
        shared = cost.shared_lm_heads
        # 1. Weights that every token is multiplied by. The embeddings of a Markov bias are looked
        # up; matrices that give logits are counted apart, by the positions that need logits.
        rank = self._settings.get("markov_rank", 0)
        weights = self._heads
        if rank:
            weights = self._count_heads(markov_rank=0)
        weights -= (cost.output_matrices - shared) * self._draft_vocab * hidden
        once = cost.weights_used_once
        weights = cost.repeats * (weights - once) + once
        outputs = cost.repeats * cost.output_matrices
        # 2. Attention of Amphista over the vectors of all heads.
        blocks = self._settings.get("auto_blocks")
        if blocks:
            attended = self._text.num_attention_heads * head_dim(self._text)
            weights += (outputs - 1) * blocks * 4 * hidden * attended
        in_states = (6 * weights + 3 * cost.layer_passes * attention) * tokens
        # 3. Logits of every output: forward, backward to the states, and to a matrix of its own;
        # and the teacher's.
        per_logit = (4 if shared else 6) * (hidden + rank)
        if section.heads_loss.soft_targets:
            per_logit += 2 * hidden
        return in_states + outputs * per_logit * self._draft_vocab * supervised

    def _count_heads(self, **changes: Any) -> int:
        return DRAFTS[self._cfg.draft].count_parameters(
            self._model, **{**self._settings, **changes}
        )

    @cached_property
    def _unfrozen(self) -> int:
        """Parameters that joint training unfreezes: all, or those of the last layers, the final
        norm and lm_head.
        """
        if self._cfg.recipe == "medusa1" or self._cfg.adapter:
            return 0
        layers = self._cfg.medusa_num_unfreeze_layers
        modules = [self._model]
        if layers:
            modules = unfrozen_modules(self._model, layers)
        distinct: dict[int, Tensor] = {}
        for module in modules:
            distinct |= {id(parameter): parameter for parameter in module.parameters()}
        return _count(distinct.values())

    @cached_property
    def _adapted_names(self) -> set[str]:
        """Names of the linear layers that an adapter changes, without their paths."""
        names = set(self._cfg.lora_target_modules or ())
        if self._cfg.lora_target_linear or not names:
            names.update(default_targets(self._model))
        return names

    @cached_property
    def _adapter(self) -> int:
        """Parameters of the adapter and of the modules that are trained in full beside it."""
        if not self._cfg.adapter:
            return 0
        total = 0
        for path, module in self._model.named_modules():
            name = path.rpartition(".")[2]
            if name in self._adapted_names and isinstance(module, nn.Linear):
                total += self._cfg.lora_r * (module.in_features + module.out_features)
            if name in (self._cfg.lora_modules_to_save or ()):
                total += _count(module.parameters())
        return total

    @cached_property
    def _weight_bytes(self) -> float | None:
        """Bytes of a quantized weight, by the configuration or of a quantized checkpoint; None if
        none is.
        """
        if self._cfg.quantization is not None:
            return _NF4 if self._cfg.quantization == "nf4" else 1
        stored = quantization_of(self._model.config)
        if stored is None:
            return None
        bits = stored.get("bits")
        if not bits:
            bits = 4 if stored.get("load_in_4bit") else 8
        return float(bits / 8)

    @cached_property
    def _quantized(self) -> list[Tensor]:
        """Weights that quantization applies to: every linear layer except lm_head."""
        if self._weight_bytes is None:
            return []
        lm_head = self._model.get_output_embeddings()
        weights = []
        for module in self._model.modules():
            if isinstance(module, nn.Linear) and module is not lm_head:
                weights.append(module.weight)
        return weights

    def _backbone_bytes(self, dtype: torch.dtype) -> float:
        quantized = _count(self._quantized)
        plain = _count(self._model.parameters()) - quantized
        return plain * dtype.itemsize + quantized * (self._weight_bytes or 0)

    def _activations(self, rows: int, width: int, item: int, device: str) -> int:
        """Estimate what a micro-batch adds at its peak, beside all gradients; `item` is bytes in
        the compute dtype.

        Activations of the backbone's layers (their inputs alone if it recomputes them), copies of
        trained layers in the compute dtype, the attention mask of packed rows (for soft-capped
        scores only), and what comes one after the other: one layer that is not kept, the backbone's
        loss, and a head with its loss.
        """
        cfg = self._cfg
        text = self._text
        tokens = rows * width
        states = tokens * text.hidden_size * item
        layer = tokens * self._layer_bytes(item, device)
        # 1. The draft: a head at a time, or all of them.
        alive = 1 if DRAFTS[cfg.draft].independent_heads else self._section.num_heads
        heads = alive * (3 * self._cost.blocks_per_head + 1) * states
        layer_of_draft = tokens * self._layer_bytes(item, device, of_draft=True)
        heads += self._cost.layer_passes * layer_of_draft
        rank = self._settings.get("markov_rank")
        if rank:  # a head's states with the embeddings of its Markov bias
            heads += states + tokens * rank * item
        # 2. The mask of packed rows.
        mask = 0
        capped = getattr(text, "attn_logit_softcapping", None) is not None
        if cfg.sample_packing and (capped or self._cost.masks_packed_rows):
            mask = rows * width * width * item
        # 3. A frozen backbone. Of a quantized matrix a product takes a copy in the compute dtype.
        single = max((weight.numel() for weight in self._quantized), default=0) * item
        later = heads + self._heads_loss(tokens, item, device)
        if cfg.recipe == "medusa1":
            return mask + max(single + layer, states + later)
        # 4. A trained one. With several micro-batches the gradients of the one before are there all
        # the time.
        backbone_loss = self._loss_buffers(
            self._lm_head.shape[0], tokens, item, device, taught=self._has_teacher
        )
        if cfg.gradient_accumulation_steps == 1:
            later = max(later, backbone_loss - self._heads * _TRAINED)
            lm_head = 0
            if self._unfrozen:
                lm_head = self._lm_head.numel()
            later -= (self._unfrozen - lm_head + self._adapter) * _TRAINED
        else:
            later = max(later, backbone_loss)
        depth = self._trained_depth
        if self._recomputes:
            inputs = depth * tokens * text.hidden_size * (_TRAINED if self._unfrozen else item)
            return mask + inputs + max(single + layer, states + later)
        copies = 0
        if item < _TRAINED:
            copies = self._unfrozen * item
        return mask + depth * layer + copies + max(single, states + later)

    @property
    def _has_teacher(self) -> bool:
        return bool(
            self._cfg.medusa_self_distillation or self._cfg.medusa_distillation_regularization
        )

    def _heads_loss(self, tokens: int, item: int, device: str) -> int:
        """Estimate the buffers of one head's loss, and the teacher's copied rows for a reduced
        vocabulary.
        """
        taught = bool(self._section.heads_loss.soft_targets)
        lm_head_rows, hidden = self._lm_head.shape
        size = self._loss_buffers(self._draft_vocab, tokens, item, device, taught=taught)
        if taught and self._draft_vocab < lm_head_rows:
            size += self._draft_vocab * hidden * item
        return size

    def _loss_buffers(
        self, vocab: int, tokens: int, item: int, device: str, *, taught: bool
    ) -> int:
        """Estimate a loss's buffers: a chunk of logits (and the teacher's), float32 blocks of it,
        and lm_head.

        One lm_head at a time is cast to the compute dtype; its gradient is added to `.grad`, which
        is counted elsewhere. A GPU with more memory takes larger chunks.
        """
        chunk = chunk_size(vocab, device, item, gpu_bytes(torch.device(device)))
        logits = (2 if taught else 1) * min(chunk, tokens) * vocab * item
        block = min(block_size(vocab, device), tokens) * vocab * _TRAINED
        matrix = 0
        if item < _TRAINED:
            matrix = vocab * self._text.hidden_size * item
        # logits and log-probabilities, and the teacher's, with its probabilities; float32 logits
        # need no copy
        blocks = (4 if taught else 2) - (item == _TRAINED)
        return logits + blocks * block + matrix

    def _layer_bytes(self, item: int, device: str, *, of_draft: bool = False) -> int:
        """Count the bytes per token that a decoder layer keeps: norms, q, k, v, attention, gated
        MLP.

        In float32 several operations keep the same tensor. In half precision the norms keep float32
        copies, every LoRA branch and every trained linear layer keeps its own copy of its input,
        and trained norms their float32 output. Dropout keeps a mask: of bytes on a GPU, in float32
        on a CPU.
        """
        cfg = self._cfg
        text = self._text
        hidden = text.hidden_size
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        attention = 2 * (text.num_attention_heads + key_value_heads(text)) * head_dim(text)
        adapted = 0
        if cfg.adapter and not of_draft:
            adapted = self._adapted_inputs()
        # 1. What norms keep, and the inputs of linear layers. A draft's layer also has embeddings
        # and their norm, and their values side by side with the states.
        norms = 4 * hidden
        inputs = 2 * hidden + inner
        is_half = item < _TRAINED
        if of_draft:
            norms = 12 * hidden
            inputs = 8 * hidden + inner
        elif is_half and cfg.adapter:
            inputs = adapted
        elif is_half and cfg.recipe == "medusa2":
            norms = 8 * hidden
            inputs = 5 * hidden + inner
        # 2. The masks of dropout.
        masks = 0
        if cfg.lora_dropout:
            masks = adapted * (1 if device == "cuda" else _TRAINED)
        return (norms + attention + 3 * inner + inputs) * item + masks

    def _adapted_inputs(self) -> int:
        """Return the sum of the input sizes of a layer's adapted linear layers, without lm_head."""
        total = 0
        for path, module in self._model.named_modules():
            name = path.rpartition(".")[2]
            if isinstance(module, nn.Linear) and name in self._adapted_names - {LM_HEAD}:
                total += module.in_features
        return int(total // self._text.num_hidden_layers)


def device_overhead(device: str, *, deepspeed: bool) -> dict[str, int]:
    """Return what is left for others than tensors, by purpose: assumed, not measured."""
    if device != "cuda":
        return {}
    parts = {"left for CUDA's context and libraries, assumed": _CUDA_CONTEXT}
    if deepspeed:
        parts["left for NCCL's buffers, assumed"] = _NCCL_BUFFERS
    return parts


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def rate_of(cfg: TrainConfig) -> Rate:
    """Return how much of a GPU's rate a run reaches; `cfg` must be resolved."""
    if cfg.recipe == "medusa2" and cfg.adapter is None:
        return RATES["layers"]
    if cfg.recipe == "medusa2":
        return RATES["lora" if cfg.quantization is None else "qlora"]
    if cfg.draft != "medusa":
        return RATES["other draft"]
    return RATES["medusa1" if cfg.quantization is None else "medusa1 quantized"]


def estimate_hours(operations: float, recipe: Rate, rate: float) -> float:
    """Return the hours that a GPU of `rate` operations per second takes for a recipe."""
    return operations / (rate * recipe.share) / 3600
