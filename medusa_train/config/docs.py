"""Generate documentation of the keys: JSON Schema, Markdown tables, and the resolved values of a
configuration.

`python -m medusa_train.config.docs` rewrites `configs/schema.json` and `docs/configuration.md`.
"""

from __future__ import annotations

import json
import types
import typing
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined

from medusa_train.config.draft_sections import LOOKUPS, SECTIONS
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import (
    DatasetConfig,
    EvalConfig,
    ExportConfig,
    SelfDistillConfig,
    TrainConfig,
)
from medusa_train.config.types import INTERNAL, Config, format_value

DIALECT = "http://json-schema.org/draft-07/schema#"
#: pydantic's names of limits on optional types -> JSON Schema's.
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_NULL = {"type": "null"}
_IGNORED = "accepted and ignored (Axolotl key without a meaning here)"


class _Generator(GenerateJsonSchema):
    """Describes keys without titles; those with a default may be empty, which means the default."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        value = super().default_schema(schema)
        default = value.pop("default", None)
        forms = []
        for form in value.get("anyOf", [value]):
            renamed = {_LIMITS.get(key, key): limit for key, limit in form.items()}
            if renamed != _NULL:
                forms.append(renamed)
        return {"default": default, "anyOf": [*forms, _NULL]}


def json_schema(cls: type[Config], title: str) -> dict[str, Any]:
    """Return the JSON Schema of a YAML file for `cls`: type, limits, default and description of
    every key.
    """
    schema = cls.model_json_schema(mode="validation", schema_generator=_Generator)
    schema["properties"] |= {
        name: {"description": _IGNORED} for name in sorted(cls.ignored_axolotl_keys)
    }
    _drop_internal(schema)
    return {"$schema": DIALECT, **schema, "title": title}


def _drop_internal(schema: Any) -> None:
    """Drop from a schema, in place, what keys say for this program alone."""
    if isinstance(schema, list):
        for part in schema:
            _drop_internal(part)
    if isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            for described in properties.values():
                for name in INTERNAL:
                    described.pop(name, None)
        for part in schema.values():
            _drop_internal(part)


def schema_text(cls: type[Config], title: str) -> str:
    """Format `json_schema` as text."""
    return json.dumps(json_schema(cls, title), indent=1) + "\n"


_COMMENT_COLUMN = 56


def format_config(cfg: Config) -> str:
    """Format every key with its resolved value, followed by its origin in a comment.

    The origin is a location in a file (`configs/x.yaml:12`), an override, a flag, `default`, or
    `derived`. Keys that have no effect given the others are marked `no effect`.
    """
    values = cfg.model_dump(mode="json")
    ineffective = {*cfg.ineffective_keys, *cfg.ignored}
    lines = []
    for name, field in type(cfg).model_fields.items():
        default = "default" if getattr(cfg, name) == field.default else "derived"
        origin = ", ".join(cfg.origin(name)) or default
        if name in ineffective:
            origin += ", no effect"
        text = f"{name}: {_inline(values[name])}"
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {origin}")
    return "\n".join(lines) + "\n"


def _inline(value: object) -> str:
    """Format a value as one line of YAML, without the empty keys of list items."""
    if isinstance(value, list):
        value = [_without_empty_keys(entry) for entry in value]
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9
    )
    return text.removesuffix("...\n").strip()


def _without_empty_keys(entry: object) -> object:
    if not isinstance(entry, dict):
        return entry
    return {key: item for key, item in entry.items() if item is not None}


#: The JSON Schema of `medusa-train`, referenced by the first line of the shipped configurations.
SCHEMA, TITLE = "configs/schema.json", "A configuration of medusa-train"
#: The key reference.
REFERENCE = "docs/configuration.md"
START, END = "<!-- keys:start -->", "<!-- keys:end -->"


def key_reference() -> str:
    """Return the tables of all commands, between the markers `START` and `END`."""
    classes: dict[str, type[BaseModel]] = {
        "medusa-train": TrainConfig,
        "medusa-train: entries of `datasets`": DatasetConfig,
        **{f"medusa-train: section `{name}`": section for name, section in SECTIONS.items()},
        "medusa-selfdistill": SelfDistillConfig,
        "medusa-eval": EvalConfig,
        **{f"medusa-eval: section `{name}`": section for section, name in LOOKUPS.values()},
        "medusa-export": ExportConfig,
    }
    tables = [f"## {title}\n\n{key_table(cls)}" for title, cls in classes.items()]
    return "\n\n".join([START, *tables, END])


def replace_reference(text: str) -> str:
    """Replace the tables between the markers in `text` by generated ones."""
    before, _, rest = text.partition(START)
    return before + key_reference() + rest.partition(END)[2]


def key_table(cls: type[BaseModel]) -> str:
    """Return a Markdown table of the keys of `cls`: name, type, default, description."""
    rows = ["| key | type | default | description |", "|---|---|---|---|"]
    for name, field in cls.model_fields.items():
        if field.default is PydanticUndefined:
            default = "required"
        elif field.default is None:
            default = ""
        else:
            default = f"`{_default(field.default)}`"
        description = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type_name(field.annotation)} | {default} | {description} |")
    return "\n".join(rows)


def _default(value: Any) -> str:
    """Format a default as in YAML."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, str):
        return value
    return format_value(value)


def _type_name(annotation: Any) -> str:
    """Name a type for users of YAML."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        names = [_type_name(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(names))
    if origin in (list, tuple):
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    plain = {bool: "boolean", int: "integer", float: "number", str: "text"}
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return str(annotation)


if __name__ == "__main__":
    reference = PROJECT_ROOT / REFERENCE
    reference.write_text(replace_reference(reference.read_text(encoding="utf-8")), encoding="utf-8")
    (PROJECT_ROOT / SCHEMA).write_text(schema_text(TrainConfig, TITLE), encoding="utf-8")
