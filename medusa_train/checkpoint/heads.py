"""Save draft heads to a directory, and load heads that this program, the public Medusa code, TGI or
vLLM wrote.

Medusa heads are stored in the public code's layout (`reference`), or exported to vLLM's (`vllm`).
Other drafts have our own layout: draft.safetensors with the names of their state dict, and
config.json with their settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from medusa_train import checksums
from medusa_train.checkpoint.dflash_layout import from_dflash
from medusa_train.checkpoint.eagle3_layouts import from_eagle3
from medusa_train.checkpoint.medusa_layouts import (
    LM_HEAD_0,
    TOKEN_MAP,
    FileLayout,
    HeadTensors,
    checked_token_map,
    from_files,
    names_in_files,
)
from medusa_train.checkpoint.resolve import (
    DRAFT,
    HEADS_CONFIG,
    PICKLED,
    PREFIXES,
    SAFETENSORS,
    HeadFiles,
    find_heads,
    heads_of_other_kinds,
    named_target_model,
)
from medusa_train.checkpoint.serialize import (
    read_json,
    read_pickled_tensors,
    read_tensors,
    write_json,
    write_pickled_tensors,
    write_tensors,
)
from medusa_train.config.draft_sections import DRAFT_CONFIGS
from medusa_train.config.types import format_value
from medusa_train.errors import CheckpointError
from medusa_train.io import WRITE_ERRORS, replace_file, warn_once, write_failure
from medusa_train.models.drafts import DRAFTS, draft_name
from medusa_train.models.drafts.base import Draft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.finite import describe_not_finite
from medusa_train.models.target_model import TargetModel

VLLM_WEIGHTS = "model.safetensors"
#: Entries of config.json that are not settings of a draft.
_NOT_SETTINGS = ("draft", "base_model_name_or_path")
#: Integer tensors: maps between the tokens of the draft and of the target model.
_MAPS = (TOKEN_MAP, "d2t", "t2d")
#: Parameters of a draft's `__init__` that are not settings in config.json.
_NOT_IN_JSON = ("target_model", "token_map", "dtype")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
#: Limit on the number of heads, layers or blocks, so that nothing huge is built from a damaged
#: file.
_MAX_SETTING = 1000
#: Entries of config.json that are read, or do not concern Medusa heads. `_KNOWN_ENTRIES` adds those
#: of each layout.
_GENERAL = frozenset(
    {
        "_name_or_path",
        "architectures",
        "base_model_name_or_path",
        "dtype",
        "hidden_size",
        "model_type",
        "torch_dtype",
        "transformers_version",
        "vocab_size",
    }
)
_KNOWN_ENTRIES = {
    "reference": _GENERAL
    | {
        "medusa_markov_rank",
        "medusa_num_heads",
        "medusa_num_layers",
        "medusa_vocab_size",
        "version",
    },
    "vllm": _GENERAL
    | {
        "max_paths",
        "max_seq_len",
        "medusa_fc_bias",
        "medusa_vocab_size",
        "num_heads",
        "num_hidden_layers",
        "num_lookahead_tokens",
        "original_lm_head",
        "topk",
        "truncated_vocab_size",
    },
}
#: Layout -> entries of config.json for the numbers of heads and blocks -> attribute of
#: `HeadTensors`.
_STATED = {
    "reference": {"medusa_num_heads": "num_heads", "medusa_num_layers": "num_layers"},
    "vllm": {"num_heads": "num_heads", "num_hidden_layers": "num_layers"},
}


# Saving


def save_draft(draft: Draft, directory: Path | str, target_model_name: str) -> Path:
    """Save a draft of any kind in its dtype. Each file is written atomically.

    Weights of the target model are not saved.
    """
    directory = Path(directory)
    state = dict(draft.state_dict())
    if isinstance(draft, MedusaDraft):
        target_model_tokens = None
        if draft.token_map is not None:
            target_model_tokens = draft.vocab_size
        heads = HeadTensors(
            draft.num_heads, draft.num_layers, state, target_model_name, target_model_tokens
        )
        return write_heads(heads, directory)
    config = {
        "draft": draft_name(draft),
        **draft.settings,
        "base_model_name_or_path": target_model_name,
    }
    write_weights(directory, DRAFT, state, config)
    return directory


def write_heads(
    heads: HeadTensors,
    directory: Path | str,
    *,
    pickled: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write Medusa heads in the public code's layout: medusa_lm_head.safetensors and config.json.

    The token_map of a reduced vocabulary and the matrices of a Markov bias are written as well, but
    only this program reads them.

    Args:
        pickled: also write medusa_lm_head.pt, which the public code reads.
        config: further keys of config.json (TensorRT-LLM expects the target model's keys there).
    """
    directory = Path(directory)
    tensors = names_in_files(heads.state, heads.num_layers)
    keys = {
        **(config or {}),
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "base_model_name_or_path": heads.target_model_name,
    }
    if heads.token_map is not None:
        keys |= {"medusa_vocab_size": len(heads.token_map), "vocab_size": heads.vocab_size}
    if heads.markov_rank:
        keys["medusa_markov_rank"] = heads.markov_rank
    write_weights(directory, SAFETENSORS, tensors, keys, pickled=PICKLED if pickled else None)
    return directory


