"""What `medusa-train --inspect` shows: samples with their loss mask, counts, steps, memory. Loads no weights."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import BatchLoader, EncodedDataset
from medusa_train.data.examples import Example
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.memory import Memory, estimate_memory
from medusa_train.training.precision import choose_precision
from medusa_train.training.prepare import load_data, load_tokenizer, make_plan
from medusa_train.training.vocabulary import describe_vocabulary, draft_vocabulary

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
    results.print(inspect(cfg, data.train, data.held_out, load_tokenizer(cfg, where), model_config))
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
    known = draft_vocabulary(cfg, train, tokenizer, vocab_size)
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
