"""Directories of Medusa heads on disk: written in the layout that others read, read whoever wrote them.

Knows no training state and no decoding; the names of the weights are `reference.py`'s.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from medusa_train.checkpoint.files import (
    WRITE_ERRORS,
    read_json,
    read_pickled_tensors,
    read_tensors,
    replace_file,
    write_json,
    write_tensors,
)
from medusa_train.checkpoint.reference import HeadTensors, from_reference, to_reference
from medusa_train.errors import CheckpointError
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.medusa import MedusaDraft

SAFETENSORS = "medusa_lm_head.safetensors"
PICKLED = "medusa_lm_head.pt"
CONFIG = "config.json"

_log = logging.getLogger(__name__)


def save_heads(draft: MedusaDraft, directory: Path | str, base_model: str) -> Path:
    """Write heads/: medusa_lm_head.safetensors and config.json, each whole or not at all, in the draft's own dtype.

    Raises:
        CheckpointError: the directory can't be written.
    """
    heads = HeadTensors(draft.num_heads, draft.num_layers, dict(draft.state_dict()), base_model)
    return write_heads(heads, directory)


def write_heads(heads: HeadTensors, directory: Path | str, *, pickled: bool = False) -> Path:
    """Write medusa_lm_head.safetensors and config.json, with `pickled` also the medusa_lm_head.pt of the public code.

    Raises:
        CheckpointError: the directory can't be written.
    """
    directory = Path(directory)
    tensors = to_reference(heads.state, heads.num_layers)
    config = {
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "base_model_name_or_path": heads.base_model,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / SAFETENSORS, lambda path: write_tensors(path, tensors))
        if pickled:
            plain = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            replace_file(directory / PICKLED, lambda path: torch.save(plain, path))
        replace_file(directory / CONFIG, lambda path: write_json(path, config))
    except (*WRITE_ERRORS, RuntimeError) as error:  # torch.save's zip writer raises RuntimeError on a full disk
        raise CheckpointError(f"the heads could not be written to {directory}: {error}") from error
    return directory


def read_heads(directory: Path | str) -> HeadTensors:
    """Read a directory of heads: safetensors where there are, else the public code's `.pt`.

    The tensors are believed where config.json says something else (published ones understate the number of heads);
    a log message says so.

    Raises:
        CheckpointError: no heads there, or files that can't be read or don't belong together.
    """
    directory = Path(directory)
    if (directory / SAFETENSORS).is_file():
        path = directory / SAFETENSORS
        tensors = read_tensors(path)
    elif (directory / PICKLED).is_file():
        path = directory / PICKLED
        tensors = read_pickled_tensors(path)
    else:
        raise CheckpointError(f"{directory}: no Medusa heads here (neither {SAFETENSORS} nor {PICKLED})")
    heads = from_reference(tensors, str(path))
    config = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory / CONFIG}: a mapping of keys is expected")
    for key, found in (("medusa_num_heads", heads.num_heads), ("medusa_num_layers", heads.num_layers)):
        said = config.get(key, found)
        if said != found:
            _log.warning(
                "%s says %s: %s, but the weights hold %d; using %d.", directory / CONFIG, key, said, found, found
            )
    base = config.get("base_model_name_or_path")
    return heads.with_base_model(base if isinstance(base, str) else None)


def load_heads(directory: Path | str, backbone: Backbone, dtype: torch.dtype | None = None) -> MedusaDraft:
    """Heads ready to decode or train with `backbone`, on its device; dtype by default its own.

    Soft cap and scale are the backbone's; a bias only where the file has one.

    Raises:
        CheckpointError: see `read_heads`; or they were made for another hidden size or vocabulary.
    """
    heads = read_heads(directory)
    vocab_size = backbone.vocab_size if heads.vocab_size is None else heads.vocab_size
    if (heads.hidden_size, vocab_size) != (backbone.hidden_size, backbone.vocab_size):
        raise CheckpointError(
            f"{directory}: made for hidden size {heads.hidden_size} and a vocabulary of {vocab_size}, but "
            f"{backbone.name or 'the backbone'} has {backbone.hidden_size} and {backbone.vocab_size}. "
            f"Name the backbone they were trained on" + (f" ({heads.base_model})." if heads.base_model else ".")
        )
    transform = backbone.unembedding()
    draft = MedusaDraft(
        heads.hidden_size,
        vocab_size,
        heads.num_heads,
        heads.num_layers,
        bias="lm_heads.0.bias" in heads.state,
        softcap=transform.softcap,
        scale=transform.scale,
        shared=transform if heads.shared else None,
        dtype=dtype or backbone.dtype,
    )
    draft.load_state_dict(heads.state)
    return draft.to(backbone.device)
