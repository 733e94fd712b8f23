"""Columns and keys of turns: used, refused, or counted by name; switches and template variables."""

import json
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.records import (
    MAX_UNREAD,
    ReadResult,
    RecordError,
    RecordFields,
    Unread,
    parse_record,
    parse_user_turns,
)
from medusa_train.data.sources import open_source
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.data.tokenize_datasets import DatasetReader, cache_key
from medusa_train.errors import DataError
from medusa_train.evaluation.questions import load_bench
from medusa_train.selfdistill.prompts import read_prompts
from tests.data.test_tokenize_chat import masked

Make = Callable[..., Any]

TURNS = [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}]
WITH_TOOLS = (
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool.name }}{% endfor %}{% endif %}"
    "{% if mode is defined %}{{ '(' + mode + ')' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def random_names(count: int, seed: int = 0) -> list[str]:
    source = random.Random(seed)
    return ["".join(source.choices(string.ascii_lowercase, k=9)) for _ in range(count)]


def write(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, encoder: ChatEncoder) -> ReadResult:
    config = DatasetConfig(path=str(path))
    return DatasetReader(config, open_source(config), encoder, skip_bad=False).read()


def chats_with(names: Sequence[str]) -> list[dict[str, Any]]:
    """Three chats: the first name is a column of all, the second of one, the third a key of a
    turn; nulls do not count.
    """
    everywhere, once, of_turn = names
    records: list[dict[str, Any]] = []
    for number in range(3):
        turns = [dict(turn) for turn in TURNS]
        if number:
            turns[0][of_turn] = "x"
        records.append(
            {"id": number, "messages": turns, everywhere: 1, once: None if number else "x"}
        )
    return records


def test_every_column_and_key_of_turns_is_counted_by_name(
    tmp_path: Path, make_tokenizer: Make
) -> None:
    names = random_names(3)
    path = write(tmp_path / "chats.jsonl", chats_with(names))
    counted = (
        f"{path}: not read: columns {names[0]} (3), {names[1]} (1); keys of turns {names[2]} (2)"
    )
    assert read(path, ChatEncoder(make_tokenizer())).notes == [counted]
    unread = Unread()
    read_prompts(path, unread=unread)
    assert unread.describe(str(path)) == [counted]
    lines: list[str] = []
    load_bench(str(path), lines.append)
    assert lines == [counted]


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        ({"messages": TURNS, "id": 1, "system": "S"}, []),
        ({"conversations": [{"from": "human", "value": "Q", "x": 1}], "y": 2}, ["x", "y"]),
        ({"instruction": "Q", "input": "", "output": "A", "topic": "t"}, ["topic"]),
        # what self-distillation writes is known; columns of these names in other records are not
        (
            {"messages": TURNS, "seed_id": "a", "token_counts": {}, "finish_reasons": ["stop"]},
            [],
        ),
        ({"messages": TURNS, "model": "m", "seed_id": "a"}, ["model", "seed_id"]),
        ({"messages": TURNS, "tools": [{"name": "f"}]}, ["tools"]),  # not in this template
    ],
)
def test_what_is_known_of_each_format(record: dict[str, Any], unread: list[str]) -> None:
    found = Unread()
    parse_record(record, unread=found)
    assert sorted([*found.columns, *found.turn_keys]) == unread
    in_prompts = Unread()
    parse_user_turns(record, unread=in_prompts)
    assert in_prompts == found


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        # a system message beside the turns, where these have one
        (
            {"messages": [{"role": "system", "content": "S"}, *TURNS], "system": "T"},
            "columns system (1)",
        ),
        ({"messages": TURNS, "id": 1.5}, "columns id (1)"),
        # of another chat: there is one answer
        ({"messages": TURNS, "finish_reasons": ["stop", "length"]}, "columns finish_reasons (1)"),
        ({"messages": TURNS, "finish_reasons": "stop"}, "columns finish_reasons (1)"),
        (
            {"messages": [TURNS[0], {**TURNS[1], "reasoning_content": "R", "reasoning": "T"}]},
            "keys of turns reasoning (1)",
        ),
        # only answers have a reasoning part
        ({"messages": [{**TURNS[0], "reasoning": "R"}, TURNS[1]]}, "keys of turns reasoning (1)"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Q", "cache": {}}]},
                    TURNS[1],
                ]
            },
            "keys of turns content.cache (1)",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "A"}, {"from": "human", "value": "Q"}]},
            "turns of assistant before the first question (1)",
        ),
    ],
)
def test_what_is_left_out_of_a_known_key_is_counted(record: dict[str, Any], sentence: str) -> None:
    found = Unread()
    parse_record(record, unread=found)
    assert found.describe("data") == [f"data: not read: {sentence}"]


