"""Which layout of heads a directory holds, told from file names and configs. Reads no weights, needs no torch.

Layouts: "draft" (any kind but Medusa), "reference" (Medusa: ours, the public code's, TGI's), "vllm", and "model": a
Medusa-2 full model, whose state dict has `medusa_head.{i}...` beside the backbone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

DRAFT = "draft.safetensors"
SAFETENSORS = "medusa_lm_head.safetensors"
PICKLED = "medusa_lm_head.pt"
CONFIG = "config.json"
MODEL_FILES = ("model.safetensors", "pytorch_model.bin")
#: Before the heads' own names in the state dict of a Medusa-2 full model.
PREFIXES = ("medusa_head.", "medusa_heads.")

Layout = Literal["draft", "reference", "vllm", "model"]


def heads_layout(directory: Path) -> Layout | None:
    """The layout of the heads in `directory`; None where it holds none."""
    if (directory / DRAFT).is_file():
        return "draft"
    if (directory / SAFETENSORS).is_file() or (directory / PICKLED).is_file():
        return "reference"
    config = _json(directory / CONFIG)
    if config.get("model_type") == "medusa" and any(directory.glob("*.safetensors")):
        return "vllm"
    return "model" if any(True for _ in shards_with_heads(directory)) else None


def heads_files(directory: Path) -> list[Path]:
    """The files that hold the heads in `directory`; empty where it holds none."""
    layout = heads_layout(directory)
    if layout == "draft":
        return [directory / DRAFT]
    if layout == "reference":
        return [path for name in (SAFETENSORS, PICKLED) if (path := directory / name).is_file()][:1]
    if layout == "vllm":
        return sorted(directory.glob("*.safetensors"))
    return sorted(set(shards_with_heads(directory)))


def shards_with_heads(directory: Path) -> Iterator[Path]:
    """The weight files of a full model that hold heads, some of them repeatedly."""
    for name in MODEL_FILES:
        if index := _json(directory / f"{name}.index.json").get("weight_map"):
            yield from (directory / file for key, file in index.items() if key.startswith(PREFIXES))
            return
        path = directory / name
        if path.is_file():
            if path.suffix == ".safetensors":
                found = any(key.startswith(PREFIXES) for key in _safetensors_names(path))
            else:
                found = "medusa_num_heads" in _json(directory / CONFIG)  # a pickle is not opened to look
            if found:
                yield path
            return


def _safetensors_names(path: Path) -> list[str]:
    """Names in a safetensors file, from its header (eight bytes of length, then JSON); none where it is damaged."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 100_000_000:  # the format's own limit
                return []
            header = json.loads(file.read(length))
    except (OSError, ValueError):
        return []
    return list(header) if isinstance(header, dict) else []


def _json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping; empty where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
