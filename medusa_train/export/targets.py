"""What TensorRT-LLM's Medusa conversion wants besides the heads: the backbone's config, and the tree as an argument."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.checkpoint.serialize import read_json, read_tensors
from medusa_train.checkpoint.vllm import loader_problems
from medusa_train.data.templates import TEMPLATES
from medusa_train.errors import BackboneError, CheckpointError
from medusa_train.hub import hub_is_out_of_reach
from medusa_train.io import WRITE_ERRORS, write_failure
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.lora import Adapter
from medusa_train.trees.tree import Tree

MAX_NODES = 63


def backbone_keys(paths: ModelPaths, num_heads: int) -> dict[str, Any]:
    """The backbone's own config.json as it stands, and the number of heads under the name that is only read here.

    Raises:
        BackboneError: it can't be had. CheckpointError: it is no JSON.
    """
    local = Path(paths.base_model) / "config.json"
    if not local.is_file():
        from huggingface_hub import hf_hub_download

        try:
            offline = hub_is_out_of_reach()
            local = Path(hf_hub_download(paths.base_model, "config.json", local_files_only=offline))
        except Exception as error:  # the hub client raises a dozen unrelated kinds for "not reachable" and "not there"
            raise BackboneError(
                f"base_model {paths.base_model}: its config.json, which belongs into this export, can't be had: {error}"
            ) from error
    config = read_json(local)
    if not isinstance(config, dict):
        raise CheckpointError(f"{local}: a mapping of keys is expected")
    return {**config, "num_medusa_heads": num_heads}


def choices(paths: ModelPaths, num_heads: int) -> tuple[str, str | None]:
    """The run's tree as `--medusa_choices` takes it, and what is in the way of that, or None."""
    if paths.tree is None:
        return "", "there is no tree.json here: give TensorRT-LLM a --medusa_choices of your own"
    tree = Tree.load(paths.tree)
    if tree.size > MAX_NODES or tree.max_depth > num_heads:
        return "", (
            f"{paths.tree} has {tree.size} nodes and is {tree.max_depth} deep; TensorRT-LLM takes {MAX_NODES} nodes at "
            f"most, and there are {num_heads} heads: give it a --medusa_choices of your own"
        )
    return json.dumps([list(path) for path in tree.paths]), None


def check_vllm_directory(directory: Path, weights: str) -> str:
    """Say against what the directory was checked.

    The rules are `loader_problems`'; where vLLM is installed, its own config class reads config.json first, and the
    weights are held against what it made of it.

    Raises:
        CheckpointError: vLLM would not load these heads as they are.
    """
    config: dict[str, Any] = read_json(directory / "config.json")
    checked = "checked against the rules of vLLM's loader (vLLM is not installed here)"
    if importlib.util.find_spec("vllm") is not None:
        version, read = _as_vllm_reads(directory)
        config = {**config, **{key: read[key] for key in config if key in read}}
        checked = f"checked against vLLM {version}'s config class and the rules of its loader"
    if problems := loader_problems(read_tensors(directory / weights), config):
        raise CheckpointError(f"{directory}: vLLM would not load these heads as they are:\n" + "\n".join(problems))
    return checked


def _as_vllm_reads(directory: Path) -> tuple[str, dict[str, Any]]:
    """vLLM's version, and config.json as its own class for Medusa drafts understands it."""
    import vllm
    from vllm.transformers_utils.configs.medusa import MedusaConfig

    return str(vllm.__version__), MedusaConfig.from_pretrained(str(directory)).to_dict()


MERGED = "merged"
MODEL = "model"


def trained_the_backbone(paths: ModelPaths) -> bool:
    """Whether the run left an adapter or a backbone of its own."""
    return paths.adapter is not None or _own_model(paths) is not None


def load_trained_backbone(paths: ModelPaths) -> Backbone:
    """The backbone as the heads know it, unquantised, in the dtype that it is stored in, on the CPU.

    An adapter is folded in. Where it was trained over 4 or 8 bits, those are what is dequantised: the original
    weights with this adapter are another model.

    Raises:
        BackboneError: it can't be loaded. CheckpointError: the adapter doesn't fit.
    """
    _, config = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    backbone = Backbone.load(
        paths.base_model,
        dtype=getattr(config, "dtype", None) or "float32",
        # bitsandbytes dequantises wherever the weights are; a GPU is quicker at it where there is one
        device=None if paths.quantization else "cpu",
        quantization=paths.quantization if paths.adapter is not None else None,
        trust_remote_code=paths.trust_remote_code,
    )
    if paths.adapter is not None:
        Adapter.load(backbone, paths.adapter).merge()
    return backbone


def write_merged(paths: ModelPaths, target: Path) -> str:
    """Write the trained backbone and its tokenizer to `target`; returns what was done, in words.

    The directory appears whole or not at all.

    Raises:
        CheckpointError: it can't be written. BackboneError: the backbone can't be loaded.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        if (own := _own_model(paths)) is not None:
            shutil.copytree(own, temporary, dirs_exist_ok=True)
            done = f"{own}, copied: the backbone itself was trained"
        else:
            backbone = load_trained_backbone(paths)
            # transformers imports DeepSpeed to save, which warns where it has to guess
            os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
            backbone.model.save_pretrained(temporary, safe_serialization=True)
            _with_template(backbone.tokenizer, paths.chat_template).save_pretrained(temporary)
            form = f"dequantised from {paths.quantization}, " if paths.quantization else ""
            done = f"{paths.base_model}, {form}adapter folded in, {_dtype_name(backbone)}"
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except WRITE_ERRORS as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(write_failure("the merged backbone", target, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return done


def _own_model(paths: ModelPaths) -> Path | None:
    model = paths.home / MODEL
    return model if (model / "config.json").is_file() else None


def _with_template(tokenizer: Any, name: str | None) -> Any:
    """The tokenizer with the chat template that the run was trained in, where it has none of its own."""
    if name in TEMPLATES and not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = TEMPLATES[name].source
    return tokenizer


def _dtype_name(backbone: Backbone) -> str:
    return str(backbone.dtype).removeprefix("torch.")
