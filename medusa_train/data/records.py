"""Chat records in the formats ShareGPT, OpenAI messages and alpaca, parsed into conversations.

Training reads whole chats (`parse_record`), self-distillation their user turns alone
(`parse_user_turns`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_train.config.schema import DatasetConfig
from medusa_train.config.types import RENDERING
from medusa_train.data.conversation import (
    REASONING_TAGS,
    SURROGATES,
    Conversation,
    Message,
    ReasoningTags,
    Role,
    join_reasoning,
    problem_with,
)
from medusa_train.data.record_files import RawRecord, read_file, shown_name
from medusa_train.errors import DataError
from medusa_train.io import parse_json, warn_once

MAX_SHOWN_PROBLEMS = 5

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
_TOOL_ROLES = ("tool", "function", "function_call", "observation", "ipython")
#: The keys that identify each format, in the order in which `auto` tries them.
_CHAT_FORMATS = {
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
}
#: The keys of a record's turns, and of the role and the text of a turn.
_TURN_KEYS = {
    "sharegpt": ("conversations", "from", "value"),
    "messages": ("messages", "role", "content"),
}
_PROMPT_FORMATS = {**_CHAT_FORMATS, "alpaca": ("instruction",), "mt_bench": ("turns",)}
#: The keys under which servers return the reasoning part of an answer.
REASONING_KEYS = ("reasoning_content", "reasoning")
_PROMPT_ROLES: tuple[Role, ...] = ("user", "system")
#: The keys of a turn that say whether it is trained, as Axolotl names them.
_TRAIN_KEYS = ("train", "training")
#: What self-distillation writes beside a chat and an id; a record with the first is its output.
_SELF_DISTILLATION_KEYS = (
    "finish_reasons",
    "seed_id",
    "model",
    "sampling",
    "temperature",
    "token_counts",
    "mode",
    "dropped",
)
#: Columns that hold variables of the chat template.
TOOLS = "tools"
TEMPLATE_KWARGS = "chat_template_kwargs"
#: Unread columns and keys of which a note names so many.
MAX_UNREAD = 12
_JSON_TYPES: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class RecordFields:
    """How the turns of a data set are written, where they are not as usual.

    Attributes:
        messages: column of the turns. role, content: keys of a turn. training: key of a turn that
            says whether it is trained.
        roles: names of roles in the data, with what they mean; "tool" for tool calls and results.
    """

    messages: str | None = None
    role: str | None = None
    content: str | None = None
    training: str | None = None
    roles: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_dataset(cls, config: DatasetConfig) -> RecordFields:
        """Return what an entry of `datasets` says."""
        roles = []
        for role, names in (config.roles or {}).items():
            roles += [(name, role) for name in names]
        return cls(
            config.field_messages,
            config.role_key,
            config.content_key,
            config.message_field_training,
            tuple(roles),
        )


_USUAL = RecordFields()


class RecordError(ValueError):
    """A record that is not a valid chat; the message says why, without its `file:line`."""


@dataclass
class Unread:
    """What records carry beside their chats, which nothing reads.

    Attributes:
        columns: names, with the number of records that have each. turn_keys: names, with the number
            of turns. turns: roles of turns that are left out, with their number.
        without_prompt: records that have no message of the user, where only these are read.
    """

    columns: Counter[str] = field(default_factory=Counter)
    turn_keys: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    without_prompt: int = 0

    def count_columns(self, record: Mapping[str, Any], read: Collection[str]) -> None:
        """Count the columns of a record beside those that are read.

        Null is as good as missing: tables have it in the columns of other records.
        """
        self.columns.update(_unread_keys(record, read))

    def update(self, other: Unread) -> None:
        """Add what `other` counted."""
        self.columns.update(other.columns)
        self.turn_keys.update(other.turn_keys)
        self.turns.update(other.turns)
        self.without_prompt += other.without_prompt

    def describe(self, name: str) -> list[str]:
        """Return a sentence on the data called `name`; none if all was read."""
        parts = []
        if self.columns:
            parts.append(f"columns {_counted(self.columns)}")
        if self.turn_keys:
            parts.append(f"keys of turns {_counted(self.turn_keys)}")
        if self.turns:
            parts.append(f"turns of {_counted(self.turns)}")
        if self.without_prompt:
            parts.append(f"records without a message of the user ({self.without_prompt:,})")
        if not parts:
            return []
        return [f"{name}: not read: {'; '.join(parts)}"]


def _counted(names: Counter[str]) -> str:
    """List names with their counts, the most frequent first."""
    ordered = sorted(names.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{shown_name(name)} ({count:,})" for name, count in ordered[:MAX_UNREAD]]
    if len(ordered) > MAX_UNREAD:
        shown.append(f"and {len(ordered) - MAX_UNREAD} more")
    return ", ".join(shown)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Conversations in file order, `file:line: reason` for each invalid record that was skipped,
    notes on files without records, and what the records carry that is not read.
    """

    conversations: list[Conversation] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: Unread = field(default_factory=Unread)

    def extend(self, other: ReadResult) -> None:
        """Append what `other` has."""
        self.conversations.extend(other.conversations)
        self.skipped.extend(other.skipped)
        self.notes.extend(other.notes)
        self.unread.update(other.unread)


