"""Estimate the memory and the floating-point operations of a run, without loading weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_train.config.schema import TrainConfig
from medusa_train.data.examples import EncodedDataset
from medusa_train.losses.chunked_logits import block_size, chunk_size, gpu_bytes
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.hf_config import (
    decoder_of,
    head_dim,
    key_value_heads,
    largest,
    quantization_of,
)
from medusa_train.models.loading import model_without_weights
from medusa_train.models.precision import Precision
from medusa_train.models.target_model import TargetModel
from medusa_train.training.target_model_recipe import build_target_model_recipe

#: Name and memory of a GPU -> its dense bfloat16 operations per second in the vendor's data sheet.
GPUS = {
    "RTX 4090, 24 GB": 165e12,
    "L40S, 48 GB": 362e12,
    "H100, 80 GB": 989e12,
    "A100, 80 GB": 312e12,
}


class MeasuredRate(NamedTuple):
    """The rate that a recipe reached on one H100 with the shape of a 7B model
    (benchmarks/results/gpu.json).

    Attributes:
        measured: description of the recipe.
        share: share of the GPU's rate in `GPUS`.
        tokens: trained tokens per second.
    """

    measured: str
    share: float
    tokens: int

    def describe(self) -> str:
        """Describe the rate and its origin in one line."""
        return (
            f"{self.share:.0%} of the matrix rate, as measured with {self.measured} on an H100 at"
            f" 7B shape: {self.tokens:,} tokens/s"
        )


#: Value of the key `recipe` -> measured rate. Variants that were not measured are assumed to reach
#: the rate of their recipe.
RATES: Mapping[str | None, MeasuredRate] = {
    "medusa1": MeasuredRate("Medusa-1", 0.38, 20_898),
    "medusa2": MeasuredRate("Medusa-2 with QLoRA", 0.27, 5_846),
}

# Bytes per parameter
_TRAINED = 4  # a trained weight or its gradient: float32 in every recipe
# 4 bits, an 8-bit scale per 64 weights, a float32 scale per 256 scales
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
ADAM = 2 * 4  # two float32 moments
ADAM_8BIT = 2 * (1 + 4 / 256)  # two 1-byte moments, each with a float32 scale per 256 values

# Activations that a layer keeps per token for the backward pass, in multiples of a hidden state:
# the inputs of norms and of linear layers. Layers with trained weights keep copies in two
# precisions. Layers of a draft also keep the inputs of the layer that joins embeddings and states.
_KEPT_FROZEN, _KEPT_TRAINED, _KEPT_DRAFT = 6, 13, 20

# GPU memory in bytes that torch's allocator does not count
_CUDA_CONTEXT = 1 << 30
_NCCL_BUFFERS = 1 << 30


@dataclass(frozen=True)
class Memory:
    """A memory estimate.

    Attributes:
        parts: bytes by purpose, in display order.
        frozen, trained: number of frozen and of trained parameters.
        checkpoint: bytes of a checkpoint: trained weights and optimizer states.
    """

    parts: dict[str, int]
    frozen: int
    trained: int
    checkpoint: int

    @property
    def weights(self) -> int:
        """Bytes of the trained weights."""
        return self.trained * _TRAINED

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts.values())


class Estimate:
    """The cost of a configuration, counted on a model with the same shapes but without weights.

    The number of parameters is exact; activations and operations are within about 15 %.

    Attributes:
        trained: number of trained parameters in the draft, the adapter and unfrozen layers.
    """

    def __init__(self, cfg: TrainConfig, model_config: Any) -> None:
        """Build the draft and apply the recipe; `model_config` is the target model's transformers
        config.
        """
        text = model_config.get_text_config()
        model = model_without_weights(model_config, trust_remote_code=cfg.trust_remote_code)
        lm_head = model.get_output_embeddings()
        self._cfg = cfg
        self._text = text
        self._cost = cfg.draft_config.cost
        self._settings = settings = cfg.draft_config.settings
        self._target_model_parameters = _count(model.parameters())
        self._vocab, self._hidden = lm_head.weight.shape
        self._draft_vocab: int = settings.get("vocab_size") or self._vocab
        # 1. Count the weights that are quantized, and the weights that a token is multiplied by.
        # Only the experts to which a token is routed are counted. The decoder layers are the
        # longest module list (`layers`, or `h` in Falcon).
        linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
        self._linear = _count(part.weight for part in linear if part is not lm_head)
        lists = [part for part in decoder_of(model).children() if isinstance(part, nn.ModuleList)]
        experts = getattr(text, "num_experts_per_tok", None) or 0
        self._in_layers = 0.0
        for weight in max(lists, key=len).parameters():
            is_expert = weight.dim() == 3 and experts
            self._in_layers += weight.numel() * (experts / len(weight) if is_expert else 1)
        # 2. Count the draft's weights, and those without embeddings, which are only looked up.
        target_model = TargetModel(model.requires_grad_(False), None)
        count = DRAFTS[cfg.draft].count_parameters
        self._draft = count(target_model, **settings)
        self._multiplied = self._draft
        if settings.get("markov_rank"):
            self._multiplied = count(target_model, **{**settings, "markov_rank": 0})
        # 3. Count the weights that the recipe trains in the target model, or adds to it.
        changes = {"lora_model_dir": None, "stage_one": None, "torch_compile": False}
        recipe = build_target_model_recipe(
            cfg.model_copy(update=changes),
            target_model,
            Precision(torch.device("meta"), torch.float32),
        )
        self._trained_in_target_model = _count(recipe.parameters.values())
        self.trained = self._draft + self._trained_in_target_model

    def memory_of_run(self, train: EncodedDataset, precision: Precision) -> Memory:
        """Estimate the peak memory of a training step on `train`. On a GPU it includes an assumed
        amount for CUDA's and NCCL's own memory.
        """
        device = precision.device.type
        rows = min(self._cfg.micro_batch_size, len(train))
        width = train.row_len or max(map(len, train.examples))
        memory = self.memory(rows=rows, width=width, dtype=precision.dtype, device=device)
        if device == "cuda":
            memory.parts["left for CUDA's context and libraries, assumed"] = _CUDA_CONTEXT
            if self._cfg.deepspeed is not None:
                memory.parts["left for NCCL's buffers, assumed"] = _NCCL_BUFFERS
        return memory

    def memory(self, *, rows: int, width: int, dtype: torch.dtype, device: str) -> Memory:
        """Estimate the peak memory of a training step on one device, without ZeRO.

        Args:
            rows: number of rows in a micro-batch. width: number of tokens in its longest row.
            dtype: compute dtype. The target model's unquantized weights have it too.
        """
        cfg = self._cfg
        item = dtype.itemsize
        frozen = self._target_model_parameters
        if not cfg.adapter:
            frozen -= self._trained_in_target_model
        weights = frozen * item
        if (quantized := self._quantized_bytes()) is not None:
            weights -= round(self._linear * (item - quantized))
        has_8bit_states = "8bit" in cfg.optimizer and device != "cpu"
        states = round(self.trained * (ADAM_8BIT if has_8bit_states else ADAM))
        parts = {
            "target model, frozen": weights,
            "adapter" if cfg.adapter else "target model, trained": self._trained_in_target_model
            * _TRAINED,
            "heads": self._draft * _TRAINED,
            "gradients": self.trained * _TRAINED,
            f"optimizer states ({cfg.optimizer})": states,
            "activations (estimate)": self._activations(rows * width, item, device),
        }
        parts = {name: size for name, size in parts.items() if size}
        return Memory(parts, frozen, self.trained, self.trained * _TRAINED + states)

    def operations(self, *, tokens: int, supervised: int, width: int, epochs: float) -> float:
        """Estimate the floating-point operations of a run.

        A matrix product takes two operations per weight and token. A forward pass needs one product
        per weight matrix. A backward pass needs two, or one if the weights are not trained. The
        draft runs on all tokens, or only on the tokens of its blocks; its output matrices run on
        supervised tokens. Soft targets also need the target model's logits of these, over the
        draft's vocabulary.

        Args:
            tokens, supervised: number of tokens and of supervised tokens per epoch.
            width: number of tokens per row. On average a token attends to half of them.
            epochs: number of epochs.
        """
        cfg = self._cfg
        layers = self._text.num_hidden_layers
        # 1. One forward pass through the target model's layers.
        forward = tokens * (2 * self._in_layers + layers * self._attention(width))
        draft_operations = self.draft_operations(tokens, supervised, width)
        # 2. A frozen target model: only forward passes, and only in one epoch if states are cached.
        if cfg.recipe == "medusa1":
            passes = min(epochs, 1) if cfg.cache_hidden_states else epochs
            return forward * passes + draft_operations * epochs
        # 3. A trained target model: also the teacher's pass, backward passes, and the lm_head.
        backward = 1 if cfg.adapter else 2
        share = self._trained_layers / layers
        passes = 1 + self._has_teacher + share * (bool(cfg.gradient_checkpointing) + backward)
        lm_head_operations = (
            2 * self._vocab * self._hidden * supervised * (1 + self._has_teacher + backward)
        )
        return (forward * passes + lm_head_operations + draft_operations) * epochs

    def _attention(self, width: int) -> float:
        """Return the operations per token in one layer's attention: two products, each with half of
        the row on average.
        """
        text = self._text
        return 2 * text.num_attention_heads * head_dim(text) * width

    def draft_operations(self, tokens: int, supervised: int, width: int = 0) -> float:
        """Estimate the draft's operations in one epoch, forward and backward; see `operations`."""
        text = self._text
        cost = self._cost
        # 1. Layers and blocks, without the output matrices.
        outputs = cost.repeats * cost.output_matrices
        own_outputs = cost.output_matrices - cost.shared_lm_heads
        once = cost.joined_states * self._hidden**2
        inner = self._multiplied - own_outputs * self._draft_vocab * self._hidden - once
        if "auto_blocks" in self._settings:  # these blocks run on the vectors of all heads
            projections = 4 * self._hidden * text.num_attention_heads * head_dim(text)
            inner += (outputs - 1) * self._settings["auto_blocks"] * projections
        passes = 3 * cost.layer_passes * self._attention(width)
        positions = float(tokens)
        targets = float(outputs * supervised)
        per_weight = 6  # 2 forward, 4 backward
        if cost.anchors:
            blocks = float(supervised)
            if width:
                blocks = min(blocks, tokens / width * cost.anchors)
            positions = blocks * cost.slots
            targets = blocks * (cost.slots - 1)
            per_weight = 8  # 2 more, because blocks are recomputed in the backward pass
        inner_operations = positions * (per_weight * cost.repeats * inner + passes)
        inner_operations += 6 * tokens * once
        # 2. Logits: forward, the gradient of the states, and the gradient of the output matrix if
        # the draft has its own. Then the teacher's logits.
        per_logit = (4 if cost.shared_lm_heads else 6) * self._hidden
        per_logit += 6 * self._settings.get("markov_rank", 0)
        if self._cfg.draft_config.heads_loss.soft_targets:
            per_logit += 2 * self._hidden
        return inner_operations + per_logit * self._draft_vocab * targets

    def _activations(self, tokens: int, item: int, device: str) -> int:
        """Estimate the peak bytes of a micro-batch's activations and loss, without gradients of
        weights; `item` is the size of a number in the compute dtype.

        The target model's layers keep all activations; only their inputs if activations are
        recomputed; nothing if the layers are frozen. The draft and the largest loss come after
        them.
        """
        cfg = self._cfg
        section, cost = cfg.draft_config, self._cost
        states = tokens * self._hidden * item
        # 1. The draft (its heads one at a time or all at once) and its loss.
        heads_at_once = 1 if DRAFTS[cfg.draft].independent_heads else section.num_heads
        draft = heads_at_once * (3 * cost.blocks_per_head + 1) * states
        draft += cost.layer_passes * tokens * self._layer_bytes(_KEPT_DRAFT, item)
        taught = bool(section.heads_loss.soft_targets)
        loss = self._loss_bytes(self._draft_vocab, tokens, item, device, taught)
        if cfg.recipe == "medusa1":
            return max(tokens * self._layer_bytes(_KEPT_FROZEN, item), states + draft + loss)
        # 2. The layers of a trained target model and its loss.
        loss = max(loss, self._loss_bytes(self._vocab, tokens, item, device, self._has_teacher))
        layer = tokens * self._layer_bytes(_KEPT_TRAINED, item)
        if cfg.gradient_checkpointing:
            return self._trained_layers * states + max(layer, states + draft + loss)
        return self._trained_layers * layer + states + draft + loss

    def _layer_bytes(self, hidden_states: int, item: int) -> int:
        """Count the bytes that a decoder layer keeps per token: q, k, v, the attention output, the
        activations of the gated MLP, and `hidden_states` times the size of a hidden state.
        """
        text = self._text
        attention = 2 * (text.num_attention_heads + key_value_heads(text)) * head_dim(text)
        inner = largest(text, "intermediate_size") or 4 * self._hidden
        return int(hidden_states * self._hidden + attention + 4 * inner) * item

    def _loss_bytes(self, vocab: int, tokens: int, item: int, device: str, taught: bool) -> int:
        """Estimate the buffers of a loss: a chunk of logits, float32 blocks of them, both also for
        the teacher if `taught`, and the output matrix in the compute dtype.
        """
        chunk = min(chunk_size(vocab, device, item, gpu_bytes(torch.device(device))), tokens)
        block = min(block_size(vocab, device), tokens)
        matrix = self._hidden * item if item < _TRAINED else 0
        return vocab * ((2 if taught else 1) * (chunk * item + 2 * block * _TRAINED) + matrix)

    @property
    def _has_teacher(self) -> bool:
        cfg = self._cfg
        return bool(cfg.medusa_self_distillation or cfg.medusa_distillation_regularization)

    @property
    def _trained_layers(self) -> int:
        """Number of layers, counted from the last, that gradients flow through."""
        if self._cfg.adapter or not self._cfg.medusa_num_unfreeze_layers:
            return int(self._text.num_hidden_layers)
        return self._cfg.medusa_num_unfreeze_layers

    def _quantized_bytes(self) -> float | None:
        """Return the bytes per quantized weight, as configured or as stored in a quantized
        checkpoint; None if weights are not quantized.
        """
        if (chosen := self._cfg.quantization) is not None:
            return _NF4 if chosen == "nf4" else 1.0
        stored = quantization_of(self._text)
        if stored is None:
            return None
        bits = stored.get("bits") or (4 if stored.get("load_in_4bit") else 8)
        return float(bits / 8)


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
