"""Directories of Medusa heads on disk: written in the layout that others read, read whoever wrote them.

Knows no training state and no decoding; the names of the weights are `reference.py`'s and `vllm.py`'s, which layout a
directory has says `found.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.checkpoint.reference import HeadTensors, from_reference, to_reference
from medusa_train.checkpoint.resolve import CONFIG, DRAFT, PICKLED, PREFIXES, SAFETENSORS, heads_files, heads_layout
from medusa_train.checkpoint.serialize import read_json, read_pickled_tensors, read_tensors, write_json, write_tensors
from medusa_train.checkpoint.vllm import from_vllm, to_vllm
from medusa_train.errors import CheckpointError
from medusa_train.io import WRITE_ERRORS, replace_file, write_failure
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts import DRAFTS, draft_name
from medusa_train.models.drafts.base import Draft
from medusa_train.models.drafts.medusa import MedusaDraft

VLLM_WEIGHTS = "model.safetensors"

_log = logging.getLogger(__name__)


def save_heads(draft: MedusaDraft, directory: Path | str, base_model: str) -> Path:
    """Write heads/: medusa_lm_head.safetensors and config.json, each whole or not at all, in the draft's own dtype.

    Raises:
        CheckpointError: the directory can't be written.
    """
    tokens = None if draft.token_map is None else draft.vocab_size
    heads = HeadTensors(draft.num_heads, draft.num_layers, dict(draft.state_dict()), base_model, tokens)
    return write_heads(heads, directory)


def write_heads(
    heads: HeadTensors,
    directory: Path | str,
    *,
    pickled: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write medusa_lm_head.safetensors and config.json, with `pickled` also the medusa_lm_head.pt of the public code.

    `config` holds further keys of config.json (TensorRT-LLM wants the backbone's there). Heads over a reduced
    vocabulary are written with their token_map, for nobody but this program.

    Raises:
        CheckpointError: the directory can't be written.
    """
    directory = Path(directory)
    tensors = to_reference(heads.state, heads.num_layers)
    keys = {
        **(config or {}),
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "base_model_name_or_path": heads.base_model,
    }
    if heads.token_map is not None:
        keys |= {"medusa_vocab_size": len(heads.token_map), "vocab_size": heads.vocab_size}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / SAFETENSORS, lambda path: write_tensors(path, tensors))
        if pickled:
            plain = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            replace_file(directory / PICKLED, lambda path: torch.save(plain, path))
        replace_file(directory / CONFIG, lambda path: write_json(path, keys))
    except (*WRITE_ERRORS, RuntimeError) as error:  # torch.save's zip writer raises RuntimeError on a full disk
        raise _not_written(directory, tensors, error) from error
    return directory


def write_vllm(heads: HeadTensors, directory: Path | str, lm_head: Tensor | None = None) -> Path:
    """Write the directory that vLLM loads: model.safetensors and config.json.

    Args:
        lm_head: the backbone's matrix [V, d], for heads that share it; of a reduced vocabulary its rows are taken.

    Raises:
        CheckpointError: the directory can't be written, or the heads share a matrix that is not given.
    """
    directory = Path(directory)
    tensors, config = to_vllm(heads, lm_head)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / VLLM_WEIGHTS, lambda path: write_tensors(path, tensors))
        replace_file(directory / CONFIG, lambda path: write_json(path, config))
    except WRITE_ERRORS as error:
        raise _not_written(directory, tensors, error) from error
    return directory


def _not_written(directory: Path, tensors: Mapping[str, Tensor], error: Exception) -> CheckpointError:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return CheckpointError(write_failure("the heads", directory, error, needed))


def read_heads(directory: Path | str) -> HeadTensors:
    """Read a directory of heads, whoever wrote it: ours, the public code's, TGI's, vLLM's, or a Medusa-2 full model.

    The tensors are believed where config.json says something else (published ones understate the number of heads);
    a log message says so.

    Raises:
        CheckpointError: no heads there, or files that can't be read or don't belong together.
    """
    directory = Path(directory)
    layout = heads_layout(directory)
    if layout is None:
        raise CheckpointError(
            f"{directory}: no Medusa heads here (neither {SAFETENSORS} nor {PICKLED}, no directory in vLLM's layout, "
            f"no model that holds {PREFIXES[0]}* weights)"
        )
    if layout == "draft":
        raise CheckpointError(
            f"{directory}: holds a draft of another kind than Medusa; only Medusa heads have layouts that others read. "
            "Decode with it here (medusa-eval, medusa_train.load)."
        )
    files = heads_files(directory)
    config = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory / CONFIG}: a mapping of keys is expected")
    base = config.get("base_model_name_or_path")
    if layout == "model":
        base = str(directory)  # the heads belong to the backbone that lies beside them
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= _read(path, PREFIXES if layout == "model" else ("",))
    source = str(files[0] if len(files) == 1 else directory)
    heads = from_vllm(tensors, config, source) if layout == "vllm" else from_reference(tensors, source)
    _correct(config, directory, heads, vllm=layout == "vllm")
    if heads.token_map is not None and isinstance(config.get("vocab_size"), int):
        heads = replace(heads, backbone_tokens=config["vocab_size"])
    return heads.with_base_model(base if isinstance(base, str) else None)


def _read(path: Path, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of one file whose names begin with one of `prefixes`."""
    if path.suffix == ".safetensors":
        return read_tensors(path, prefixes)
    return {name: tensor for name, tensor in read_pickled_tensors(path).items() if name.startswith(prefixes)}


def _correct(config: Mapping[str, Any], directory: Path, heads: HeadTensors, *, vllm: bool) -> None:
    """Say where config.json counts heads or blocks that are not those of the weights."""
    names = ("num_heads", "num_hidden_layers") if vllm else ("medusa_num_heads", "medusa_num_layers")
    for key, found in zip(names, (heads.num_heads, heads.num_layers), strict=True):
        said = config.get(key, found)
        if said != found:
            _log.warning(
                "%s says %s: %s, but the weights hold %d; using %d.", directory / CONFIG, key, said, found, found
            )


def load_heads(directory: Path | str, backbone: Backbone, dtype: torch.dtype | None = None) -> MedusaDraft:
    """Heads ready to decode or train with `backbone`, on its device; dtype by default its own.

    Soft cap and scale are the backbone's; a bias only where the file has one.

    Raises:
        CheckpointError: see `read_heads`; or they were made for another hidden size or vocabulary.
    """
    heads = read_heads(directory)
    vocab_size = backbone.vocab_size if heads.vocab_size is None else heads.vocab_size
    if heads.token_map is not None:
        vocab_size = max(vocab_size, int(heads.token_map.max()) + 1)
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
        token_map=heads.token_map,
        dtype=dtype or backbone.dtype,
    )
    draft.load_state_dict(heads.state)
    return draft.to(backbone.device)


def save_draft(draft: Draft, directory: Path | str, base_model: str) -> Path:
    """Write heads/, each file whole or not at all, in the draft's own dtype; nothing of the backbone goes in.

    Raises:
        CheckpointError: the directory can't be written.
    """
    directory = Path(directory)
    if isinstance(draft, MedusaDraft):
        return save_heads(draft, directory, base_model)
    tensors = draft.state_dict()
    config = {"draft": draft_name(draft), **draft.settings, "base_model_name_or_path": base_model}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / DRAFT, lambda path: write_tensors(path, tensors))
        replace_file(directory / CONFIG, lambda path: write_json(path, config))
    except WRITE_ERRORS as error:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(write_failure("the draft", directory, error, needed)) from error
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
