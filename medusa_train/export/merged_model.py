"""Write a run's target model as a model of its own: the adapter merged, with tokenizer and template."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from medusa_train.checkpoint.resolve import ModelPaths, read_mapping
from medusa_train.checkpoint.run_directory import CONFIG
from medusa_train.checkpoint.serialize import read_json
from medusa_train.data.builtin_templates import get_template
from medusa_train.errors import CheckpointError
from medusa_train.io import WRITE_ERRORS, make_readable, replace_text, write_failure
from medusa_train.models.finite import describe_not_finite
from medusa_train.models.loading import load_target_model, resolve_target_model
from medusa_train.models.lora import Adapter
from medusa_train.models.model_files import model_directory
from medusa_train.models.target_model import TargetModel

MERGED = "merged"
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
    """Load the target model that the heads were trained with, unquantised, in its stored dtype, on the
    CPU.

    An adapter is merged. If it was trained over 4-bit or 8-bit weights, those are dequantised
    first: merged into the original weights it would give another model.
    """
    _, config = resolve_target_model(paths.base_model, trust_remote_code=paths.trust_remote_code)
    quantization = None
    if paths.adapter is not None:
        quantization = paths.quantization
    target_model = load_target_model(
        paths.base_model,
        dtype=getattr(config, "dtype", None) or "float32",
        device="cpu",  # a GPU may have no room for the unquantised weights
        quantization=quantization,
        trust_remote_code=paths.trust_remote_code,
        special_tokens=paths.special_tokens,
    )
    target_model.end_answers_by(paths.chat_template, paths.chat_template_kwargs)
    if paths.adapter is not None:
        Adapter.load(target_model, paths.adapter).merge()
    problem = describe_not_finite(target_model.model.named_parameters())
    if problem is not None:
        raise CheckpointError(f"{paths.base_model}: the merged model cannot be used: {problem}")
    return target_model


def write_merged(paths: ModelPaths, target: Path, card: str | None = None) -> str:
    """Write the trained target model, adapter merged, its tokenizer and its card atomically; return what
    was written, in words.
    """
    target = target.resolve()  # "." has no name
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        # 1. The model and its tokenizer.
        if (model := paths.trained_model) is not None:
            shutil.copytree(model, temporary, dirs_exist_ok=True)
            original = read_mapping(paths.home / CONFIG).get("base_model")
            if isinstance(original, str):
                _copy_tokenizer(model_directory(original), temporary)
                _set_special_tokens(temporary, paths.special_tokens)
            content = f"copy of {model}: the target model itself was trained"
        else:
            content = _save_merged_adapter(paths, temporary)
            _copy_tokenizer(model_directory(paths.base_model), temporary)
            _set_special_tokens(temporary, paths.special_tokens)
        # 2. The chat template of training, and the card.
        if paths.chat_template is not None:
            _set_chat_template(temporary, get_template(paths.chat_template).source)
        if card is not None:
            replace_text(temporary / "README.md", card)
        # 3. The directory gets its name when it is complete.
        make_readable(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except WRITE_ERRORS as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(write_failure("the merged target model", target, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return content


def _copy_tokenizer(source: Path, directory: Path) -> None:
    """Replace the tokenizer that this transformers saved by the target model's own files: earlier
    versions cannot read the former.

    A target model without tokenizer.json keeps what was saved.
    """
    if not (source / "tokenizer.json").is_file():
        return
    for name in TOKENIZER_FILES:
        (directory / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _set_special_tokens(directory: Path, special_tokens: Mapping[str, str]) -> None:
    if not special_tokens:
        return
    path = directory / TOKENIZER_CONFIG
    config = {**read_json(path), **special_tokens}
    replace_text(path, json.dumps(config, indent=2) + "\n")


def _set_chat_template(directory: Path, template: str) -> None:
    """Write a chat template where all versions of transformers read it: in its file, and in
    tokenizer_config.json for those that do not know that.
    """
    path = directory / TOKENIZER_CONFIG
    config = {}
    if path.is_file():
        config = read_json(path)
    config["chat_template"] = template
    replace_text(path, json.dumps(config, indent=2) + "\n")
    replace_text(directory / CHAT_TEMPLATE, template)
    (directory / "chat_template.json").unlink(missing_ok=True)


def untie_config(target_model: TargetModel) -> None:
    """Let the config say that lm_head is a matrix of its own, where merging an adapter made it one:
    not every version of PEFT does.
    """
    model = target_model.model
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        target_model.config.tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def _save_merged_adapter(paths: ModelPaths, directory: Path) -> str:
    target_model = load_for_export(paths)
    # transformers imports DeepSpeed in save_pretrained, which prints a warning if it has to guess
    # the accelerator
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    untie_config(target_model)
    target_model.save(directory)
    facts = [paths.base_model]
    if paths.quantization:
        facts.append(f"dequantised from {paths.quantization}")
    if paths.adapter is not None:
        facts.append("adapter merged")
    facts.append(str(target_model.dtype).removeprefix("torch."))
    return ", ".join(facts)
