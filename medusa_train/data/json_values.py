"""Checked access to the values of records. Messages call types by their JSON names."""

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


class JsonObject(dict[str, Any]):
    """A JSON object that remembers which of its keys were read by `get`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, and remember that the key was read."""
        self.read.add(key)
        return super().get(key, default)

    def unread(self) -> list[str]:
        """Return the keys that were not read. Null counts as missing: tables have null in the
        columns of other records.
        """
        return [str(k) for k, value in self.items() if k not in self.read and value is not None]


def optional_text(values: Mapping[str, Any], key: str) -> str:
    """Return the string under a key; '' if there is none."""
    value = values.get(key)
    if not isinstance(value, str | None):
        raise RecordError(f"'{key}' must be a string, it is {json_type(value)}")
    return value or ""


def from_json(value: object, problem: str) -> Any:
    """Return a value; a string is parsed as JSON, since tables hold nested values as JSON text. If
    it is not valid JSON, the message of the RecordError begins with `problem`.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise RecordError(f"{problem}: {error}") from None


def turns_under(record: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return the list of turns that a record has under `key`; it may be JSON text, as in tables."""
    turns = record.get(key)
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = from_json(turns, f"'{key}' is not valid JSON")
    if not isinstance(turns, (list, tuple)):
        raise RecordError(f"'{key}' must be a list of turns, it is {found_under(record, key)}")
    return turns


def found_under(values: Mapping[str, Any], key: str) -> str:
    """Return the JSON name of the type of the value under `key`, for a message. If the key is
    missing, say so and list the existing keys.
    """
    if key in values:
        return json_type(values[key])
    return f"missing; the keys are {', '.join(sorted(map(str, values))) or 'none'}"


def json_type(value: object) -> str:
    """Return the JSON name of a value's type, for a message."""
    if value is None:
        return "missing or null"
    return _JSON_TYPES.get(type(value), type(value).__name__)
