"""Reads an exported directory back and holds it against vLLM's loader; vLLM itself where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.files import read_json, read_tensors
from medusa_train.checkpoint.vllm import loader_problems
from medusa_train.errors import CheckpointError


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
