"""Every value of a configuration with its origin, as YAML that can be read again. Knows no particular key."""

from __future__ import annotations

import yaml

from medusa_train.config.base import Config

_COMMENT_COLUMN = 56


def show_config(cfg: Config) -> str:
    """One line per key: its resolved value, and behind a # where it is from.

    Origins: a place in a file (`configs/x.yaml:12`), an override, a flag, `default`, or `follows from other keys`.
    Keys that change nothing beside the others are marked `no effect here`.
    """
    values = cfg.model_dump(mode="json")
    idle = set(cfg.without_effect)
    lines = []
    for name, field in type(cfg).model_fields.items():
        text = f"{name}: {_inline(values[name])}"
        if origin := cfg.origin(name):
            where = ", ".join(origin)
        else:
            where = "default" if getattr(cfg, name) == field.default else "follows from other keys"
        if name in idle or name in cfg.ignored:
            where += ", no effect here"
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {where}")
    return "\n".join(lines) + "\n"


def _inline(value: object) -> str:
    """A value in YAML's one-line form; entries of lists without their empty keys."""
    if isinstance(value, list):
        value = [
            {key: item for key, item in entry.items() if item is not None} if isinstance(entry, dict) else entry
            for entry in value
        ]
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()