def test_turns_that_prompts_leave_out_are_counted(tmp_path: Path) -> None:
    system = {"role": "system", "content": "S"}
    path = write(
        tmp_path / "chats.jsonl",
        [
            {"messages": [*TURNS, {"role": "tool", "content": "R"}, TURNS[0]]},
            {"messages": [{"role": "customer", "content": "Q"}]},
            {"messages": [system, {**system, "content": "T"}, TURNS[0]], "system": "U"},
        ],
    )
    found = Unread()
    prompts = read_prompts(path, unread=found)
    assert [(prompt.turns, prompt.system) for prompt in prompts] == [
        (("Q1", "Q1"), None),
        (("Q1",), "T"),
    ]
    assert found.describe("data") == [
        "data: not read: columns system (1); turns of system before the last one (1), the role"
        " customer (1), the role tool (1); records without a message of the user (1)"
    ]


def test_names_are_shown_in_one_line() -> None:
    names = ["a\nb", "\x1b[31mred", "", " ", "\ud800", "x" * 5000, "[bold]", "名"]
    found = Unread()
    found.columns.update(names)
    (line,) = found.describe("data")
    assert line.isprintable()
    assert len(line) < 300
    for shown in (r"'a\nb' (1)", r"'\x1b[31mred' (1)", "'' (1)", "' ' (1)", "[bold] (1)", "名 (1)"):
        assert shown in line


