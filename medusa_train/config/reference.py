"""The tables of keys in the README and the shipped configs' JSON Schema. Knows no values that a user set."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from medusa_train.config.drafts import SECTIONS
from medusa_train.config.json_schema import schema_text
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import DatasetConfig, EvalConfig, ExportConfig, SelfDistillConfig, TrainConfig
from medusa_train.config.types import show

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
    """`text` with everything between the marks made anew; `python -m medusa_train.config.reference` writes it."""
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
