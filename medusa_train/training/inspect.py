"""`medusa-train --inspect`: samples with their loss mask, token counts, steps and a memory estimate; no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from medusa_train.checkpoint.background import copy_fits
from medusa_train.config.load import stage_one_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import BatchLoader, EncodedDataset
from medusa_train.data.draft_vocabulary import choose_draft_vocabulary, coverage, describe_vocabulary, token_counts
from medusa_train.data.examples import Example
from medusa_train.data.state_store import distinct_documents
from medusa_train.models.features import FeatureSpec
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.precision import choose_precision, default_device
from medusa_train.progress import LoadingProgress, RunProgress, duration
from medusa_train.training.compute import GPUS, UTILIZATION, estimate_hours, estimate_operations
from medusa_train.training.distributed import SINGLE_PROCESS
from medusa_train.training.heads_cost import NOTABLE_SHARE, cheaper_settings, count_step_bytes
from medusa_train.training.hidden_states import describe_states, state_format
from medusa_train.training.load_data import TrainingData, load_tokenizer
from medusa_train.training.memory import Memory, estimate_memory
from medusa_train.training.stages import TITLES, load_stages
from medusa_train.training.state import make_plan

SAMPLES = 3
#: Tokens shown of a sample.
MAX_TOKENS = 400
#: Bytes of a GPU that torch's allocator does not count.
_CONTEXT, _NCCL = 1 << 30, 1 << 30
#: Aligns the tables of the page.
LABEL_WIDTH = 10
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
    first = stage_one_config(cfg)
    stages = [cfg] if first is None else [first, cfg]
    with LoadingProgress(RunProgress(console)) as shown:
        loaded = load_stages(stages, console, SINGLE_PROCESS, shown)
    resolved, model_config = resolve_backbone(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    for title, stage, data in zip(TITLES, stages, loaded, strict=False):
        if first is not None:
            results.print(Text(f"{title}: {stage.output_dir}\n", "bold underline"))
        samples = stage is stages[0] or data is not loaded[0]
        results.print(inspection_page(stage, data, load_tokenizer(stage, resolved), model_config, samples=samples))
    if first is not None:
        results.print(_both_stages(stages, loaded, model_config))
    return 0


def _both_stages(stages: Sequence[TrainConfig], loaded: Sequence[TrainingData], model_config: Any) -> RenderableType:
    """Add up the steps, disk and time of stages that run one after the other; the larger one decides on memory."""
    steps, disk, operations, memory = 0, 0, 0.0, 0
    for cfg, data in zip(stages, loaded, strict=True):
        loader = BatchLoader(data.train, cfg.micro_batch_size, seed=cfg.seed)
        estimate = _estimate_for_page(cfg, data.train, loader, model_config)
        steps += make_plan(cfg, loader.steps_per_epoch).total_steps
        disk += _disk(estimate, cfg)
        operations += count_operations(cfg, data.train, loader, model_config)
        memory = max(memory, estimate.total)
    table = _grid()
    table.add_row("steps", f"{steps:,} in all on one device")
    table.add_row("memory", f"{_size(memory)}, of the larger stage")
    table.add_row("disk", f"at most {_size(disk)}")
    return Group(Text("\nboth stages\n", "bold underline"), table, _time_table(operations))


def inspection_page(
    cfg: TrainConfig, data: TrainingData, tokenizer: Any, model_config: Any, *, samples: bool = True
) -> RenderableType:
    """Render the first samples, the data's figures and the memory estimate.

    Args:
        cfg: a validated configuration.
        data: loaded for it.
        tokenizer: with which the data were tokenized.
        model_config: the backbone's transformers config.
        samples: whether to show samples.
    """
    loader = BatchLoader(data.train, cfg.micro_batch_size, seed=cfg.seed)
    figures = _data_table(cfg, data, loader, _describe_draft_vocabulary(cfg, data, tokenizer, model_config))
    if cfg.cache_hidden_states:
        figures.add_row("hidden states", _describe_hidden_states(cfg, data, model_config))
    heads = _heads_table(cfg, data, loader, tokenizer, model_config)
    legend = Text.assemble("supervised tokens are ", ("«green»", SUPERVISED), ", context is ", ("dim", CONTEXT), "\n")
    return Group(
        *([legend, *_samples(data.train, tokenizer)] if samples else []),
        Padding(figures, (0, 0, 1, 0)),
        _memory_table(_estimate_for_page(cfg, data.train, loader, model_config), cfg),
        _time_table(count_operations(cfg, data.train, loader, model_config)),
        *([] if heads is None else [Padding(heads, (1, 0, 0, 0))]),
    )


def _samples(train: EncodedDataset, tokenizer: Any) -> Iterator[RenderableType]:
    shown = train.examples[:SAMPLES]
    if not any(example.row for example in shown):  # a later row shows what the template makes of earlier turns
        shown = [*shown, *islice((example for example in train.examples if example.row), 1)]
    for example in shown:
        supervised = int(example.supervised.sum())
        row = f", row {example.row + 1}" if example.row else ""
        yield Text(f"{example.source}{row}: {len(example):,} tokens, {supervised:,} supervised", "bold")
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
        "training",
        f"{train.describe_count()}, {train.tokens:,} tokens, {_supervised_share(train)} supervised",
    )
    table.add_row("lengths", f"{min(lengths):,} to {max(lengths):,} tokens, median {median(lengths):,.0f}")
    table.add_row("answers", _describe_answers(train))
    if len(validation):
        table.add_row(
            "held out",
            f"{validation.describe_count()}, {validation.tokens:,} tokens, {_supervised_share(validation)} supervised",
        )
    if cfg.test_datasets is not None:
        table.add_row("", _describe_answers(validation))
    if draft_vocabulary is not None:
        table.add_row("vocabulary", draft_vocabulary)
    table.add_row("loss", cfg.heads_loss.describe())
    table.add_row("rows", _describe_rows(train, loader))
    plan = make_plan(cfg, loader.steps_per_epoch)
    batch = f"{cfg.micro_batch_size} x {cfg.gradient_accumulation_steps}"
    table.add_row(
        "steps", f"{plan.steps_per_epoch:,.1f} per epoch ({batch} rows each), {plan.total_steps:,} in all on one device"
    )
    return table


def _supervised_share(dataset: EncodedDataset) -> str:
    return f"{dataset.supervised_tokens / dataset.tokens:.1%}"


def _describe_answers(dataset: EncodedDataset) -> str:
    """Describe the answers in the reports of `dataset`, and how much of its supervised text is new."""
    counts, share = dataset.report.answers, dataset.report.looping_share
    return (
        f"{counts['all']:,}, of which {share:.1%} loop and {counts['cut'] / max(1, counts['all']):.1%} are known to be "
        f"cut off by a length limit; {dataset.distinct_share():.1%} of the 8-grams of supervised tokens are distinct"
    )


def _describe_rows(train: EncodedDataset, loader: BatchLoader) -> str:
    tokens, rows = loader.tokens_per_epoch, loader.rows_per_epoch
    kind = "one conversation each" if train.conversations == len(train) else "one row of a conversation each"
    if train.row_len is not None:
        full = tokens / (rows * train.row_len)
        kind = f"{rows:,} packed rows of {train.row_len:,} tokens per epoch, {full:.1%} full"
    return f"{kind}; {1 - tokens / loader.positions_per_epoch:.1%} of the computed positions are padding"


def _describe_hidden_states(cfg: TrainConfig, data: TrainingData, model_config: Any) -> str:
    """Describe the size on disk of the backbone's hidden states, those that are stored already included."""
    text_config = model_config.get_text_config()
    need = FeatureSpec(early=cfg.draft_config.early_layers(text_config.num_hidden_layers))
    dtype = choose_precision(cfg.bf16, default_device(), fp16=cfg.fp16).dtype
    spec = state_format(need, text_config.hidden_size, dtype)
    tokens = sum(distinct_documents([*data.train, *data.validation]).values())
    return f"{describe_states(spec, tokens)}: {_size(spec.size(tokens))} in {cfg.dataset_prepared_path}"


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
    parts = dict(memory.parts)
    if default_device().type == "cuda":
        parts["left for CUDA's context and libraries, assumed"] = _CONTEXT
        if cfg.deepspeed:
            parts["left for NCCL's buffers, assumed"] = _NCCL
    table.add_row("memory", Text("needed on one device", "bold"), Text(_size(sum(parts.values())), "bold"))
    for name, size in parts.items():
        table.add_row("", name, _size(size))
    table.add_row("", f"{memory.trained / 1e6:,.1f}M parameters trained, {memory.frozen / 1e6:,.1f}M frozen", "")
    if cfg.deepspeed:
        table.add_row("", "ZeRO partitions optimizer states (2: and gradients, 3: and weights) over the devices", "")
    size = memory.checkpoint
    table.add_row("CPU memory", "copy of a checkpoint while it is written", _size(size))
    if not copy_fits(size):
        table.add_row("", "more than half of what is free here, so training waits until it is written", "")
    limit = cfg.save_total_limit
    checkpoints = f"{limit} checkpoint{'' if limit == 1 else 's'}"
    kept = f"{checkpoints} of {_size(size)}, one being written, and weights of two evaluations"
    table.add_row("disk", f"at most: {kept}", _size(_disk(memory, cfg)))
    return table


