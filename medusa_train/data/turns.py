"""The turns of a chat: who speaks, what is said, and whether it is trained.

A data set's turns are parsed with `parse_turns`, the messages of a chat that is to be answered with
`read_messages`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.conversation import (
    REASONING_TAGS,
    SURROGATES,
    Message,
    ReasoningTags,
    Role,
    join_reasoning,
)
from medusa_train.data.record_files import shown_name
from medusa_train.data.unread import TURN_KEYS, TURNS, Unread, unread_keys
from medusa_train.errors import DataError
from medusa_train.io import parse_json, warn_once

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    # ShareGPT's other assistants
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
}
_TOOL_ROLES = ("tool", "function", "function_call", "observation", "ipython")
#: The keys under which servers return the reasoning part of an answer.
REASONING_KEYS = ("reasoning_content", "reasoning")
#: The keys of a turn that say whether it is trained, as Axolotl names them.
_TRAIN_KEYS: tuple[str, ...] = ("train", "training")
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


class Turns(NamedTuple):
    """The turns of a record.

    Attributes:
        turns: mappings, if the record is valid.
        columns: of the record that they were read from.
        role: key of a turn that says who speaks.
        content: key of a turn's text.
    """

    turns: Sequence[Any]
    columns: Collection[str]
    role: str = "role"
    content: str = "content"


def parse_turns(
    keys: Turns,
    *,
    tags: ReasoningTags = REASONING_TAGS,
    roles: Collection[Role] | None = None,
    unread: Unread,
    fields: DatasetConfig | None = None,
) -> list[Message]:
    """Parse the turns of a record.

    Args:
        roles: turns of other roles are skipped unparsed; None: all are read.
        unread: counts the keys of turns that are not read.
        fields: names of roles and switches, where they are not as usual.
    """
    named_roles: dict[str, str] = {}  # "tool" for tool calls and results
    train_keys = _TRAIN_KEYS
    if fields is not None:
        for meant, names in (fields.roles or {}).items():
            named_roles.update(dict.fromkeys(names, meant))
        if fields.message_field_training is not None:
            train_keys = (fields.message_field_training,)
    messages = []
    for number, turn in enumerate(keys.turns, start=1):
        if not isinstance(turn, Mapping):
            raise RecordError(f"turn {number} must be an object, it is {json_type(turn)}")
        # 1. Who speaks.
        name = turn.get(keys.role)
        meaning = ""
        if isinstance(name, str):
            meaning = named_roles.get(name, name.lower())
        role = _ROLES.get(meaning)
        if roles is not None and role not in roles:
            if role is None:  # answers are left out on purpose
                unread.add(TURNS, f"the role {name}")
            continue
        if meaning in _TOOL_ROLES or turn.get("tool_calls") or turn.get("function_call"):
            raise RecordError(f"turn {number} is a tool call or its result, which is not supported")
        if name is None:
            raise RecordError(
                f"turn {number}: '{keys.role}' must be a string, it is"
                f" {found_under(turn, keys.role)}"
            )
        if role is None:
            raise RecordError(
                f"turn {number}: unknown '{keys.role}': {name!r}, expected one of"
                f" {', '.join([*_ROLES, *named_roles])}; `roles` of the data set gives other names"
            )
        # 2. What is said: an answer has its reasoning before the content.
        content = _content(turn, number, keys.content, unread)
        read = {keys.role, keys.content, "weight", "tool_calls", "function_call", *train_keys}
        ids = None
        if role == "assistant":
            ids = _token_ids(turn.get("token_ids"), number)
            reasoning = _reasoning_of(turn, number)
            content = join_reasoning(reasoning, content, tags)
            read.add("token_ids")
            read |= {key for key in REASONING_KEYS if turn.get(key) in ("", reasoning)}
        # 3. Whether it is trained.
        is_target = _is_target(turn, number, train_keys)
        messages.append(Message(role, content, ids, is_target=is_target))
        # 4. What is left.
        unread.add(TURN_KEYS, *unread_keys(turn, read))
    return messages


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
                f"turn {number}: '{key}' must be a string, it is {json_type(turn[key])}"
            )
    return reasoning_part(turn)


def reasoning_part(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message has beside its content, or ''."""
    for key in REASONING_KEYS:
        text = message.get(key)
        if isinstance(text, str) and text.strip():
            return text
    return ""


