"""Whether the files and directories that a configuration names are there. Knows nothing of their content; no torch."""

from __future__ import annotations

from medusa_train.config.paths import names_a_path, resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.data.sources import names_a_file
from medusa_train.errors import MedusaError


def check_inputs(cfg: TrainConfig) -> None:
    """Refuse a configuration of which several inputs are missing, all of them at once and before anything loads.

    A single one is left to whoever reads it, who has more to say about it.

    Raises:
        MedusaError: two or more are missing.
    """
    missing = missing_inputs(cfg)
    if len(missing) > 1:
        raise MedusaError(f"{len(missing)} inputs are missing:\n" + "\n".join(f"  {line}" for line in missing))


def missing_inputs(cfg: TrainConfig) -> list[str]:
    """Name every file or directory of this machine that is not there; names that the hub might know are left out."""
    missing = []
    if resolve_path(cfg.base_model) is None and names_a_path(cfg.base_model):
        missing.append(f"base_model: {cfg.base_model}: no such directory")
    for entry in cfg.datasets:
        if resolve_path(entry.path) is None and names_a_file(entry.path):
            missing.append(f"datasets: {entry.path}: no such file or directory")
    if cfg.lora_model_dir is not None and resolve_path(cfg.lora_model_dir) is None:
        missing.append(f"lora_model_dir: {cfg.lora_model_dir}: no such directory")
    if isinstance(cfg.deepspeed, str) and resolve_path(cfg.deepspeed) is None:
        missing.append(f"deepspeed: {cfg.deepspeed}: no such file")
    return missing
