import json
from typing import Any

import pytest

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.json_values import RecordError
from medusa_train.data.records import (
    answer_points,
    normalize,
    parse_tool_chat,
    parse_user_turns,
)
from medusa_train.data.report import COLUMNS, Unread
from tests.tool_chats import CHAT, TOOL

GOOD = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


def of_type(type: str) -> DatasetConfig:
    return DatasetConfig(path="d.jsonl", type=type)


def turns(record: dict[str, Any], type: str = "auto") -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in normalize(record, of_type(type)).messages]


def test_three_formats_give_the_same_chat() -> None:
    expected = [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert (
        turns({"conversations": [{"from": "system", "value": "s"}, *GOOD["conversations"]]})
        == expected
    )
    continued = [{"from": "gpt", "value": "the end of a longer chat"}, *GOOD["conversations"]]
    assert turns({"conversations": continued}) == turns(GOOD)  # as in FastChat
    for assistant in ("chatgpt", "bing", "bard"):  # as in ShareGPT
        answer = {"from": assistant, "value": "a"}
        assert turns({"conversations": [GOOD["conversations"][0], answer]}) == turns(GOOD)
    assert (
        turns({"system": "s", **GOOD})
        == turns({"system": "s", "messages": GOOD["conversations"]})
        == expected
    )
    # a table's null column
    assert turns({"conversations": None, "messages": GOOD["conversations"]}) == turns(GOOD)
    named = [("developer", "s"), ("user", "q"), ("assistant", "a")]
    assert turns({"messages": [{"role": r, "content": c} for r, c in named]}) == expected
    assert turns(
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "q"}]}
    ) == [("user", "q")]
    assert turns({"system": "s", "instruction": "q", "input": "", "output": "a"}) == expected
    assert turns({"instruction": "add", "input": "1 2", "output": "3"})[0] == ("user", "add\n\n1 2")


@pytest.mark.parametrize("type", ["messages", "sharegpt", "alpaca"])
def test_a_record_without_the_keys_of_its_type_lists_those_that_it_has(type: str) -> None:
    with pytest.raises(RecordError, match="it is missing; the keys are meta, text"):
        normalize({"text": "x", "meta": 1}, of_type(type))


