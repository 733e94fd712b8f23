"""Chat records in the formats ShareGPT, OpenAI messages and alpaca, parsed into conversations.

Training reads whole chats (`normalize`), self-distillation their user turns alone
(`parse_user_turns`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
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
    problem_with,
)
from medusa_train.data.turns import (
    RecordError,
    Turns,
    as_list,
    found_under,
    json_type,
    mark_cut_answers,
    parse_turns,
)
from medusa_train.data.unread import TURNS, WITHOUT_PROMPT, Unread
from medusa_train.io import parse_json

#: The keys that identify each format, in the order in which `auto` tries them.
_CHAT_FORMATS = {
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "conversation": ("conversation",),  # LMSYS-Chat-1M, WildChat
    "alpaca": ("instruction", "output"),
}
#: The keys of the role and of the text of a turn, by format.
_TURN_KEYS = {
    "sharegpt": ("from", "value"),
    "messages": ("role", "content"),
    "conversation": ("role", "content"),
}
#: The columns that an alpaca record's question and answer are read from.
_ALPACA_COLUMNS = ("instruction", "input", "output", "history")
#: Columns of prompts that are no chats: a text, or a list of texts or messages.
_PROMPT_COLUMNS = ("prompt", "question", "problem", "input")
_PROMPT_FORMATS = {
    **_CHAT_FORMATS,
    "alpaca": ("instruction",),
    "mt_bench": ("turns",),
    **{key: (key,) for key in _PROMPT_COLUMNS},
}
_PROMPT_ROLES: tuple[Role, ...] = ("user", "system")
#: What a line of a batch file has around its request.
_BATCH_KEYS = ("method", "url", "body")
#: A record with this key is output of self-distillation; it has a reason for each answer.
_FINISH_REASONS = "finish_reasons"
#: What self-distillation writes beside them, a chat and an id.
_SELF_DISTILLATION_KEYS = (
    "seed_id",
    "model",
    "sampling",
    "temperature",
    "token_counts",
    "mode",
    "dropped",
)
#: Columns that name a prompt; the first that is there counts.
PROMPT_IDS = ("id", "question_id", "custom_id")
#: Columns that hold variables of the chat template.
TOOLS = "tools"
TEMPLATE_KWARGS = "chat_template_kwargs"


def normalize(
    record: object,
    type: str = "auto",
    *,
    source: str = "",
    tags: ReasoningTags = REASONING_TAGS,
    variables: Collection[str] | None = (),
    fields: DatasetConfig | None = None,
    unread: Unread | None = None,
) -> Conversation:
    """Return the chat of a record.

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
            `chat_template_kwargs`, become variables of the chat; None if the template is not known
            yet: then any entry is allowed.
        fields: names the keys of turns and their roles, where they are not as usual.
        unread: counts the columns and the keys of turns that are not read.

    Raises:
        RecordError: the record is not a valid chat.
    """
    found = Unread()
    # 1. The turns of any format as messages.
    formats = _CHAT_FORMATS
    if fields is not None and fields.field_messages is not None:
        formats = {"messages": (fields.field_messages,)}
        type = "auto"
    record, record_format = _detect_format(record, type, formats)
    turns = _turns_of(record, record_format, fields)
    columns = set(turns.columns)
    messages = parse_turns(turns, tags=tags, unread=found, fields=fields)
    num_answers = sum(message.role == "assistant" for message in messages)
    mark_cut_answers(messages, record.get(_FINISH_REASONS))
    # 2. An answer that continues a longer chat of ShareGPT is left out, as by FastChat, and no row
    # has a question after the last answer.
    if record_format == "sharegpt" and messages[0].role == "assistant":
        found.add(TURNS, "assistant before the first question")
        del messages[0]
        num_left = num_answers - 1
    else:
        num_left = num_answers
    if num_left and messages[-1].role == "user":
        found.add(TURNS, "user after the last answer")
    # 3. The system message, of the turns or beside them. Many data sets always have the field, empty
    # for none.
    if not messages or messages[0].role != "system":
        columns.add("system")
        messages.insert(0, Message("system", _field(record, "system", required=False)))
    if not messages[0].content.strip():
        del messages[0]
    problem = problem_with(tuple(messages))
    if problem is not None:
        raise RecordError(problem)
    # 4. Variables of the chat template, the id, and the columns that are left.
    template_variables = _variables_of(record, variables, columns)
    conversation = Conversation("", tuple(messages), source, template_variables)
    record_id = usable_id(record, "id")
    if record_id is not None:
        columns.add("id")
    if unread is not None:
        found.count_columns(record, columns | _bookkeeping(record, num_answers))
        unread.update(found)
    return replace(conversation, id=record_id or conversation.content_key[:16])


def parse_user_turns(
    record: object, type: str = "auto", unread: Unread | None = None
) -> tuple[list[str], str | None]:
    """Return the user's messages of one record, and its system message or None.

    Assistant messages are ignored, so that prompts without answers and chats in any order are
    accepted. Besides the formats of `normalize`, "auto" accepts MT-Bench's `{"turns": [text,
    ...]}`, and a text, or a list of texts or messages, under `prompt`, `question`, `problem` or
    `input`. Blank messages are dropped; the last system message counts; lone surrogates become
    question marks. `unread` counts the columns, and the keys of the user's turns, that are not
    read.

    Raises:
        RecordError: the record has none of these formats, or its turns are not text.
    """
    found = Unread()
    # 1. The turns of the user and the system.
    record, record_format = _detect_format(_request_of(record), type, _PROMPT_FORMATS)
    turns = _turns_of(record, record_format, is_prompt=True)
    columns = set(turns.columns)
    # 2. What they say.
    said: dict[Role, list[str]] = {"user": [], "system": []}
    for message in parse_turns(turns, roles=_PROMPT_ROLES, unread=found):
        text = message.content.encode("utf-8", "replace").decode()
        if text.strip():
            said[message.role].append(text)
    user, system = said["user"], said["system"]
    if not system:
        columns.add("system")
        beside = _field(record, "system", required=False)
        if beside.strip():
            system.append(beside)
    # 3. What is left.
    if unread is not None:
        if len(system) > 1:
            found[TURNS, "system before the last one"] += len(system) - 1
        if not user:
            found.add(WITHOUT_PROMPT, "")
        columns.update([key for key in PROMPT_IDS if usable_id(record, key) is not None][:1])
        found.count_columns(record, columns | _bookkeeping(record))
        unread.update(found)
    return user, (system[-1] if system else None)


def _request_of(record: object) -> object:
    """Return the request that a line of a batch file of OpenAI's and vLLM's servers holds, with its
    id; other records as they are.
    """
    if not isinstance(record, Mapping) or "custom_id" not in record:
        return record
    if not isinstance(record.get("body"), Mapping):
        return record
    beside = {key: value for key, value in record.items() if key not in _BATCH_KEYS}
    return {**beside, **record["body"]}


def _turns_of(
    record: Mapping[str, Any],
    record_format: str,
    fields: DatasetConfig | None = None,
    is_prompt: bool = False,
) -> Turns:
    """Return the turns of a record in any format; of a prompt, those of the user at least."""
    if record_format == "alpaca":
        turns = [{"role": "user", "content": _alpaca_prompt(record)}]
        if not is_prompt:
            turns.append({"role": "assistant", "content": _field(record, "output")})
        return Turns(turns, _ALPACA_COLUMNS)
    if record_format == "mt_bench":
        texts = as_list(record, "turns")
        return Turns([{"role": "user", "content": text} for text in texts], ("turns",))
    if record_format in _PROMPT_COLUMNS:
        said = record[record_format]
        if not isinstance(said, (list, tuple)):
            said = [_field(record, record_format)]
        turns = [{"role": "user", "content": t} if isinstance(t, str) else t for t in said]
        return Turns(turns, (record_format,))
    # the turns of a format may have the keys of another
    column = _CHAT_FORMATS[record_format][0]
    if fields is not None:
        column = fields.field_messages or column
    found = as_list(record, column)
    if not found and not is_prompt:
        raise RecordError(f"'{column}' is an empty list")
    role, content = _TURN_KEYS[record_format]
    if found and isinstance(found[0], Mapping):
        for keys in _TURN_KEYS.values():
            if keys[0] in found[0]:
                role, content = keys
                break
    if fields is not None:
        role, content = fields.role_key or role, fields.content_key or content
    return Turns(found, (column,), role, content)


def _detect_format(
    record: object, type: str, formats: Mapping[str, tuple[str, ...]]
) -> tuple[Mapping[str, Any], str]:
    """Return the record, which has to be an object, and its format: `type`, or the one that has its
    keys.
    """
    if _is_list_of_turns(record):  # as create_data.py of the Medusa repository writes them
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise RecordError(f"a record must be a JSON object, this is {json_type(record)}")
    if type in formats:
        return record, type
    if type == "auto":
        # tables have null in the columns of other formats, so keys with a value come first
        filled = {key for key, value in record.items() if value is not None}
        found = _format_with(filled, formats) or _format_with(set(record), formats)
        if found is not None:
            return record, found
    wanted = [f"{' and '.join(map(repr, keys))} ({name})" for name, keys in formats.items()]
    expected = ", ".join(wanted)
    present = ", ".join(sorted(map(str, record))) or "none"
    remedy = ""
    if _format_with(set(record), _PROMPT_FORMATS) is not None:
        remedy = "; medusa-selfdistill --prompts writes a model's answers to such prompts"
    raise RecordError(
        f"unknown record format, expected the keys {expected}; its keys: {present}{remedy}"
    )


def _format_with(keys: set[str], formats: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the first format of which all keys are there."""
    for name, required in formats.items():
        if keys.issuperset(required):
            return name
    return None


def _is_list_of_turns(record: object) -> bool:
    """Return whether a record is a chat without anything around it."""
    if not isinstance(record, list) or not record:
        return False
    return all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in record)


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
        raise RecordError(f"'{key}' must be a string, it is {found_under(record, key)}")
    return value


def _variables_of(
    record: Mapping[str, Any], names: Collection[str] | None, columns: set[str]
) -> str:
    """Return what a record says of the chat template's variables `names`, as JSON text, '' for
    nothing; add the columns that it is read from to `columns`.

    `tools` may be JSON text, as in tables. Values of null are as good as missing.
    """
    values: dict[str, Any] = {}
    for name in names or ():
        if record.get(name) is not None and name not in ("system", "messages"):
            values[name] = record[name]
            columns.add(name)
    further = record.get(TEMPLATE_KWARGS)
    if further is not None:
        if not isinstance(further, Mapping):
            raise RecordError(f"'{TEMPLATE_KWARGS}' must be an object, it is {json_type(further)}")
        taken = sorted(set(further) & RENDERING)
        if taken:
            raise RecordError(f"'{TEMPLATE_KWARGS}': {', '.join(taken)}: set by rendering itself")
        unknown = sorted(set(further) - set(further if names is None else names))
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
        return ""
    try:
        return json.dumps(values, sort_keys=True)
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
    reasons = record.get(_FINISH_REASONS)
    if not isinstance(reasons, (list, tuple)):
        return set()
    if answers is not None and len(reasons) != answers:
        return set(_SELF_DISTILLATION_KEYS)
    return {_FINISH_REASONS, *_SELF_DISTILLATION_KEYS}
