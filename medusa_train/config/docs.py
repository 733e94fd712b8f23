"""The keys of a command as a JSON Schema, for editors that complete and check YAML. Knows no particular key."""

from __future__ import annotations

import json
import types
import typing
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from medusa_train.config.drafts import SECTIONS
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import DatasetConfig, EvalConfig, ExportConfig, SelfDistillConfig, TrainConfig
from medusa_train.config.types import Config, show

DIALECT = "http://json-schema.org/draft-07/schema#"
#: pydantic leaves limits of a type that may be null under its own names.
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_ANYTHING = "accepted and ignored: a key of other trainers without a meaning here"


def json_schema(cls: type[Config], title: str) -> dict[str, Any]:
    """The schema of a YAML file for `cls`: every key with type, limits, default and meaning; others are refused.

    What the command takes, the schema takes: every key may be empty (its default), ignored Axolotl keys hold anything.
    """
    made = cls.model_json_schema(mode="validation")
    required = made.get("required", [])
    properties = _keys(made)
    properties |= {name: {"description": _ANYTHING} for name in sorted(cls.ignored_axolotl_keys)}
    schema: dict[str, Any] = {
        "$schema": DIALECT,
        "title": title,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    if required:
        schema["required"] = required
    if "$defs" in made:
        schema["definitions"] = {name: _definition(value) for name, value in made["$defs"].items()}
    return schema


def schema_text(cls: type[Config], title: str) -> str:
    """`json_schema` as text, as `--schema` prints it."""
    return json.dumps(json_schema(cls, title), indent=1) + "\n"


def _definition(value: dict[str, Any]) -> dict[str, Any]:
    """A mapping inside a key, such as an entry of `datasets`: its keys may be empty too."""
    return {**_plain(value), "properties": _keys(value)}


def _keys(made: dict[str, Any]) -> dict[str, Any]:
    """The properties of what pydantic made; those that need not be given may be empty."""
    required = made.get("required", [])
    plain = {name: _plain(value) for name, value in made["properties"].items()}
    return {name: value if name in required else _nullable(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
    """Without the titles that pydantic makes of names, and with draft-07's words for definitions and limits."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {
        _LIMITS.get(key, key): _plain(item)
        for key, item in value.items()
        if not (key == "title" and isinstance(item, str))
    }
    if "$ref" in kept:
        kept["$ref"] = kept["$ref"].replace("#/$defs/", "#/definitions/")
    return kept


def _nullable(value: dict[str, Any]) -> dict[str, Any]:
    """The same, or nothing: an empty key means its default."""
    if "anyOf" in value:
        beside = {key: item for key, item in value.items() if key != "anyOf"}  # limits concern numbers alone
        forms = value["anyOf"]
    else:
        beside = {key: value[key] for key in ("description", "default") if key in value}
        forms = [{key: item for key, item in value.items() if key not in beside}]
    if {"type": "null"} not in forms:
        forms = [*forms, {"type": "null"}]
    return {**beside, "anyOf": forms}


_COMMENT_COLUMN = 56


def format_config(cfg: Config) -> str:
    """One line per key: its resolved value, and behind a # where it is from.

    Origins: a place in a file (`configs/x.yaml:12`), an override, a flag, `default`, or `follows from other keys`.
    Keys that change nothing beside the others are marked `no effect here`.
    """
    values = cfg.model_dump(mode="json")
    idle = set(cfg.ineffective_keys)
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


#: What `medusa-train --schema` prints, beside the shipped configs for their editor line.
SCHEMA, TITLE = "configs/schema.json", "A configuration of medusa-train"
START, END = "<!-- keys:start -->", "<!-- keys:end -->"


def key_table(cls: type[BaseModel]) -> str:
    """A Markdown table of every key of `cls`: name, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in cls.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{_default(field.default)}`"
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type_name(field.annotation)} | {default} | {meaning} |")
    return "\n".join(rows)


def key_reference() -> str:
    """The tables of all commands, each under its heading, between the marks that the README carries."""
    classes: dict[str, type[BaseModel]] = {
        "Keys of `medusa-train`": TrainConfig,
        **{f"Keys of `{name}`": section for name, section in SECTIONS.items()},
        "Keys of an entry of `datasets`": DatasetConfig,
        "Keys of `medusa-eval`": EvalConfig,
        "Keys of `medusa-selfdistill`": SelfDistillConfig,
        "Keys of `medusa-export`": ExportConfig,
    }
    parts = [f"### {title}\n\n{key_table(cls)}" for title, cls in classes.items()]
    return "\n\n".join([START, *parts, END])


def replace_reference(text: str) -> str:
    """`text` with everything between the marks made anew; `python -m medusa_train.config.docs` writes it."""
    before, _, rest = text.partition(START)
    return before + key_reference() + rest.partition(END)[2]


def _default(value: Any) -> str:
    """A default as one writes it in YAML."""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return value if isinstance(value, str) else show(value)


def _type_name(annotation: Any) -> str:
    """A type as a reader of YAML knows it."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        names = [_type_name(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(names))
    if origin is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    plain = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    if annotation in plain:
        return plain[annotation]
    return "mapping" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else str(annotation)


if __name__ == "__main__":
    readme = PROJECT_ROOT / "README.md"
    readme.write_text(replace_reference(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (PROJECT_ROOT / SCHEMA).write_text(schema_text(TrainConfig, TITLE), encoding="utf-8")
