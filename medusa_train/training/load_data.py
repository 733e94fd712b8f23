"""Load the tokenizer and the tokenized training and validation data of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import Batch, BatchLoader, EncodedDataset, load_datasets
from medusa_train.data.draft_vocabulary import check_vocabulary
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError
from medusa_train.hub import hub_is_unreachable
from medusa_train.models.hf_config import context_length
from medusa_train.models.layer_split import check_exit_layer
from medusa_train.models.loading import resolve_backbone
from medusa_train.training.backbone_recipe import check_initial_weights
from medusa_train.training.deepspeed_config import check_compiler, check_deepspeed
from medusa_train.training.distributed import SINGLE_PROCESS, World

SHAREGPT_TEMPLATE = "vicuna_v1.1"


@dataclass
class TrainingData:
    """The tokenized data of a run.

    Attributes:
        train, validation: supervised tokens as configured (`roles_to_train`, `train_on_inputs`).
        prompts: conversations to choose the tree on: the validation set, or the training set without one, with only
            the assistant's tokens supervised.
    """

    train: EncodedDataset
    validation: EncodedDataset
    prompts: EncodedDataset


def load_data(cfg: TrainConfig, console: Console, world: World = SINGLE_PROCESS) -> TrainingData:
    """Check the configuration against the backbone's config and tokenize the data; no weights are loaded.

    With several processes it raises in all of them if it fails in one.

    Raises:
        BackboneError: the backbone does not exist, the hub cannot be reached, or its architecture is not supported.
        ConfigError: a key does not fit the backbone or contradicts another.
        CheckpointError: `lora_model_dir` holds nothing to start from.
        DataError: the data cannot be read or has no supervised tokens.
    """
    if world.size > 1 and cfg.dataset_prepared_path is not None:  # rank 0 fills the cache for the others
        world.run_on_main(lambda: bool(_load_data(cfg, Console(quiet=True), world.size)))
    return world.run_on_all(lambda: _load_data(cfg, console, world.size))


def _load_data(cfg: TrainConfig, console: Console, processes: int) -> TrainingData:
    resolved, config = resolve_backbone(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    check_deepspeed(cfg, processes)
    if processes > 1 or cfg.deepspeed is not None:
        check_compiler(torch.cuda.is_available())
    check_initial_weights(cfg)
    text_config = config.get_text_config()
    check_vocabulary(cfg, text_config.vocab_size)
    if cfg.draft == "kangaroo":
        check_exit_layer(cfg.draft_config.settings["exit_layer"], text_config.num_hidden_layers, cfg.base_model)
    context = context_length(text_config)
    if cfg.sequence_len > context:
        console.print(
            f"sequence_len: {cfg.sequence_len} exceeds the context length of {cfg.base_model}; using {context}"
        )
        cfg = cfg.model_copy(update={"sequence_len": context})
    tokenizer = load_tokenizer(cfg, resolved)
    if (completed := with_template(cfg, tokenizer)) is not cfg:
        cfg = completed
        console.print(f"chat template: {cfg.chat_template} (neither the tokenizer nor the configuration sets one)")
    encoder = chat_encoder(cfg, tokenizer)
    train, validation = load_datasets(cfg, encoder)
    for line in train.report.describe():
        console.print(f"data: {line}", highlight=False)
    prompts = (train, validation)
    if cfg.train_on_inputs or cfg.roles_to_train != ["assistant"]:
        answers_only = {"train_on_inputs": False, "roles_to_train": ["assistant"]}
        prompts = load_datasets(cfg.model_copy(update=answers_only), encoder)
    return TrainingData(train, validation, prompts[1] if len(validation) else prompts[0])


def load_tokenizer(cfg: TrainConfig, resolved: str) -> Any:
    """Load the backbone's tokenizer from `resolved`, the path or hub name returned by `resolve_backbone`.

    Raises:
        BackboneError: it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(
            resolved, trust_remote_code=cfg.trust_remote_code, local_files_only=hub_is_unreachable()
        )
    except (OSError, ValueError, ImportError) as error:
        raise BackboneError(f"base_model {cfg.base_model}: cannot load its tokenizer: {error}") from error


def with_template(cfg: TrainConfig, tokenizer: Any) -> TrainConfig:
    """Set Axolotl's default chat template for `type: sharegpt` if neither tokenizer nor configuration has one."""
    if cfg.chat_template or tokenizer.chat_template or any(entry.type != "sharegpt" for entry in cfg.datasets):
        return cfg
    return cfg.model_copy(update={"chat_template": SHAREGPT_TEMPLATE})


def chat_encoder(cfg: TrainConfig, tokenizer: Any) -> ChatEncoder:
    """Build the encoder from which every data set derives its own.

    If every data set sets `conversation`, the tokenizer needs no template: any of theirs is used.
    """
    templates = [entry.conversation for entry in cfg.datasets]
    return ChatEncoder(tokenizer, cfg.chat_template or (templates[0] if all(templates) else None))


def validation_batches(validation: EncodedDataset, micro_batch_size: int) -> Callable[[], Iterable[Batch]] | None:
    """Return a function that iterates once over the validation set in a fixed order; None if the set is empty."""
    if not len(validation):
        return None

    def batches() -> Iterable[Batch]:
        loader = BatchLoader(validation, micro_batch_size, seed=0, shuffle=False)
        return islice(loader, loader.steps_per_epoch)

    return batches
