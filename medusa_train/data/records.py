"""Chat records in the formats ShareGPT, OpenAI messages and alpaca, parsed into conversations.

Training reads whole chats (`normalize`). Self-distillation and benchmarks read only the user's
turns (`parse_user_turns`), unless the chats have tools (`parse_tool_chat`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
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
from medusa_train.data.json_values import (
    JsonObject,
    RecordError,
    found_under,
    json_type,
    optional_text,
    turns_under,
)
from medusa_train.data.report import COLUMNS, TURNS, WITHOUT_PROMPT, Unread
from medusa_train.data.tool_calls import TOOLS, link_results, parse_tools
from medusa_train.data.turns import TurnKeys, has_tool_keys, parse_turns

#: Settings of a data set whose records have the usual keys and roles.
USUAL = DatasetConfig(path="-")
#: The columns that identify a format, by its name. The first usually holds the turns.
Formats = Mapping[str, tuple[str, ...]]
#: The formats of chats, in the order in which `auto` tries them.
_CHAT_FORMATS: Formats = {
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "conversation": ("conversation",),  # LMSYS-Chat-1M, WildChat
    "alpaca": ("instruction", "output"),
    "xlam": ("query", "answers"),  # one answer, whose calls are JSON text
}
#: Columns that hold prompts instead of chats: a text, or a list of texts or messages.
_PROMPT_COLUMNS = ("prompt", "question", "problem", "input")
_PROMPT_FORMATS: Formats = {
    **_CHAT_FORMATS,
    "alpaca": ("instruction",),
    "mt_bench": ("turns",),
    **{column: (column,) for column in _PROMPT_COLUMNS},
}
#: Keys around the request in a line of a batch file.
_BATCH_KEYS = ("method", "url", "body")
#: Only output of self-distillation has this key: a list of the reasons why the answers ended.
_FINISH_REASONS = "finish_reasons"
#: Keys that self-distillation writes, next to the chat and its id.
_SELF_DISTILLATION_KEYS = (
    _FINISH_REASONS,
    "seed_id",
    "model",
    "sampling",
    "temperature",
    "token_counts",
    "mode",
    "dropped",
)
#: Columns with the id of a prompt. The first usable one counts.
PROMPT_IDS = ("id", "question_id", "custom_id")
#: Columns that hold variables of the chat template.
TEMPLATE_KWARGS = "chat_template_kwargs"
_TOOL_COLUMNS = (TOOLS, "functions")
#: Entries of `chat_template_kwargs` that hold tools (smoltalk2).
TOOL_KWARGS = (TOOLS, "xml_tools", "python_tools")


def normalize(
    record: object,
    entry: DatasetConfig = USUAL,
    *,
    tags: ReasoningTags = REASONING_TAGS,
    variables: Collection[str] | None = (),
    unread: Unread | None = None,
    is_prompt: bool = False,
) -> Conversation:
    """Return the chat of a record, without its source.

        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
        -> messages (Message("user", "Hi"), Message("assistant", "Hello!"))

    Args:
        record: a JSON object: ShareGPT `{"conversations": [{"from", "value"}]}`, OpenAI
            `{"messages": [{"role", "content"}]}` or alpaca `{"instruction", "input", "output"}`.
            A turn may have its reasoning in `reasoning_content`; `tags` join it with the
            content. Output of self-distillation may have `token_ids` next to an answer's
            content, and `finish_reasons`. A turn's `train` or `training` tells whether it is
            trained; turns of `weight` 0 are not.
        entry: the format (`type`), and the keys and roles of turns that differ from the usual ones.
        variables: variables of the chat template. Columns of these names, and the entries of
            `chat_template_kwargs`, become variables of the chat. None if the template is not
            known yet; then any entry is allowed.
        unread: counts the columns and the keys of turns that are not read.
        is_prompt: the record may have the formats and ids of prompts, see `parse_user_turns`.

    Raises:
        RecordError: the record is not a valid chat.
    """
    unread_keys = Unread()
    # 1. Parse the turns into messages.
    formats, type = _PROMPT_FORMATS if is_prompt else _CHAT_FORMATS, entry.type
    if entry.field_messages is not None:
        formats, type = {"messages": (entry.field_messages,)}, "auto"
    record, record_format = _detect_format(record, type, formats)
    turns, keys = _turns_of(record, record_format, formats[record_format], entry)
    if not turns:
        raise RecordError(f"'{formats[record_format][0]}' is an empty list")
    messages = link_results(parse_turns(turns, keys, unread_keys, tags=tags))
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    reasons = _finish_reasons(record)
    if len(reasons) == len(answers):
        for index, reason in zip(answers, reasons, strict=True):
            if reason in ("length", "context", "possibly cut"):
                messages[index] = replace(messages[index], is_cut=True)
    else:  # the reasons belong to another chat
        record.read.discard(_FINISH_REASONS)
    # 2. A ShareGPT chat may begin with an answer that continues a longer chat. It is left out, as
    # FastChat does. Turns after the last answer are in no row, so they count as unread.
    if record_format == "sharegpt" and messages[0].role == "assistant":
        unread_keys.add(TURNS, "assistant before the first question")
        del messages[0]
    if any(message.role == "assistant" for message in messages):
        for message in takewhile(lambda turn: turn.role != "assistant", reversed(messages)):
            unread_keys.add(TURNS, f"{message.role} after the last answer")
    # 3. The system message: one of the turns, or the column `system`, which many data sets have but
    # leave empty.
    if not messages or messages[0].role != "system":
        messages.insert(0, Message("system", optional_text(record, "system")))
    if not messages[0].content.strip():
        del messages[0]
    problem = problem_with(tuple(messages))
    if problem is not None:
        raise RecordError(problem)
    # 4. Variables of the chat template, the id, and the unread columns.
    # Hermes lists the tools in the system message
    has_listed_tools = messages[0].role == "system" and "<tools>" in messages[0].content
    template_variables = _variables_of(record, variables, unread_keys, has_listed_tools)
    conversation = Conversation("", tuple(messages), "", template_variables)
    record_id = usable_id(record, *(PROMPT_IDS if is_prompt else ("id",)))
    if unread is not None:
        unread_keys.add(COLUMNS, *record.unread())
        unread.update(unread_keys)
    return replace(conversation, id=record_id or conversation.content_key[:16])


def _detect_format(record: object, type: str, formats: Formats) -> tuple[JsonObject, str]:
    """Return the record, which must be an object, and its format: `type`, or the one whose keys it
    has.
    """
    if _is_list_of_turns(record):  # as create_data.py of the Medusa repository writes them
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise RecordError(f"a record must be a JSON object, this is {json_type(record)}")
    if type in formats:
        return JsonObject(record), type
    # keys with a value come first, since tables have null in the columns of other formats
    filled = {key for key, value in record.items() if value is not None}
    detected = _format_with(filled, formats) or _format_with(set(record), formats)
    if detected is not None:
        return JsonObject(record), detected
    expected = [f"{' and '.join(map(repr, keys))} ({name})" for name, keys in formats.items()]
    remedy = ""
    if "chat" in record or "trajectory" in record:  # glaive v2, nebius
        remedy = "; docs/reference/data-formats.md says how to convert it"
    elif _format_with(set(record), _PROMPT_FORMATS) is not None:
        remedy = "; medusa-selfdistill --prompts writes a model's answers to such prompts"
    raise RecordError(
        f"unknown record format, expected the keys {', '.join(expected)}; its keys:"
        f" {', '.join(sorted(map(str, record))) or 'none'}{remedy}"
    )


def _format_with(columns: set[str], formats: Formats) -> str | None:
    """Return the first format whose keys are all in `columns`; None if there is none."""
    return next((name for name, keys in formats.items() if columns.issuperset(keys)), None)


def _is_list_of_turns(record: object) -> bool:
    """Return whether a record is a bare list of turns."""
    if not isinstance(record, list) or not record:
        return False
    return all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in record)


def _turns_of(
    record: JsonObject, name: str, columns: tuple[str, ...], entry: DatasetConfig = USUAL
) -> tuple[Sequence[Any], TurnKeys]:
    """Return the turns of a record in the format called `name`, which has these `columns`, and the
    keys of the turns.
    """
    # 1. Questions and answers that are columns, not turns.
    if name == "alpaca":
        if record.get("history"):
            raise RecordError("'history' is not supported; write the chat as 'messages'")
        parts = [_text(record, "instruction"), optional_text(record, "input")]
        turns = [_said("user", "\n\n".join(part for part in parts if part.strip()))]
        if "output" in columns:
            turns.append(_said("assistant", _text(record, "output")))
        record.read.add("output")  # counts as read: prompts do not use it
        return turns, TurnKeys()
    if name == "xlam":
        answer = {**_said("assistant", None), "tool_calls": record.get("answers")}
        return [_said("user", _text(record, "query")), answer], TurnKeys()
    if name in (*_PROMPT_COLUMNS, "mt_bench"):
        is_list = name == "mt_bench" or isinstance(record[name], (list, tuple))
        prompts = turns_under(record, columns[0]) if is_list else [_text(record, name)]
        turns = [turn if isinstance(turn, Mapping) else _said("user", turn) for turn in prompts]
        return turns, TurnKeys()
    # 2. A list of turns. Those of either format may have the keys of the other.
    listed_turns = turns_under(record, columns[0])
    first = listed_turns[0] if listed_turns and isinstance(listed_turns[0], Mapping) else {}
    has_sharegpt_keys = "from" in first or (name == "sharegpt" and "role" not in first)
    keys = TurnKeys("from", "value") if has_sharegpt_keys else TurnKeys()
    keys = TurnKeys(
        entry.role_key or keys.role,
        entry.content_key or keys.content,
        (entry.message_field_training,) if entry.message_field_training else keys.train,
        {name: role for role, names in (entry.roles or {}).items() for name in names},
    )
    return listed_turns, keys


def _said(role: Role, content: object) -> Mapping[str, Any]:
    return {"role": role, "content": content}


def _text(record: Mapping[str, Any], key: str) -> str:
    """Return the string under a required key."""
    if not isinstance(record.get(key), str):
        raise RecordError(f"'{key}' must be a string, it is {found_under(record, key)}")
    return str(record[key])


def _finish_reasons(record: JsonObject) -> Sequence[Any]:
    """Return why the answers of a record ended, if self-distillation wrote it; all keys that it
    writes then count as read.
    """
    reasons = dict.get(record, _FINISH_REASONS)  # dict.get does not count as reading
    if not isinstance(reasons, (list, tuple)):
        return ()
    record.read.update(_SELF_DISTILLATION_KEYS)
    return reasons


def _variables_of(
    record: JsonObject, names: Collection[str] | None, unread: Unread, has_listed_tools: bool
) -> str:
    """Return the values that a record has for the chat template's variables `names`, as JSON text;
    '' if it has none.

    `tools` may be JSON text, as in tables. Null counts as missing. Other lists of tools are unread
    if the system message has one.
    """
    own_names = sorted(set(names or ()) - {"system", "messages", TOOLS})
    values = {name: record[name] for name in own_names if record.get(name) is not None}
    takes_tools = names is None or TOOLS in names
    tools: list[Any] = []
    if names and TOOLS in names and not has_listed_tools:
        for column in _TOOL_COLUMNS:
            tools += parse_tools(record.get(column), column)
    template_kwargs = record.get(TEMPLATE_KWARGS)
    if template_kwargs is not None:
        if not isinstance(template_kwargs, Mapping):
            raise RecordError(
                f"'{TEMPLATE_KWARGS}' must be an object, it is {json_type(template_kwargs)}"
            )
        reserved = sorted(set(template_kwargs) & RENDERING)
        if reserved:
            raise RecordError(
                f"'{TEMPLATE_KWARGS}': {', '.join(reserved)}: set by rendering itself"
            )
        # tables have null in the entries of other records
        kwargs = {name: value for name, value in template_kwargs.items() if value is not None}
        if takes_tools:
            for name in TOOL_KWARGS:
                if name not in (names or ()) or name == TOOLS:
                    listed = parse_tools(kwargs.pop(name, None), name)
                    if listed and has_listed_tools:
                        unread.add(COLUMNS, f"{TEMPLATE_KWARGS}.{name}")
                    else:
                        tools += listed
        unknown_names = sorted(set(kwargs) - set(kwargs if names is None else names))
        if unknown_names:
            raise RecordError(
                f"'{TEMPLATE_KWARGS}': not in the chat template: {', '.join(unknown_names)}"
            )
        values |= kwargs
    if tools:
        values[TOOLS] = tools
    try:
        # keep the order of keys, in which templates write tools
        return json.dumps(values) if values else ""
    except (TypeError, ValueError) as error:
        raise RecordError(f"variables of the chat template: {error}") from None


def usable_id(record: Mapping[str, Any], *keys: str) -> str | None:
    """Return the first usable id under one of `keys`, as text; None if there is none."""
    for key in (key for key in keys if key in record):
        value = record[key]
        if type(value) in (str, int) and value != "":
            return SURROGATES.sub("?", str(record.get(key)))
    return None


def parse_user_turns(
    record: object, type: str = "auto", unread: Unread | None = None
) -> tuple[list[str], str | None]:
    """Return the user's messages of one record, and its system message or None.

    Assistant messages are ignored, so that prompts without answers and chats in any order are
    accepted. In addition to the formats of `normalize`, "auto" accepts MT-Bench's `{"turns": [text,
    ...]}`, and a text, or a list of texts or messages, under `prompt`, `question`, `problem` or
    `input`.

    Blank messages are dropped. The last system message is used. Lone surrogates become question
    marks. `unread` counts the unread columns, and the unread keys of the user's turns.

    Raises:
        RecordError: the record has none of these formats, or its turns are not text.
    """
    unread_keys = Unread()
    # 1. The turns of the user and the system.
    record, record_format = _detect_format(_request_of(record), type, _PROMPT_FORMATS)
    turns, keys = _turns_of(record, record_format, _PROMPT_FORMATS[record_format])
    # 2. Their texts.
    texts: dict[Role, list[str]] = {"user": [], "system": []}
    for message in parse_turns(turns, keys, unread_keys, roles=texts.keys()):
        text = message.content.encode("utf-8", "replace").decode()
        if text.strip():
            texts[message.role].append(text)
    user, system = texts["user"], texts["system"]
    if not system and (column := optional_text(record, "system")).strip():
        system.append(column)
    # 3. What was not read.
    if unread is not None:
        if len(system) > 1:
            unread_keys[TURNS, "system before the last one"] += len(system) - 1
        if not user:
            unread_keys.add(WITHOUT_PROMPT, "")
        usable_id(record, *PROMPT_IDS)
        _finish_reasons(record)
        unread_keys.add(COLUMNS, *record.unread())
        unread.update(unread_keys)
    return user, (system[-1] if system else None)


def parse_tool_chat(
    record: object, type: str = "auto", unread: Unread | None = None
) -> Conversation | None:
    """Return the chat of a record that has tools, tool calls or results of tools; None for others.

    All of its messages are read, as in training, since an answer depends on more than the user's
    turns. See `parse_user_turns` for the formats, and `normalize` for the errors.
    """
    record, record_format = _detect_format(_request_of(record), type, _PROMPT_FORMATS)
    turns, keys = _turns_of(record, record_format, _PROMPT_FORMATS[record_format])
    has_tools = any(parse_tools(record.get(column), column) for column in _TOOL_COLUMNS)
    if not (has_tools or record_format == "xlam" or any(has_tool_keys(t, keys) for t in turns)):
        return None
    # The variables of the template are not known here, so take those that the record sets.
    names = {TOOLS}
    template_kwargs = record.get(TEMPLATE_KWARGS)
    if isinstance(template_kwargs, Mapping):  # `normalize` rejects anything else
        names.update(template_kwargs)
    variables = names.difference(TOOL_KWARGS[1:])
    entry = USUAL.model_copy(update={"type": type})
    return normalize(record, entry, variables=variables, unread=unread, is_prompt=True)


def _request_of(record: object) -> object:
    """Return the request in a line of a batch file (OpenAI, vLLM), with the line's id; return other
    records unchanged.
    """
    if not isinstance(record, Mapping) or "custom_id" not in record:
        return record
    if not isinstance(record.get("body"), Mapping):
        return record
    other_values = {key: value for key, value in record.items() if key not in _BATCH_KEYS}
    return {**other_values, **record["body"]}


def answer_points(chat: Conversation) -> list[int]:
    """Return the message indices of a chat's recorded answers. For a chat without answers, return
    the index after its first question.
    """
    points = [n for n, message in enumerate(chat.messages) if message.role == "assistant"]
    return points or [len(chat.first_prompt.messages)]
