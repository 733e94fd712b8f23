"""`medusa-train --inspect`: samples with their loss mask, token counts, steps, memory and hours.

No weights are loaded. With `tokens=60M` no data are read either, so they need not exist yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
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
from medusa_train.data.draft_vocabulary import DraftVocabulary
from medusa_train.data.examples import EncodedDataset
from medusa_train.data.hidden_state_store import StateFormat
from medusa_train.io import describe_size
from medusa_train.models.loading import load_tokenizer, resolve_target_model
from medusa_train.progress import LoadingProgress, RunProgress, duration
from medusa_train.training.device_choices import decide_auto
from medusa_train.training.distributed import SINGLE_PROCESS
from medusa_train.training.estimate import GPUS, RATES, Estimate, Memory
from medusa_train.training.hidden_states import describe_states, distinct_documents
from medusa_train.training.load_data import TrainingData, assumed_data
from medusa_train.training.preflight import check_run
from medusa_train.training.schedule import few_steps_advice, plan_steps
from medusa_train.training.stages import TITLES, load_stages

#: Number of samples that are shown, and of tokens per sample.
SAMPLES, MAX_TOKENS = 3, 400
#: Width of the first column, so that all tables are aligned.
LABEL_WIDTH = 10
SUPERVISED = "bold green"
CONTEXT = "dim"


class _StageCosts:
    """A run, or a stage of a run, with the estimates of its cost.

    Attributes:
        operations: number of operations of the whole stage.
        disk: largest number of bytes that checkpoints take at once.
        without_checkpointing: bytes of memory without gradient checkpointing, and the share of
            operations that this saves; None if the stage does not use gradient checkpointing.
    """

    def __init__(
        self, cfg: TrainConfig, data: TrainingData, model_config: Any, processes: int = 1
    ) -> None:
        self.data = data
        self.model_config = model_config
        self.processes = processes
        self.loader, self.schedule = plan_steps(cfg, data.train, processes=processes)
        # 1. Replace `auto` by the value it has in this run.
        self.notes: list[str] = []
        self.cfg, self.precision = decide_auto(cfg, data.train, self.notes.append)
        advice = few_steps_advice(cfg, self.schedule)
        if advice is not None:
            self.notes.append(advice)
        # 2. Memory, operations and disk.
        self.memory, self.operations = self._costs(self.cfg)
        # The weights of two evaluations may be kept until the next checkpoint: those of the best
        # one so far, and of the best one at the last checkpoint.
        self.disk = (cfg.save_total_limit + 1) * self.memory.checkpoint + 2 * self.memory.weights
        # 3. The cost without gradient checkpointing: bytes, and the share of operations it saves.
        self.without_checkpointing: tuple[int, float] | None = None
        if cfg.recipe == "medusa2" and self.cfg.gradient_checkpointing:
            kept = self.cfg.model_copy(update={"gradient_checkpointing": False})
            memory, operations = self._costs(kept)
            self.without_checkpointing = (memory.total, 1 - operations / self.operations)

    def _costs(self, cfg: TrainConfig) -> tuple[Memory, float]:
        """Return the memory of a step and the operations of the stage."""
        estimate = Estimate(cfg, self.model_config)
        loader = self.loader
        operations = estimate.operations(
            tokens=loader.positions_per_epoch,
            supervised=self.data.train.supervised_tokens,
            width=round(loader.positions_per_epoch / loader.rows_per_epoch),
            epochs=self.schedule.epoch(self.schedule.total_steps),
        )
        return estimate.memory_of_run(self.data.train, self.precision), operations


def inspect_run(
    cfg: TrainConfig,
    console: Console,
    results: Console,
    processes: int = 1,
    tokens: int | None = None,
) -> int:
    """Print to `results` what `cfg` would train on, and notes on the data to `console`; return the
    exit code, 0.

    Args:
        processes: number of devices that train together; memory is estimated per device.
        tokens: number of training tokens to assume without reading data; None: read the data.

    Raises:
        MedusaError: an error in the configuration or in the data, also one that only occurs with
            this number of processes.
    """
    stage_one = stage_one_config(cfg)
    configs = [cfg] if stage_one is None else [stage_one, cfg]
    for config in configs:
        check_run(config, processes)
    # 1. Load the data and estimate the cost.
    resolved, model_config = resolve_target_model(
        cfg.base_model, trust_remote_code=cfg.trust_remote_code
    )
    tokenizer = None
    if tokens is None:
        with LoadingProgress(RunProgress(console)) as shown:
            loaded = load_stages(configs, console, SINGLE_PROCESS, shown)
        tokenizer = load_tokenizer(
            resolved, trust_remote_code=cfg.trust_remote_code, special_tokens=cfg.special_tokens
        )
    else:
        loaded = [assumed_data(config, tokens, model_config, console) for config in configs]
    stages = [
        _StageCosts(config, data, model_config, processes)
        for config, data in zip(configs, loaded, strict=True)
    ]
    # 2. Print a page for each stage.
    for title, stage in zip(TITLES, stages, strict=False):
        if stage_one is not None:
            results.print(Text(f"{title}: {stage.cfg.output_dir}\n", "bold underline"))
        train = stage.data.train
        described = [("training", f"{_describe_tokens(train)}: assumed, none are read")]
        if tokenizer is not None:
            if stage is stages[0] or stage.data is not stages[0].data:
                results.print(Group(*_samples(train, tokenizer)))
            described = list(_describe_data(stage, tokenizer))
        steps = _grid([*described, *_describe_steps(stage)])
        results.print(Group(steps, "", _memory_table(stage), _time_table([stage])))
    # 3. Print the totals of both stages, which run one after the other.
    if stage_one is not None:
        total = sum(stage.schedule.total_steps for stage in stages)
        memory = describe_size(max(stage.memory.total for stage in stages))
        disk = describe_size(sum(stage.disk for stage in stages))
        rows = [
            ("steps", f"{total:,} in all on {_devices(processes)}"),
            ("memory", f"{memory}, of the larger stage"),
            ("disk", f"at most {disk}"),
        ]
        heading = Text("\nboth stages\n", "bold underline")
        results.print(Group(heading, _grid(rows), _time_table(stages)))
    return 0


def _samples(train: EncodedDataset, tokenizer: Any) -> Iterator[RenderableType]:
    green = ("«green»", SUPERVISED)
    yield Text.assemble("supervised tokens are ", green, ", context is ", ("dim", CONTEXT), "\n")
    for example in _chosen(train.examples):
        supervised = int(example.supervised.sum())
        place = example.source
        if example.row:
            place += f", row {example.row + 1}"
        yield Text(f"{place}: {len(example):,} tokens, {supervised:,} supervised", "bold")
        yield Padding(masked_text(example, tokenizer), (0, 0, 1, 2))


def _chosen(examples: Sequence[Example]) -> list[Example]:
    """Choose the examples to show: the first of each data set, and one that is a later row."""
    numbers = sorted({example.dataset for example in examples})
    each = max(1, SAMPLES // len(numbers))
    chosen: list[Example] = []
    for number in numbers:
        chosen += [example for example in examples if example.dataset == number][:each]
    # a later row shows how the template renders earlier turns
    if not any(example.row for example in chosen):
        chosen += [example for example in examples if example.row][:1]
    return chosen


def masked_text(example: Example, tokenizer: Any, limit: int = MAX_TOKENS) -> Text:
    """Decode a sample with its special tokens. Supervised tokens are colored, between « and »."""
    text = Text()
    tokens = example.tokens.tolist()
    end = 0
    before = ""
    for is_supervised, piece_tokens in groupby(example.supervised[:limit].tolist()):
        # A piece is the difference of two decoded prefixes. Decoded alone, it would lose the space
        # before its first token.
        end += len(list(piece_tokens))
        text_shown = tokenizer.decode(
            tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        piece = text_shown[len(before) :]
        before = text_shown
        if is_supervised:
            text.append(f"«{piece}»", SUPERVISED)
        else:
            text.append(piece, CONTEXT)
    if end < len(example):
        text.append(f" ... and {len(example) - end:,} more tokens", "italic")
    return text


def _describe_data(stage: _StageCosts, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield table rows on the data that were read."""
    cfg, train, validation = stage.cfg, stage.data.train, stage.data.validation
    yield "training", _describe_tokens(train)
    if len(cfg.datasets) > 1:
        for number, entry in enumerate(cfg.datasets):
            examples = [example for example in train.examples if example.dataset == number]
            described = "nothing"  # held-out examples are not counted
            if examples:
                described = _describe_tokens(EncodedDataset(examples, train.report))
            yield "", f"{entry.path}: {described}"
    lengths = [len(example) for example in train.examples]
    span = f"{min(lengths):,} to {max(lengths):,}"
    yield "lengths", f"{span} tokens, median {median(lengths):,.0f}"
    yield "answers", _describe_answers(train)
    if len(validation):
        yield "held out", _describe_tokens(validation)
    if cfg.test_datasets is not None:
        yield "", _describe_answers(validation)
    text_config = stage.model_config.get_text_config()
    vocabulary = _draft_vocabulary(cfg, train, tokenizer, int(text_config.vocab_size))
    if vocabulary is not None:
        lines = vocabulary.describe(train, validation)
        yield from zip_longest(["vocabulary"], lines, fillvalue="")
    if cfg.cache_hidden_states:  # the size includes states that are already stored
        states = 1 + len(cfg.draft_config.aux_layers(text_config.num_hidden_layers))
        spec = StateFormat(states, text_config.hidden_size, stage.precision.dtype)
        tokens = sum(distinct_documents([*train, *validation]).values())
        size = f"{describe_states(spec, tokens)}: {describe_size(spec.size(tokens))}"
        yield "hidden states", f"{size} in {cfg.dataset_prepared_path}"


