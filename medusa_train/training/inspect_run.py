"""`medusa-train --inspect`: samples with their loss mask, token counts, steps, memory and hours.

No weights are loaded. With `tokens=60M` no data are read either: they need not exist yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from medusa_train.checkpoint.heads import read_token_map
from medusa_train.checkpoint.resolve import find_initial_heads
from medusa_train.config.load import stage_one_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Example
from medusa_train.data.dataset import BatchLoader
from medusa_train.data.draft_vocabulary import DraftVocabulary
from medusa_train.data.examples import EncodedDataset
from medusa_train.data.hidden_state_store import StateFormat
from medusa_train.io import describe_size
from medusa_train.models.loading import load_tokenizer, resolve_target_model
from medusa_train.progress import LoadingProgress, RunProgress, duration
from medusa_train.training.device_choices import (
    decide_auto,
    memory_without_checkpointing,
)
from medusa_train.training.distributed import SINGLE_PROCESS
from medusa_train.training.estimate import (
    GPUS,
    Estimate,
    device_overhead,
    estimate_hours,
    rate_of,
)
from medusa_train.training.hidden_states import describe_states, distinct_documents
from medusa_train.training.load_data import TrainingData, assumed_data
from medusa_train.training.preflight import check_run
from medusa_train.training.schedule import few_steps_advice, plan_steps
from medusa_train.training.stages import TITLES, load_stages

#: Samples that are shown, and tokens of each.
SAMPLES, MAX_TOKENS = 3, 400
#: Aligns the tables of the page.
LABEL_WIDTH = 10
SUPERVISED = "bold green"
CONTEXT = "dim"


class _Stage:
    """A run, or a stage of one, with what is estimated of it.

    Attributes:
        operations: of the whole stage. disk: bytes of checkpoints that may be kept at once.
        without_checkpointing: bytes, and the share of operations that is saved; None where
            activations are kept anyway.
    """

    def __init__(
        self, cfg: TrainConfig, data: TrainingData, model_config: Any, processes: int = 1
    ) -> None:
        loader, self.schedule = plan_steps(cfg, data.train, processes=processes)
        self.data = data
        self.model_config = model_config
        self.loader = loader
        self.processes = processes
        # 1. What `auto` means here.
        notes: list[str] = []
        cfg, precision = decide_auto(cfg, data.train, notes.append)
        self.device = precision.device
        self.dtype = precision.dtype
        advice = few_steps_advice(cfg, self.schedule, loader.batches_per_epoch, processes)
        self.notes = [line for line in (*notes, advice) if line is not None]
        self.cfg = cfg
        # 2. Memory, operations and disk.
        estimate = Estimate(cfg, model_config)
        self.memory = estimate.memory(
            rows=min(cfg.micro_batch_size, loader.rows_per_epoch),
            width=data.train.row_len or max(map(len, data.train.examples)),
            dtype=self.dtype,
            device=self.device.type,
        )
        epoch = {
            "tokens": loader.positions_per_epoch,
            "supervised": data.train.supervised_tokens,
            "width": round(loader.positions_per_epoch / loader.rows_per_epoch),
        }
        epochs = self.schedule.epoch(self.schedule.total_steps)
        self.operations = estimate.operations(**epoch, epochs=epochs)
        # until the next checkpoint two evaluations may be kept: the best one so far, and that of
        # the last checkpoint
        self.disk = (cfg.save_total_limit + 1) * self.memory.checkpoint + 2 * self.memory.weights
        # 3. The same without gradient checkpointing: bytes, and the share of operations it saves.
        self.without_checkpointing: tuple[int, float] | None = None
        if cfg.recipe == "medusa2" and cfg.gradient_checkpointing:
            kept = Estimate(cfg.model_copy(update={"gradient_checkpointing": False}), model_config)
            saved = 1 - kept.operations(**epoch, epochs=epochs) / self.operations
            size = memory_without_checkpointing(cfg, data.train, precision)
            self.without_checkpointing = (size, saved)


def inspect_run(
    cfg: TrainConfig,
    console: Console,
    results: Console,
    processes: int = 1,
    tokens: int | None = None,
) -> int:
    """Print what `cfg` would train on to `results`, notes on the data to `console`; return the exit
    code, 0.

    Args:
        processes: number of devices that train together; the memory is that of one of them.
        tokens: assume so many tokens of training data, and read none; None: read the data.

    Raises:
        MedusaError: an error of configuration or data, also one of so many processes.
    """
    first = stage_one_config(cfg)
    configs = [cfg]
    if first is not None:
        configs = [first, cfg]
    if processes > 1:
        for config in configs:
            check_run(config, processes)
    if tokens is None:
        with LoadingProgress(RunProgress(console)) as shown:
            loaded = load_stages(configs, console, SINGLE_PROCESS, shown)
    else:
        loaded = [assumed_data(config, tokens, processes, console) for config in configs]
    resolved, model_config = resolve_target_model(
        cfg.base_model, trust_remote_code=cfg.trust_remote_code
    )
    stages = [
        _Stage(config, data, model_config, processes)
        for config, data in zip(configs, loaded, strict=True)
    ]
    for title, stage in zip(TITLES, stages, strict=False):
        if first is not None:
            results.print(Text(f"{title}: {stage.cfg.output_dir}\n", "bold underline"))
        tokenizer = load_tokenizer(
            resolved, trust_remote_code=cfg.trust_remote_code, special_tokens=cfg.special_tokens
        )
        if tokens is None and (stage is stages[0] or stage.data is not stages[0].data):
            legend = (
                "supervised tokens are ",
                ("«green»", SUPERVISED),
                ", context is ",
                ("dim", CONTEXT),
                "\n",
            )
            results.print(Group(Text.assemble(*legend), *_samples(stage.data.train, tokenizer)))
        data = _grid()
        if tokens is None:
            _describe_data(stage, tokenizer, data)
        else:
            data.add_row(
                "training", f"{_describe_tokens(stage.data.train)}: assumed, none are read"
            )
        _describe_steps(stage, data)
        results.print(
            Group(Padding(data, (0, 0, 1, 0)), _memory_table(stage), _time_table([stage]))
        )
    if first is not None:  # one after the other
        table = _grid()
        table.add_row(
            "steps",
            f"{sum(stage.schedule.total_steps for stage in stages):,} in all on {_devices(processes)}",
        )
        table.add_row(
            "memory",
            f"{describe_size(max(stage.memory.total for stage in stages))}, of the larger stage",
        )
        table.add_row("disk", f"at most {describe_size(sum(stage.disk for stage in stages))}")
        results.print(Group(Text("\nboth stages\n", "bold underline"), table, _time_table(stages)))
    return 0


def _samples(train: EncodedDataset, tokenizer: Any) -> Iterator[RenderableType]:
    for example in _chosen(train.examples):
        supervised = int(example.supervised.sum())
        place = example.source
        if example.row:
            place += f", row {example.row + 1}"
        yield Text(f"{place}: {len(example):,} tokens, {supervised:,} supervised", "bold")
        yield Padding(masked_text(example, tokenizer), (0, 0, 1, 2))


def _chosen(examples: Sequence[Example]) -> list[Example]:
    """Choose examples to show: the first of each data set, and one that is a later row."""
    numbers = sorted({example.dataset for example in examples})
    each = max(1, SAMPLES // len(numbers))
    shown: list[Example] = []
    for number in numbers:
        examples_of_dataset = (example for example in examples if example.dataset == number)
        shown += islice(examples_of_dataset, each)
    # a later row shows what the template makes of earlier turns
    if not any(example.row for example in shown):
        shown += islice((example for example in examples if example.row), 1)
    return shown


def masked_text(example: Example, tokenizer: Any, limit: int = MAX_TOKENS) -> Text:
    """Decode a sample, special tokens included; supervised tokens are coloured and set between «
    and ».
    """
    text = Text()
    supervised = example.supervised.tolist()
    end = min(len(example), limit)
    tokens = example.tokens[:end].tolist()
    starts = [i for i in range(end) if i == 0 or supervised[i] != supervised[i - 1]]
    before = ""
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        # decoded as the difference of two prefixes: a piece alone would lose the space before its
        # first token
        whole = tokenizer.decode(
            tokens[:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        piece = whole[len(before) :]
        before = whole
        if supervised[start]:
            text.append(f"«{piece}»", SUPERVISED)
        else:
            text.append(piece, CONTEXT)
    if end < len(example):
        text.append(f" ... and {len(example) - end:,} more tokens", "italic")
    return text


def _describe_data(stage: _Stage, tokenizer: Any, table: Table) -> None:
    """Add rows on the data that were read."""
    cfg = stage.cfg
    train = stage.data.train
    validation = stage.data.validation
    lengths = [len(example) for example in train.examples]
    table.add_row("training", _describe_tokens(train))
    for line in _describe_datasets(cfg, train):
        table.add_row("", line)
    table.add_row(
        "lengths", f"{min(lengths):,} to {max(lengths):,} tokens, median {median(lengths):,.0f}"
    )
    table.add_row("answers", _describe_answers(train))
    if len(validation):
        table.add_row("held out", _describe_tokens(validation))
    if cfg.test_datasets is not None:
        table.add_row("", _describe_answers(validation))
    for title, line in _describe_vocabulary(stage, tokenizer):
        table.add_row(title, line)
    if cfg.cache_hidden_states:
        table.add_row("hidden states", _describe_hidden_states(stage))


def _describe_steps(stage: _Stage, table: Table) -> None:
    """Add rows on the loss, and on the rows and steps of an epoch."""
    cfg = stage.cfg
    schedule = stage.schedule
    table.add_row("loss", cfg.describe_loss())
    table.add_row("rows", _describe_rows(stage.data.train, stage.loader))
    batch = f"{cfg.micro_batch_size} x {cfg.gradient_accumulation_steps}"
    if stage.processes > 1:
        batch += f" x {stage.processes}"
    table.add_row(
        "steps",
        f"{schedule.steps_per_epoch:,.1f} per epoch ({batch} rows each), {schedule.total_steps:,} in all on"
        f" {_devices(stage.processes)}",
    )


def _describe_vocabulary(stage: _Stage, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Describe a reduced vocabulary: that of the heads in `lora_model_dir`, or the one that new
    heads get.
    """
    cfg = stage.cfg
    vocab_size = int(stage.model_config.get_text_config().vocab_size)
    vocabulary = None
    heads = None
    if cfg.lora_model_dir is not None:  # heads of a stage one may be those of an earlier run
        heads = find_initial_heads(cfg.initial_run)
    if heads is None:
        vocabulary = DraftVocabulary.choose(
            cfg.draft_config, stage.data.train, tokenizer, vocab_size
        )
    elif (tokens := read_token_map(heads)) is not None:
        vocabulary = DraftVocabulary(tokens, vocab_size)
    if vocabulary is not None:
        lines = vocabulary.describe(stage.data.train, stage.data.validation)
        yield from zip(("vocabulary", ""), lines, strict=False)


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices"


