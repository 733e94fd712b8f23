"""What may change when a run is resumed: list the settings behind weights and optimizer that differ
from those of the earlier run, and what that run decided for its device.

Which keys these are is said by `affects` in config/schema.py. Changed data is refused by
data/dataset.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.run_directory import CONFIG
from medusa_train.config.load import load_config
from medusa_train.config.paths import absolute_name
from medusa_train.config.schema import WEIGHT_KEYS, TrainConfig
from medusa_train.errors import ConfigError

#: Keys whose `auto` a run decides once; config.yaml then has true or false.
CHOSEN_FOR_DEVICE = ("torch_compile", "gradient_checkpointing")


def config_of(run: Path) -> TrainConfig | None:
    """Return the configuration of a run; None if it has no readable config.yaml."""
    try:
        return load_config(TrainConfig, run / CONFIG)
    except ConfigError:
        return None


def changed_weight_keys(cfg: TrainConfig, run: Path) -> list[str]:
    """List `key: was A, now B` of the keys behind weights and optimizer; empty if `run` has no
    readable config.yaml.
    """
    config = config_of(run)
    if config is None:
        return []
    before = _weight_keys(config)
    changed = []
    for key, value in _weight_keys(cfg).items():
        if key not in before or before[key] == value:
            continue
        came_with_adapter = key.startswith("lora_") and cfg.lora_model_dir is not None
        if came_with_adapter and key not in cfg.model_fields_set:
            continue
        changed.append(f"{key}: was {json.dumps(before[key])}, now {json.dumps(value)}")
    return changed


def _weight_keys(cfg: TrainConfig) -> dict[str, Any]:
    """Return the values behind weights and optimizer, by key."""
    others = {name: getattr(cfg, name) for name in WEIGHT_KEYS if name not in cfg.ineffective_keys}
    return {**cfg.heads_keys, "base_model": absolute_name(cfg.base_model), **others}


def device_choices_of(run: Path) -> dict[str, bool]:
    """Return what a run did where its configuration may say `auto`, by key; empty if `run` has no
    readable config.yaml.
    """
    before = config_of(run)
    if before is None:
        return {}
    values = {key: getattr(before, key) for key in CHOSEN_FOR_DEVICE}
    return {key: value for key, value in values.items() if isinstance(value, bool)}
