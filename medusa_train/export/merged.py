"""The backbone of a joint run as a directory that plain transformers loads. Knows no heads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from medusa_train.checkpoint.disk import WRITE_ERRORS, write_failure
from medusa_train.checkpoint.subject import SubjectPaths
from medusa_train.data.templates import TEMPLATES
from medusa_train.errors import CheckpointError
from medusa_train.models.adapter import Adapter
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import resolve_backbone

MERGED = "merged"
MODEL = "model"


def trained_the_backbone(paths: SubjectPaths) -> bool:
    """Whether the run left an adapter or a backbone of its own."""
    return paths.adapter is not None or _own_model(paths) is not None


def load_trained_backbone(paths: SubjectPaths) -> Backbone:
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


def write_merged(paths: SubjectPaths, target: Path) -> str:
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
        raise CheckpointError(
            f"the merged backbone could not be written to {target}: {write_failure(error, target)}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return done


def _own_model(paths: SubjectPaths) -> Path | None:
    model = paths.home / MODEL
    return model if (model / "config.json").is_file() else None


def _with_template(tokenizer: Any, name: str | None) -> Any:
    """The tokenizer with the chat template that the run was trained in, where it has none of its own."""
    if name in TEMPLATES and not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = TEMPLATES[name].source
    return tokenizer


def _dtype_name(backbone: Backbone) -> str:
    return str(backbone.dtype).removeprefix("torch.")
