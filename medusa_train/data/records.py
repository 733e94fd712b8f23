"""Chat records in the formats ShareGPT, OpenAI messages and alpaca, parsed into conversations.

Training reads whole chats (`normalize`). Self-distillation and benchmarks read their user turns alone
(`parse_user_turns`), unless they have tools (`parse_tool_chat`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

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
    RecordError,
    as_list,
    found_under,
    json_type,
    optional_text,
)
from medusa_train.data.report import TURNS, WITHOUT_PROMPT, Unread
from medusa_train.data.tool_calls import TOOLS, link_results, parse_tools
from medusa_train.data.turns import TurnKeys, has_tool_keys, mark_cut_answers, parse_turns


class Format(NamedTuple):
    """A record format: the keys by which it is known, of which the first usually holds the turns,
    and the keys of a turn.
    """

    keys: tuple[str, ...]
    role: str = "role"
    content: str = "content"


#: The formats of chats, in the order in which `auto` tries them.
_CHAT_FORMATS = {
    "sharegpt": Format(("conversations",), "from", "value"),
    "messages": Format(("messages",)),
    "conversation": Format(("conversation",)),  # LMSYS-Chat-1M, WildChat
    "alpaca": Format(("instruction", "output")),
    "xlam": Format(("query", "answers")),  # one answer, whose calls are JSON text
}
#: Columns of prompts that are no chats: a text, or a list of texts or messages.
_PROMPT_COLUMNS = ("prompt", "question", "problem", "input")
_PROMPT_FORMATS = {
    **_CHAT_FORMATS,
    "alpaca": Format(("instruction",)),
    "mt_bench": Format(("turns",)),
    **{key: Format((key,)) for key in _PROMPT_COLUMNS},
}
_PROMPT_ROLES: tuple[Role, ...] = ("user", "system")
#: What a line of a batch file has around its request.
_BATCH_KEYS = ("method", "url", "body")
#: A record with this key is output of self-distillation; it has a reason for each answer.
_FINISH_REASONS = "finish_reasons"
#: What self-distillation writes next to them, a chat and an id.
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
TEMPLATE_KWARGS = "chat_template_kwargs"
_TOOL_COLUMNS = (TOOLS, "functions")
#: Entries of it that hold tools (smoltalk2).
TOOL_KWARGS = (TOOLS, "xml_tools", "python_tools")


def normalize(
    record: object,
    type: str = "auto",
    *,
    source: str = "",
    tags: ReasoningTags = REASONING_TAGS,
    variables: Collection[str] | None = (),
    fields: DatasetConfig | None = None,
    unread: Unread | None = None,
    is_prompt: bool = False,
) -> Conversation:
    """Return the chat of a record.

    Args:
        record: a JSON object: ShareGPT `{"conversations": [{"from", "value"}]}`, OpenAI
            `{"messages": [{"role", "content"}]}` or alpaca `{"instruction", "input", "output"}`.
            Turns may have their reasoning apart, as `reasoning_content`, which `tags` join with the
            content. Output of self-distillation may have `token_ids` next to an answer's content,
            and `finish_reasons`. `train` or `training` of a turn say whether it is trained, and
            turns of `weight` 0 are not.
        type: which of the three, or "auto" to detect it by the keys.
        source: `file:line`, stored in the conversation.
        variables: of the chat template. Columns of these names, and the entries of
            `chat_template_kwargs`, become variables of the chat; None if the template is not known
            yet: then any entry is allowed.
        fields: names the keys of turns and their roles, where they are not as usual.
        unread: counts the columns and the keys of turns that are not read.
        is_prompt: the record may have the formats and ids of prompts, see `parse_user_turns`.

    Raises:
        RecordError: the record is not a valid chat.
    """
    found = Unread()
    # 1. The turns of any format as messages.
    formats = _PROMPT_FORMATS if is_prompt else _CHAT_FORMATS
    if fields is not None and fields.field_messages is not None:
        formats = {"messages": Format((fields.field_messages,))}
        type = "auto"
    record, record_format = _detect_format(record, type, formats)
    turns, columns, keys = _turns_of(record, record_format, formats[record_format], fields)
    if not turns:
        raise RecordError(f"'{columns.pop()}' is an empty list")
    messages = link_results(parse_turns(turns, keys, found, tags=tags))
    num_answers = sum(message.role == "assistant" for message in messages)
    mark_cut_answers(messages, record.get(_FINISH_REASONS))
    # 2. An answer that continues a longer chat of ShareGPT is left out, as by FastChat, and no row
    # has a question after the last answer.
    if record_format == "sharegpt" and messages[0].role == "assistant":
        found.add(TURNS, "assistant before the first question")
        del messages[0]
    if any(message.role == "assistant" for message in messages):
        for message in takewhile(lambda turn: turn.role != "assistant", reversed(messages)):
            found.add(TURNS, f"{message.role} after the last answer")
    # 3. The system message, of the turns or next to them. Many data sets always have the field, empty
    # for none.
    if not messages or messages[0].role != "system":
        columns.add("system")
        messages.insert(0, Message("system", optional_text(record, "system")))
    if not messages[0].content.strip():
        del messages[0]
    problem = problem_with(tuple(messages))
    if problem is not None:
        raise RecordError(problem)
    # 4. Variables of the chat template, the id, and the columns that are left.
    if messages[0].role == "system" and "<tools>" in messages[0].content:
        variables = set(variables or ()) - {TOOLS}  # the system message of Hermes has them
    template_variables = _variables_of(record, variables, columns)
    conversation = Conversation("", tuple(messages), source, template_variables)
    ids = [key for key in (PROMPT_IDS if is_prompt else ("id",)) if usable_id(record, key)]
    record_id = usable_id(record, *ids)
    columns.update(ids[:1])
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
    turns, columns, keys = _turns_of(record, record_format, _PROMPT_FORMATS[record_format])
    # 2. What they say.
    said: dict[Role, list[str]] = {"user": [], "system": []}
    for message in parse_turns(turns, keys, found, roles=_PROMPT_ROLES):
        text = message.content.encode("utf-8", "replace").decode()
        if text.strip():
            said[message.role].append(text)
    user, system = said["user"], said["system"]
    if not system:
        columns.add("system")
        column = optional_text(record, "system")
        if column.strip():
            system.append(column)
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


def parse_tool_chat(
    record: object, type: str = "auto", unread: Unread | None = None
) -> Conversation | None:
    """Return the chat of a record that has tools, tool calls or results of tools; None for others.

    All of its messages are read, as in training, since the user's turns alone do not lead to its
    answers. The formats, and the errors for these chats, are those of `parse_user_turns` and
    `normalize`.
    """
    record, record_format = _detect_format(_request_of(record), type, _PROMPT_FORMATS)
    turns, _, keys = _turns_of(record, record_format, _PROMPT_FORMATS[record_format])
    has_tools = any(parse_tools(record.get(column), column) for column in _TOOL_COLUMNS)
    if not (has_tools or record_format == "xlam" or any(has_tool_keys(t, keys) for t in turns)):
        return None
    # its own variables of the template, whose names are not known here
    names = {TOOLS}
    own = record.get(TEMPLATE_KWARGS)
    if isinstance(own, Mapping):  # `normalize` rejects anything else
        names.update(own)
    variables = names.difference(TOOL_KWARGS[1:])
    return normalize(record, type, variables=variables, unread=unread, is_prompt=True)


def answer_points(chat: Conversation) -> list[int]:
    """Return where the recorded answers of a chat are among its messages; for a chat without any,
    after its first question.
    """
    points = [n for n, message in enumerate(chat.messages) if message.role == "assistant"]
    return points or [len(chat.first_prompt.messages)]


def _request_of(record: object) -> object:
    """Return the request that a line of a batch file of OpenAI's and vLLM's servers holds, with its
    id; other records as they are.
    """
    if not isinstance(record, Mapping) or "custom_id" not in record:
        return record
    if not isinstance(record.get("body"), Mapping):
        return record
    others = {key: value for key, value in record.items() if key not in _BATCH_KEYS}
    return {**others, **record["body"]}


def _turns_of(
    record: Mapping[str, Any], name: str, format: Format, fields: DatasetConfig | None = None
) -> tuple[Sequence[Any], set[str], TurnKeys]:
    """Return the turns of a record in the format called `name`, the columns that they are read
    from, and the keys of the turns.
    """
    # 1. Questions and answers that are no turns.
    column = format.keys[0]
    if name == "alpaca":
        if record.get("history"):
            raise RecordError("'history' is not supported; write the chat as 'messages'")
        parts = [_text(record, "instruction"), optional_text(record, "input")]
        turns = [_said("user", "\n\n".join(part for part in parts if part.strip()))]
        if "output" in format.keys:
            turns.append(_said("assistant", _text(record, "output")))
        return turns, {"instruction", "input", "output", "history"}, TurnKeys()
    if name == "xlam":
        answer = {**_said("assistant", None), "tool_calls": record["answers"]}
        return [_said("user", _text(record, "query")), answer], {"query", "answers"}, TurnKeys()
    if name in (*_PROMPT_COLUMNS, "mt_bench"):
        is_list = name == "mt_bench" or isinstance(record[name], (list, tuple))
        prompts = as_list(record, column) if is_list else [_text(record, name)]
        turns = [turn if isinstance(turn, Mapping) else _said("user", turn) for turn in prompts]
        return turns, {column}, TurnKeys()
    found = as_list(record, column)
    # 2. Turns, which may have the keys of another format.
    if found and isinstance(found[0], Mapping):
        format = next((other for other in _CHAT_FORMATS.values() if other.role in found[0]), format)
    keys = TurnKeys(format.role, format.content)
    if fields is None:
        return found, {column}, keys
    names = {name: role for role, names in (fields.roles or {}).items() for name in names}
    keys = TurnKeys(
        fields.role_key or keys.role,
        fields.content_key or keys.content,
        (fields.message_field_training,) if fields.message_field_training else keys.train,
        names,
    )
    return found, {column}, keys


def _detect_format(
    record: object, type: str, formats: Mapping[str, Format]
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
    # tables have null in the columns of other formats, so keys with a value come first
    filled = {key for key, value in record.items() if value is not None}
    found = _format_with(filled, formats) or _format_with(set(record), formats)
    if type == "auto" and found is not None:
        return record, found
    wanted = [f"{' and '.join(map(repr, f.keys))} ({name})" for name, f in formats.items()]
    remedy = ""
    if "chat" in record or "trajectory" in record:  # glaive v2, nebius
        remedy = "; docs/reference/data-formats.md says how to convert it"
    elif _format_with(set(record), _PROMPT_FORMATS) is not None:
        remedy = "; medusa-selfdistill --prompts writes a model's answers to such prompts"
    raise RecordError(
        f"unknown record format, expected the keys {', '.join(wanted)}; its keys:"
        f" {', '.join(sorted(map(str, record))) or 'none'}{remedy}"
    )


def _format_with(keys: set[str], formats: Mapping[str, Format]) -> str | None:
    """Return the first format of which all keys are there."""
    return next((name for name, f in formats.items() if keys.issuperset(f.keys)), None)


def _is_list_of_turns(record: object) -> bool:
    """Return whether a record is a chat without anything around it."""
    if not isinstance(record, list) or not record:
        return False
    return all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in record)


def _said(role: Role, content: object) -> Mapping[str, Any]:
    return {"role": role, "content": content}


def _text(record: Mapping[str, Any], key: str) -> str:
    """Return the string under a key that has to be there."""
    if not isinstance(record.get(key), str):
        raise RecordError(f"'{key}' must be a string, it is {found_under(record, key)}")
    return str(record[key])


def _variables_of(
    record: Mapping[str, Any], names: Collection[str] | None, columns: set[str]
) -> str:
    """Return what a record says of the chat template's variables `names`, as JSON text, '' for
    nothing; add the columns that it is read from to `columns`.

    `tools` may be JSON text, as in tables. Values of null are as good as missing.
    """
    own = sorted(set(names or ()) - {"system", "messages", TOOLS})
    values = {name: record[name] for name in own if record.get(name) is not None}
    columns.update(values)
    takes_tools = names is None or TOOLS in names
    tools: list[Any] = []
    if names and TOOLS in names:
        for column in _TOOL_COLUMNS:
            if record.get(column) is not None:
                columns.add(column)
                tools += parse_tools(record[column], column)
    further = record.get(TEMPLATE_KWARGS)
    if further is not None:
        if not isinstance(further, Mapping):
            raise RecordError(f"'{TEMPLATE_KWARGS}' must be an object, it is {json_type(further)}")
        taken = sorted(set(further) & RENDERING)
        if taken:
            raise RecordError(f"'{TEMPLATE_KWARGS}': {', '.join(taken)}: set by rendering itself")
        # columns of tables have null in the others' entries
        given = {name: value for name, value in further.items() if value is not None}
        if takes_tools:
            for name in TOOL_KWARGS:
                if name not in (names or ()) or name == TOOLS:
                    tools += parse_tools(given.pop(name, None), name)
        unknown = sorted(set(given) - set(given if names is None else names))
        if unknown:
            raise RecordError(
                f"'{TEMPLATE_KWARGS}': not in the chat template: {', '.join(unknown)}"
            )
        values |= given
        columns.add(TEMPLATE_KWARGS)
    if tools:
        values[TOOLS] = tools
    try:
        # templates write tools with their keys in this order
        return json.dumps(values) if values else ""
    except (TypeError, ValueError) as error:
        raise RecordError(f"variables of the chat template: {error}") from None


def usable_id(record: Mapping[str, Any], *keys: str) -> str | None:
    """Return the first of `keys` that names a record, as text; None if none does."""
    for key in keys:
        value = record.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return SURROGATES.sub("?", str(value))
    return None


def _bookkeeping(record: Mapping[str, Any], answers: int | None = None) -> set[str]:
    """Return the keys that self-distillation writes next to a chat, if it wrote the record.

    Reasons of another number than that of the `answers` belong to another chat, and are not read.
    """
    reasons = record.get(_FINISH_REASONS)
    if not isinstance(reasons, (list, tuple)):
        return set()
    if answers is not None and len(reasons) != answers:
        return set(_SELF_DISTILLATION_KEYS)
    return {_FINISH_REASONS, *_SELF_DISTILLATION_KEYS}
