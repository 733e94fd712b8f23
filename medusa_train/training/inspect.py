"""What `medusa-train --inspect` shows: samples with their loss mask, counts, steps, memory. Loads no weights."""

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
from medusa_train.losses.fused_linear import block_rows, chunk_rows
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.lora import HEAD, linear_names
from medusa_train.models.precision import choose_precision, default_device
from medusa_train.training.load_data import load_data, load_tokenizer
from medusa_train.training.setup import make_plan

SAMPLES = 3
TOKENS = 400  # shown of a sample
LEARNT = "bold green"
GIVEN = "dim"


def inspect_run(cfg: TrainConfig, console: Console, results: Console) -> int:
    """Show what `cfg` would train on.

    Args:
        cfg: a validated configuration.
        console: for notes on the data. results: for the page.

    Returns:
        The exit code, 0.

    Raises:
        MedusaError: as training would before it loads the backbone.
    """
    data = load_data(cfg, console)
    where, model_config = resolve_backbone(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    results.print(inspect(cfg, data.train, data.validation, load_tokenizer(cfg, where), model_config))
    return 0


def inspect(
    cfg: TrainConfig, train: EncodedDataset, held_out: EncodedDataset, tokenizer: Any, model_config: Any
) -> RenderableType:
    """Lay out the page: the first samples, then the figures.

    Args:
        cfg: a validated configuration.
        train, held_out: what `load_datasets` gave for it.
        tokenizer: the one they were encoded with.
        model_config: the backbone's transformers config.
    """
    loader = BatchLoader(train, cfg.micro_batch_size, seed=cfg.seed)
    return Group(
        Text.assemble("learnt tokens are ", ("«green»", LEARNT), ", those only read are ", ("dim", GIVEN), "\n"),
        *_samples(train, tokenizer),
        Padding(
            _figures(cfg, train, held_out, loader, _known(cfg, train, held_out, tokenizer, model_config)), (0, 0, 1, 0)
        ),
        _memory_table(_memory(cfg, train, loader, model_config), cfg),
    )


def masked_text(example: Example, tokenizer: Any, limit: int = TOKENS) -> Text:
    """The sample as text, special tokens included; what is learnt is coloured and stands between « and »."""
    text = Text()
    supervised = example.supervised.tolist()
    end = min(len(example), limit)
    tokens = example.tokens[:end].tolist()
    starts = [i for i in range(end) if i == 0 or supervised[i] != supervised[i - 1]]
    before = ""
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        # the difference of two prefixes: alone, a piece would lose the space that its first token stands for
        whole = tokenizer.decode(tokens[:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece, before = whole[len(before) :], whole
        text.append(f"«{piece}»" if supervised[start] else piece, LEARNT if supervised[start] else GIVEN)
    if end < len(example):
        text.append(f" ... and {len(example) - end:,} more tokens", "italic")
    return text


def _samples(train: EncodedDataset, tokenizer: Any) -> Iterator[RenderableType]:
    for example in train.examples[:SAMPLES]:
        learnt = int(example.supervised.sum())
        yield Text(f"{example.source}: {len(example):,} tokens, {learnt:,} learnt", "bold")
        yield Padding(masked_text(example, tokenizer), (0, 0, 1, 2))


def _known(
    cfg: TrainConfig, train: EncodedDataset, held_out: EncodedDataset, tokenizer: Any, model_config: Any
) -> str | None:
    """What heads over a reduced vocabulary would know, in a line; None: everything."""
    vocab_size = model_config.get_text_config().vocab_size
    known = choose_draft_vocabulary(cfg, train, tokenizer, vocab_size)
    return None if known is None else describe_vocabulary(known, train, held_out, vocab_size)


def _figures(
    cfg: TrainConfig, train: EncodedDataset, held_out: EncodedDataset, loader: BatchLoader, known: str | None
) -> Table:
    table = _grid()
    lengths = [len(example) for example in train.examples]
    table.add_row(
        "training", f"{len(train):,} conversations, {train.tokens:,} tokens, {_percent(train)} of them learnt"
    )
    table.add_row("lengths", f"{min(lengths):,} to {max(lengths):,} tokens, median {median(lengths):,.0f}")
    if len(held_out):
        table.add_row("held out", f"{len(held_out):,} conversations, {held_out.tokens:,} tokens, {_percent(held_out)}")
    if known is not None:
        table.add_row("heads know", known)
    table.add_row("rows", _rows(train, loader))
    plan = make_plan(cfg, loader.steps_per_epoch)
    batch = f"{cfg.micro_batch_size} x {cfg.gradient_accumulation_steps}"
    table.add_row(
        "steps",
        f"{plan.steps_per_epoch:,.1f} an epoch ({batch} rows each), {plan.total_steps:,} in all on one device",
    )
    return table


def _rows(train: EncodedDataset, loader: BatchLoader) -> str:
    tokens, rows = loader.tokens_per_epoch, loader.rows_per_epoch
    what = "one conversation each"
    if train.row_len is not None:
        what = f"{rows:,} packed rows of {train.row_len:,} tokens an epoch, {tokens / (rows * train.row_len):.1%} full"
    return f"{what}; {1 - tokens / loader.positions_per_epoch:.1%} of what is computed is padding"


def _percent(dataset: EncodedDataset) -> str:
    return f"{dataset.supervised_tokens / dataset.tokens:.1%}"


def _memory(cfg: TrainConfig, train: EncodedDataset, loader: BatchLoader, model_config: Any) -> Memory:
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
        table.add_row("", "ZeRO divides optimizer states (2: gradients, 3: weights too) by the number of devices", "")
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    return table


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


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
    heads = DRAFTS[cfg.draft].count_parameters(model, **cfg.draft_config.settings)
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
    heads = cfg.draft_config.num_heads * (3 * cfg.draft_config.blocks_per_head + 1) * tokens * hidden * item
    mask = rows * width * width * item if cfg.sample_packing else 0
    return body + copies + heads + mask + _losses(cfg, model, tokens, item, device)


def _shared_rows(cfg: TrainConfig, hidden: int) -> int:
    """Numbers of the rows of lm_head that heads over a reduced vocabulary copy once to share."""
    settings = cfg.draft_config.settings
    return (settings.get("vocab_size") or 0) * hidden if settings.get("share_lm_head") else 0


def _losses(cfg: TrainConfig, model: Any, tokens: int, item: int, device: str) -> int:
    """A chunk's logits (and the teacher's), blocks of it in float32, a matrix in the products' dtype, and gradients.

    Matrices get their gradients in the forward pass. With gradient accumulation they lie beside the sums of earlier
    micro-steps until the backward pass; without it they become the gradients, which are counted elsewhere. Over a
    reduced vocabulary all is smaller, unless the backbone's own loss is there; of a teacher the rows are copied.
    """
    vocab, hidden = model.get_output_embeddings().weight.shape
    known = cfg.draft_config.settings.get("vocab_size") or vocab
    rows_of_teacher = known * hidden * item if known < vocab and cfg.draft_config.heads_loss.soft_targets else 0
    vocab = known if cfg.resolved().recipe == "medusa1" else vocab
    taught = (
        cfg.medusa_self_distillation
        or cfg.draft_config.heads_loss.soft_targets
        or cfg.medusa_distillation_regularization
    )
    logits = (2 if taught else 1) * min(chunk_rows(vocab, device, item), tokens) * vocab * item
    blocks = 4 * min(block_rows(vocab, device), tokens) * vocab * _MASTER
    matrix = vocab * hidden * item if item < _MASTER else 0
    own = 0 if cfg.draft_config.settings.get("share_lm_head") else cfg.draft_config.num_heads
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
