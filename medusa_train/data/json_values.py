"""Values of records, checked: messages name their types in JSON's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_train.io import parse_json

_JSON_TYPES: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class RecordError(ValueError):
    """A record that is not a valid chat; the message says why, without its `file:line`."""


def optional_text(values: Mapping[str, Any], key: str) -> str:
    """Return the string under a key, '' if there is none."""
    value = values.get(key)
    if not isinstance(value, str | None):
        raise RecordError(f"'{key}' must be a string, it is {json_type(value)}")
    return value or ""


def from_json(value: object, problem: str) -> Any:
    """Return a value, parsed if it is JSON text, as tables hold it; the RecordError of other text
    begins with `problem`.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise RecordError(f"{problem}: {error}") from None


def as_list(record: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return the list of turns that a record has under `key`; tables may hold it as JSON text."""
    turns = record.get(key)
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = from_json(turns, f"'{key}' is not valid JSON")
    if not isinstance(turns, (list, tuple)):
        raise RecordError(f"'{key}' must be a list of turns, it is {found_under(record, key)}")
    return turns


def found_under(values: Mapping[str, Any], key: str) -> str:
    """Return the type of a value in JSON's words, for a message; if the key is missing, the keys
    that are there.
    """
    if key in values:
        return json_type(values[key])
    return f"missing; the keys are {', '.join(sorted(map(str, values))) or 'none'}"


def json_type(value: object) -> str:
    """Return the type of a value in JSON's words, for a message."""
    if value is None:
        return "missing or null"
    return _JSON_TYPES.get(type(value), type(value).__name__)
