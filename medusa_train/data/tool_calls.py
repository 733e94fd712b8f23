"""Convert tool calls and results from the forms of data sets to the one that templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from medusa_train.data.conversation import Message
from medusa_train.data.json_values import RecordError, from_json, json_type

#: The column, and the variable of chat templates, that holds the tools of a chat.
TOOLS = "tools"
#: glaive writes arguments as JSON text in single quotes, which is not valid JSON.
_QUOTED = re.compile(r"""\{\s*"name":\s*"([^"]+)",\s*"arguments":\s*'(.*)'\s*\}""", re.DOTALL)


def calls_of(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of an answer: `tool_calls`, or the `function_call` of older OpenAI data."""
    for key in ("tool_calls", "function_call"):
        if turn.get(key):
            return parse_calls(turn[key], key)
    return []


def parse_calls(value: object, name: str) -> list[dict[str, Any]]:
    """Return the calls in the `value` of the key `name`: one call, a list, or JSON text of
    either.

    Each becomes `{"id", "type", "function": {"name", "arguments"}}`, without an id if it has none.
    The arguments become an object: most templates escape arguments that are text, or reject them.
    """
    if isinstance(value, str) and (quoted := _QUOTED.fullmatch(value.strip())):
        value = {"name": quoted[1], "arguments": quoted[2]}
    value = from_json(value, f"'{name}' is not JSON of tool calls")
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, (list, tuple)):
        raise RecordError(f"'{name}' must be a list of tool calls, it is {json_type(value)}")
    return [_parse_call(call) for call in calls]


def _parse_call(value: object) -> dict[str, Any]:
    call = value if isinstance(value, Mapping) else {}
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RecordError("a tool call has no name")
    name, arguments = function["name"], function.get("arguments")
    what = f"arguments of the call {name}"
    if isinstance(arguments, str) and not arguments.strip():
        arguments = None
    arguments = from_json(arguments, f"{what} are not JSON")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RecordError(f"{what} must be an object, they are {json_type(arguments)}")
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:  # a table may hold bytes and dates
        raise RecordError(f"{what} are not JSON: {error}") from None
    call_id = {} if call.get("id") is None else {"id": str(call["id"])}
    function = {"name": name, "arguments": dict(arguments)}
    return {**call_id, "type": "function", "function": function}


def result_parts(turn: Mapping[str, Any]) -> dict[str, str]:
    """Return the id of the call that a result belongs to, and the name of its tool, if present."""
    call_id = turn.get("tool_call_id")
    several = turn.get("tool_call_ids")  # SWE-smith
    if call_id is None and isinstance(several, (list, tuple)) and len(several) == 1:
        call_id = several[0]
    parts = {}
    for key, value in (("tool_call_id", call_id), ("name", turn.get("name"))):
        if not isinstance(value, str | int | None):
            raise RecordError(f"'{key}' must be a string, it is {json_type(value)}")
        if value is not None:
            parts[key] = str(value)
    return parts


def link_results(messages: Sequence[Message]) -> list[Message]:
    """Link results to calls: a result without an id gets the id of a call before it, in order.

    A result that has its own `<tool_response>` tags, without a parsed call, becomes a turn of the
    user: templates would wrap it again.
    """
    linked = []
    calls: Sequence[Mapping[str, Any]] = ()
    open_ids: list[str] = []  # ids of calls whose result has not come yet
    for message in messages:
        call_id = message.parts.get("tool_call_id")
        if message.role == "assistant":
            calls = message.calls
            open_ids = [call["id"] for call in calls if "id" in call]
        elif message.role == "tool" and not calls:
            if message.content.lstrip().startswith("<tool_response>"):
                message = replace(message, role="user", parts={})
        elif call_id in open_ids:
            open_ids.remove(call_id)
        elif message.role == "tool" and call_id is None and open_ids:
            message = replace(message, parts={"tool_call_id": open_ids.pop(0), **message.parts})
        linked.append(message)
    return linked


def parse_tools(value: object, name: str) -> list[Any]:
    """Return the tools in the value of the key `name`: a list. The whole list or each item may be
    JSON text.

    Bare functions are wrapped, since most templates read `tool.function`.
    """
    if isinstance(value, str) and not value.strip():
        return []
    tools = from_json(value, f"'{name}' is not valid JSON") or []
    if not isinstance(tools, (list, tuple)):
        raise RecordError(f"'{name}' must be a list of objects")
    return [_parse_tool(tool, name) for tool in tools]


def _parse_tool(tool: object, name: str) -> dict[str, Any]:
    tool = from_json(tool, f"'{name}' must be a list of objects")
    if not isinstance(tool, Mapping):
        raise RecordError(f"'{name}' must be a list of objects")
    function = tool.get("function")
    around = tool
    if not isinstance(function, Mapping):
        function = {key: value for key, value in tool.items() if key != "type"}
        around = {}
    if "parameters" in function:
        problem = f"'{name}': parameters are not valid JSON"
        function = {**function, "parameters": from_json(function["parameters"], problem)}
    return {"type": "function", **around, "function": function}
