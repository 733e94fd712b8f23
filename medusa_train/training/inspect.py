"""`medusa-train --inspect`: samples with their loss mask, token counts, steps and a memory estimate; no weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import BatchLoader, EncodedDataset
from medusa_train.data.draft_vocabulary import choose_draft_vocabulary, describe_vocabulary
from medusa_train.data.tokenize import Example
from medusa_train.losses.fused_losses import block_rows, chunk_rows
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.lora import LM_HEAD, linear_names
from medusa_train.models.precision import choose_precision, default_device
from medusa_train.training.load_data import TrainingData, load_data, load_tokenizer
from medusa_train.training.state import make_plan

SAMPLES = 3
#: Tokens shown of a sample.
MAX_TOKENS = 400
SUPERVISED = "bold green"
CONTEXT = "dim"


def inspect_run(cfg: TrainConfig, console: Console, results: Console) -> int:
    """Print what `cfg` would train on: samples with their loss mask, token counts, steps and memory.

    Args:
        cfg: a validated configuration.
        console: for notes on the data. results: for the page.

    Returns:
        The exit code, 0.

    Raises:
        MedusaError: as training would before it loads the backbone.
    """
    data = load_data(cfg, console)
    resolved, model_config = resolve_backbone(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    results.print(inspection_page(cfg, data, load_tokenizer(cfg, resolved), model_config))
    return 0


def inspection_page(cfg: TrainConfig, data: TrainingData, tokenizer: Any, model_config: Any) -> RenderableType:
    """Render the first samples, the data's figures and the memory estimate.

    Args:
        cfg: a validated configuration.
        data: loaded for it.
        tokenizer: with which the data were tokenized.
        model_config: the backbone's transformers config.
    """
    loader = BatchLoader(data.train, cfg.micro_batch_size, seed=cfg.seed)
    figures = _data_table(cfg, data, loader, _describe_draft_vocabulary(cfg, data, tokenizer, model_config))
    return Group(
        Text.assemble("supervised tokens are ", ("«green»", SUPERVISED), ", context is ", ("dim", CONTEXT), "\n"),
        *_samples(data.train, tokenizer),
        Padding(figures, (0, 0, 1, 0)),
        _memory_table(_estimate_for_page(cfg, data.train, loader, model_config), cfg),
    )


def _samples(train: EncodedDataset, tokenizer: Any) -> Iterator[RenderableType]:
    for example in train.examples[:SAMPLES]:
        supervised = int(example.supervised.sum())
        yield Text(f"{example.source}: {len(example):,} tokens, {supervised:,} supervised", "bold")
        yield Padding(masked_text(example, tokenizer), (0, 0, 1, 2))


def masked_text(example: Example, tokenizer: Any, limit: int = MAX_TOKENS) -> Text:
    """Decode a sample, special tokens included; supervised tokens are coloured and set between « and »."""
    text = Text()
    supervised = example.supervised.tolist()
    end = min(len(example), limit)
    tokens = example.tokens[:end].tolist()
    starts = [i for i in range(end) if i == 0 or supervised[i] != supervised[i - 1]]
    before = ""
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        # decoded as the difference of two prefixes: a piece alone would lose the space before its first token
        whole = tokenizer.decode(tokens[:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece, before = whole[len(before) :], whole
        if supervised[start]:
            text.append(f"«{piece}»", SUPERVISED)
        else:
            text.append(piece, CONTEXT)
    if end < len(example):
        text.append(f" ... and {len(example) - end:,} more tokens", "italic")
    return text


def _describe_draft_vocabulary(cfg: TrainConfig, data: TrainingData, tokenizer: Any, model_config: Any) -> str | None:
    """Describe a reduced draft vocabulary in one line; None if heads have the whole vocabulary."""
    vocab_size = model_config.get_text_config().vocab_size
    token_map = choose_draft_vocabulary(cfg, data.train, tokenizer, vocab_size)
    return None if token_map is None else describe_vocabulary(token_map, data.train, data.validation, vocab_size)


def _data_table(cfg: TrainConfig, data: TrainingData, loader: BatchLoader, draft_vocabulary: str | None) -> Table:
    table = _grid()
    train, validation = data.train, data.validation
    lengths = [len(example) for example in train.examples]
    table.add_row(
        "training", f"{len(train):,} conversations, {train.tokens:,} tokens, {_supervised_share(train)} supervised"
    )
    table.add_row("lengths", f"{min(lengths):,} to {max(lengths):,} tokens, median {median(lengths):,.0f}")
    if len(validation):
        table.add_row(
            "held out",
            f"{len(validation):,} conversations, {validation.tokens:,} tokens, {_supervised_share(validation)} "
            "supervised",
        )
    if draft_vocabulary is not None:
        table.add_row("vocabulary", draft_vocabulary)
    table.add_row("rows", _describe_rows(train, loader))
    plan = make_plan(cfg, loader.steps_per_epoch)
    batch = f"{cfg.micro_batch_size} x {cfg.gradient_accumulation_steps}"
    table.add_row(
        "steps", f"{plan.steps_per_epoch:,.1f} per epoch ({batch} rows each), {plan.total_steps:,} in all on one device"
    )
    return table


def _supervised_share(dataset: EncodedDataset) -> str:
    return f"{dataset.supervised_tokens / dataset.tokens:.1%}"


def _describe_rows(train: EncodedDataset, loader: BatchLoader) -> str:
    tokens, rows = loader.tokens_per_epoch, loader.rows_per_epoch
    kind = "one conversation each"
    if train.row_len is not None:
        full = tokens / (rows * train.row_len)
        kind = f"{rows:,} packed rows of {train.row_len:,} tokens per epoch, {full:.1%} full"
    return f"{kind}; {1 - tokens / loader.positions_per_epoch:.1%} of the computed positions are padding"


def _estimate_for_page(cfg: TrainConfig, train: EncodedDataset, loader: BatchLoader, model_config: Any) -> Memory:
    device = default_device()
    return estimate_memory(
        cfg,
        model_config,
        rows=min(cfg.micro_batch_size, loader.rows_per_epoch),
        width=train.row_len or max(len(example) for example in train.examples),
        dtype=choose_precision(cfg.bf16, device, fp16=cfg.fp16).dtype,
        device=device.type,
    )


def _memory_table(memory: Memory, cfg: TrainConfig) -> Table:
    table = _grid()
    table.add_column(justify="right")
    table.add_row("memory", "[bold]needed on one device[/bold]", f"[bold]{_size(memory.total)}[/bold]")
    for name, size in memory.parts.items():
        table.add_row("", name, _size(size))
    table.add_row("", f"{memory.trained / 1e6:,.1f}M parameters trained, {memory.frozen / 1e6:,.1f}M frozen", "")
    if cfg.deepspeed:
        table.add_row("", "ZeRO partitions optimizer states (2: and gradients, 3: and weights) over the devices", "")
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    return table


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


# Memory estimate

# Bytes per parameter
_TRAINED = 4  # weight of a trained parameter, and its gradient: float32 in every recipe
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, an 8-bit scale per 64 weights, a float32 scale per 256 scales
_ADAM = 2 * 4  # two float32 moments
_ADAM_8BIT = 2 * (1 + 4 / 256)  # two moments in one byte each, a float32 scale per 256


@dataclass(frozen=True)
class Memory:
    """A memory estimate: bytes by purpose, in display order, and the numbers of frozen and trained parameters."""

    parts: dict[str, int]
    frozen: int
    trained: int

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
        "backbone, frozen": round(_weight_bytes(cfg, model, dtype)) - joint * dtype.itemsize,
        "backbone, trained": joint * _TRAINED,
        "adapter": adapter * _TRAINED,
        "heads": heads * _TRAINED,
        "lm_head rows of the draft vocabulary (shared)": _shared_rows(cfg, text.hidden_size) * dtype.itemsize,
        "gradients": trained * _TRAINED,
        f"optimizer states ({cfg.optimizer})": round(trained * state),
        "activations (estimate)": _activations(cfg, model, text, rows, width, dtype, device),
    }
    return Memory({name: size for name, size in parts.items() if size}, frozen, trained)


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _weight_bytes(cfg: TrainConfig, model: Any, dtype: torch.dtype) -> float:
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
    chosen = {id(p): p for layer in model.base_model.layers[-count:] for p in layer.parameters()}
    for module in (model.base_model.norm, model.get_output_embeddings()):
        chosen.update({id(p): p for p in module.parameters()})
    return _count(chosen.values())


def _count_adapter(cfg: TrainConfig, model: Any) -> int:
    if not cfg.adapter:
        return 0
    names = set(cfg.lora_target_modules or ())
    if cfg.lora_target_linear or not names:
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        names |= {name for name in linear_names(model) if not (tied and name == LM_HEAD)}
    total = 0
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name in names and isinstance(module, nn.Linear):
            total += cfg.lora_r * (module.in_features + module.out_features)
        if name in (cfg.lora_modules_to_save or ()):
            total += _count(module.parameters())
    return total


def _activations(
    cfg: TrainConfig, model: Any, text: Any, rows: int, width: int, dtype: torch.dtype, device: str
) -> int:
    """Estimate what a micro-batch adds at its peak.

    Activations of the backbone's layers (of one layer if it is frozen or recomputes them), copies of trained layers in
    the compute dtype, activations of the heads, the attention mask of packed rows, and the losses' buffers.
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
    copies = _count_unfrozen(cfg, model) * item if item < _TRAINED else 0
    heads = cfg.draft_config.num_heads * (3 * cfg.draft_config.blocks_per_head + 1) * tokens * hidden * item
    mask = rows * width * width * item if cfg.sample_packing else 0
    return body + copies + heads + mask + _losses(cfg, model, tokens, item, device)