def write_weights(
    directory: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    pickled: str | None = None,
) -> None:
    """Write a weight file and config.json, each atomically. If `pickled` is the name of a `.pt`
    file, write the weights to it too.
    """

    def write_with_checksum(path: Path) -> None:
        write_tensors(path, tensors, metadata={checksums.NAME: checksums.EMPTY})
        checksums.write_checksum(path)

    try:
        replace_file(directory / name, write_with_checksum)
        if pickled is not None:
            replace_file(directory / pickled, lambda path: write_pickled_tensors(path, tensors))
        replace_file(directory / HEADS_CONFIG, lambda path: write_json(path, config))
    except WRITE_ERRORS as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(write_failure("the heads", directory, error, size)) from error


# Reading files


def read_heads(directory: Path | str) -> HeadTensors:
    """Read the Medusa heads in a directory, in the public code's, TGI's or vLLM's layout, or from a
    Medusa-2 full model.

    Heads and layers are counted in the tensors, because published configs state too few.
    """
    head_files = find_heads(Path(directory))
    if head_files.layout == "draft":
        raise CheckpointError(
            f"{directory}: holds a draft of another kind than Medusa; other programs have no layout"
            " for it. Decode with it here (medusa-eval, medusa_train.load)."
        )
    return _medusa_heads(head_files, *_read_files(head_files))


