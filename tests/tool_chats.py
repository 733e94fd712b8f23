"""A chat with tools, as a record of OpenAI's format: two calls after another, and an answer."""

from typing import Any

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def call(number: int) -> dict[str, Any]:
    function = {"name": "find", "arguments": f'{{"n": {number}}}'}
    return {"id": f"c{number}", "type": "function", "function": function}


def turns_of(number: int) -> list[dict[str, Any]]:
    """A call and its result."""
    return [
        {"role": "assistant", "content": None, "tool_calls": [call(number)]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"},
    ]


CHAT: dict[str, Any] = {
    "id": "chat",
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find both."},
        *turns_of(1),
        *turns_of(2),
        {"role": "assistant", "content": "Found."},
    ],
}