def _shared_rows(cfg: TrainConfig, hidden: int) -> int:
    """Count the parameters of lm_head that heads with a reduced vocabulary copy once and share."""
    settings = cfg.draft_config.settings
    return (settings.get("vocab_size") or 0) * hidden if settings.get("share_lm_head") else 0


def _losses(cfg: TrainConfig, model: Any, tokens: int, item: int, device: str) -> int:
    """Estimate the losses' buffers: a chunk of logits (and the teacher's), float32 blocks of it, and lm_head.

    lm_head is held in the compute dtype together with its gradient, which is computed in the forward pass. With
    gradient accumulation, the heads' gradients of this micro-batch are kept beside those of the earlier ones until the
    backward pass; without it they become the gradients, which are counted elsewhere. A reduced vocabulary makes all of
    it smaller unless the backbone's loss is trained too; the teacher's rows for it are copied.
    """
    heads = cfg.draft_config
    lm_head_rows, hidden = model.get_output_embeddings().weight.shape
    draft_vocab = heads.settings.get("vocab_size") or lm_head_rows
    reduced = draft_vocab < lm_head_rows
    vocab = draft_vocab if cfg.resolved().recipe == "medusa1" else lm_head_rows  # of the largest logits
    soft_targets = heads.heads_loss.soft_targets
    has_teacher = cfg.medusa_self_distillation or soft_targets or cfg.medusa_distillation_regularization

    logits = (2 if has_teacher else 1) * min(chunk_rows(vocab, device, item), tokens) * vocab * item
    blocks = 4 * min(block_rows(vocab, device), tokens) * vocab * _TRAINED
    matrix = vocab * hidden * item if item < _TRAINED else 0
    teacher_rows = draft_vocab * hidden * item if reduced and soft_targets else 0
    accumulates = cfg.gradient_accumulation_steps > 1 and not heads.settings.get("share_lm_head")
    gradients = heads.num_heads * draft_vocab * hidden * _TRAINED if accumulates else 0
    return logits + blocks + 2 * matrix + teacher_rows + gradients


def _layer_width(text: Any) -> int:
    """Count the activations per token that a decoder layer keeps: norms, q, k, v, attention, gated MLP."""
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    head_dim = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    attention = 2 * text.num_attention_heads * head_dim + 2 * kv_heads * head_dim
    return 6 * hidden + attention + 4 * inner
