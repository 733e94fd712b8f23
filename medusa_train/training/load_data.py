"""Load the tokenizer and the tokenized training and validation data of a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from medusa_train.checkpoint.load_model import read_generation_config
from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Example
from medusa_train.data.conversation import NOTABLE_LOOPING, Message
from medusa_train.data.dataset import load_datasets
from medusa_train.data.examples import DataReport, EncodedDataset
from medusa_train.data.record_files import settings_path
from medusa_train.data.sources import OnProgress
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError, MedusaError
from medusa_train.io import parse_json
from medusa_train.models.hf_config import context_length, rope_switch
from medusa_train.models.loading import (
    load_tokenizer,
    resolve_target_model,
    unneeded_special_tokens,
)
from medusa_train.tree_search.choose_tree import MIN_CONVERSATIONS

#: If no data are read: the assumed tokens of a conversation, and the share of them that is
#: supervised.
ASSUMED_LENGTH, ASSUMED_SHARE = 1000, 0.7
#: Axolotl's default for `type: sharegpt`.
SHAREGPT_TEMPLATE = "vicuna_v1.1"


@dataclass
class TrainingData:
    """The tokenized data of a run.

    Attributes:
        train, validation: data with the configured supervised tokens (`roles_to_train`,
            `train_on_inputs`).
        prompts: conversations on which the tree is chosen: the validation set, or the training set
            if the validation set has too few. Only the assistant's tokens are supervised.
        sequence_len: the configured value, or the model's context length if that is smaller.
        chat_template: the configured template, or the default that was used; None: the tokenizer's.
        prompts_held_out: whether `prompts` are from the validation set.
    """

    train: EncodedDataset
    validation: EncodedDataset
    prompts: EncodedDataset
    sequence_len: int
    chat_template: str | None = None
    prompts_held_out: bool = True


def load_data(
    cfg: TrainConfig,
    console: Console,
    on_progress: OnProgress | None = None,
) -> TrainingData:
    """Load the tokenizer and tokenize the data of a run that `check_run` has checked. Of several
    processes only rank 0 calls this, see `stages.load_stages`.
    """
    # 1. Load the tokenizer and build the encoder of chats.
    resolved, config = resolve_target_model(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    text_config = config.get_text_config()
    cfg = _fit_sequence_len(cfg, text_config, console)
    tokenizer = load_tokenizer(
        resolved, trust_remote_code=cfg.trust_remote_code, special_tokens=cfg.special_tokens
    )
    if (unneeded := unneeded_special_tokens(tokenizer, cfg.special_tokens)) is not None:
        console.print(f"note: {unneeded}", style="yellow")
    cfg = _with_default_template(cfg, tokenizer, console)
    generation_config = read_generation_config(resolved, config, cfg.base_model)
    encoder = chat_encoder(cfg, tokenizer, generation_config.eos_token_id)
    for note in _template_notes(cfg, encoder):
        console.print(f"note: {note}", style="yellow")
    # 2. Load the data to train on.
    train, validation = load_datasets(cfg, encoder, on_progress)
    _print_reports(cfg, train, validation, console)
    # 3. Load the data on which the tree is chosen: the same data, but only answers are supervised.
    answers = (train, validation)
    if cfg.train_on_inputs or cfg.roles_to_train != ["assistant"]:
        answers_only = {"train_on_inputs": False, "roles_to_train": ["assistant"]}
        held_out = None
        if not cfg.test_datasets:
            held_out = {example.prompt for example in validation}
        answers_cfg = cfg.model_copy(update=answers_only)
        answers = load_datasets(answers_cfg, encoder, on_progress, held_out)
    # 4. Drop conversations with tokens that the target model does not have.
    parts = [train, validation, *answers]
    dropped = _drop_unknown_tokens(parts, text_config.vocab_size, tokenizer, cfg)
    if dropped:
        console.print(
            f"data: {len(dropped)} conversations skipped: a token has no embedding; the first:"
            f" {dropped[0]}",
        )
    # 5. Choose the tree on training data if too few conversations are held out.
    prompts, held_out_prompts = answers
    is_enough = len({example.prompt for example in held_out_prompts}) >= MIN_CONVERSATIONS
    if is_enough:
        prompts = held_out_prompts
    return TrainingData(
        train, validation, prompts, cfg.sequence_len, encoder.template_name, is_enough
    )


def _fit_sequence_len(cfg: TrainConfig, text_config: Any, console: Console) -> TrainConfig:
    """Limit sequence_len to the model's context length. With longrope, limit it also to the length
    at which the rotary angles switch, if several rows share a forward pass.
    """
    context = context_length(text_config)
    switch = rope_switch(text_config)
    if cfg.sequence_len > context:
        console.print(
            f"sequence_len: {cfg.sequence_len} exceeds the context of {cfg.base_model}; using"
            f" {context}"
        )
        cfg = cfg.model_copy(update={"sequence_len": context})
    if switch is not None and cfg.sequence_len > switch and cfg.mixes_rows:
        console.print(
            f"sequence_len: using {switch}, since beyond it the longest row of a batch would change"
            " the rotary angles of all; for longer ones set micro_batch_size: 1 and"
            " sample_packing: false"
        )
        cfg = cfg.model_copy(update={"sequence_len": switch})
    return cfg


def _with_default_template(cfg: TrainConfig, tokenizer: Any, console: Console) -> TrainConfig:
    """Set Axolotl's template for ShareGPT data if there is no other template."""
    if cfg.chat_template or tokenizer.chat_template:
        return cfg
    all_have_template = all(entry.conversation for entry in cfg.all_datasets)
    if all_have_template or any(entry.type != "sharegpt" for entry in cfg.all_datasets):
        return cfg
    console.print(
        f"chat template: {SHAREGPT_TEMPLATE} (neither the tokenizer nor the configuration sets one)"
    )
    return cfg.model_copy(update={"chat_template": SHAREGPT_TEMPLATE})


