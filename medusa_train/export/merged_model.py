"""Write a run's target model as a plain model: adapter merged, with tokenizer and chat template."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from medusa_train.checkpoint.heads import read_heads
from medusa_train.checkpoint.load_model import load_trained_target_model
from medusa_train.checkpoint.resolve import ModelPaths, find_heads, read_mapping
from medusa_train.checkpoint.run_directory import CONFIG
from medusa_train.checkpoint.serialize import read_json
from medusa_train.data.builtin_templates import get_template
from medusa_train.errors import CheckpointError
from medusa_train.export.card import model_card
from medusa_train.export.publish import CARD, Export
from medusa_train.io import WRITE_ERRORS, replace_text, write_failure
from medusa_train.models.finite import describe_not_finite
from medusa_train.models.loading import resolve_target_model
from medusa_train.models.model_files import model_directory
from medusa_train.models.target_model import TargetModel

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
)


def load_for_export(paths: ModelPaths) -> TargetModel:
    """Load the target model with which the heads were trained, unquantized, in its stored dtype, on
    the CPU.

    An adapter is merged. If it was trained on 4-bit or 8-bit weights, it is merged into these after
    they are dequantized, because merging it into the original weights would give another model.
    """
    _, config = resolve_target_model(paths.target_model, trust_remote_code=paths.trust_remote_code)
    if paths.adapter is None:
        paths = replace(paths, quantization=None)
    # the unquantized weights may not fit on the GPU
    dtype = getattr(config, "dtype", None) or "float32"
    target_model = load_trained_target_model(paths, dtype, device="cpu")
    problem = describe_not_finite(target_model.model.named_parameters())
    if problem is not None:
        raise CheckpointError(f"{paths.target_model}: the merged model cannot be used: {problem}")
    return target_model


def write_merged_export(export: Export) -> None:
    """Write the trained target model with a card.

    Raises:
        CheckpointError: the run did not train its target model.
    """
    is_full = find_heads(export.draft).layout == "model"
    if not export.paths.trained_target_model and not is_full:
        raise CheckpointError(
            f"{export.paths.home}: this run did not train the target model, so there is nothing to"
            f" merge: use {export.paths.target_model}"
        )
    text = model_card(export, read_heads(export.draft))
    export.facts.append(write_merged(export.paths, export.files))
    replace_text(export.files / CARD, text)


def write_merged(paths: ModelPaths, directory: Path) -> str:
    """Write the trained target model with its adapter merged, and its tokenizer; return a
    description of what was written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (model := paths.trained_model) is not None:
            shutil.copytree(model, directory, dirs_exist_ok=True)
            content = f"copy of {model}: the target model itself was trained"
            original = read_mapping(paths.home / CONFIG).get("base_model")
        else:
            content = _save_merged_adapter(paths, directory)
            original = paths.target_model
        if isinstance(original, str):
            _copy_tokenizer(model_directory(original), directory)
        _set_tokenizer(paths, directory)
    except WRITE_ERRORS as error:
        shutil.rmtree(directory, ignore_errors=True)  # delete before free space is measured
        raise CheckpointError(write_failure("the merged target model", directory, error)) from error
    return content


def _copy_tokenizer(source: Path, directory: Path) -> None:
    """Replace the tokenizer that the installed transformers saved by the target model's own files,
    because earlier versions of transformers cannot read the saved one.

    If the target model has no tokenizer.json, the saved files are kept.
    """
    if not (source / "tokenizer.json").is_file():
        return
    for name in TOKENIZER_FILES:
        (directory / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _set_tokenizer(paths: ModelPaths, directory: Path) -> None:
    """Write the special tokens and the chat template of training. The template is written to its
    own file, and also to tokenizer_config.json for versions of transformers that do not read that
    file.
    """
    entries = dict(paths.special_tokens)
    if paths.chat_template:
        template = get_template(paths.chat_template)
        entries["chat_template"] = template
        replace_text(directory / CHAT_TEMPLATE, template)
        (directory / "chat_template.json").unlink(missing_ok=True)
    path = directory / TOKENIZER_CONFIG
    if entries:
        config = read_json(path) if path.is_file() else {}
        replace_text(path, json.dumps({**config, **entries}, indent=2) + "\n")


def untie_config(target_model: TargetModel) -> None:
    """Set `tie_word_embeddings` to false if merging an adapter untied lm_head from the embeddings.
    Not every version of PEFT does so.
    """
    model = target_model.model
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        target_model.config.tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def _save_merged_adapter(paths: ModelPaths, directory: Path) -> str:
    target_model = load_for_export(paths)
    # save_pretrained imports DeepSpeed, which prints a warning if it has to guess the accelerator
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    untie_config(target_model)
    target_model.save(directory)
    dtype = str(target_model.dtype).removeprefix("torch.")
    return f"{paths.target_model}, {paths.target_model_form}, {dtype}"
