"""Chats with tool calls in the form that a chat template takes, found by rendering small examples."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from medusa_train.data.chat_template import ChatTemplate, ChatTemplateError
from medusa_train.data.conversation import Message

#: Templates of Mistral demand such ids of calls.
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_QUESTION = Message("user", "Hello")


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """What a chat template does with tool calls.

    Attributes:
        text_arguments: it takes arguments as JSON text only.
        calls: how many of two parallel calls it renders.
        keeps_content: it renders the text next to calls.
        has_results: it renders the role `tool`, and not as an answer.
    """

    text_arguments: bool
    calls: int
    keeps_content: bool
    has_results: bool


def fit_to_template(
    messages: Sequence[Message], template: ChatTemplate, counts: Counter[str]
) -> Sequence[Message]:
    """Return the messages of a chat as the template takes them, and count what it changes or leaves
    out; ChatTemplateError if it cannot render the chat.
    """
    if not any(message.calls or message.role == "tool" for message in messages):
        return messages
    support = _tool_support(template.source, tuple(sorted(template.special_tokens.items())))
    # 1. What the template cannot render, which it may not say.
    most = max(len(message.calls) for message in messages)
    if most and not support.calls:
        raise ChatTemplateError("the chat template leaves out tool calls")
    if most > support.calls == 1:
        raise ChatTemplateError("the chat template renders only the first of several tool calls")
    if most and not support.has_results:
        raise ChatTemplateError("the chat template leaves out results of tools")
    # 2. Results of answers whose calls are text, and arguments as JSON text.
    if not support.has_results:
        counts["results_of_user"] += 1
        messages = [
            replace(message, role="user", parts={}) if message.role == "tool" else message
            for message in messages
        ]
    if most and support.text_arguments:
        counts["text_arguments"] += 1
        messages = [_with_text_arguments(message) for message in messages]
    if not support.keeps_content and any(m.calls and m.content.strip() for m in messages):
        counts["dropped_content"] += 1
    # 3. Ids of nine letters and digits, if the template rejects others.
    try:
        template.render(messages)
    except ChatTemplateError:
        shortened = [_with_short_ids(message) for message in messages]
        if shortened == messages:
            raise
        template.render(shortened)
        return shortened
    return messages


@lru_cache(maxsize=8)
def _tool_support(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ToolSupport:
    """Find out what a template does with tool calls by rendering chats of one and two calls."""
    template = ChatTemplate(source, dict(special_tokens))
    if "tools" in template.variables:
        schema = {"type": "object", "properties": {"place": {"type": "string", "description": "x"}}}
        tool = {"name": "find1", "description": "Finds", "parameters": schema}
        template = template.with_variables({"tools": [{"type": "function", "function": tool}]})

    def render(*messages: Message) -> str:
        try:
            return template.render([_QUESTION, *messages])
        except ChatTemplateError:
            return ""

    result = Message("tool", "Sunny", parts={"tool_call_id": "callno001", "name": "find1"})
    text_only = render(Message("assistant", "Yes"), result)
    as_answer = render(Message("assistant", "Yes"), Message("assistant", "Sunny"))
    has_results = "Sunny" in text_only and text_only != as_answer
    for text_arguments in (False, True):
        for count in (2, 1):
            answer, one_call = (
                Message("assistant", "Looking", parts={"tool_calls": _example_calls(number)})
                for number in (count, 1)
            )
            if text_arguments:
                answer, one_call = map(_with_text_arguments, (answer, one_call))
            text = render(answer)
            if not text:
                continue
            shown = [n for n in range(1, count + 1) if f"find{n}" in text and f"town{n}" in text]
            # a template that rejects two calls says so itself
            calls = 2 if len(shown) == count else len(shown)
            has_results = has_results or "Sunny" in render(one_call, result)
            return ToolSupport(text_arguments, calls, "Looking" in text, has_results)
    return ToolSupport(False, 2, True, has_results)  # it rejects every call, and says why


def _example_calls(count: int) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for n in range(1, count + 1):
        function = {"name": f"find{n}", "arguments": {"place": f"town{n}"}}
        calls.append({"id": f"callno00{n}", "type": "function", "function": function})
    return calls


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
    """Return messages in the form of OpenAI's API: arguments are JSON text, and every call has an id,
    to which its result refers.
    """
    chat = []
    ids: list[str] = []  # of the last calls, whose results have not come
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
    """Return a JSON value with every string in it changed, apart from names of keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(inner, change) for inner in value]
    return value
