"""Where a run writes, and the settings that its file and its lines record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.config.paths import expand_user, public_name
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.selfdistill.model import model_name, resolve_model_paths, weights_digest
from medusa_train.selfdistill.prompts import short_name


def output_path(cfg: SelfDistillConfig) -> Path:
    """Return the output file."""
    if cfg.output is not None:
        return expand_user(cfg.output)
    return Path("runs") / "selfdistill" / f"{short_name(cfg.seed_dataset)}.jsonl"


def record_metadata(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Return the fields of every output line that tell how it was generated."""
    metadata: dict[str, Any] = {"model": model_name(cfg), "sampling": _sampling(cfg, dtype)}
    if cfg.mode != "replay":
        metadata["mode"] = cfg.mode
    return metadata


def output_settings(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Return all settings that a conversation depends on; missing keys equal None.

    A key at its default is left out if it was added later, so that the files of earlier runs can be
    continued. The selection of prompts is not among them, so that a run can be extended; nor is the
    server's address.
    """
    heads = None
    if cfg.heads is not None:
        heads = public_name(cfg.heads)
    reasoning_tags = None
    if cfg.reasoning_tags != SelfDistillConfig.model_fields["reasoning_tags"].default:
        reasoning_tags = list(cfg.reasoning_tags)
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
        heads=heads,
        weights=weights_digest(cfg),
        drop_looping=cfg.drop_looping or None,
        engine="openai" if cfg.engine == "openai" else None,
        chat_template_kwargs=cfg.chat_template_kwargs,
        special_tokens=cfg.special_tokens,
        stop_tokens=_added_stop_tokens(cfg),
        reasoning_tags=reasoning_tags,
        mode=None if cfg.mode == "replay" else cfg.mode,
        rounds=cfg.rounds if cfg.mode == "selftalk" else None,
    )


def _added_stop_tokens(cfg: SelfDistillConfig) -> list[int] | None:
    """Return the tokens that end answers in addition to those of the generation config, at which earlier
    versions did not stop; None without any, and for servers.
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
