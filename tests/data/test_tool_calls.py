"""Chats with tool calls as public data sets have them, one record of each shape."""

import json
from typing import Any

import pytest

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.conversation import Message
from medusa_train.data.json_values import RecordError
from medusa_train.data.records import normalize, parse_user_turns
from medusa_train.data.report import TURN_KEYS, Unread
from medusa_train.data.turns import read_messages

Turn = dict[str, Any]


def call(arguments: object, id: str | None = "c1", name: str = "get") -> Turn:
    made: Turn = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if id is None else {"id": id, **made}


def said(role: str, content: str | None, **keys: object) -> Turn:
    return {"role": role, "content": content, **keys}


def from_(role: str, value: str) -> Turn:
    return {"from": role, "value": value}


ASKED = said("user", "Q")
DONE = said("assistant", "A")
READ = [
    ASKED,
    said("assistant", "", tool_calls=[call({"x": 1})]),
    said("tool", "R", tool_call_id="c1"),
    DONE,
]
WITHOUT_IDS = [
    ASKED,
    said("assistant", "", tool_calls=[call({"x": 1}, None)]),
    said("tool", "R"),
    DONE,
]
FUNCTION = {"name": "get", "description": "Gets", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}

SHAPES: dict[str, tuple[Turn, list[Turn]]] = {
    "OpenAI, arguments as JSON text": (
        {
            "messages": [
                ASKED,
                said("assistant", None, tool_calls=[call('{"x": 1}')]),
                said("tool", "R", tool_call_id="c1", name="get"),
                DONE,
            ],
            "tools": [TOOL],
        },
        [*READ[:2], said("tool", "R", tool_call_id="c1", name="get"), DONE],
    ),
    "calls as JSON text, a result without an id": (
        {
            "messages": [
                ASKED,
                said("assistant", "", tool_calls=json.dumps([call({"x": 1})])),
                said("tool", "R"),
                DONE,
            ],
            "tools": json.dumps([TOOL]),
        },
        READ,
    ),
    "OpenAI's older function calls": (
        {
            "messages": [
                ASKED,
                said("assistant", None, function_call={"name": "get", "arguments": '{"x": 1}'}),
                said("function", "R", name="get"),
                DONE,
            ],
            "functions": [FUNCTION],
        },
        [*WITHOUT_IDS[:2], said("tool", "R", name="get"), DONE],
    ),
    "APIGen-MT, LLaMA-Factory": (
        {
            "conversations": [
                from_("human", "Q"),
                from_("function_call", '{"name": "get", "arguments": {"x": 1}}'),
                from_("observation", "R"),
                from_("gpt", "A"),
            ],
            "tools": json.dumps([FUNCTION]),
        },
        WITHOUT_IDS,
    ),
    "glaive-chatml": (
        {
            "messages": [
                ASKED,
                said("function-call", '{"name": "get", "arguments": \'{"x": 1}\'}'),
                said("function-response", "R"),
                DONE,
            ]
        },
        WITHOUT_IDS,
    ),
    "Hermes": (
        {
            "conversations": [
                from_("system", "<tools>[]</tools>"),
                from_("human", "Q"),
                from_("gpt", '<tool_call>\n{"name": "get"}\n</tool_call>'),
                from_("tool", "<tool_response>\nR\n</tool_response>"),
                from_("gpt", "A"),
            ]
        },
        [
            said("system", "<tools>[]</tools>"),
            ASKED,
            said("assistant", '<tool_call>\n{"name": "get"}\n</tool_call>'),
            said("user", "<tool_response>\nR\n</tool_response>"),
            DONE,
        ],
    ),
    "ToolACE": (
        {
            "system": "S",
            "conversations": [
                from_("user", "Q"),
                from_("assistant", "[get(x=1)]"),
                from_("tool", "R"),
                from_("assistant", "A"),
            ],
        },
        [said("system", "S"), ASKED, said("assistant", "[get(x=1)]"), said("tool", "R"), DONE],
    ),
    "SWE-smith": (
        {
            "messages": [
                ASKED,
                said("assistant", "A", tool_calls=[call('{"x": 1}')], thought="T"),
                {
                    "role": "tool",
                    "content": [{"type": "text", "text": "R"}],
                    "tool_call_ids": ["c1"],
                },
            ]
        },
        [
            ASKED,
            said("assistant", "A", tool_calls=[call({"x": 1})]),
            said("tool", "R", tool_call_id="c1"),
        ],
    ),
    "xLAM": (
        {
            "id": 0,
            "query": "Q",
            "answers": '[{"name": "get", "arguments": {"x": 1}}, {"name": "put", "arguments": {}}]',
            "tools": json.dumps([FUNCTION]),
        },
        [
            ASKED,
            said("assistant", "", tool_calls=[call({"x": 1}, None), call({}, None, "put")]),
        ],
    ),
    "reasoning": (
        {"messages": [ASKED, said("assistant", None, tool_calls=[call({})], reasoning="T")]},
        [
            ASKED,
            said("assistant", "", tool_calls=[call({})], reasoning_content="T", thinking="T"),
        ],
    ),
    "thinking": (
        {"messages": [ASKED, said("assistant", None, tool_calls=[call({})], thinking="T")]},
        [
            ASKED,
            said("assistant", "", tool_calls=[call({})], reasoning_content="T", thinking="T"),
        ],
    ),
    "no calls": (
        {"messages": [ASKED, {**DONE, "tool_calls": []}, ASKED, {**DONE, "tool_calls": None}]},
        [ASKED, DONE, ASKED, DONE],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_record_of_each_public_shape_is_read(shape: str) -> None:
    record, messages = SHAPES[shape]
    chat = normalize(record, variables=["tools"])
    assert [message.as_dict() for message in chat.messages] == messages


@pytest.mark.parametrize(
    ("columns", "tools"),
    [
        ({"tools": [TOOL]}, [TOOL]),
        ({"functions": [FUNCTION]}, [TOOL]),
        ({"tools": [FUNCTION]}, [TOOL]),
        ({"tools": [{**FUNCTION, "parameters": '{"type": "object"}'}]}, [TOOL]),
        (
            {"chat_template_kwargs": {"xml_tools": [json.dumps(FUNCTION)], "python_tools": []}},
            [TOOL],
        ),
        ({"chat_template_kwargs": {"tools": [TOOL], "xml_tools": None}}, [TOOL]),
        ({"tools": "[]"}, None),
    ],
)
def test_tools_are_functions_under_one_name(columns: Turn, tools: object) -> None:
    chat = normalize({"messages": [ASKED, DONE], **columns}, variables=["tools"])
    assert json.loads(chat.variables or "{}").get("tools") == tools


def test_tools_keep_the_order_of_their_keys() -> None:
    chat = normalize({"messages": [ASKED, DONE], "tools": [TOOL]}, variables=["tools"])
    assert chat.variables == json.dumps({"tools": [TOOL]})


def test_tools_of_hermes_system_message_are_not_rendered_twice() -> None:
    system = said("system", "You have <tools>[...]</tools>")
    unread = Unread()
    record = {"messages": [system, ASKED, DONE], "tools": [TOOL]}
    assert normalize(record, variables=["tools"], unread=unread).variables == ""
    assert unread.describe("d") == ["d: not read: columns tools (1)"]


def test_variables_next_to_tools_of_a_hermes_system_message_are_read() -> None:
    """By a template, and before the template is known."""
    unread = Unread()
    variables = {"mode": "fast", "xml_tools": [TOOL], "python_tools": None}
    system = said("system", "You have <tools>[...]</tools>")
    record = {"messages": [system, ASKED, DONE], "chat_template_kwargs": variables}
    chat = normalize(record, variables=["tools", "mode"], unread=unread)
    assert chat.variables == json.dumps({"mode": "fast"})
    assert unread.describe("d") == ["d: not read: columns chat_template_kwargs.xml_tools (1)"]
    assert normalize(record, variables=None).variables == json.dumps({"mode": "fast"})


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (
            [said("assistant", None, tool_calls=[call("{x")])],
            "turn 2: arguments of the call get ar",
        ),
        (
            [said("assistant", None, tool_calls=[call("[1]")])],
            "turn 2: arguments of the call get mu",
        ),
        ([said("assistant", None, tool_calls=[{"id": "c"}])], "turn 2: a tool call has no name"),
        ([said("assistant", None, tool_calls=5)], "turn 2: 'tool_calls' must be a list"),
        ([said("function_call", "get(1)")], "turn 2: 'content' is not JSON of tool calls"),
        ([READ[1], DONE], "turn 3 has the role assistant, expected tool"),
        ([READ[1], READ[2], READ[2]], "turn 4 has the role tool, expected assistant"),
        (
            [said("assistant", "", tool_calls=[call({}), call({}, "c2")]), READ[2], DONE],
            "turn 4 has the role assistant, expected tool",
        ),
        ([DONE, DONE], "turn 3 has the role assistant, expected user or tool"),
        ([said("assistant", "")], r"turn 2 \(assistant\) is empty"),
        ([said("assistant", [{"type": "tool_use", "name": "get"}])], "parts that are not text"),  # type: ignore[arg-type]
        ([said("assistant", "", tool_calls=[call({"x": "\ud800"})])], "lone surrogate"),
        ([said("assistant", "", tool_calls=[call({"x": b"1"})])], "of the call get are not JSON: "),
        (
            [said("assistant", "", tool_calls=[call([])])],
            "of the call get must be an object, they are a list",
        ),
        (
            [said("assistant", "", tool_calls=[call("0")])],
            "of the call get must be an object, they are a number",
        ),
        ([READ[1], said("tool", "R", tool_call_id=[1])], "turn 3: 'tool_call_id' must be a string"),
        ([DONE, {**ASKED, "tool_calls": [call({})]}], "turn 3: tool calls of the role user"),
    ],
)
def test_a_chat_that_cannot_be_read_is_rejected_with_its_turn(
    turns: list[Turn], reason: str
) -> None:
    with pytest.raises(RecordError, match=reason):
        normalize({"messages": [ASKED, *turns]})


