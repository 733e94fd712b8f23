"""The model of self-distillation: its files, names and dtype. Nothing here imports torch, except to
choose a dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_train.config.paths import public_name, resolve_path
from medusa_train.config.schema import SelfDistillConfig

if TYPE_CHECKING:
    from medusa_train.checkpoint.resolve import ModelPaths


def resolve_model_paths(cfg: SelfDistillConfig) -> ModelPaths:
    """Return the paths of the base model, its adapter and, if configured, the heads.

    `base_model` may be a run: its trained base model is used, with the adapter merged.
    """
    from medusa_train.checkpoint.resolve import resolve_model

    model = cfg.heads
    base = cfg.base_model
    if model is None and base is not None and _is_run(base):
        model = base
        base = None
    paths = resolve_model(
        model,
        base,
        None,
        chat_template=cfg.chat_template,
        chat_template_kwargs=cfg.chat_template_kwargs,
        special_tokens=cfg.special_tokens,
        trust_remote_code=cfg.trust_remote_code,
    )
    if cfg.heads is not None:
        return paths
    return replace(paths, heads=None, tree=None)


def _is_run(name: str) -> bool:
    """Return whether `name` is a run directory with heads."""
    directory = resolve_path(name)
    if directory is None:
        return False
    return (directory / "heads").is_dir() and (directory / "config.yaml").is_file()


def model_name(cfg: SelfDistillConfig) -> str:
    """Return the model's name in the output; the trained base model of a run is named after the run."""
    if cfg.engine == "openai":
        return str(cfg.base_model)  # checked with the configuration
    if cfg.base_model is not None:
        return public_name(cfg.base_model)
    paths = resolve_model_paths(cfg)
    is_trained = paths.adapter is not None or Path(paths.base_model).is_relative_to(paths.home)
    return public_name(str(paths.home) if is_trained else paths.base_model)


def weights_digest(cfg: SelfDistillConfig) -> str | None:
    """Return a hash of the weights of a model or heads of which only the last part of the path is
    in the output.

    `a/merged` and `b/merged` have the same name there. None for other names, and for servers.
    """
    from medusa_train.checkpoint.digest import digest_files

    if cfg.engine == "openai":
        return None
    # 1. directories of which the name is not the whole path
    paths = [Path(name).expanduser() for name in (cfg.base_model, cfg.heads) if name]
    shortened = [
        path for path in paths if path.is_absolute() and public_name(str(path)) == path.name
    ]
    if not shortened:
        return None
    # 2. the files of their weights
    files: list[Path] = []
    for path in shortened:
        for folder in ("", "adapter/", "heads/"):
            for suffix in ("safetensors", "bin"):
                files.extend(path.glob(f"{folder}*.{suffix}"))
    return digest_files(files)


def resolve_dtype(cfg: SelfDistillConfig, note: Callable[[str], None]) -> str | None:
    """Return the model's dtype; None for a server. `note` receives why `auto` is slow here."""
    if cfg.engine == "openai":
        return None
    if cfg.dtype != "auto":
        return cfg.dtype
    from medusa_train.checkpoint.load_model import auto_dtype_of  # imports torch

    return auto_dtype_of(resolve_model_paths(cfg), note)
