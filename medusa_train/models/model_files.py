"""Find a model by directory or hub name and read its JSON files, without importing torch, which
takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from medusa_train.config.paths import looks_like_path, nearest_path, resolve_path
from medusa_train.errors import CheckpointError, TargetModelError
from medusa_train.hub import hub_is_unreachable, offline_advice
from medusa_train.io import parse_json

#: File that PEFT writes to the directory of an adapter.
ADAPTER_CONFIG = "adapter_config.json"


def find_target_model(name: str) -> tuple[str, dict[str, Any]]:
    """Find a model and read its config.json.

    Returns:
        The argument for `from_pretrained`, and the content of config.json, which is empty for a
        model that must be downloaded from the hub.

    Raises:
        TargetModelError: there is no such directory, no readable config.json in it, or only an
            adapter; or the hub cannot be reached and the model is not in its cache.
    """
    local = resolve_path(name)
    if local is None and (looks_like_path(name) or not _may_be_on_hub(name)):
        similar = nearest_path(name)
        advice = f"; did you mean {similar}?" if similar else ""
        raise TargetModelError(f"base_model {name}: no such directory{advice}")
    source = str(local or name)
    directory = model_directory(source)
    weights = {*directory.glob("model*.safetensors"), *directory.glob("pytorch_model*.bin")}
    # Axolotl writes the model's config.json next to an adapter
    if not weights and (directory / ADAPTER_CONFIG).is_file():
        raise TargetModelError(
            f"base_model {name}: an adapter without its model; merge it, for example by"
            " `axolotl merge-lora`, and set base_model to the directory that this writes"
        )
    path = directory / "config.json"
    if not path.is_file():
        if local is not None:
            raise TargetModelError(f"base_model {name}: not a model directory: no config.json")
        if hub_is_unreachable():
            target = f"models/{Path(name).name}"
            reason = offline_advice(name, "model", target)
            raise missing_from_hub(name, f"{reason}, then set base_model={target}")
        return source, {}
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TargetModelError(f"base_model {name}: cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise TargetModelError(f"base_model {name}: cannot read {path}: it is not a JSON object")
    return source, config


def missing_from_hub(name: str, reason: str) -> TargetModelError:
    """Return the error for a name that is not a directory, and that the hub does not deliver for a
    `reason`.
    """
    # checked only after the hub failed: a local directory may have the name of an owner on the hub
    if similar := nearest_path(name):
        reason = (
            f"no such directory, and no such model on the Hugging Face hub; did you mean {similar}?"
        )
    # the README and the shipped configurations keep models here
    elif name.startswith("models/"):
        reason = (
            "no such directory. `make smollm2-model` writes the model of configs/smollm2_*.yaml;"
            f" for another one, `hf download OWNER/{Path(name).name} --local-dir {name}`"
        )
    return TargetModelError(f"base_model {name}: {reason}")


def model_directory(source: str) -> Path:
    """Return a model's directory, given its path or its hub name in the hub's cache."""
    directory = Path(source)
    if directory.is_dir():
        return directory
    cached = try_to_load_from_cache(source, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    return directory


def _may_be_on_hub(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """Read PEFT's adapter_config.json.

    Raises:
        CheckpointError: it is missing, not JSON, or not the configuration of an adapter.
    """
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{directory}: not an adapter: no adapter_config.json")
    try:
        config: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise CheckpointError(f"{path}: not the configuration of an adapter (no peft_type)")
    return config