@pytest.mark.parametrize("kind", ["lines", "array"])
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, kind: str) -> None:
    """JSON readers keep the last one."""
    turns = json.dumps(TURNS)
    record = f'{{"messages": {turns}, "messages": {turns}}}'
    nested = f'{{"messages": {turns[:-2]}, "content": "B"}}]}}'
    path = tmp_path / "chats.json"
    lines = [record, nested]
    path.write_text(f"[{record}]" if kind == "array" else "\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=r"the key '(messages|content)' stands twice in an object"):
        read_prompts(path)


def test_many_columns_are_counted_in_one_line() -> None:
    found = Unread()
    found.columns.update(random_names(MAX_UNREAD + 5))
    (line,) = found.describe("data")
    assert line.endswith("and 5 more")
    assert line.count("(1)") == MAX_UNREAD


# Switches


def turn(role: str, content: str, **keys: object) -> dict[str, object]:
    return {"role": role, "content": content, **keys}


@pytest.mark.parametrize(
    ("keys", "roles", "everything", "expected"),
    [
        ([{}, {}, {}, {}], ["assistant"], False, "Q1 [A1] Q2 [A2]"),
        ([{}, {"train": False}, {}, {}], ["assistant"], False, "Q1 A1 Q2 [A2]"),
        ([{}, {"training": False}, {}, {"train": True}], ["assistant"], False, "Q1 A1 Q2 [A2]"),
        ([{"train": True}, {}, {}, {}], ["assistant"], False, "[Q1] [A1] Q2 [A2]"),
        ([{}, {"weight": 0}, {}, {"weight": 1}], ["assistant"], False, "Q1 A1 Q2 [A2]"),
        ([{"weight": 0}, {}, {}, {}], ["user", "assistant"], False, "Q1 [A1] [Q2] [A2]"),
        ([{"weight": 1}, {}, {}, {}], ["assistant"], False, "Q1 [A1] Q2 [A2]"),
        ([{}, {}, {}, {"train": True}], ["user"], False, "[Q1] A1 [Q2] [A2]"),
        ([{}, {}, {"train": False}, {}], ["assistant"], True, "[Q1] [A1] Q2 [A2]"),
        ([{}, {"train": False}, {}, {}], ["assistant"], True, "[Q1] A1 [Q2] [A2]"),
    ],
)
def test_switches_of_turns_decide_before_roles(
    keys: list[dict[str, object]],
    roles: list[str],
    everything: bool,
    expected: str,
    make_tokenizer: Make,
) -> None:
    contents = ["Q1", "A1", "Q2", "A2"]
    record = {
        "messages": [
            turn("assistant" if number % 2 else "user", content, **keys[number])
            for number, content in enumerate(contents)
        ]
    }
    encoder = ChatEncoder(make_tokenizer(), roles=roles, train_on_inputs=everything)  # type: ignore[arg-type]
    (row,) = encoder.encode(parse_record(record))
    text = encoder.tokenizer.decode(row.ids)
    shown = []
    for content in contents:
        # tokens of single bytes: one token per character, apart from special tokens
        start = len(encoder.tokenizer(text[: text.index(content)])["input_ids"])
        part = row.supervised[start : start + len(content)]
        assert len(set(part)) == 1
        shown.append(f"[{content}]" if part[0] else content)
    assert " ".join(shown) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight": 0.5}, "'weight' must be 0 or 1, it is 0.5"),
        ({"weight": True}, "'weight' must be 0 or 1"),
        ({"train": "no"}, "'train' must be true or false, it is 'no'"),
        ({"train_detail": [{"begin": 0}]}, "training of parts of a turn is not supported"),
        ({"function_call": {"name": "f"}}, "turn 2 is a tool call"),
        ({"train": True, "training": False}, "turn 2: 'train' and 'training' contradict each o"),
        ({"train": True, "weight": 0}, "turn 2: 'train' and 'weight' contradict each other"),
    ],
)
def test_switches_that_cannot_be_honored_are_refused(keys: dict[str, Any], message: str) -> None:
    record = {"messages": [TURNS[0], turn("assistant", "A", **keys)]}
    with pytest.raises(RecordError, match=message):
        parse_record(record)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": TURNS, "system": ["S"]}, "'system' must be a string, it is a list"),
        (
            {"messages": [TURNS[0], {**TURNS[1], "reasoning": ["R"]}]},
            "turn 2: 'reasoning' must be a string, it is a list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "Q"}]}]},
            "turn 1: 'content' holds parts that are not text",
        ),
        (
            {"messages": [{"from": "human", "value": "Q"}, TURNS[1]]},
            "turn 2 has no 'from'",
        ),
    ],
)
def test_known_keys_of_another_type_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse_record(record)


# Variables of the template


@pytest.mark.parametrize(
    ("columns", "start"),
    [
        ({"tools": [{"name": "f"}, {"name": "g"}]}, "<tools>fg"),
        ({"tools": json.dumps([{"name": "f"}])}, "<tools>f"),
        ({"tools": "[]"}, ""),
        ({"tools": None}, ""),
        ({"mode": "fast"}, "(fast)"),
        ({"chat_template_kwargs": {"mode": "fast"}}, "(fast)"),
        ({"mode": "slow", "chat_template_kwargs": {"mode": "fast", "tools": None}}, "(fast)"),
    ],
)
def test_variables_are_rendered_as_in_decoding(
    columns: dict[str, Any], start: str, make_tokenizer: Make, tmp_path: Path
) -> None:
    encoder = ChatEncoder(make_tokenizer(WITH_TOOLS))
    path = write(tmp_path / "chats.jsonl", [{"messages": TURNS, **columns}])
    result = read(path, encoder)
    assert result.notes == []
    (chat,) = result.conversations
    assert masked(encoder, chat) == f"{start}<|user|>Q1</s><|assistant|>[[A1</s>]]"
    variables = json.loads(chat.variables or "{}")
    decoding = ChatEncoder(make_tokenizer(WITH_TOOLS), template_kwargs=variables)
    (row,) = encoder.encode(chat)
    prompt = decoding.prompt(chat.messages[:1])
    assert row.ids[: len(prompt)] == prompt