@pytest.mark.parametrize("record", [{"chat": "USER: Q"}, {"trajectory": [], "model_name": "m"}])
def test_data_sets_of_their_own_form_are_rejected_with_the_way_out(record: Turn) -> None:
    with pytest.raises(RecordError, match=r"data-formats\.md says how to convert it"):
        normalize(record)


def test_other_calls_make_another_chat() -> None:
    def key(*turns: Turn) -> str:
        return normalize({"messages": list(turns)}).content_key

    other = said("assistant", "", tool_calls=[call({"x": 2})])
    assert len({key(*READ), key(ASKED, other, *READ[2:]), key(ASKED, DONE)}) == 3
    assert key(*READ) == key(*READ)


def test_a_result_may_be_blank_and_missing() -> None:
    for content in ("", None):
        (result,) = normalize({"messages": [*READ[:2], said("tool", content)]}).messages[2:]
        assert result == Message("tool", "", parts={"tool_call_id": "c1"})


def test_results_without_an_id_are_those_of_the_calls_in_their_order() -> None:
    made = said("assistant", "", tool_calls=[call({}, f"c{n}") for n in range(3)])
    results = [said("tool", "Q", tool_call_id="c1"), said("tool", "R"), said("tool", "S")]
    chat = normalize({"messages": [ASKED, made, *results, DONE]})
    found = {message.content: message.parts["tool_call_id"] for message in chat.messages[2:5]}
    assert found == {"Q": "c1", "R": "c0", "S": "c2"}


