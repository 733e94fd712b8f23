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
from medusa_train.models.layer_split import check_exit
from medusa_train.models.loading import resolve_backbone
from medusa_train.training.backbone_recipe import check_initial_weights
from medusa_train.training.deepspeed_config import check_compiler, check_deepspeed
from medusa_train.training.distributed import SINGLE_PROCESS, World

SHAREGPT_TEMPLATE = "vicuna_v1.1"


@dataclass
class TrainingData:
    """What is trained on and what is measured on."""

    train: EncodedDataset
    validation: EncodedDataset
    prompts: EncodedDataset  # the held-out set, else the training set, with the assistant's words alone marked


def load_data(cfg: TrainConfig, console: Console, world: World = SINGLE_PROCESS) -> TrainingData:
    """Find the backbone, refuse what can't be done with it, and encode the data; loads no weights.

    Several processes go on only if all of them could.

    Raises:
        BackboneError: there is no such backbone, the hub can't be reached, or it can't be trained for here.
        ConfigError: a key means nothing where it stands, or contradicts another.
        CheckpointError: there is nothing to start from where `lora_model_dir` says.
        DataError: the data can't be read, or nothing in it can be learnt.
    """
    if world.size > 1 and cfg.dataset_prepared_path is not None:
        world.run_on_main(
            lambda: bool(_load_data(cfg, Console(quiet=True), world.size))
        )  # fills what the others then read
    return world.run_on_all(lambda: _load_data(cfg, console, world.size))


def _load_data(cfg: TrainConfig, console: Console, processes: int) -> TrainingData:
    where, config = resolve_backbone(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    check_deepspeed(cfg, processes)
    if processes > 1 or cfg.deepspeed is not None:
        check_compiler(torch.cuda.is_available())
    check_initial_weights(cfg)
    text = config.get_text_config()
    check_vocabulary(cfg, text.vocab_size)
    if cfg.draft == "kangaroo":
        check_exit(cfg.draft_config.settings["exit_layer"], text.num_hidden_layers, cfg.base_model)
    context = context_length(text)
    if cfg.sequence_len > context:
        console.print(f"sequence_len: {cfg.sequence_len} is more than {cfg.base_model} reads, taking {context}")
        cfg = cfg.model_copy(update={"sequence_len": context})
    tokenizer = load_tokenizer(cfg, where)
    if (named := with_template(cfg, tokenizer)) is not cfg:
        cfg = named
        console.print(f"chat template: {cfg.chat_template}; neither the tokenizer nor the configuration names one")
    encoder = chat_encoder(cfg, tokenizer)
    train, held_out = load_datasets(cfg, encoder)
    for line in train.report.lines():
        console.print(f"data: {line}", highlight=False)
    if cfg.train_on_inputs or cfg.roles_to_train != ["assistant"]:
        answers = {"train_on_inputs": False, "roles_to_train": ["assistant"]}
        only = load_datasets(cfg.model_copy(update=answers), encoder)
        return TrainingData(train, held_out, only[1] if len(held_out) else only[0])
    return TrainingData(train, held_out, held_out if len(held_out) else train)


def load_tokenizer(cfg: TrainConfig, where: str) -> Any:
    """Load the backbone's tokenizer; `where` is what `resolve_backbone` gave.

    Raises:
        BackboneError: it can't be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(
            where, trust_remote_code=cfg.trust_remote_code, local_files_only=hub_is_unreachable()
        )
    except (OSError, ValueError, ImportError) as error:
        raise BackboneError(f"base_model {cfg.base_model}: its tokenizer can't be loaded: {error}") from error


def with_template(cfg: TrainConfig, tokenizer: Any) -> TrainConfig:
    """Name the chat template that Axolotl takes for `type: sharegpt`, where neither tokenizer nor YAML has one."""
    if cfg.chat_template or tokenizer.chat_template or any(entry.type != "sharegpt" for entry in cfg.datasets):
        return cfg
    return cfg.model_copy(update={"chat_template": SHAREGPT_TEMPLATE})


def chat_encoder(cfg: TrainConfig, tokenizer: Any) -> ChatEncoder:
    """Make the encoder that every data set's own is a variant of.

    Where each of them names its `conversation`, any of those will do: the tokenizer needs no template of its own.
    """
    named = [entry.conversation for entry in cfg.datasets]
    return ChatEncoder(tokenizer, cfg.chat_template or (named[0] if all(named) else None))


def validation_batches(held_out: EncodedDataset, micro_batch_size: int) -> Callable[[], Iterable[Batch]] | None:
    """Make a maker of one pass over the held-out set, always in the same order; None where nothing is held out."""
    if not len(held_out):
        return None

    def batches() -> Iterable[Batch]:
        loader = BatchLoader(held_out, micro_batch_size, seed=0, shuffle=False)
        return islice(loader, loader.steps_per_epoch)

    return batches