def test_chats_with_other_tools_are_other_chats() -> None:
    records = [{"messages": TURNS, "tools": [{"name": name}]} for name in "fg"]
    chats = [parse_record(record, variables=["tools"]) for record in records]
    assert chats[0].content_key != chats[1].content_key
    assert chats[0].first(1).variables == chats[0].variables
    assert parse_record(records[0]).content_key == parse_record({"messages": TURNS}).content_key


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tools": "{"}, "'tools' is not valid JSON"),
        ({"tools": "f"}, "'tools' is not valid JSON"),
        ({"tools": "[" * 5000}, "'tools' is not valid JSON: nested too deeply"),
        ({"tools": ["f"]}, "'tools' must be a list of objects"),
        ({"chat_template_kwargs": {"messages": []}}, "messages: set by rendering itself"),
        ({"chat_template_kwargs": {"mdoe": 1}}, "not in the chat template: mdoe"),
        ({"chat_template_kwargs": "x"}, "'chat_template_kwargs' must be an object"),
    ],
)
def test_variables_that_cannot_be_rendered_are_refused(
    columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        parse_record({"messages": TURNS, **columns}, variables=["tools", "mode"])


def test_the_variables_of_a_template_are_those_that_it_reads(make_tokenizer: Make) -> None:
    assert ChatEncoder(make_tokenizer(WITH_TOOLS)).template.variables == {"tools", "mode"}
    assert ChatEncoder(make_tokenizer()).template.variables == set()
    for name in ("chatml", "llama-3", "vicuna_v1.1"):
        assert "messages" not in ChatEncoder(make_tokenizer(), name).template.variables


# Other names, as Axolotl's field mappings say


def test_turns_under_other_names_are_read(tmp_path: Path, make_tokenizer: Make) -> None:
    record = {
        "chat": [
            {"speaker": "customer", "text": "Q1", "keep": False, "role": "x"},
            {"speaker": "agent", "text": "A1", "keep": True},
        ],
        "messages": "not these",
    }
    path = write(tmp_path / "chats.jsonl", [record])
    config = DatasetConfig(
        path=str(path),
        field_messages="chat",
        message_property_mappings={"role": "speaker", "content": "text"},
        message_field_training="keep",
        roles={"user": ["customer"], "assistant": ["agent"]},
    )
    encoder = ChatEncoder(make_tokenizer())
    reader = DatasetReader(config, open_source(config), encoder, skip_bad=False)
    result = reader.read()
    assert result.notes == [f"{path}: not read: columns messages (1); keys of turns role (1)"]
    assert masked(encoder, result.conversations[0]) == "<s><user>Q1</s><|assistant|>[[A1</s>]]"
    plain = DatasetReader(
        DatasetConfig(path=str(path)), open_source(config), encoder, skip_bad=False
    )
    assert cache_key([reader], 64) != cache_key([plain], 64)
    with pytest.raises(DataError, match="'messages' must be a list of turns"):
        plain.read()


def test_a_single_part_may_have_another_name() -> None:
    fields = RecordFields(content="text")
    record = {"conversations": [{"from": "human", "text": "Q"}]}
    assert parse_record(record, fields=fields).messages[0].content == "Q"
    fields = RecordFields(messages="chat", roles=(("caller", "tool"),))
    with pytest.raises(RecordError, match="turn 1 is a tool call"):
        parse_record({"chat": [{"role": "caller", "content": "Q"}]}, fields=fields)
    with pytest.raises(RecordError, match="expected the keys 'chat'"):
        parse_record({"messages": TURNS}, fields=fields)


def test_a_chat_without_anything_around_it_is_read(tmp_path: Path, make_tokenizer: Make) -> None:
    """As create_data.py of the Medusa repository writes them: a list of lists of turns."""
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([TURNS, TURNS[:1]]))
    result = read(path, ChatEncoder(make_tokenizer()))
    assert [len(chat.messages) for chat in result.conversations] == [2, 1]
    assert [prompt.turns for prompt in read_prompts(path)] == [("Q1",), ("Q1",)]
    with pytest.raises(RecordError, match="this is a list"):
        parse_record([1, 2])


def test_templates_by_name_without_a_default_are_named(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"rag": "{{ messages }}", "tool_use": "{{ messages }}"}
    with pytest.raises(DataError, match=r"several names \(rag, tool_use\) and none"):
        ChatEncoder(tokenizer)
    tokenizer.chat_template["default"] = make_tokenizer().chat_template
    assert ChatEncoder(tokenizer).template.source == make_tokenizer().chat_template