def _describe_datasets(cfg: TrainConfig, train: EncodedDataset) -> Iterator[str]:
    """Describe each of several data sets in a line; what is held out is not counted."""
    if len(cfg.datasets) < 2:
        return
    for number, entry in enumerate(cfg.datasets):
        examples = [example for example in train.examples if example.dataset == number]
        described = "nothing"
        if examples:
            described = _describe_tokens(EncodedDataset(examples, train.report))
        yield f"{entry.path}: {described}"


def _describe_tokens(dataset: EncodedDataset) -> str:
    share = dataset.supervised_tokens / dataset.tokens
    return f"{dataset.describe_count()}, {dataset.tokens:,} tokens, {share:.1%} supervised"


def _describe_answers(dataset: EncodedDataset) -> str:
    """Describe the answers in the report of `dataset`."""
    counts, share = dataset.report.counts, dataset.report.looping_share
    cut = counts["cut"] / max(1, counts["answers"])
    return (
        f"{counts['answers']:,}, of which {share:.1%} loop and {cut:.1%} are known to be cut off by"
        " a length limit"
    )


def _describe_rows(train: EncodedDataset, loader: BatchLoader) -> str:
    tokens, rows = train.tokens, loader.rows_per_epoch
    if train.row_len is not None:
        full = tokens / (rows * train.row_len)
        kind = f"{rows:,} packed rows of {train.row_len:,} tokens per epoch, {full:.1%} full"
    elif train.conversations == len(train):
        kind = "one conversation each"
    else:
        kind = "one row of a conversation each"
    return (
        f"{kind}; {1 - tokens / loader.positions_per_epoch:.1%} of the computed positions are"
        " padding"
    )


