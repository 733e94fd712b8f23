"""Write what single targets need besides the heads: TensorRT-LLM's config, decoding code, merged
models.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from transformers.utils import cached_file

from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_eagle3, write_weights
from medusa_train.checkpoint.load_model import load_tree
from medusa_train.checkpoint.resolve import ModelPaths, read_mapping
from medusa_train.checkpoint.run_directory import CONFIG, TREE
from medusa_train.checkpoint.serialize import read_json
from medusa_train.checkpoint.server_layouts import for_target, to_eagle3
from medusa_train.config.drafts import default_layers
from medusa_train.config.types import ExportTarget
from medusa_train.data.builtin_templates import get_template
from medusa_train.errors import BackboneError, CheckpointError
from medusa_train.export.card import card
from medusa_train.hub import hub_is_unreachable
from medusa_train.io import WRITE_ERRORS, replace_text, write_failure
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.eagle3_layer import layer_config
from medusa_train.models.finite import describe_not_finite
from medusa_train.models.loading import load_backbone, model_directory, resolve_backbone
from medusa_train.models.lora import Adapter
from medusa_train.trees.tree import Tree

MAX_NODES = 63  # of a --medusa_choices tree in TensorRT-LLM
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
CUSTOM_GENERATE_REQUIREMENTS = "torch>=2.9\ntransformers>=5.16\n"


def check_vllm_config(config: Mapping[str, Any]) -> None:
    """Check that vLLM would load heads with this config.json on the backbone that it names."""
    path = Path(config["base_model_name_or_path"] or "") / "config.json"
    if not path.is_absolute() or not path.is_file():
        return
    backbone = read_json(path)
    if not isinstance(backbone, dict):
        raise CheckpointError(f"{path}: expected an object of JSON")
    backbone |= backbone.get("text_config") or {}
    for key in ("vocab_size", "hidden_size"):
        size = backbone.get(key, config[key])
        if size != config[key]:
            raise CheckpointError(
                f"vLLM would not load these heads: their {key} is {config[key]}, that of {path}"
                f" {size}"
            )


def tensorrt_config(paths: ModelPaths, num_heads: int) -> dict[str, Any]:
    """Return the backbone's config.json plus `num_medusa_heads`, as TensorRT-LLM's Medusa
    conversion reads it.
    """
    try:
        path = cached_file(paths.base_model, "config.json", local_files_only=hub_is_unreachable())
    except OSError as error:
        raise BackboneError(
            f"base_model {paths.base_model}: cannot read its config.json, which this export"
            f" contains: {error}"
        ) from error
    return {**read_json(Path(path)), "num_medusa_heads": num_heads}


def medusa_choices(paths: ModelPaths, num_heads: int) -> tuple[str, str | None]:
    """Return the run's tree as the value of `--medusa_choices`, and a warning where there is no
    usable tree.
    """
    advice = "pass a --medusa_choices to TensorRT-LLM yourself"
    if paths.tree is None:
        return "", f"no tree.json in the run: {advice}"
    tree = Tree.load(paths.tree)
    if 0 < tree.size <= MAX_NODES and tree.max_depth <= num_heads:
        return json.dumps([list(path) for path in tree.paths]), None
    return "", (
        f"{paths.tree} has {tree.size} nodes and depth {tree.max_depth}; TensorRT-LLM accepts 1 to"
        f" {MAX_NODES} nodes, and there are {num_heads} heads: {advice}"
    )


def write_custom_generate(paths: ModelPaths, num_heads: int, directory: Path) -> str:
    """Write the decoding code that transformers' `generate` loads, and its tree; return how to use
    it, in words.
    """
    tree = load_tree(paths, num_heads)
    if not tree.size:
        raise CheckpointError(
            f"{paths.tree}: the tree is empty, since none was faster than plain decoding where it"
            " was fitted, so the heads would not be used; fit it on the machine that will decode"
            " (medusa-eval --calibrate)"
        )
    try:
        tree.save(directory / TREE)
        code = Path(__file__).with_name("custom_generate.py").read_text(encoding="utf-8")
        replace_text(directory / "custom_generate" / "generate.py", code)
        replace_text(
            directory / "custom_generate" / "requirements.txt", CUSTOM_GENERATE_REQUIREMENTS
        )
    except WRITE_ERRORS as error:
        raise CheckpointError(write_failure("custom_generate", directory, error)) from error
    return f'decode with model.generate(..., custom_generate="{directory}", trust_remote_code=True)'


def load_trained_backbone(paths: ModelPaths) -> Backbone:
    """Load the backbone that the heads were trained with, unquantised, in its stored dtype, on the
    CPU.

    An adapter is merged. If it was trained over 4-bit or 8-bit weights, those are dequantised
    first: merged into the original weights it would give another model.
    """
    _, config = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    quantization = None
    if paths.adapter is not None:
        quantization = paths.quantization
    backbone = load_backbone(
        paths.base_model,
        dtype=getattr(config, "dtype", None) or "float32",
        device="cpu",  # a GPU may have no room for the unquantised weights
        quantization=quantization,
        trust_remote_code=paths.trust_remote_code,
        special_tokens=paths.special_tokens,
    )
    backbone.end_answers_by(paths.chat_template, paths.chat_template_kwargs)
    if paths.adapter is not None:
        Adapter.load(backbone, paths.adapter).merge()
    problem = describe_not_finite(backbone.model.named_parameters())
    if problem is not None:
        raise CheckpointError(f"{paths.base_model}: the merged model cannot be used: {problem}")
    return backbone


def write_merged(paths: ModelPaths, target: Path, card: str | None = None) -> str:
    """Write the trained backbone, adapter merged, its tokenizer and its card atomically; return what
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
            content = f"copy of {model}: the backbone itself was trained"
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
        _make_readable(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except WRITE_ERRORS as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(write_failure("the merged backbone", target, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return content


def _copy_tokenizer(source: Path, directory: Path) -> None:
    """Replace the tokenizer that this transformers saved by the backbone's own files: earlier
    versions cannot read the former.

    A backbone without tokenizer.json keeps what was saved.
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


def _make_readable(directory: Path) -> None:
    """Give files the mode that new files get; safetensors writes them for their owner alone."""
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode & 0o777)


def untie_config(backbone: Backbone) -> None:
    """Let the config say that lm_head is a matrix of its own, where merging an adapter made it one:
    not every version of PEFT does.
    """
    model = backbone.model
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        backbone.config.tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def _save_merged_adapter(paths: ModelPaths, directory: Path) -> str:
    backbone = load_trained_backbone(paths)
    # transformers imports DeepSpeed in save_pretrained, which prints a warning if it has to guess
    # the accelerator
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    untie_config(backbone)
    backbone.save(directory)
    facts = [paths.base_model]
    if paths.quantization:
        facts.append(f"dequantised from {paths.quantization}")
    if paths.adapter is not None:
        facts.append("adapter merged")
    facts.append(str(backbone.dtype).removeprefix("torch."))
    return ", ".join(facts)


# EAGLE-3

_EAGLE3_COMMANDS: dict[ExportTarget, str] = {
    "vllm": (
        "vllm serve {backbone} --speculative-config "
        '\'{{"method": "eagle3", "model": "{directory}", "num_speculative_tokens": 3}}\''
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path {backbone} --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path {directory}"
    ),
    "speculators": "vllm serve {directory}",
}
_EAGLE3_DESCRIPTION = (
    "One decoder layer that drafts the tokens after the next one (EAGLE-3, arXiv 2503.01840), from"
    " the backbone's states after {layers} layers. Draft vocabulary: {tokens}. The server verifies"
    " every drafted token."
)
_EAGLE3_USE = (
    "```bash\n%s\n```\n\nServers draft a chain of its first guesses, or a tree of their own."
    " {chain}\n\nMeasure your server under your load, with and without the draft: with many"
    " requests at a time it can be slower."
)


def write_eagle3(
    paths: ModelPaths,
    heads: Path,
    to: ExportTarget,
    target: Path,
    base_model: str,
    licence: str | None,
) -> list[str]:
    """Write the EAGLE-3 draft in `heads`, with a model card; return what was written, in lines.

    `base_model` is named in config.json, `licence` on the card.
    """
    if to not in _EAGLE3_COMMANDS:
        raise CheckpointError(
            f"{heads}: an EAGLE-3 draft is exported --to {', '.join(_EAGLE3_COMMANDS)}, not to {to}"
        )
    # 1. Tensors and config.json as the server reads them.
    state, settings = read_eagle3(heads)
    _, backbone = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    text_config = backbone.get_text_config()
    settings["layers"] = settings.get("layers") or default_layers(text_config.num_hidden_layers)
    layer = layer_config(text_config, settings.get("layer")).to_dict()
    tensors, config = to_eagle3(state, settings, layer, text_config.vocab_size, base_model)
    tensors, config = for_target(tensors, config, to, min(3, settings.get("num_heads", 3)))
    # 2. The card.
    drafted = f"{config['draft_vocab_size']:,} of {text_config.vocab_size:,} tokens"
    layers = ", ".join(map(str, settings["layers"]))
    use = _EAGLE3_USE % _EAGLE3_COMMANDS[to]
    text = card(
        paths,
        "EAGLE-3 draft",
        _EAGLE3_DESCRIPTION.format(layers=layers, tokens=drafted),
        partial(use.format, directory="THIS_DIRECTORY"),
        base_model,
        licence,
        served_by_vllm=to != "sglang",
        tag="eagle3",
    )
    write_weights(target, VLLM_WEIGHTS, tensors, config)
    replace_text(target / "README.md", text)
    # 3. How to serve it.
    directory = str(target)
    if to != "vllm":  # there it stands within quotes
        directory = quote(directory)
    command = _EAGLE3_COMMANDS[to].format(directory=directory, backbone=quote(base_model))
    return [
        f"EAGLE-3, {drafted}; backbone {base_model}",
        f"serve it: {command}",
        "servers draft a chain, or a tree of their own; tree.json is not read",
    ]
