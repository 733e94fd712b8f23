"""Records of chats as files hold them (ShareGPT, messages, alpaca) -> Conversation; knows no tokenizer.

Every problem is reported with `file:line`, for JSON arrays too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from medusa_train.data.conversation import Conversation, Message, Role, problem_with
from medusa_train.errors import DataError

RecordType = Literal["auto", "sharegpt", "messages", "alpaca"]
RECORD_TYPES: tuple[str, ...] = get_args(RecordType)
_SHOWN = 5  # problems shown one by one; the others are counted

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
}


_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


class RecordError(ValueError):
    """One record is not a chat; the message says why, without saying where."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Chats in the order of the file, and one `file:line: reason` for each record that was skipped."""

    conversations: list[Conversation]
    skipped: list[str]


@dataclass(frozen=True, slots=True)
class _Raw:
    """A record before it is understood: `value` is its JSON, or `error` says why there is none."""

    source: str
    value: Any = None
    error: str | None = None


def parse_record(record: object, type: str = "auto", *, source: str = "") -> Conversation:
    """Turn one record into a chat.

    Args:
        record: a JSON object: ShareGPT `{"conversations": [{"from", "value"}]}`, OpenAI
            `{"messages": [{"role", "content"}]}` or alpaca `{"instruction", "input", "output"}`.
        type: which of the three, or "auto" to tell by the keys.
        source: where it stood (`file:line`), kept in the chat.

    Raises:
        RecordError: the record is not a legal chat.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"a record must be a JSON object, this is {_kind(record)}")
    if type == "auto":
        type = _guess_type(record)
    messages = _drop_empty_system(_READERS[type](record))
    problem = problem_with(messages)
    if problem:
        raise RecordError(problem)
    conversation = Conversation("", messages, source)
    name = record.get("id")
    identity = str(name) if isinstance(name, (str, int)) and str(name) else conversation.content_key[:16]
    return Conversation(identity, messages, source)


def read_conversations(path: Path | str, type: str = "auto", *, skip_bad: bool = False) -> ReadResult:
    """Read every chat of a JSONL file (one record a line) or a JSON file (one array of records).

    Args:
        path: the file.
        type: one of `RECORD_TYPES`.
        skip_bad: leave bad records out and list them in `skipped` instead of raising.

    Raises:
        DataError: no such file, no usable record in it, or bad records (unless `skip_bad`); names file:line.
    """
    return _collect(_read_raw(Path(path)), type, name=str(path), skip_bad=skip_bad)


def read_records(records: Iterable[object], type: str = "auto", *, name: str, skip_bad: bool = False) -> ReadResult:
    """Read chats from records already in memory; problems are located as `name:number`, counted from 1.

    Raises:
        DataError: as `read_conversations`.
    """
    raw = (_Raw(f"{name}:{number}", value) for number, value in enumerate(records, start=1))
    return _collect(raw, type, name=name, skip_bad=skip_bad)


def _collect(records: Iterable[_Raw], type: str, *, name: str, skip_bad: bool) -> ReadResult:
    """Parse `records`, gathering problems so that the first few are told at once."""
    if type not in RECORD_TYPES:
        raise DataError(f"{name}: unknown record type '{type}'; known are {', '.join(RECORD_TYPES)}")
    conversations: list[Conversation] = []
    problems: list[str] = []
    for raw in records:
        try:
            if raw.error is not None:
                raise RecordError(raw.error)
            conversations.append(parse_record(raw.value, type, source=raw.source))
        except RecordError as error:
            problems.append(f"{raw.source}: {error}")
    if problems and not skip_bad:
        raise DataError(bad_records(problems, name))
    if not conversations:
        why = "it holds no records"
        if problems:
            why = f"all {len(problems)} records are bad; the first: {problems[0]}"
        raise DataError(f"{name}: no conversation to read: {why}")
    return ReadResult(conversations, problems)


def bad_records(problems: list[str], name: str) -> str:
    """Say which records of `name` are bad: the first few one by one, the others counted."""
    lines = [f"{name}: {len(problems)} bad record{'s' if len(problems) > 1 else ''}"]
    lines += [f"  {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  ... and {len(problems) - _SHOWN} more")
    lines.append("Mend the file, or set skip_bad_records: true to leave such records out.")
    return "\n".join(lines)


# -- files -> raw records --------------------------------------------------------------------------------


def _read_raw(path: Path) -> Iterator[_Raw]:
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if data.lstrip()[:1] == b"[":
        return _read_array(path, data)
    return _read_lines(path, data)


def _read_lines(path: Path, data: bytes) -> Iterator[_Raw]:
    # Split bytes, not text: str.splitlines would also break at U+2028, which JSON strings may hold unescaped.
    for number, line in enumerate(data.rstrip().split(b"\n"), start=1):
        source = f"{path}:{number}"
        if not line.strip():
            if data.strip():  # an empty file is told apart from an empty line
                yield _Raw(source, error="the line is empty")
            continue
        try:
            yield _Raw(source, json.loads(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            yield _Raw(source, error=f"not UTF-8 text (byte {error.start + 1} of the line)")
        except json.JSONDecodeError as error:
            yield _Raw(source, error=f"not valid JSON: {error.msg} (column {error.colno})")
        except RecursionError:
            yield _Raw(source, error="not valid JSON: nested too deeply")


def _read_array(path: Path, data: bytes) -> Iterator[_Raw]:
    """Yield a JSON array's elements with the line that each starts on; a broken array cannot be skipped."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text") from None
    decoder = json.JSONDecoder()
    position = _skip_space(text, text.index("[") + 1)
    line, counted = 1, 0
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            where = f"{path}:{error.lineno}"
            raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from None
        yield _Raw(f"{path}:{line}", value)
        position = _skip_space(text, position)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
        elif text[position : position + 1] != "]":
            line += text.count("\n", counted, position)
            raise DataError(f"{path}:{line}: not valid JSON: a ',' or the closing ']' is missing")
    position = _skip_space(text, position + 1)
    if position < len(text):
        line += text.count("\n", counted, position)
        raise DataError(f"{path}:{line}: not valid JSON: text after the closing ']'")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