def _describe_hidden_states(stage: _Stage) -> str:
    """Describe the size on disk of the base model's hidden states, those that are stored already
    included.
    """
    text_config = stage.model_config.get_text_config()
    aux_layers = stage.cfg.draft_config.aux_layers(text_config.num_hidden_layers)
    spec = StateFormat(1 + len(aux_layers), text_config.hidden_size, stage.dtype)
    tokens = sum(distinct_documents([*stage.data.train, *stage.data.validation]).values())
    return (
        f"{describe_states(spec, tokens)}: {describe_size(spec.size(tokens))} in"
        f" {stage.cfg.dataset_prepared_path}"
    )


def _memory_table(stage: _Stage) -> Table:
    table = _grid()
    table.add_column(justify="right")
    memory, cfg = stage.memory, stage.cfg
    overhead = device_overhead(stage.device.type, deepspeed=cfg.deepspeed is not None)
    parts = {**memory.parts, **overhead}
    table.add_row(
        "memory",
        Text("needed on one device", "bold"),
        Text(describe_size(sum(parts.values())), "bold"),
    )
    for name, size in parts.items():
        table.add_row("", name, describe_size(size))
    table.add_row(
        "",
        f"{memory.trained / 1e6:,.1f}M parameters trained, {memory.frozen / 1e6:,.1f}M frozen",
        "",
    )
    if cfg.deepspeed:
        table.add_row(
            "",
            "ZeRO partitions optimizer states (2: and gradients, 3: and weights) over the devices",
            "",
        )
    for note in stage.notes:
        table.add_row("", note)
    if stage.without_checkpointing is not None:
        size, saved = stage.without_checkpointing
        table.add_row(
            "",
            f"with gradient_checkpointing: false, which saves {saved:.0%} of the operations",
            describe_size(size),
        )
    checkpoints = f"{cfg.save_total_limit} checkpoint{'' if cfg.save_total_limit == 1 else 's'}"
    kept = (
        f"{checkpoints} of {describe_size(memory.checkpoint)}, one being written, and weights of"
        " two evaluations"
    )
    table.add_row("disk", f"at most: {kept}", describe_size(stage.disk))
    return table


def _time_table(stages: Sequence[_Stage]) -> Table:
    def duration_at(rate: float) -> str:
        hours = 0.0
        for stage in stages:
            hours += estimate_hours(stage.operations, rate_of(stage.cfg), rate)
        return duration(3600 * hours)

    table = _grid()
    total = sum(stage.operations for stage in stages)
    table.add_row("time", f"{total:.1e} operations. One GPU takes, for small models longer:")
    table.add_row("", ", ".join(f"{duration_at(rate)} ({gpu})" for gpu, rate in GPUS.items()))
    for line in dict.fromkeys(rate_of(stage.cfg).describe() for stage in stages):
        table.add_row("", line)
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", min_width=LABEL_WIDTH)
    table.add_column()
    return table
