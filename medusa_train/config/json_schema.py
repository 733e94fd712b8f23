"""The keys of a command as a JSON Schema, for editors that complete and check YAML. Knows no particular key."""

from __future__ import annotations

import json
from typing import Any

from medusa_train.config.base import Config

DIALECT = "http://json-schema.org/draft-07/schema#"
#: pydantic leaves limits of a type that may be null under its own names.
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_ANYTHING = "accepted and ignored: a key of other trainers without a meaning here"


def json_schema(cls: type[Config], title: str) -> dict[str, Any]:
    """The schema of a YAML file for `cls`: every key with type, limits, default and meaning; others are refused.

    What the command takes, the schema takes: every key may be empty (its default), foreign keys hold anything.
    """
    made = cls.model_json_schema(mode="validation")
    required = made.get("required", [])
    properties = _keys(made)
    properties |= {name: {"description": _ANYTHING} for name in sorted(cls.foreign)}
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