def chat_encoder(
    cfg: TrainConfig, tokenizer: Any, eos_token_id: int | list[int] | None = None
) -> ChatEncoder:
    """Build the encoder from which the encoder of every data set is derived.

    Without `chat_template`, the template of the first data set is used if every data set has a
    `conversation` and the tokenizer has no template. (If all have the same `conversation`, it is
    the configuration's `chat_template`.)

    Args:
        eos_token_id: the one in the generation config.
    """
    template = cfg.chat_template
    templates = [entry.conversation for entry in cfg.datasets]
    if template is None and all(templates) and not tokenizer.chat_template:
        template = templates[0]
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    stops = tokenizer.convert_ids_to_tokens([token for token in ids if token is not None])
    return ChatEncoder(
        tokenizer,
        template,
        cfg.chat_template_kwargs,
        stops=[token for token in stops if token is not None],
        max_tool_rows=cfg.max_rows_per_chat,
    )


def _template_notes(cfg: TrainConfig, encoder: ChatEncoder) -> Iterator[str]:
    """Yield notes on variables that the template does not use, and on data that were generated with
    other prompts.
    """
    note = encoder.template.describe_unused_kwargs()
    if note:
        yield note
    for entry in cfg.all_datasets:
        path = resolve_path(entry.path)
        if path is None or path.is_dir() or not settings_path(path).is_file():
            continue
        dataset_encoder = encoder.with_settings(template=entry.conversation)
        note = None
        # ignore a file that has no settings, or a template that rejects the chat
        with suppress(OSError, ValueError, TypeError, AttributeError, MedusaError):
            settings = parse_json(settings_path(path).read_text(encoding="utf-8"))
            note = _prompts_differ(settings, dataset_encoder)
        if note is not None:
            yield f"{entry.path} {note}"