def _draft_vocabulary(
    cfg: TrainConfig, train: EncodedDataset, tokenizer: Any, vocab_size: int
) -> DraftVocabulary | None:
    """Return the reduced vocabulary of the heads in `lora_model_dir`, or else of new heads."""
    heads = None
    if cfg.lora_model_dir is not None:  # stage one's heads may also exist from an earlier run
        heads = find_initial_heads(cfg.initial_run)
    if heads is None:
        return DraftVocabulary.choose(cfg.draft_config, train, tokenizer, vocab_size)
    tokens = read_token_map(heads)
    return None if tokens is None else DraftVocabulary(tokens, vocab_size)


def _describe_steps(stage: _StageCosts) -> Iterator[tuple[str, str]]:
    """Yield table rows on the loss, and on an epoch's data rows and steps."""
    cfg, train, schedule = stage.cfg, stage.data.train, stage.schedule
    yield "loss", cfg.describe_loss()
    rows = stage.loader.rows_per_epoch
    if train.row_len is not None:
        full = train.tokens / (rows * train.row_len)
        kind = f"{rows:,} packed rows of {train.row_len:,} tokens per epoch, {full:.1%} full"
    elif train.conversations == len(train):
        kind = "one conversation each"
    else:
        kind = "one row of a conversation each"
    padding = 1 - train.tokens / stage.loader.positions_per_epoch
    yield "rows", f"{kind}; {padding:.1%} of the computed positions are padding"
    batch = f"{cfg.micro_batch_size} x {cfg.gradient_accumulation_steps}"
    if stage.processes > 1:
        batch += f" x {stage.processes}"
    per_epoch = f"{schedule.steps_per_epoch:,.1f} per epoch ({batch} rows each)"
    yield "steps", f"{per_epoch}, {schedule.total_steps:,} in all on {_devices(stage.processes)}"


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices"