def _disk(memory: Memory, cfg: TrainConfig) -> int:
    """Return the most bytes that a run's checkpoints take.

    Until the next checkpoint two evaluations may be kept: its best one so far, and that of the last checkpoint.
    """
    return (cfg.save_total_limit + 1) * memory.checkpoint + 2 * memory.weights


def count_operations(cfg: TrainConfig, train: EncodedDataset, loader: BatchLoader, model_config: Any) -> float:
    """Estimate the floating-point operations of a run on `train`, see `estimate_operations`."""
    plan = make_plan(cfg, loader.steps_per_epoch)
    return estimate_operations(
        cfg,
        model_config,
        tokens=loader.positions_per_epoch,
        supervised=train.supervised_tokens,
        width=round(loader.positions_per_epoch / loader.rows_per_epoch),
        epochs=plan.total_steps / plan.steps_per_epoch,
    )


def _time_table(total: float) -> Table:
    table = _grid()
    hours = (f"{duration(3600 * estimate_hours(total, rate))} ({gpu})" for gpu, rate in GPUS.items())
    table.add_row("time", f"{total:.1e} operations. One GPU at {UTILIZATION:.0%} of its matrix rate, an assumption:")
    table.add_row("", ", ".join(hours))
    return table


def _heads_table(
    cfg: TrainConfig, data: TrainingData, loader: BatchLoader, tokenizer: Any, model_config: Any
) -> Group | None:
    """Compare large heads with cheaper settings; None for heads that are small beside the backbone."""
    dtype = choose_precision(cfg.bf16, default_device(), fp16=cfg.fp16).dtype
    size = count_step_bytes(cfg, model_config, dtype)
    vocab_size = model_config.get_text_config().vocab_size
    cheaper = cheaper_settings(cfg, vocab_size)
    if size.draft < NOTABLE_SHARE * size.backbone or not cheaper:
        return None
    intro = _grid()
    intro.add_row(
        "heads",
        f"a decoding step with all heads reads {_size(size.draft)} more than the {_size(size.backbone)} of a plain one "
        f"(+{size.draft / size.backbone:.0%}). Cheaper:",
    )
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(min_width=LABEL_WIDTH)
    table.add_column()
    for _ in range(5):
        table.add_column(justify="right")
    table.add_row("", "", "trained", "memory", "operations", "read per step", "targets covered")
    counts = token_counts(data.train, vocab_size)
    for change, variant in {"as configured": cfg, **cheaper}.items():
        memory = _estimate_for_page(variant, data.train, loader, model_config)
        read = count_step_bytes(variant, model_config, dtype).draft
        token_map = choose_draft_vocabulary(variant, data.train, tokenizer, vocab_size)
        table.add_row(
            "",
            change,
            f"{memory.trained / 1e6:,.1f}M",
            _size(memory.total),
            f"{count_operations(variant, data.train, loader, model_config):.1e}",
            f"+{_size(read)}",
            "all" if token_map is None else f"{coverage(counts, token_map):.2%}",
        )
    return Group(intro, table)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", min_width=LABEL_WIDTH)
    table.add_column()
    return table


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