def read_draft(directory: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the state dict and the settings of an EAGLE-3 or DFlash draft, in our layout or in one
    that servers read.
    """
    head_files = find_heads(directory)
    tensors, config = _read_files(head_files)
    if config.get("draft") != kind:
        title = DRAFT_CONFIGS[kind].title
        raise CheckpointError(f"{directory}: holds no {title} draft")
    return tensors, _settings(config, head_files.directory / HEADS_CONFIG)


def read_token_map(directory: Path) -> Tensor | None:
    """Read the reduced vocabulary of a draft of any kind: the token id of each logit, int64 [N];
    None if its heads predict all tokens.
    """
    head_files = find_heads(directory)
    tensors, config = _read_files(head_files)
    if head_files.layout in ("draft", "eagle3", "dflash"):
        return tensors.get(TOKEN_MAP)
    return _medusa_heads(head_files, tensors, config).token_map


@contextmanager
def _naming(source: Path) -> Iterator[None]:
    """Prefix the errors of the block with the file or directory that is read."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _read_files(head_files: HeadFiles) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and config.json. For EAGLE-3 and DFlash drafts in a server's layout, they
    are converted to what `save_draft` writes.
    """
    directory, layout, files = head_files
    if layout is None:
        raise CheckpointError(
            f"{directory}: no Medusa heads here (neither {SAFETENSORS} nor {PICKLED}, no directory"
            f" in vLLM's layout, no model with {PREFIXES[0]}* weights)"
        )
    if not files:
        raise CheckpointError(
            f"{directory}: config.json describes a draft, but there are no weights next to"
            " it (*.safetensors, pytorch_model*.bin)"
        )
    other_files = heads_of_other_kinds(head_files)
    if other_files:
        raise CheckpointError(
            f"{directory}: holds heads of two kinds, {files[0].name} and {other_files[0]}; move one"
            " of them to a directory of its own"
        )
    # 1. Read config.json, which Medusa heads may lack.
    needs_config = layout not in ("reference", "model")
    config = {}
    if needs_config or (directory / HEADS_CONFIG).is_file():
        config = read_json(directory / HEADS_CONFIG)
        if not isinstance(config, dict):
            raise CheckpointError(f"{directory / HEADS_CONFIG}: expected a mapping of keys")
    # 2. Read the tensors, without the target model's.
    tensors: dict[str, Tensor] = {}
    for path in files:
        if path.suffix == ".safetensors":
            if layout != "model":  # the heads are only a small part of a large file
                checksums.check(path, expected_here=layout in ("draft", "reference"))
            tensors |= read_tensors(path, PREFIXES if layout == "model" else ("",))
        else:
            tensors |= read_pickled_tensors(path)
    if layout == "model":
        tensors = {name: t for name, t in tensors.items() if name.startswith(PREFIXES)}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and name not in _MAPS:
            raise CheckpointError(
                f"{directory}: {name} holds whole numbers ({tensor.dtype}), not weights: quantized"
                " heads are not read"
            )
    problem = describe_not_finite(tensors.items())
    if problem is not None:
        raise CheckpointError(
            f"{directory}: {problem}: the file is damaged, or training failed; use an earlier"
            " checkpoint, or train again"
        )
    # 3. Convert the names and the config to ours.
    if layout in ("eagle3", "dflash"):
        target_model_name = named_target_model(config)
        read = from_eagle3 if layout == "eagle3" else from_dflash
        with _naming(directory):
            tensors, settings, unread = read(tensors, config)
        if unread:
            warn_once(f"{directory}: not read: {', '.join(unread)}")
        config = {"draft": layout, **settings, "base_model_name_or_path": target_model_name}
    return tensors, config


def _medusa_heads(
    head_files: HeadFiles, tensors: dict[str, Tensor], config: Mapping[str, Any]
) -> HeadTensors:
    """Build Medusa heads from tensors with a layout's names, and warn about what is not used."""
    directory, layout, files = head_files
    source = files[0] if len(files) == 1 else directory
    file_layout: FileLayout = "vllm" if layout == "vllm" else "reference"
    with _naming(source):
        heads = from_files(tensors, config, file_layout)
    for note in _notes_on_config(heads, tensors, config, layout):
        warn_once(f"{source}: {note}")
    if heads.token_map is not None and isinstance(config.get("vocab_size"), int):
        heads = replace(heads, target_model_tokens=config["vocab_size"])
    name = config.get("base_model_name_or_path")
    if layout == "model":
        name = str(directory)
    return replace(heads, target_model_name=name if isinstance(name, str) else None)


def _notes_on_config(
    heads: HeadTensors, tensors: Mapping[str, Tensor], config: Mapping[str, Any], layout: str | None
) -> Iterator[str]:
    """Yield notes if config.json does not match the tensors, or has entries that are not read.

    The entries are not listed if config.json also has a target model's entries, as for TensorRT-LLM
    and in full models.
    """
    if layout == "vllm" and not config.get("medusa_fc_bias", False):
        biases = [t for name, t in tensors.items() if ".layers." in name and name.endswith(".bias")]
        if any(bool(bias.any()) for bias in biases):
            yield (
                "the biases of the blocks are not used, as in vLLM, since config.json lacks"
                " medusa_fc_bias: true"
            )
    for entry, attribute in _STATED.get(layout or "", {}).items():
        stated = config.get(entry)
        actual = getattr(heads, attribute)
        if isinstance(stated, int) and stated != actual:
            yield f"config.json has {entry}: {stated}, the tensors are of {actual}: all are used"
    if layout == "vllm" or (layout == "reference" and "num_attention_heads" not in config):
        unread = sorted(set(config) - _KNOWN_ENTRIES[layout])
        if unread:
            yield f"config.json, not read: {', '.join(unread)}"


def _settings(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings in a draft's config.json; check that each has the type of the draft's
    parameter.
    """
    kind = config["draft"]
    settings = {name: value for name, value in config.items() if name not in _NOT_SETTINGS}
    types = get_type_hints(DRAFTS[kind].__init__)
    for name, value in settings.items():
        if isinstance(value, Tensor):  # a token map, read from a server's layout
            continue
        if name not in types or name in _NOT_IN_JSON:
            raise CheckpointError(
                f"{path}: not valid settings of a {kind} draft: {name} is none of them; remove it,"
                " or use the version that wrote it"
            )
        try:
            TypeAdapter(types[name], config=_STRICT).validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise CheckpointError(
                f"{path}: not valid settings of a {kind} draft: {name}: {format_value(value)}:"
                f" {reason}"
            ) from None
        is_number = isinstance(value, int) and not name.endswith(
            ("_size", "_id", "window", "anchors")
        )
        if is_number and value > _MAX_SETTING:
            raise CheckpointError(f"{path}: {name}: {format_value(value)} is more than a draft has")
    layers = settings.get("layers")
    if kind == "eagle3" and layers is not None and len(layers) != 3:
        raise CheckpointError(f"{path}: layers must be three numbers, it is {layers!r}")
    return settings


# Loading for a target model


def load_draft(
    directory: Path | str, target_model: TargetModel, dtype: torch.dtype | None = None
) -> Draft:
    """Load a draft of any kind for `target_model`, on its device; `dtype` defaults to its dtype."""
    # 1. Read the files.
    head_files = find_heads(Path(directory))
    tensors, config = _read_files(head_files)
    if head_files.layout not in ("draft", "eagle3", "dflash"):
        return _new_medusa(
            _medusa_heads(head_files, tensors, config), head_files.directory, target_model, dtype
        )
    is_eagle3 = head_files.layout == "eagle3"  # an EAGLE-3 draft in a server's layout
    if is_eagle3:
        for problem in _problems_with_target(tensors, target_model, config):
            raise _does_not_fit(head_files.directory, target_model, problem, config)
    # 2. Build a draft with these settings.
    draft = _new_draft(config, head_files.directory, tensors, target_model, dtype)
    draft_state = draft.state_dict()
    if is_eagle3 and LM_HEAD_0 not in tensors:  # like servers, use the target model's lm_head
        tensors |= {name: t for name, t in draft_state.items() if name.startswith("lm_heads.")}
    elif is_eagle3 and "lm_heads.0.bias" in draft_state:  # servers have no bias
        tensors["lm_heads.0.bias"] = torch.zeros_like(draft_state["lm_heads.0.bias"])
    # 3. Load its weights.
    try:
        draft.load_state_dict(tensors)
    except RuntimeError as error:
        error_line = str(error).splitlines()[1].strip()  # the first line has the draft's class name
        names_differ = error_line.startswith(("Missing key", "Unexpected key"))
        # with equal names in our layout, only widths differ, which are the target model's
        if head_files.layout != "draft" or names_differ:
            raise CheckpointError(
                f"{head_files.directory}: the tensors are not those that config.json describes:"
                f" {error_line}"
            ) from None
        raise _does_not_fit(
            head_files.directory / DRAFT, target_model, error_line, config
        ) from None
    return draft.eval()


def _problems_with_target(
    tensors: Mapping[str, Tensor], target_model: TargetModel, config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield in what an EAGLE-3 draft in a server's layout does not fit `target_model`."""
    width = tensors["fc.weight"].shape[1] // 3
    tables = {"embeddings": tensors.get("embed_tokens.weight")}
    if TOKEN_MAP not in tensors:
        tables["lm_head"] = tensors.get(LM_HEAD_0)
    last_layer = max(config.get("layers") or [0])
    if width != target_model.hidden_size:
        yield f"fc reads states of {width}, the target model has {target_model.hidden_size}"
    for name, table in tables.items():
        if table is not None and len(table) != target_model.vocab_size:
            yield f"{name} of {len(table)} tokens, the target model has {target_model.vocab_size}"
    if last_layer > target_model.num_layers:
        yield (
            f"reads states after {last_layer} layers, the target model has"
            f" {target_model.num_layers}"
        )


def _does_not_fit(
    path: Path, target_model: TargetModel, problem: str, config: Mapping[str, Any]
) -> CheckpointError:
    """Return the error for a draft that was trained for another target model."""
    target_model_name = config.get("base_model_name_or_path")
    trained_on = f" ({target_model_name})" if target_model_name else ""
    return CheckpointError(
        f"{path}: does not fit {target_model.name or 'the target model'} ({problem}). Name the"
        f" target model it was trained on{trained_on}."
    )


def _new_draft(
    config: Mapping[str, Any],
    directory: Path,
    tensors: Mapping[str, Tensor],
    target_model: TargetModel,
    dtype: torch.dtype | None,
) -> Draft:
    """Build an untrained draft with the settings in `config` and the vocabulary in `tensors`."""
    path = directory / HEADS_CONFIG
    kind = config.get("draft")
    if not isinstance(kind, str) or kind not in DRAFTS:
        raise CheckpointError(f"{path}: draft: {kind!r} is none of {', '.join(DRAFTS)}")
    settings = _settings(config, path)
    if settings.get("vocab_size") is not None:
        source = directory / DRAFT
        if TOKEN_MAP not in tensors:
            raise CheckpointError(f"{source}: {TOKEN_MAP} is missing, but {path} has vocab_size")
        with _naming(source):
            settings[TOKEN_MAP] = checked_token_map(tensors)
        largest_token = int(settings[TOKEN_MAP].max())
        if largest_token >= target_model.vocab_size:
            problem = (
                f"{TOKEN_MAP} has the token {largest_token}, the target model"
                f" {target_model.vocab_size} tokens"
            )
            raise _does_not_fit(source, target_model, problem, config)
    try:
        return DRAFTS[kind].from_target_model(target_model, dtype=dtype, **settings)
    except torch.OutOfMemoryError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise CheckpointError(f"{path}: not valid settings of a {kind} draft: {error}") from error


def _new_medusa(
    heads: HeadTensors, directory: Path, target_model: TargetModel, dtype: torch.dtype | None
) -> MedusaDraft:
    """Build a `MedusaDraft` from heads that were read.

    Logit soft cap and scale are the target model's; lm_heads have a bias only if the file has one.
    """
    vocab_size = heads.vocab_size
    if vocab_size is None:
        vocab_size = target_model.vocab_size
    if heads.token_map is not None:
        vocab_size = max(vocab_size, int(heads.token_map.max()) + 1)
    if (heads.hidden_size, vocab_size) != (target_model.hidden_size, target_model.vocab_size):
        problem = (
            f"made for hidden size {heads.hidden_size} and a vocabulary of {vocab_size}, the"
            f" target model has {target_model.hidden_size} and {target_model.vocab_size}"
        )
        config = {"base_model_name_or_path": heads.target_model_name}
        raise _does_not_fit(directory, target_model, problem, config)
    lm_head = target_model.lm_head()
    draft = MedusaDraft(
        heads.hidden_size,
        vocab_size,
        heads.num_heads,
        heads.num_layers,
        bias="lm_heads.0.bias" in heads.state,
        softcap=lm_head.softcap,
        scale=lm_head.scale,
        shared=lm_head if heads.shared else None,
        token_map=heads.token_map,
        markov_rank=heads.markov_rank,
        dtype=dtype or target_model.dtype,
    )
    draft.load_state_dict(heads.state)
    return draft.to(target_model.device)