# -- raw records -> messages -----------------------------------------------------------------------------


def _guess_type(record: Mapping[str, Any]) -> str:
    if "conversations" in record:
        return "sharegpt"
    if "messages" in record:
        return "messages"
    if "instruction" in record and "output" in record:
        return "alpaca"
    found = ", ".join(sorted(map(str, record))) or "none"
    raise RecordError(
        "neither ShareGPT ('conversations'), messages ('messages') nor alpaca ('instruction', 'output'); "
        f"its keys: {found}"
    )


def _from_sharegpt(record: Mapping[str, Any]) -> tuple[Message, ...]:
    turns = _turns(record, "conversations", role_key="from", content_key="value")
    system = record.get("system")
    if isinstance(system, str) and system.strip() and (not turns or turns[0].role != "system"):
        return (Message("system", system), *turns)
    return turns


def _from_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    return _turns(record, "messages", role_key="role", content_key="content")


def _from_alpaca(record: Mapping[str, Any]) -> tuple[Message, ...]:
    texts: dict[str, str] = {}
    for key, needed in (("instruction", True), ("output", True), ("input", False), ("system", False)):
        value = record.get(key)
        if value is None and not needed:
            value = ""
        if not isinstance(value, str):
            raise RecordError(f"'{key}' must be a text, it is {_kind(value)}")
        texts[key] = value
    prompt = texts["instruction"]
    if texts["input"].strip():
        prompt = f"{prompt}\n\n{texts['input']}"
    pair = (Message("user", prompt), Message("assistant", texts["output"]))
    return (Message("system", texts["system"]), *pair)


_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[Message, ...]]] = {
    "sharegpt": _from_sharegpt,
    "messages": _from_messages,
    "alpaca": _from_alpaca,
}


def _turns(record: Mapping[str, Any], key: str, *, role_key: str, content_key: str) -> tuple[Message, ...]:
    turns = record.get(key)
    if not isinstance(turns, (list, tuple)):
        raise RecordError(f"'{key}' must be a list of turns, it is {_kind(turns)}")
    if not turns:
        raise RecordError(f"'{key}' is an empty list")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            raise RecordError(f"turn {number} must be an object, it is {_kind(turn)}")
        name = turn.get(role_key)
        if not isinstance(name, str) or name not in _ROLES:
            raise RecordError(f"turn {number}: unknown '{role_key}': {name!r}; known are {', '.join(_ROLES)}")
        messages.append(Message(_ROLES[name], _text(turn.get(content_key), number, content_key)))
    return tuple(messages)


def _text(content: object, number: int, key: str) -> str:
    """Take a text, or the joined text parts of OpenAI's list form."""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
        raise RecordError(f"turn {number}: '{key}' holds parts that are not text")
    raise RecordError(f"turn {number}: '{key}' must be a text, it is {_kind(content)}")


def _drop_empty_system(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Leave out an empty system prompt: many data sets carry the field always, and it means "none"."""
    if messages and messages[0].role == "system" and not messages[0].content.strip():
        return messages[1:]
    return messages


def _kind(value: object) -> str:
    if value is None:
        return "missing or null"
    return _KINDS.get(type(value), type(value).__name__)
