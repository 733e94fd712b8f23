"""Generate documentation of the keys: JSON Schema, Markdown tables, and the resolved values of a
configuration.

`python -m medusa_train.config.docs` rewrites `configs/schema.json` and
`docs/reference/configuration.md`.
"""

from __future__ import annotations

import json
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema

from medusa_train.config.draft_sections import LOOKUPS, SECTIONS
from medusa_train.config.keys import Config, Section
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import (
    DatasetConfig,
    EvalConfig,
    ExportConfig,
    SelfDistillConfig,
    TrainConfig,
)
from medusa_train.config.types import as_list

#: The JSON Schema of `medusa-train`, referenced by the first line of the shipped configurations.
SCHEMA = "configs/schema.json"
#: The key reference.
REFERENCE = "docs/reference/configuration.md"
START, END = "<!-- keys:start -->", "<!-- keys:end -->"
_NULL = {"type": "null"}
#: pydantic's names of limits, for types that are read from text -> JSON Schema's names.
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_IGNORED = {"description": "accepted and ignored (Axolotl key without a meaning here)"}
_COMMENT_COLUMN = 56
#: JSON Schema's names of types -> names for users of YAML.
_TYPES = {"string": "text", "object": "mapping"}


class _Generator(GenerateJsonSchema):
    """Describes keys without titles. A key with a default may be null, which means the default."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        described = super().generate_inner(schema)
        return {_LIMITS.get(name, name): value for name, value in described.items()}

    def function_before_schema(self, schema: Any) -> dict[str, Any]:
        """Describe a list that may also be written as its only item."""
        described = super().function_before_schema(schema)
        if schema["function"]["function"] is not as_list:
            return described
        return {"anyOf": [described["items"], described]}

    def default_schema(self, schema: Any) -> dict[str, Any]:
        described = super().default_schema(schema)
        default = described.pop("default", None)
        forms = [form for form in described.get("anyOf", [described]) if form != _NULL]
        return {"default": default, "anyOf": [*forms, _NULL]}


def json_schema(cls: type[Section]) -> dict[str, Any]:
    """Return the JSON Schema of a YAML file for `cls`: type, limits, default and description of
    every key.
    """
    schema = cls.model_json_schema(mode="validation", schema_generator=_Generator)
    for name in sorted(getattr(cls, "ignored_axolotl_keys", ())):
        schema["properties"][name] = _IGNORED
    return schema


def schema_text() -> str:
    """Return the JSON Schema of `medusa-train` as text."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **json_schema(TrainConfig),
        "title": "A configuration of medusa-train",
    }
    return json.dumps(schema, indent=1) + "\n"


def format_config(cfg: Config) -> str:
    """Format every key with its resolved value, followed by its origin in a comment.

    The origin is a place in a file (`configs/x.yaml:12`), an override, an option, `default`, or
    `derived`. Keys that have no effect given the others are marked `no effect`.
    """
    ineffective = {*cfg.ineffective_keys(), *cfg.ignored}
    lines = []
    for name, value in cfg.model_dump(mode="json").items():
        is_default = getattr(cfg, name) == type(cfg).model_fields[name].default
        origin = ", ".join(cfg.origin(name)) or ("default" if is_default else "derived")
        if name in ineffective:
            origin += ", no effect"
        text = f"{name}: {_inline(value)}"
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {origin}")
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    """Format a value as one line of YAML, without the empty keys of list items."""
    if isinstance(value, list):
        value = [
            {key: item for key, item in entry.items() if item is not None}
            if isinstance(entry, dict)
            else entry
            for entry in value
        ]
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9
    )
    return str(text).removesuffix("...\n").strip()


def key_reference() -> str:
    """Return the tables of all commands, between the markers `START` and `END`."""
    classes: dict[str, type[Section]] = {
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


def key_table(cls: type[Section]) -> str:
    """Return a Markdown table of the keys of `cls`: name, type, default, description."""
    rows = ["| key | type | default | description |", "|---|---|---|---|"]
    described = json_schema(cls)["properties"]
    for name, field in cls.model_fields.items():
        form = described[name]
        default = "required" if field.is_required() else ""
        if isinstance(field.default, float):
            default = f"`{field.default:g}`"
        elif form.get("default") is not None:
            default = f"`{_inline(form['default'])}`"
        meaning = form["description"].replace("|", "\\|")
        rows.append(f"| `{name}` | {_type_name(form)} | {default} | {meaning} |")
    return "\n".join(rows)


def _type_name(form: dict[str, Any]) -> str:
    """Name a type of JSON Schema for users of YAML."""
    forms = [inner for inner in form.get("anyOf", ()) if inner != _NULL]
    if forms and forms[-1].get("items") == forms[0]:  # a list, or its only item
        return _type_name(forms[-1])
    if forms:
        return " or ".join(dict.fromkeys(_type_name(inner) for inner in forms))
    values = form.get("enum") or ([form["const"]] if "const" in form else [])
    if values:
        return ", ".join(f"`{value}`" for value in values)
    kinds = form.get("type", "object")
    kind = kinds if isinstance(kinds, str) else next(kind for kind in kinds if kind != "boolean")
    if kind == "array":
        return f"list of {_type_name(form['items'] if 'items' in form else form['prefixItems'][0])}"
    return _TYPES.get(kind, kind)


if __name__ == "__main__":
    reference = PROJECT_ROOT / REFERENCE
    reference.write_text(replace_reference(reference.read_text(encoding="utf-8")), encoding="utf-8")
    (PROJECT_ROOT / SCHEMA).write_text(schema_text(), encoding="utf-8")