def read_conversations(
    path: Path | str, type: str = "auto", *, skip_bad: bool = False
) -> ReadResult:
    """Read every chat of a JSON, JSON Lines or parquet file.

    Args:
        type: record format, as in `datasets[].type`; "auto" detects it by the keys of each record.
        skip_bad: skip invalid records and list them in `skipped` instead of raising.

    Raises:
        DataError: the file does not exist, has no valid record, or has invalid ones (unless
            `skip_bad`).
    """
    records = read_file(Path(path))
    result = parse_records(records, type, name=str(path), skip_bad=skip_bad)
    return with_some(result, str(path))


def parse_records(
    records: Iterable[RawRecord],
    type: str,
    *,
    name: str,
    skip_bad: bool,
    tags: ReasoningTags = REASONING_TAGS,
    variables: Collection[str] = (),
    fields: RecordFields = _USUAL,
) -> ReadResult:
    """Parse the records of a file or split called `name`; raises as `read_conversations`, for all
    records at once. `variables` and `fields` as in `parse_record`.

    With `skip_bad` all records may be invalid; `with_some` raises then, and for a file without
    records, which is noted.
    """
    conversations: list[Conversation] = []
    problems: list[str] = []
    unread = Unread()
    for raw in records:
        try:
            if raw.error is not None:
                raise RecordError(raw.error)
            conversation = parse_record(
                raw.value,
                type,
                source=raw.source,
                tags=tags,
                variables=variables,
                fields=fields,
                unread=unread,
            )
        except RecordError as error:
            problems.append(f"{raw.source}: {error}")
            continue
        conversations.append(conversation)
    if problems and not skip_bad:
        raise DataError(describe_problems(problems, name))
    notes = []
    if not conversations and not problems:
        notes.append(f"{name}: no records")
    return ReadResult(conversations, problems, notes, unread)


def with_some(result: ReadResult, name: str) -> ReadResult:
    """Return `result`; raises DataError if it has no conversation."""
    if not result.conversations and not result.skipped:
        raise DataError(f"{name}: no conversation to read: no records")
    if not result.conversations:
        reason = f"all {len(result.skipped)} records are invalid; the first: {result.skipped[0]}"
        raise DataError(f"{name}: no conversation to read: {reason}")
    return result


def describe_problems(problems: Sequence[str], name: str) -> str:
    """Format an error message on the invalid records of `name`: the first ones, the number of
    others, and a hint.
    """
    lines = [f"{name}: {len(problems)} invalid record{'s' if len(problems) > 1 else ''}"]
    lines += [f"  {line}" for line in first_problems(problems)]
    lines.append("Fix the file, or set skip_bad_records: true to skip such records.")
    return "\n".join(lines)


