"""Say what is wrong with a configuration: where, what is expected, and the nearest valid key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic_core import ErrorDetails

from medusa_train.config.keys import Config, Section
from medusa_train.config.types import format_value
from medusa_train.config.yaml_source import KeyPath, Source

#: Short names that other programs use, with the keys that they mean here.
COMMON_NAMES = {
    "lr": ("learning_rate",),
    "bs": ("micro_batch_size", "batch_size"),
    "bsz": ("micro_batch_size", "batch_size"),
    "grad_accum": ("gradient_accumulation_steps",),
    "heads": ("medusa_num_heads",),
    "num_heads": ("medusa_num_heads", "max_draft_tokens"),
    "warmup": ("warmup_steps",),
    "wd": ("weight_decay",),
    "clip": ("max_grad_norm",),
    "max_length": ("sequence_len", "max_new_tokens"),
    "max_tokens": ("max_new_tokens",),
    "model": ("run", "base_model"),
    "model_name_or_path": ("base_model",),
    "out": ("output_dir", "output"),
    "temp": ("temperature",),
}
#: pydantic's error type -> (limit in its context, message).
_LIMITS = {
    "greater_than_equal": ("ge", "must be {:g} or more"),
    "greater_than": ("gt", "must be more than {:g}"),
    "less_than_equal": ("le", "must be {:g} or less"),
    "less_than": ("lt", "must be less than {:g}"),
    "too_short": ("min_length", "needs {} or more items"),
    "too_long": ("max_length", "needs {} or fewer items"),
    "literal_error": ("expected", "must be {}"),
}
#: pydantic's error type -> what is expected.
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "string_type": "text (put it in quotes)",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping such as {name: value}",
    "model_type": "`key: value` lines",
}


def text_problems(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield problems of texts: characters that no file can hold, and a missing space after a colon:
    YAML reads `{x:1}` as a name without a value.
    """
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        yield path, "contains characters that are not UTF-8, or a null byte; remove them"
    items = value.items() if isinstance(value, dict) else ()
    for name, item in enumerate(value) if isinstance(value, list) else items:
        before, colon, rest = str(name).partition(":")
        if item is None and colon and rest:
            yield (*path, name), f"a space is missing after the colon: {before}: {rest}"
        yield from text_problems(item, (*path, name))


def explain(detail: ErrorDetails, cls: type[Config], source: Source) -> str:
    """Return the message for an error of pydantic."""
    name = str(detail["loc"][-1])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    got = f", got {format_value(value)}"
    if kind == "rule":
        return _explain_rule(detail, source)
    if kind == "extra_forbidden":
        section = None
        if len(detail["loc"]) > 1:
            section = _section(cls.model_fields[str(detail["loc"][0])].annotation)
        return _unknown(name, section or cls)
    if kind == "missing" and len(detail["loc"]) == 1:
        described = cls.model_fields[name].description
        return f"is missing ({described}); set it in the file, or add {name}=... to the command"
    if kind == "missing":
        return "is missing"
    if kind in _LIMITS:
        limit, wording = _LIMITS[kind]
        shown = context[limit]
        if kind == "literal_error":
            shown = shown.replace("'", "")
        return wording.format(shown) + got
    if kind in _EXPECTED:
        text = f"expected {_EXPECTED[kind]}{got}"
        if isinstance(value, bool):
            switch = next((key for key in _switches(cls) if name in key), None)
            hint = " (YAML reads yes, no, on and off as true and false)"
            text += f"; did you mean {switch}?" if kind == "model_type" and switch else hint
        return text
    return detail["msg"] if kind == "problem" else detail["msg"] + got


def _section(annotation: Any) -> type[Section] | None:
    """Return the section class in the type of a key; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)


def _explain_rule(detail: ErrorDetails, source: Source) -> str:
    """Return the message for a broken rule: the value that breaks it, and where the other keys that
    it reads were set.
    """
    name, message = str(detail["loc"][0]), detail["msg"]
    value = source.values.get(name, detail["input"])
    if not isinstance(value, (dict, list)):
        message = f"{format_value(value)}: {message}"
    set_keys = [key for key in detail["ctx"]["keys"] if source.values.get(key) is not None]
    other_keys = [f"{key}: {source.place((key,))}" for key in set_keys if key != name]
    return f"{message} ({', '.join(other_keys)})" if other_keys else message


def _switches(cls: type[Config]) -> list[str]:
    return [name for name, field in cls.model_fields.items() if field.annotation is bool]


def _unknown(name: str, owner: type[Section]) -> str:
    """Say what to write in place of an unknown key."""
    if name in owner.axolotl_hints:
        return owner.axolotl_hints[name]
    nearest = difflib.get_close_matches(name.lower(), owner.model_fields, n=1, cutoff=0.65)
    meant = [key for key in COMMON_NAMES.get(name.lower(), ()) if key in owner.model_fields]
    for suggested in meant or nearest:
        return f"unknown key; did you mean {suggested}?"
    return "unknown key; see docs/reference/configuration.md"