def _prompts_differ(settings: Any, encoder: ChatEncoder) -> str | None:
    """Describe how the prompts with which data were generated differ from this run's; None if they
    are equal.

    Args:
        settings: settings that self-distillation wrote next to the data.
        encoder: this run's encoder.
    """
    kwargs = settings.get("chat_template_kwargs") or {}
    name = settings.get("chat_template") or None
    # a plain target model answered with its tokenizer's template, a run with the template of its
    # heads
    is_of_target_model = "model" in settings and "weights" not in settings
    if name is None and not is_of_target_model:
        name = encoder.template_name
    generated = ChatEncoder(encoder.tokenizer, name, kwargs).template
    chat = [Message("user", "Hello")]
    if generated.render(chat, prompt=True) == encoder.template.render(chat, prompt=True):
        return None
    return (
        "was generated with other prompts: its chat_template and chat_template_kwargs are"
        f" {name} and {kwargs}, those of this run {encoder.template_name} and"
        f" {dict(encoder.template.kwargs)}"
    )


def _print_reports(
    cfg: TrainConfig, train: EncodedDataset, validation: EncodedDataset, console: Console
) -> None:
    """Print what was skipped or truncated, and the share of answers that loop."""
    reports = {"data": train.report}
    if cfg.test_datasets is not None:  # otherwise both have the same report
        reports["test data"] = validation.report
    for name, report in reports.items():
        for line in report.describe():
            console.print(f"{name}: {line}")
    if train.report.looping_share > NOTABLE_LOOPING:
        console.print(
            f"warning: {train.report.describe_looping()}",
            style="yellow",
        )


def _drop_unknown_tokens(
    parts: Sequence[EncodedDataset], vocab_size: int, tokenizer: Any, cfg: TrainConfig
) -> list[str]:
    """Drop conversations with a token that has no embedding in the target model, for example
    because it was added only to the tokenizer. Return the reason for each dropped conversation.

    Raises:
        DataError: there are such tokens, and `skip_bad_records` is off or no conversation remains.
    """
    problems: dict[str, str] = {}  # by source, because a conversation may have several rows
    for example in itertools.chain.from_iterable(parts):
        token = int(example.tokens.max())
        if token >= vocab_size:
            name = tokenizer.convert_ids_to_tokens(token)
            problems[example.source] = f"{example.source}: token {token} ({name})"
    if not problems:
        return []
    reasons = list(problems.values())
    more = f" (and {len(reasons) - 1} more conversations)" if len(reasons) > 1 else ""
    problem = (
        f"{reasons[0]} has no embedding, since the model has {vocab_size:,}: resize its embeddings,"
        f" or set another chat_template{more}"
    )
    if not cfg.skip_bad_records:
        raise DataError(problem)
    for part in parts:
        part.examples[:] = [row for row in part.examples if row.source not in problems]
    if not parts[0].examples:
        raise DataError(f"no conversation to train on is left: {problem}")
    return reasons


def assumed_data(
    cfg: TrainConfig, tokens: int, model_config: Any, console: Console
) -> TrainingData:
    """Return dummy data with this number of tokens.

    Only the lengths are meaningful: conversations have 1,000 tokens, and 70 % are supervised.

    Args:
        model_config: the target model's transformers config.
    """
    cfg = _fit_sequence_len(cfg, model_config.get_text_config(), console)
    length = min(ASSUMED_LENGTH, cfg.sequence_len)
    supervised = torch.arange(length) >= round((1 - ASSUMED_SHARE) * length)
    example = Example(torch.zeros(length, dtype=torch.int32), supervised, "", "")
    report = DataReport(cfg.sequence_len)
    row_len = cfg.sequence_len if cfg.sample_packing else None
    train = EncodedDataset([example] * max(1, tokens // length), report, row_len)
    nothing = EncodedDataset([], report)
    return TrainingData(train, nothing, train, cfg.sequence_len)