def first_problems(problems: Sequence[str]) -> list[str]:
    """Return the first `MAX_SHOWN_PROBLEMS`, and a line that counts the others."""
    shown = list(problems[:MAX_SHOWN_PROBLEMS])
    others = len(problems) - len(shown)
    if others:
        shown.append(f"... and {others} more")
    return shown


def parse_record(
    record: object,
    type: str = "auto",
    *,
    source: str = "",
    tags: ReasoningTags = REASONING_TAGS,
    variables: Collection[str] = (),
    fields: RecordFields = _USUAL,
    unread: Unread | None = None,
) -> Conversation:
    """Parse one record into a conversation.

    Args:
        record: a JSON object: ShareGPT `{"conversations": [{"from", "value"}]}`, OpenAI
            `{"messages": [{"role", "content"}]}` or alpaca `{"instruction", "input", "output"}`.
            Turns may have their reasoning apart, as `reasoning_content`, which `tags` join with the
            content. Output of self-distillation may have `token_ids` beside an answer's content,
            and `finish_reasons`. `train` or `training` of a turn say whether it is trained, and
            turns of `weight` 0 are not.
        type: which of the three, or "auto" to detect it by the keys.
        source: `file:line`, stored in the conversation.
        variables: of the chat template. Columns of these names, and the entries of
            `chat_template_kwargs`, become variables of the chat.
        fields: how turns are written, where they are not as usual.
        unread: counts the columns and the keys of turns that are not read.

    Raises:
        RecordError: the record is not a valid chat.
    """
    # 1. The format.
    formats = _CHAT_FORMATS
    if fields.messages is not None:
        formats = {"messages": (fields.messages,)}
        type = "auto"
    record, type = _detect_format(record, type, formats)
    # 2. The messages, and the columns that they were read from.
    found = Unread()
    if type == "alpaca":
        messages = _alpaca_chat(record)
        read = {"instruction", "input", "output", "history"}
    else:
        keys = _turn_keys(record, type, fields)
        messages = _parse_turns(record, *keys, tags, unread=found, fields=fields)
        read = {keys[0]}
    record_id = usable_id(record, "id")
    if record_id is not None:
        read.add("id")
    num_answers = sum(message.role == "assistant" for message in messages)
    read |= _bookkeeping(record, num_answers)
    # 3. What comes before the first question.
    if type == "sharegpt" and messages[0].role == "assistant":
        messages = messages[1:]  # continues a longer chat; FastChat's `preprocess` skips it as well
        found.turns["assistant before the first question"] += 1
    if type == "alpaca":
        read.add("system")
    elif not (messages and messages[0].role == "system"):
        messages = (*_system_of(record), *messages)
        read.add("system")
    if messages and messages[0].role == "system" and not messages[0].content.strip():
        # many data sets always have the field, and leave it empty for "none"
        messages = messages[1:]
    if (problem := problem_with(messages)) is not None:
        raise RecordError(problem)
    # 4. Variables of the chat template, and what is left.
    template_variables = _variables_of(record, variables)
    if unread is not None:
        found.count_columns(record, read | template_variables.columns)
        unread.update(found)
    conversation = Conversation("", messages, source, template_variables.text)
    return replace(conversation, id=record_id or conversation.content_key[:16])


@dataclass(frozen=True)
class _Variables:
    """Variables of a chat as JSON text, '' for none, and the columns that they were read from."""

    text: str
    columns: set[str]