def _token_ids(ids: object, number: int) -> tuple[int, ...] | None:
    """Return the tokens that self-distillation stores beside an answer."""
    if ids is None:
        return None
    if isinstance(ids, (list, tuple)) and all(map(_is_token_id, ids)):
        return tuple(ids)
    raise RecordError(f"turn {number}: 'token_ids' must be a list of token ids")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def mark_cut_answers(messages: list[Message], reasons: object) -> None:
    """Mark the answers that reached a length limit: `reasons` of self-distillation has an entry for
    each answer.
    """
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not isinstance(reasons, (list, tuple)) or len(reasons) != len(answers):
        return
    for index, reason in zip(answers, reasons, strict=True):
        if reason in ("length", "context", "possibly cut"):
            messages[index] = replace(messages[index], is_cut=True)


def read_messages(chat: object) -> list[Message]:
    """Read the messages of a chat that is to be answered, as OpenAI's clients hold them.

    Read are `role`, `content` (text, or a list of text parts) and the reasoning of an answer beside
    it; `tool_calls` are refused, and other keys, such as `name`, are named in a warning, once.

    Raises DataError, which names the message: also if there is none, or the last is an answer.
    """
    found = json_type(chat)
    turns: list[Any] = []
    if isinstance(chat, Sequence) and not isinstance(chat, (str, bytes)):
        turns = list(chat)
        found = f"a list with {json_type(turns[0])}" if turns else "an empty list"
    if not turns or not all(isinstance(turn, Message | Mapping) for turn in turns):
        raise DataError(
            "a prompt is text, or a list of messages such as {'role': 'user', 'content': TEXT}; it"
            f" is {found}. For several prompts write [model.generate(prompt) for prompt in"
            " prompts], for token ids model.generate(tokenizer.decode(ids), raw=True)"
        )
    messages = []
    unread = Unread()
    for number, turn in enumerate(turns, start=1):
        if isinstance(turn, Message):
            messages.append(turn)
            continue
        if not isinstance(turn.get("role"), str):
            raise DataError(f"message {number}: expected a mapping with role and content")
        role = turn["role"]
        if turn.get("tool_calls"):
            raise DataError(f"message {number} ({role}): tool_calls are not supported")
        try:
            content = _content(turn, number, "content", unread)
            reasoning = ""
            if role == "assistant":
                reasoning = _reasoning_of(turn, number)
        except RecordError as error:
            raise DataError(str(error)) from None
        read = {"role", "content", "tool_calls"}
        if role == "assistant":
            read |= {*REASONING_KEYS}
        unread.add(TURN_KEYS, *unread_keys(turn, read))
        text = join_reasoning(reasoning, content)
        if SURROGATES.search(text):
            raise DataError(
                f"message {number} ({role}) contains a lone surrogate, which UTF-8 cannot encode"
            )
        messages.append(Message(role, text))
    if messages[-1].role == "assistant":
        raise DataError(
            f"message {len(messages)} (assistant): a chat that is to be answered ends with the user's"
            " turn; a text that is to be continued is given with raw=True"
        )
    if unread:
        # without the counts, which differ from call to call
        names = ", ".join(shown_name(name) for _, name in sorted(unread))
        warn_once(f"messages: not read: {names}")
    return messages


def _content(turn: Mapping[str, Any], number: int, key: str, unread: Unread) -> str:
    """Return a string, or the joined text parts of OpenAI's list form, whose other keys `unread`
    counts.
    """
    content = turn.get(key)
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        texts = []
        for part in content:
            if not _is_text_part(part):
                raise RecordError(f"turn {number}: '{key}' holds parts that are not text")
            texts.append(part["text"])
            names = unread_keys(part, ("type", "text"))
            unread.add(TURN_KEYS, *(f"{key}.{name}" for name in names))
        return "".join(texts)
    raise RecordError(f"turn {number}: '{key}' must be a string, it is {found_under(turn, key)}")


def _is_text_part(part: object) -> bool:
    """Return whether a part of a content is text: a caption of an image is not."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    return part.get("type") in (None, "text", "input_text", "output_text")


def as_list(record: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return the list of turns that a record has under `key`; tables may hold it as JSON text."""
    turns = record.get(key)
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        try:
            turns = parse_json(turns)
        except ValueError as error:
            raise RecordError(f"'{key}' is not valid JSON: {error}") from None
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