def test_ids_may_be_numbers() -> None:
    made = said("assistant", "", tool_calls=[{**call({}), "id": 7}])
    chat = normalize({"messages": [ASKED, made, said("tool", "R", tool_call_id=7)]})
    assert [chat.messages[1].calls[0]["id"], chat.messages[2].parts["tool_call_id"]] == ["7", "7"]


def test_results_may_have_another_name_in_a_data_set() -> None:
    fields = DatasetConfig(path="x", roles={"tool": ["output"]})
    chat = normalize({"messages": [*READ[:2], said("output", "R"), DONE]}, fields)
    assert [message.as_dict() for message in chat.messages] == READ


def test_what_calls_leave_unread_is_counted() -> None:
    unread = Unread()
    normalize({"messages": [{**ASKED, "name": "N"}, {**READ[1], "agent": "x"}]}, unread=unread)
    assert unread == {(TURN_KEYS, "name"): 1, (TURN_KEYS, "agent"): 1}


def test_results_after_the_last_answer_are_counted() -> None:
    unread = Unread()
    normalize({"messages": READ[:3]}, unread=unread)
    assert unread.describe("d") == ["d: not read: turns of tool after the last answer (1)"]


def test_prompts_of_tool_chats_are_the_users_turns() -> None:
    unread = Unread()
    assert parse_user_turns({"messages": READ}, unread=unread) == (["Q"], None)
    assert unread.describe("d") == ["d: not read: turns of the role tool (1)"]


def test_a_chat_to_be_answered_may_have_calls() -> None:
    assert [message.as_dict() for message in read_messages(READ[:3])] == READ[:3]