def _variables_of(record: Mapping[str, Any], names: Collection[str]) -> _Variables:
    """Return what a record says of the chat template's variables `names`.

    `tools` may be JSON text, as in tables. Values of null are as good as missing.
    """
    values: dict[str, Any] = {}
    columns: set[str] = set()
    for name in names:
        if record.get(name) is not None and name not in ("system", "messages"):
            values[name] = record[name]
            columns.add(name)
    further = record.get(TEMPLATE_KWARGS)
    if further is not None:
        if not isinstance(further, Mapping):
            raise RecordError(f"'{TEMPLATE_KWARGS}' must be an object, it is {_json_type(further)}")
        taken = sorted(set(further) & RENDERING)
        if taken:
            raise RecordError(f"'{TEMPLATE_KWARGS}': {', '.join(taken)}: set by rendering itself")
        unknown = sorted(set(further) - set(names))
        if unknown:
            raise RecordError(
                f"'{TEMPLATE_KWARGS}': not in the chat template: {', '.join(unknown)}"
            )
        # columns of tables have null in the others' entries
        values |= {name: value for name, value in further.items() if value is not None}
        columns.add(TEMPLATE_KWARGS)
    if TOOLS in values:
        values[TOOLS] = _tools(values[TOOLS])
        if not values[TOOLS]:
            del values[TOOLS]
    if not values:
        return _Variables("", columns)
    try:
        return _Variables(json.dumps(values, sort_keys=True), columns)
    except (TypeError, ValueError) as error:
        raise RecordError(f"variables of the chat template: {error}") from None


def _tools(value: object) -> list[Any]:
    """Return a list of tools, of JSON text too."""
    if isinstance(value, str):
        if not value.strip():
            return []
        try:
            value = parse_json(value)
        except ValueError as error:
            raise RecordError(f"'{TOOLS}' is not valid JSON: {error}") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(t, Mapping) for t in value):
        raise RecordError(f"'{TOOLS}' must be a list of objects")
    return list(value)


def usable_id(record: Mapping[str, Any], *keys: str) -> str | None:
    """Return the first of `keys` that names a record, as text; None if none does."""
    for key in keys:
        value = record.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return SURROGATES.sub("?", str(value))
    return None


def _bookkeeping(record: Mapping[str, Any], answers: int | None = None) -> set[str]:
    """Return the keys that self-distillation writes beside a chat, if it wrote the record.

    Reasons of another number than that of the `answers` belong to another chat, and are not read.
    """
    reasons = record.get(_SELF_DISTILLATION_KEYS[0])
    if not isinstance(reasons, (list, tuple)):
        return set()
    names = set(_SELF_DISTILLATION_KEYS)
    if answers is not None and len(reasons) != answers:
        names.remove(_SELF_DISTILLATION_KEYS[0])
    return names