def test_turns_as_public_data_sets_have_them() -> None:
    """LMSYS-Chat-1M and WildChat, capitals (Daring-Anteater), a table's JSON text."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert turns({"conversation_id": "x", "conversation": messages}) == turns(GOOD)
    capitals = [{"from": "User", "value": "q"}, {"from": "Assistant", "value": "a"}]
    assert turns({"conversations": capitals}) == turns(GOOD)
    assert turns({"messages": json.dumps(messages)}) == turns(GOOD)
    assert turns({"conversations": json.dumps(GOOD["conversations"])}) == turns(GOOD)
    with pytest.raises(RecordError, match="'messages' is not valid JSON"):
        normalize({"messages": "[{"})


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turns({"messages": [{"role": "user", "content": parts}]}) == [("user", "ab")]
    with pytest.raises(RecordError, match="turn 1: 'content' holds parts that are not text"):
        normalize({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})


def test_identity_is_the_records_or_the_contents() -> None:
    assert normalize({"id": 7, **GOOD}).id == "7"
    assert normalize({"id": "x", **GOOD}).id == "x"
    unnamed = normalize(GOOD)
    assert unnamed.id == normalize({"instruction": "q", "output": "a"}).id
    assert unnamed.id == unnamed.content_key[:16]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], "must be a JSON object, this is a list"),
        ({"text": "x"}, "its keys: text"),
        ({"question": "x", "answer": "y"}, "its keys: answer, question; medusa-selfdistill"),
        ({"conversations": []}, "'conversations' is an empty list"),
        ({"conversations": "x"}, "must be a list of turns, it is a string"),
        ({"conversations": ["x"]}, "turn 1: must be an object"),
        (
            {"conversations": [{"from": "tool", "value": "x"}]},
            "turn 1 has the role tool, expected user",
        ),
        (
            {"conversations": [{"role": "assistant", "tool_calls": [{}]}]},
            "turn 1: a tool call has no name",
        ),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "turn 1: unknown 'from'"),
        (
            {"conversations": [{"from": "human", "value": 3}]},
            "turn 1: 'value' must be a string, it is a num",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "'content' must be a string, it is missing",
        ),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "turn 1 has the role assistant"),
        ({"instruction": "x", "output": ""}, r"turn 2 \(assistant\) is empty"),
        ({"instruction": "x", "output": None}, "'output' must be a string"),
        ({"instruction": "x", "answer": "y"}, "its keys: answer, instruction"),
        (
            {"instruction": "x", "output": "y", "history": [["a", "b"]]},
            "'history' is not supported",
        ),
    ],
)
def test_bad_records_say_why(record: object, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        normalize(record)


def test_user_turns_need_no_answers_and_no_turns() -> None:
    chat = [
        {"from": "gpt", "value": None},
        {"from": "human", "value": "q"},
        {"from": "tool"},
        {"from": "human", "value": " "},
    ]
    assert parse_user_turns({"conversations": chat}) == (["q"], None)
    assert parse_user_turns({"conversations": []}) == ([], None)
    assert parse_user_turns({"instruction": "q", "input": "more"}) == (["q\n\nmore"], None)
    parts = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
    ]
    assert parse_user_turns({"messages": parts}) == (["q"], "s")
    with pytest.raises(RecordError, match="'turns' must be a list"):
        parse_user_turns({"turns": "q"})


def test_prompts_may_be_texts() -> None:
    """As in the benches of `speculators`, the hub's MT-Bench, TRL's prompts, GSM8K, MATH,
    OpenCodeInstruct, and Llama-Nemotron's list of messages.
    """
    assert parse_user_turns({"prompt": "q"}) == (["q"], None)
    assert parse_user_turns({"problem": "q", "solution": "a"}) == (["q"], None)
    assert parse_user_turns({"input": "q", "output": "a"}) == (["q"], None)
    nemotron = {"input": [{"role": "user", "content": "q"}], "output": "a"}
    assert parse_user_turns(nemotron) == (["q"], None)
    assert parse_user_turns({"prompt": ["q", "r"]}) == (["q", "r"], None)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert parse_user_turns({"prompt": messages}) == (["q"], "s")
    unread = Unread()
    assert parse_user_turns({"question": "q", "answer": "a"}, unread=unread) == (["q"], None)
    assert unread == {(COLUMNS, "answer"): 1}
    # UltraChat has the first question beside the turns
    said = {"prompt": "q", "messages": [{"role": "user", "content": text} for text in ("q", "r")]}
    assert parse_user_turns(said) == (["q", "r"], None)
    with pytest.raises(RecordError, match="'prompt' must be a string"):
        parse_user_turns({"prompt": 3})


def test_prompts_keep_the_system_message_beside_the_turns() -> None:
    chat = [{"from": "human", "value": "q"}]
    assert parse_user_turns({"conversations": chat, "system": "s"}) == (["q"], "s")
    assert parse_user_turns(
        {"conversations": [{"from": "system", "value": "t"}, *chat], "system": "s"}
    ) == (["q"], "t")
    assert parse_user_turns({"instruction": "q", "system": "s"}) == (["q"], "s")
    assert parse_user_turns({"instruction": "q", "system": " "}) == (["q"], None)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_beside_the_content_is_joined_with_it(key: str) -> None:
    record = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", key: "r"},
        ]
    }
    assert turns(record) == [("user", "q"), ("assistant", "<think>\nr\n</think>\n\na")]
    assert normalize(record, tags=("[T]", "[/T]")).messages[1].content == "[T]\nr\n[/T]\n\na"
    record["messages"][1] |= {key: "\nr\n", "content": "\n\na"}  # as generated
    assert turns(record)[1][1] == "<think>\nr\n</think>\n\na"
    record["messages"][1] |= {key: None, "content": "a"}
    assert turns(record)[1][1] == "a"
    record["messages"][1] |= {key: "r", "content": ""}
    with pytest.raises(RecordError, match="turn 2 \\(assistant\\) is empty"):
        normalize(record)


def test_a_chat_with_tools_is_read_whole_as_a_prompt() -> None:
    unread = Unread()
    chat = parse_tool_chat({**CHAT, "extra": 1}, unread=unread)
    assert chat is not None
    roles = [message.role for message in chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert chat.messages[2].calls[0]["function"]["arguments"] == {"n": 1}
    assert (chat.id, json.loads(chat.variables)) == ("chat", {"tools": [TOOL]})
    assert unread == {(COLUMNS, "extra"): 1}
    assert answer_points(chat) == [2, 4, 6]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT["messages"]},
        {"query": "q", "answers": '[{"name": "f", "arguments": {}}]', "tools": "[]"},
        {"conversations": [{"from": "human", "value": "q"}], "tools": [{"name": "f"}]},
        {"prompt": "q", "functions": [{"name": "f"}]},
        {
            "custom_id": "1",
            "body": {"messages": [{"role": "user", "content": "q"}], "tools": [TOOL]},
        },
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "<tool_call>{}</tool_call>"},
                {"from": "tool", "value": "r"},
            ]
        },
    ],
    ids=["calls", "xlam", "sharegpt", "prompt", "batch", "Hermes"],
)
def test_tools_and_calls_of_any_format_make_a_chat_with_tools(record: dict[str, Any]) -> None:
    assert parse_tool_chat(record) is not None


@pytest.mark.parametrize("extra", [{}, {"tools": None}, {"tools": "[]"}, {"tools": []}])
def test_chats_without_tools_are_no_chats_with_tools(extra: dict[str, Any]) -> None:
    assert parse_tool_chat({**GOOD, **extra}) is None
    assert parse_tool_chat({"turns": ["q"], **extra}) is None


@pytest.mark.parametrize("given", [5, "x", [1]], ids=["number", "text", "list"])
def test_variables_of_a_chat_with_tools_that_are_no_object_are_an_error(given: object) -> None:
    with pytest.raises(RecordError, match="'chat_template_kwargs' must be an object"):
        parse_tool_chat({**CHAT, "chat_template_kwargs": given})


def test_a_chat_with_tools_and_no_answer_is_answered_after_its_question() -> None:
    chat = parse_tool_chat({"messages": CHAT["messages"][:2], "tools": [TOOL]})
    assert chat is not None
    assert answer_points(chat) == [2]
