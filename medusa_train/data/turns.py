"""Parse the turns of a chat: the role, the content, and whether the turn is trained."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from medusa_train.data.conversation import (
    REASONING_TAGS,
    SURROGATES,
    Message,
    ReasoningTags,
    Role,
    join_reasoning,
)
from medusa_train.data.json_values import (
    JsonObject,
    RecordError,
    found_under,
    json_type,
    optional_text,
)
from medusa_train.data.record_files import shown_name
from medusa_train.data.report import TURN_KEYS, TURNS, Unread
from medusa_train.data.tool_calls import (
    TOOLS,
    calls_of,
    link_results,
    parse_calls,
    parse_tools,
    result_parts,
)
from medusa_train.errors import DataError
from medusa_train.io import warn_once

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
    # results of tools
    "tool": "tool",
    "function": "tool",
    "function-response": "tool",
    "observation": "tool",
    "ipython": "tool",
    # answers whose text is a call (APIGen-MT, LLaMA-Factory, glaive)
    "function_call": "assistant",
    "function-call": "assistant",
}
_CALL_ROLES = ("function_call", "function-call")
#: The keys under which servers return the reasoning part of an answer.
REASONING_KEYS = ("reasoning_content", "reasoning")


class TurnKeys(NamedTuple):
    """The names that a data set uses in its turns.

    Attributes:
        role: key of the role.
        content: key of the text.
        train: keys that say whether the turn is trained, as in Axolotl.
        roles: the data set's names of roles, with the usual name of each.
        is_prompt: the chat is a prompt: no turn is trained, and roles that only its template knows
            are allowed.
    """

    role: str = "role"
    content: str = "content"
    train: Sequence[str] = ("train", "training")
    roles: Mapping[str, str] = {}
    is_prompt: bool = False


def parse_turns(
    turns: Sequence[Any],
    keys: TurnKeys,
    unread: Unread,
    *,
    tags: ReasoningTags = REASONING_TAGS,
    roles: Collection[Role] | None = None,
) -> list[Message]:
    """Parse the turns of a record. A RecordError tells which turn is not valid.

    Args:
        unread: counts the keys of turns that are not read.
        tags: tags that join the reasoning of an answer with its content.
        roles: turns of other roles are skipped unparsed; None: all are read.
    """
    messages = []
    for number, turn in enumerate(turns, start=1):
        try:
            if not isinstance(turn, Mapping):
                raise RecordError(f"must be an object, it is {json_type(turn)}")
            turn = JsonObject(turn)
            name = turn.get(keys.role)
            meaning = keys.roles.get(name, name.lower()) if isinstance(name, str) else ""
            role = _ROLES.get(meaning)
            if roles is None or role in roles:
                messages.append(_parse_turn(turn, keys, meaning, tags, unread))
            elif role != "assistant" or meaning in _CALL_ROLES:  # answers are left out on purpose
                unread.add(TURNS, f"the role {name}")
        except RecordError as error:
            raise RecordError(f"turn {number}: {error}") from None
    return messages


def _parse_turn(
    turn: JsonObject, keys: TurnKeys, meaning: str, tags: ReasoningTags, unread: Unread
) -> Message:
    """Parse a turn. `meaning` is the name of its role."""
    # 1. The role.
    if turn.get(keys.role) is None:
        raise RecordError(f"'{keys.role}' must be a string, it is {found_under(turn, keys.role)}")
    if meaning not in _ROLES and not (meaning and keys.is_prompt):
        raise RecordError(
            f"unknown '{keys.role}': {turn[keys.role]!r}, expected one of"
            f" {', '.join([*_ROLES, *keys.roles])}; `roles` of the data set gives other names"
        )
    role = _ROLES.get(meaning, turn[keys.role])
    calls = calls_of(turn)
    if calls and role != "assistant":
        raise RecordError(f"tool calls of the role {role}")
    # 2. The content. The reasoning of an answer is put before its content. If it has calls, which
    # are not part of the content, the template joins reasoning, content and calls.
    is_blank = (calls or role == "tool") and turn.get(keys.content) is None
    content = "" if is_blank else _content(turn, keys.content, unread)
    ids = None
    parts: dict[str, Any] = {}
    if role == "assistant":
        if meaning in _CALL_ROLES and not calls:
            calls = parse_calls(content, keys.content)
            content = ""
        names = (*REASONING_KEYS, "thinking") if calls else REASONING_KEYS
        texts = {key: optional_text(turn, key) for key in names}
        reasoning = reasoning_part(texts, names)
        turn.read -= {key for key, text in texts.items() if text not in ("", reasoning)}
        if calls:
            parts["tool_calls"] = calls
            if reasoning:  # templates read one of the two keys
                parts |= {"reasoning_content": reasoning, "thinking": reasoning}
        else:
            content = join_reasoning(reasoning, content, tags)
        ids = _token_ids(turn)
    elif role == "tool":
        parts |= result_parts(turn)
    # 3. Whether it is trained.
    is_target = None if keys.is_prompt else _is_target(turn, keys.train)
    # 4. The unread keys.
    unread.add(TURN_KEYS, *turn.unread())
    return Message(role, content, ids, is_target=is_target, parts=parts)


def _content(turn: Mapping[str, Any], key: str, unread: Unread) -> str:
    """Return the content of a turn as a string. OpenAI's list form is joined from its text parts;
    `unread` counts their other keys.
    """
    content = turn.get(key)
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RecordError(f"'{key}' must be a string, it is {found_under(turn, key)}")
    texts = []
    for part in content:
        part = JsonObject(part if isinstance(part, Mapping) else {})
        # The `text` of an image is its caption, which is not content.
        is_text = isinstance(part.get("text"), str)
        if not is_text or part.get("type") not in (None, "text", "input_text", "output_text"):
            raise RecordError(f"'{key}' holds parts that are not text")
        texts.append(part["text"])
        unread.add(TURN_KEYS, *(f"{key}.{name}" for name in part.unread()))
    return "".join(texts)


def reasoning_part(message: Mapping[str, Any], keys: Sequence[str] = REASONING_KEYS) -> str:
    """Return the reasoning that a message has next to its content, or ''."""
    for key in keys:
        text = message.get(key)
        if isinstance(text, str) and text.strip():
            return text
    return ""


def _token_ids(turn: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the tokens that self-distillation stores next to an answer."""
    ids = turn.get("token_ids")
    if ids is None:
        return None
    if isinstance(ids, (list, tuple)) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        return tuple(ids)
    raise RecordError("'token_ids' must be a list of token ids")


