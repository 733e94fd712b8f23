"""The model of self-distillation, the path of the output file, and the settings that are recorded
with the output. This module imports torch only to read a model's files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_train.config.paths import expand_user, public_name, resolve_path
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.selfdistill.prompts import short_name

if TYPE_CHECKING:
    from medusa_train.checkpoint.resolve import ModelPaths


def resolve_model_paths(cfg: SelfDistillConfig) -> ModelPaths:
    """Return the paths of the target model, its adapter and, if configured, the heads.

    `base_model` may be a run. Then its trained target model is used, with the adapter merged.
    """
    from medusa_train.checkpoint.resolve import resolve_model

    model = cfg.heads
    target_model = cfg.base_model
    directory = resolve_path(target_model) if target_model is not None and model is None else None
    if directory and (directory / "heads").is_dir() and (directory / "config.yaml").is_file():
        model, target_model = target_model, None
    paths = resolve_model(
        model,
        target_model,
        None,
        chat_template=cfg.chat_template,
        chat_template_kwargs=cfg.chat_template_kwargs,
        special_tokens=cfg.special_tokens,
        trust_remote_code=cfg.trust_remote_code,
    )
    return paths if cfg.heads is not None else replace(paths, heads=None, tree=None)


def model_name(cfg: SelfDistillConfig) -> str:
    """Return the model's name in the output.

    A target model that a run trained is named after the run.
    """
    if cfg.engine == "openai":
        return str(cfg.base_model)  # checked with the configuration
    if cfg.base_model is not None:
        return public_name(cfg.base_model)
    paths = resolve_model_paths(cfg)
    is_trained = paths.adapter is not None or Path(paths.target_model).is_relative_to(paths.home)
    return public_name(str(paths.home) if is_trained else paths.target_model)


def weights_digest(cfg: SelfDistillConfig) -> str | None:
    """Return a hash of the weights of a model or heads, if the output shows only the last part of
    the path.

    The hash tells models apart that have the same name in the output, such as `a/merged` and
    `b/merged`. None if the name is unambiguous, and for servers.
    """
    from medusa_train.checkpoint.digest import digest_files

    if cfg.engine == "openai":
        return None
    files: list[Path] = []
    for path in (Path(name).expanduser() for name in (cfg.base_model, cfg.heads) if name):
        # only directories whose name in the output is not the whole path
        if path.is_absolute() and public_name(str(path)) == path.name:
            for folder in ("", "adapter/", "heads/"):
                for suffix in ("safetensors", "bin"):
                    files.extend(path.glob(f"{folder}*.{suffix}"))
    return digest_files(files) if files else None


def resolve_dtype(cfg: SelfDistillConfig, note: Callable[[str], None]) -> str | None:
    """Return the model's dtype; None for a server. `note` is called with a line if `auto` is slow
    on this machine.
    """
    if cfg.engine == "openai":
        return None
    if cfg.dtype != "auto":
        return cfg.dtype
    from medusa_train.checkpoint.load_model import auto_dtype_of  # imports torch

    return auto_dtype_of(resolve_model_paths(cfg), note)


def output_path(cfg: SelfDistillConfig) -> Path:
    """Return the path of the output file."""
    if cfg.output is not None:
        return expand_user(cfg.output)
    return Path("runs") / "selfdistill" / f"{short_name(cfg.seed_dataset)}.jsonl"


def record_metadata(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Return the fields of every output line that record how it was generated."""
    metadata: dict[str, Any] = {"model": model_name(cfg), "sampling": _sampling(cfg, dtype)}
    if cfg.mode != "replay":
        metadata["mode"] = cfg.mode
    return metadata


def output_settings(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Return all settings that a conversation depends on. A missing key equals None.

    Keys that were added later are left out at their default, so that files of earlier versions can
    be continued. The selection of prompts is left out, so that a run can be extended to more
    prompts. The server's address is left out too.
    """
    usual_tags = SelfDistillConfig.model_fields["reasoning_tags"].default
    return _without_none(
        model=model_name(cfg),
        seed_dataset=public_name(cfg.seed_dataset),
        type=cfg.type,
        chat_template=cfg.chat_template,
        **_sampling(cfg, dtype),
        drop_truncated=cfg.drop_truncated,
        split=cfg.split,
        name=cfg.name,
        max_turns=cfg.max_turns,
        heads=cfg.heads and public_name(cfg.heads),
        weights=weights_digest(cfg),
        drop_looping=cfg.drop_looping or None,
        engine="openai" if cfg.engine == "openai" else None,
        chat_template_kwargs=cfg.chat_template_kwargs,
        special_tokens=cfg.special_tokens,
        stop_tokens=_added_stop_tokens(cfg),
        reasoning_tags=None if cfg.reasoning_tags == usual_tags else list(cfg.reasoning_tags),
        mode=None if cfg.mode == "replay" else cfg.mode,
        rounds=cfg.rounds if cfg.mode == "selftalk" else None,
    )


def _added_stop_tokens(cfg: SelfDistillConfig) -> list[int] | None:
    """Return the tokens that end answers in addition to the generation config's, at which earlier
    versions did not stop; None if there are none, and for servers.
    """
    if cfg.engine == "openai":
        return None
    from medusa_train.checkpoint.load_model import added_stop_tokens

    return list(added_stop_tokens(resolve_model_paths(cfg))) or None


def _sampling(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    return _without_none(
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
        dtype=dtype,
        top_k=cfg.top_k,
    )


def _without_none(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
