"""Find the form of a chat with tool calls that its template accepts, by rendering it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from medusa_train.data.chat_template import ChatTemplate, ChatTemplateError, placeholder
from medusa_train.data.conversation import Message

#: The form of call ids that Mistral's templates require.
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def fit_to_template(
    messages: Sequence[Message], template: ChatTemplate, counts: Counter[str]
) -> Sequence[Message]:
    """Return the messages of a chat in a form that the template accepts, and count what this
    changes or leaves out; raise ChatTemplateError if it cannot render the chat.
    """
    has_calls = any(message.calls for message in messages)
    if not has_calls and all(message.role != "tool" for message in messages):
        return messages
    # 1. The forms to try. A template may reject ids other than nine letters and digits, and
    # arguments that are objects. If the calls of answers are plain text, results may be turns of
    # the user.
    shortened = [_with_short_ids(message) for message in messages]
    change = _with_text_arguments if has_calls else _of_user
    count = "text_arguments" if has_calls else "results_of_user"
    changed = [[change(message) for message in form] for form in (messages, shortened)]
    # 2. The first form that the template accepts.
    problems = []
    for form in (messages, shortened, *changed):
        try:
            keeps_content = _keeps_content(form, template)
        except ChatTemplateError as error:
            problems.append(error)
            continue
        if form in changed:
            counts[count] += 1
        if not keeps_content:
            counts["dropped_content"] += 1
        return form
    # 3. The template rejects all forms. Its error for the chat as it is may only be about the ids,
    # so raise its error for the same chat with short ids.
    raise problems[1]


def _keeps_content(messages: Sequence[Message], template: ChatTemplate) -> bool:
    """Return whether a template renders the text next to tool calls; raise ChatTemplateError if it
    rejects the chat, or leaves out calls or results.
    """
    # 1. The chat with placeholders for tool names, results, and texts next to calls.
    outline = []
    names: list[str] = []
    results: list[str] = []
    last_text = None  # the last text next to calls
    for number, message in enumerate(messages):
        content = f"{placeholder(number)}text"
        calls = []
        for place, call in enumerate(message.calls):
            names.append(f"{placeholder(number)}name{place}")
            calls.append({**call, "function": {**call["function"], "name": names[-1]}})
        if calls:
            message = replace(message, parts={**message.parts, "tool_calls": calls})
        if calls and message.content.strip():
            last_text = number, content
            message = replace(message, content=content)
        elif message.role == "tool":
            results.append(content)
            message = replace(message, content=content)
        outline.append(message)
    # 2. Which placeholders the template renders.
    text = template.render(outline)
    if not all(name in text for name in names):
        raise ChatTemplateError("the chat template leaves out tool calls")
    if results and not any(result in text for result in results):
        raise ChatTemplateError("the chat template leaves out results of tools")
    # A template may drop such a text once later turns follow, so render up to the last one.
    if last_text is None:
        return True
    number, content = last_text
    return content in template.render(outline[: number + 1])


def _of_user(message: Message) -> Message:
    """Make the result of a tool a turn of the user."""
    return replace(message, role="user", parts={}) if message.role == "tool" else message


def _with_text_arguments(message: Message) -> Message:
    """Write the arguments of calls as JSON text."""
    if not message.calls:
        return message
    calls = []
    for call in message.calls:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return replace(message, parts={**message.parts, "tool_calls": calls})


def _with_short_ids(message: Message) -> Message:
    """Replace the ids of calls and results by nine letters and digits, the same for the same id."""
    parts: dict[str, Any] = dict(message.parts)
    if "tool_call_id" in parts:
        parts["tool_call_id"] = _short_id(parts["tool_call_id"])
    if message.calls:
        parts["tool_calls"] = [
            {**call, "id": _short_id(call.get("id") or str(number))}
            for number, call in enumerate(message.calls)
        ]
    return replace(message, parts=parts)


def _short_id(name: str) -> str:
    if _SHORT_ID.fullmatch(name):
        return name
    number = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
    digits = ""
    for _ in range(9):
        number, digit = divmod(number, 62)
        digits += _DIGITS[digit]
    return digits


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's API: arguments are JSON text, every call has an id,
    and its result refers to this id.
    """
    chat = []
    ids: list[str] = []  # ids of the last calls whose results have not come yet
    for number, message in enumerate(messages):
        turn = _with_text_arguments(message).as_dict()
        for place, call in enumerate(turn.get("tool_calls", ())):
            call.setdefault("id", f"call_{number}_{place}")
            ids = [*ids[:place], call["id"]]
        if message.role == "tool":
            turn.setdefault("tool_call_id", ids[0] if ids else f"call_{number}")
            ids = ids[1:]
        chat.append(turn)
    return chat


def map_strings(value: Any, change: Any) -> Any:
    """Return a JSON value with every string in it changed, except keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(inner, change) for inner in value]
    return value