def _unread_keys(values: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Return the keys beside those that are read whose values are not null."""
    return [str(key) for key, value in values.items() if key not in read and value is not None]


def parse_user_turns(
    record: object, type: str = "auto", unread: Unread | None = None
) -> tuple[list[str], str | None]:
    """Return the user's messages of one record, and its system message or None.

    Assistant messages are ignored, so that prompts without answers and chats in any order are
    accepted. Besides the formats of `parse_record`, "auto" accepts MT-Bench's `{"turns": [text,
    ...]}`. Blank messages are dropped; the last system message counts; lone surrogates become
    question marks. `unread` counts the columns, and the keys of the user's turns, that are not
    read.

    Raises:
        RecordError: the record has none of these formats, or its turns are not text.
    """
    # 1. The messages, and the columns that they were read from.
    record, type = _detect_format(record, type, _PROMPT_FORMATS)
    found = Unread()
    if type == "alpaca":
        messages = [Message("user", _alpaca_prompt(record))]
        read = {"instruction", "input", "output", "history"}
    elif type == "mt_bench":
        turns = [{"role": "user", "content": text} for text in _as_list(record, "turns")]
        chat = {"turns": turns}
        keys = ("turns", "role", "content")
        messages = list(_parse_turns(chat, *keys, REASONING_TAGS, _PROMPT_ROLES))
        read = {"turns"}
    else:
        keys = _turn_keys(record, type)
        messages = list(_parse_turns(record, *keys, REASONING_TAGS, _PROMPT_ROLES, found))
        read = {keys[0]}
    # 2. What the user and the system say.
    user = []
    system = []
    for message in messages:
        text = message.content.encode("utf-8", "replace").decode()
        if not text.strip():
            continue
        if message.role == "user":
            user.append(text)
        elif message.role == "system":
            system.append(text)
    if not system:
        system = [message.content for message in _system_of(record)]
        read.add("system")
    # 3. What is left.
    if unread is not None:
        if len(system) > 1:
            found.turns["system before the last one"] += len(system) - 1
        if not user:
            found.without_prompt += 1
        for key in ("id", "question_id"):
            if usable_id(record, key) is not None:
                read.add(key)
                break
        found.count_columns(record, read | _bookkeeping(record))
        unread.update(found)
    if not system:
        return user, None
    return user, system[-1]


def reasoning_part(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message has beside its content, or ''."""
    for key in REASONING_KEYS:
        text = message.get(key)
        if isinstance(text, str) and text.strip():
            return text
    return ""


def _detect_format(
    record: object, type: str, formats: Mapping[str, tuple[str, ...]]
) -> tuple[Mapping[str, Any], str]:
    """Return the record, which has to be an object, and its format: `type`, or the one that has its
    keys.
    """
    if _is_list_of_turns(record):  # as create_data.py of the Medusa repository writes them
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise RecordError(f"a record must be a JSON object, this is {_json_type(record)}")
    if type in formats:
        return record, type
    if type == "auto":
        # tables have null in the other's columns
        filled = {key for key, value in record.items() if value is not None}
        for present_keys in (filled, set(record)):
            for name, keys in formats.items():
                if present_keys.issuperset(keys):
                    return record, name
    expected = ", ".join(
        f"{' and '.join(map(repr, keys))} ({name})" for name, keys in formats.items()
    )
    present = ", ".join(sorted(map(str, record))) or "none"
    raise RecordError(f"unknown record format, expected the keys {expected}; its keys: {present}")


def _is_list_of_turns(record: object) -> bool:
    """Return whether a record is a chat without anything around it."""
    if not isinstance(record, list) or not record:
        return False
    return all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in record)


def _turn_keys(
    record: Mapping[str, Any], type: str, fields: RecordFields = _USUAL
) -> tuple[str, str, str]:
    """Return the keys of the turns, of a role and of a text; a format's turns may have the keys of
    the other.
    """
    column, role, content = _TURN_KEYS[type]
    column = fields.messages or column
    turns = record.get(column)
    if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
        for _, other_role, other_content in _TURN_KEYS.values():
            if other_role in turns[0]:
                role = other_role
                content = other_content
                break
    return column, fields.role or role, fields.content or content


def _system_of(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the system message that a record has beside its turns, if any."""
    system = _field(record, "system", required=False)
    if not system.strip():
        return ()
    return (Message("system", system),)


def _alpaca_chat(record: Mapping[str, Any]) -> tuple[Message, ...]:
    system = _field(record, "system", required=False)
    answer = _field(record, "output")
    return (
        Message("system", system),
        Message("user", _alpaca_prompt(record)),
        Message("assistant", answer),
    )


def _alpaca_prompt(record: Mapping[str, Any]) -> str:
    if record.get("history"):
        raise RecordError("'history' is not supported; write the chat as 'messages'")
    instruction = _field(record, "instruction")
    extra = _field(record, "input", required=False)
    if not extra.strip():
        return instruction
    if not instruction.strip():
        return extra
    return f"{instruction}\n\n{extra}"


def _field(record: Mapping[str, Any], key: str, *, required: bool = True) -> str:
    value = record.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise RecordError(f"'{key}' must be a string, it is {_json_type(value)}")
    return value


def _as_list(record: Mapping[str, Any], key: str) -> Sequence[Any]:
    turns = record.get(key)
    if not isinstance(turns, (list, tuple)):
        raise RecordError(f"'{key}' must be a list of turns, it is {_json_type(turns)}")
    return turns


def _parse_turns(
    record: Mapping[str, Any],
    key: str,
    role_key: str,
    content_key: str,
    tags: ReasoningTags,
    roles: Collection[Role] | None = None,
    unread: Unread | None = None,
    fields: RecordFields = _USUAL,
) -> tuple[Message, ...]:
    """Parse the list of turns under `key`; with `roles`, other turns are skipped unparsed, and
    there may be none. `unread` counts the keys of turns that are not read.
    """
    turns = _as_list(record, key)
    if not turns and roles is None:
        raise RecordError(f"'{key}' is an empty list")
    named = dict(fields.roles)
    train_keys: tuple[str, ...] = _TRAIN_KEYS
    if fields.training is not None:
        train_keys = (fields.training,)
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            raise RecordError(f"turn {number} must be an object, it is {_json_type(turn)}")
        # 1. Who speaks.
        name = turn.get(role_key)
        meaning = None
        if isinstance(name, str):
            meaning = named.get(name, name)
        role = _ROLES.get(meaning or "")
        if roles is not None and role not in roles:
            if unread is not None and role is None:  # answers are left out on purpose
                unread.turns[f"the role {name}"] += 1
            continue
        calls = turn.get("tool_calls") or turn.get("function_call")
        if meaning in _TOOL_ROLES or calls:
            raise RecordError(f"turn {number} is a tool call or its result, which is not supported")
        if name is None:
            raise RecordError(f"turn {number} has no '{role_key}'")
        if role is None:
            raise RecordError(
                f"turn {number}: unknown '{role_key}': {name!r}, expected one of"
                f" {', '.join([*_ROLES, *named])}; `roles` of the data set gives other names"
            )
        # 2. What is said: an answer has its reasoning before the content.
        content = _content(turn.get(content_key), number, content_key, unread)
        read = {role_key, content_key, "weight", "tool_calls", "function_call", *train_keys}
        ids = None
        if role == "assistant":
            ids = _token_ids(turn.get("token_ids"), number)
            reasoning = _reasoning_of(turn, number)
            read.add("token_ids")
            read |= {key for key in REASONING_KEYS if turn.get(key) in ("", reasoning)}
            content = join_reasoning(reasoning, content, tags)
        # 3. Whether it is trained.
        is_target = _is_target(turn, number, train_keys)
        messages.append(Message(role, content, ids, is_target=is_target))
        if unread is not None:
            unread.turn_keys.update(_unread_keys(turn, read))
    return _with_finish_reasons(messages, record.get("finish_reasons"))


def _is_target(turn: Mapping[str, Any], number: int, keys: Sequence[str]) -> bool | None:
    """Return whether a turn says that it is trained; None where it says nothing.

    `keys` are true or false, as in Axolotl; `weight` 0 or 1 as in OpenAI's fine-tuning, where 1 is the
    default. They must not contradict each other.
    """
    if turn.get("train_detail") is not None or turn.get("training_detail") is not None:
        raise RecordError(f"turn {number}: training of parts of a turn is not supported")
    said: dict[str, bool] = {}
    for key in keys:
        switch = turn.get(key)
        if switch is None:
            continue
        if not isinstance(switch, bool):
            raise RecordError(f"turn {number}: '{key}' must be true or false, it is {switch!r}")
        said[key] = switch
    weight = turn.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RecordError(f"turn {number}: 'weight' must be 0 or 1, it is {weight!r}")
    if weight == 0:
        said["weight"] = False
    if len(set(said.values())) > 1:
        raise RecordError(f"turn {number}: {' and '.join(map(repr, said))} contradict each other")
    return next(iter(said.values()), None)


def _reasoning_of(turn: Mapping[str, Any], number: int) -> str:
    """Return the reasoning that a turn has beside its content, or ''."""
    for key in REASONING_KEYS:
        if not isinstance(turn.get(key), str | None):
            raise RecordError(
                f"turn {number}: '{key}' must be a string, it is {_json_type(turn[key])}"
            )
    return reasoning_part(turn)


def _token_ids(ids: object, number: int) -> tuple[int, ...] | None:
    """Return the tokens that self-distillation stores beside an answer."""
    if ids is None:
        return None
    if isinstance(ids, (list, tuple)) and all(map(_is_token_id, ids)):
        return tuple(ids)
    raise RecordError(f"turn {number}: 'token_ids' must be a list of token ids")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _with_finish_reasons(messages: Sequence[Message], reasons: object) -> tuple[Message, ...]:
    """Mark the answers that reached a length limit: `reasons` of self-distillation has an entry for
    each answer.
    """
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not isinstance(reasons, (list, tuple)) or len(reasons) != len(answers):
        return tuple(messages)
    marked = list(messages)
    for index, reason in zip(answers, reasons, strict=True):
        if reason in ("length", "context"):
            marked[index] = replace(marked[index], is_cut=True)
    return tuple(marked)


def read_messages(chat: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    """Read the messages of a chat that is to be answered, as OpenAI's clients hold them.

    Read are `role`, `content` (text, or a list of text parts) and the reasoning of an answer beside
    it; `tool_calls` are refused, and other keys, such as `name`, are named in a warning, once.

    Raises DataError, which names the message.
    """
    if not isinstance(chat, Sequence) or isinstance(chat, (str, bytes)):
        raise DataError(
            f"a prompt is text, or a list of messages with role and content; it is"
            f" {_json_type(chat)}"
        )
    messages = []
    unread = Unread()
    for number, turn in enumerate(chat, start=1):
        if isinstance(turn, Message):
            messages.append(turn)
            continue
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise DataError(f"message {number}: expected a mapping with role and content")
        role = turn["role"]
        if turn.get("tool_calls"):
            raise DataError(f"message {number} ({role}): tool_calls are not supported")
        try:
            content = _content(turn.get("content"), number, "content", unread)
            reasoning = ""
            if role == "assistant":
                reasoning = _reasoning_of(turn, number)
        except RecordError as error:
            raise DataError(str(error)) from None
        read = {"role", "content", "tool_calls"}
        if role == "assistant":
            read |= {*REASONING_KEYS}
        unread.turn_keys.update(_unread_keys(turn, read))
        text = join_reasoning(reasoning, content)
        if SURROGATES.search(text):
            raise DataError(
                f"message {number} ({role}) contains a lone surrogate, which UTF-8 cannot encode"
            )
        messages.append(Message(role, text))
    if unread.turn_keys:
        # without the counts, which differ from call to call
        names = ", ".join(map(shown_name, sorted(unread.turn_keys)))
        warn_once(f"messages: not read: {names}")
    return messages


def _content(content: object, number: int, key: str, unread: Unread | None = None) -> str:
    """Return a string, or the joined text parts of OpenAI's list form, whose other keys `unread`
    counts.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        texts = []
        for part in content:
            if not _is_text_part(part):
                raise RecordError(f"turn {number}: '{key}' holds parts that are not text")
            texts.append(part["text"])
            if unread is not None:
                names = _unread_keys(part, ("type", "text"))
                unread.turn_keys.update(f"{key}.{name}" for name in names)
        return "".join(texts)
    raise RecordError(f"turn {number}: '{key}' must be a string, it is {_json_type(content)}")


def _is_text_part(part: object) -> bool:
    """Return whether a part of a content is text: a caption of an image is not."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    return part.get("type") in (None, "text", "input_text", "output_text")


def _json_type(value: object) -> str:
    if value is None:
        return "missing or null"
    return _JSON_TYPES.get(type(value), type(value).__name__)