def _describe_tokens(dataset: EncodedDataset) -> str:
    share = dataset.supervised_tokens / dataset.tokens
    return f"{dataset.describe_count()}, {dataset.tokens:,} tokens, {share:.1%} supervised"


def _describe_answers(dataset: EncodedDataset) -> str:
    """Describe the answers of `dataset`, as counted in its report."""
    counts, share = dataset.report.counts, dataset.report.looping_share
    cut = counts["cut"] / max(1, counts["answers"])
    return (
        f"{counts['answers']:,}, of which {share:.1%} loop and {cut:.1%} are known to be cut off by"
        " a length limit"
    )


def _memory_table(stage: _StageCosts) -> Table:
    memory, cfg = stage.memory, stage.cfg
    title = Text("needed on one device", "bold")
    rows: list[tuple[RenderableType, ...]] = [
        ("memory", title, Text(describe_size(memory.total), "bold"))
    ]
    rows += [("", name, describe_size(size)) for name, size in memory.parts.items()]
    trained, frozen = memory.trained / 1e6, memory.frozen / 1e6
    rows.append(("", f"{trained:,.1f}M parameters trained, {frozen:,.1f}M frozen"))
    if cfg.deepspeed:
        parts = "optimizer states (2: and gradients, 3: and weights)"
        rows.append(("", f"ZeRO partitions {parts} over the devices"))
    rows += [("", note) for note in stage.notes]
    if stage.without_checkpointing is not None:
        size, saved = stage.without_checkpointing
        described = f"with gradient_checkpointing: false, which saves {saved:.0%} of the operations"
        rows.append(("", described, describe_size(size)))
    checkpoints = f"{cfg.save_total_limit} checkpoint{'' if cfg.save_total_limit == 1 else 's'}"
    kept = (
        f"{checkpoints} of {describe_size(memory.checkpoint)}, one being written, and weights of"
        " two evaluations"
    )
    rows.append(("disk", f"at most: {kept}", describe_size(stage.disk)))
    table = _grid(rows)
    table.columns[2].justify = "right"
    return table


def _time_table(stages: Sequence[_StageCosts]) -> Table:
    total = sum(stage.operations for stage in stages)
    times = []
    for gpu, rate in GPUS.items():
        seconds = sum(stage.operations / (rate * RATES[stage.cfg.recipe].share) for stage in stages)
        times.append(f"{duration(seconds)} ({gpu})")
    lines = [f"{total:.1e} operations. One GPU takes, for small models longer:", ", ".join(times)]
    lines += dict.fromkeys(RATES[stage.cfg.recipe].describe() for stage in stages)
    return _grid(zip_longest(["time"], lines, fillvalue=""))


def _grid(rows: Iterable[Sequence[RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", min_width=LABEL_WIDTH)
    for row in rows:
        table.add_row(*row)
    return table
