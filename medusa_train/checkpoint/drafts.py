"""Directories of drafts of any kind: heads/ as a run writes it and as decoding reads it. Knows no training state.

Medusa heads lie in the layout that others read (`layouts.py`). The other kinds, which nobody else reads, lie in
`draft.safetensors`, and config.json names the kind and what it was made with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from medusa_train.checkpoint.disk import WRITE_ERRORS, replace_file, write_failure
from medusa_train.checkpoint.files import read_json, read_tensors, write_json, write_tensors
from medusa_train.checkpoint.found import CONFIG, DRAFT, heads_layout
from medusa_train.checkpoint.layouts import load_heads, save_heads
from medusa_train.errors import CheckpointError
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.models.drafts.kinds import DRAFTS, kind_of
from medusa_train.models.drafts.medusa import MedusaDraft


def save_draft(draft: Draft, directory: Path | str, base_model: str) -> Path:
    """Write heads/, each file whole or not at all, in the draft's own dtype; nothing of the backbone goes in.

    Raises:
        CheckpointError: the directory can't be written.
    """
    directory = Path(directory)
    if isinstance(draft, MedusaDraft):
        return save_heads(draft, directory, base_model)
    tensors = draft.state_dict()
    config = {"draft": kind_of(draft), **draft.settings, "base_model_name_or_path": base_model}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / DRAFT, lambda path: write_tensors(path, tensors))
        replace_file(directory / CONFIG, lambda path: write_json(path, config))
    except WRITE_ERRORS as error:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(
            f"the draft could not be written to {directory}: {write_failure(error, directory, needed)}"
        ) from error
    return directory


def load_draft(directory: Path | str, backbone: Backbone, dtype: torch.dtype | None = None) -> Draft:
    """A draft of any kind ready to decode or train with `backbone`, on its device; dtype by default its own.

    Raises:
        CheckpointError: no draft there, a file that can't be read, or one that was made for another backbone.
        BackboneError: this kind of draft can't be had for the backbone.
    """
    directory = Path(directory)
    if heads_layout(directory) != "draft":
        return load_heads(directory, backbone, dtype)
    config = read_json(directory / CONFIG)
    draft = _make(config, directory / CONFIG, backbone, dtype)
    tensors, wanted = read_tensors(directory / DRAFT), draft.state_dict()
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} belongs to nothing in it" for name in tensors if name not in wanted]
    problems += [
        f"{name} is {list(tensors[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        made_for = config.get("base_model_name_or_path")
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(
            f"{directory / DRAFT}: does not fit {backbone.name or 'the backbone'} ({problems[0]}{more}). "
            f"Name the backbone it was trained on" + (f" ({made_for})." if made_for else ".")
        )
    draft.load_state_dict(tensors)
    return draft.eval()


def _make(config: Any, path: Path, backbone: Backbone, dtype: torch.dtype | None) -> Draft:
    """An untrained draft as a config.json says."""
    kind = config.get("draft") if isinstance(config, dict) else None
    if kind not in DRAFTS:
        raise CheckpointError(f"{path}: draft: {kind!r} is none of {', '.join(DRAFTS)}")
    settings = {name: value for name, value in config.items() if name not in ("draft", "base_model_name_or_path")}
    try:
        return DRAFTS[kind].from_backbone(backbone, dtype=dtype, **settings)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: no {kind} draft can be made of it: {error}") from error