def _is_target(turn: Mapping[str, Any], keys: Sequence[str]) -> bool | None:
    """Return whether a turn is marked as trained; None if it is not marked.

    The values of `keys` are true or false, as in Axolotl. `weight` is 0 or 1, as in OpenAI's
    fine-tuning, where 1 is the default. They must not contradict each other.
    """
    if turn.get("train_detail") is not None or turn.get("training_detail") is not None:
        raise RecordError("training of parts of a turn is not supported")
    switches = {key: turn[key] for key in keys if turn.get(key) is not None}
    for key, switch in switches.items():
        if not isinstance(switch, bool):
            raise RecordError(f"'{key}' must be true or false, it is {switch!r}")
    weight = turn.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise RecordError(f"'weight' must be 0 or 1, it is {weight!r}")
    if weight == 0:
        switches["weight"] = False
    if len(set(switches.values())) > 1:
        raise RecordError(f"{' and '.join(map(repr, switches))} contradict each other")
    return next(iter(switches.values()), None)


def has_tool_keys(turn: object, keys: TurnKeys) -> bool:
    """Return whether a turn makes tool calls, or is the result of one."""
    if not isinstance(turn, Mapping):
        return False
    name = str(turn.get(keys.role)).lower()
    is_call = any(turn.get(key) for key in ("tool_calls", "function_call"))
    return bool(is_call) or name in _CALL_ROLES or _ROLES.get(name) == "tool"


def read_messages(chat: object) -> list[Message]:
    """Read the messages of a prompt, in the format of OpenAI's clients.

    A warning lists the keys that are not read, such as `name`, once.

    Raises:
        DataError: a turn is not valid (the message tells which), there is no turn, or the last turn
            is an answer.
    """
    found_type = json_type(chat)
    turns: list[Any] = []
    if isinstance(chat, Sequence) and not isinstance(chat, (str, bytes)):
        turns = list(chat)
        found_type = f"a list with {json_type(turns[0])}" if turns else "an empty list"
    if not turns or not all(isinstance(turn, Message | Mapping) for turn in turns):
        raise DataError(
            "a prompt is text, or a list of messages such as {'role': 'user', 'content': TEXT}; it"
            f" is {found_type}. For several prompts write [model.generate(prompt) for prompt in"
            " prompts], for token ids model.generate(tokenizer.decode(ids), raw=True)"
        )
    unread = Unread()
    try:
        messages = parse_turns(
            [turn.as_dict() if isinstance(turn, Message) else turn for turn in turns],
            TurnKeys(is_prompt=True),
            unread,
        )
        messages = link_results(messages)
    except RecordError as error:
        raise DataError(str(error)) from None
    for number, message in enumerate(messages, start=1):
        if SURROGATES.search(message.content):
            raise DataError(
                f"turn {number} ({message.role}) contains a lone surrogate, which UTF-8 cannot"
                " encode"
            )
    if messages[-1].role == "assistant":
        raise DataError(
            f"turn {len(messages)} (assistant): a chat that is to be answered ends with the user's"
            " turn; a text that is to be continued is given with raw=True"
        )
    if unread:
        # without the counts, which differ from call to call
        names = ", ".join(shown_name(name) for _, name in sorted(unread))
        warn_once(f"messages: not read: {names}")
    return messages


def read_tools(tools: object) -> str:
    """Return the tools of a prompt as variables of its template, see `Conversation.variables`.
    Raises DataError.
    """
    try:
        functions = parse_tools(tools, TOOLS)
        return json.dumps({TOOLS: functions}) if functions else ""
    except (RecordError, TypeError, ValueError) as error:
        raise DataError(str(error)) from None
