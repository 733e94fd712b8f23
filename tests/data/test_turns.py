"""Turns of a chat: their roles, names of keys, and switches of training."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.json_values import RecordError
from medusa_train.data.read_chats import ReadResult
from medusa_train.data.records import normalize
from medusa_train.data.sources import open_source
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.data.tokenize_datasets import DatasetReader, cache_key
from medusa_train.errors import DataError
from medusa_train.selfdistill.prompts import read_prompts
from tests.data.test_tokenize_chat import masked

Make = Callable[..., Any]


TURNS = [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}]


def write(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, encoder: ChatEncoder) -> ReadResult:
    config = DatasetConfig(path=str(path))
    return DatasetReader(config, open_source(config), encoder, skip_bad=False).read()


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
    (row,) = encoder.encode(normalize(record))
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
        ({"function_call": {"name": 5}}, "turn 2: a tool call has no name"),
        ({"train": True, "training": False}, "turn 2: 'train' and 'training' contradict each o"),
        ({"train": True, "weight": 0}, "turn 2: 'train' and 'weight' contradict each other"),
    ],
)
def test_switches_that_cannot_be_honored_are_refused(keys: dict[str, Any], message: str) -> None:
    record = {"messages": [TURNS[0], turn("assistant", "A", **keys)]}
    with pytest.raises(RecordError, match=message):
        normalize(record)


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
            "turn 2: 'from' must be a string, it is missing; the keys are content, role",
        ),
        (
            {"messages": [{"role": "user", "text": "Q"}, TURNS[1]]},
            "turn 1: 'content' must be a string, it is missing; the keys are role, text",
        ),
    ],
)
def test_known_keys_of_another_type_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        normalize(record)


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
    assert result.report.notes == [
        f"{path}: not read: columns messages (1); keys of turns role (1)"
    ]
    assert masked(encoder, result.conversations[0]) == "<s><user>Q1</s><|assistant|>[[A1</s>]]"
    plain = DatasetReader(
        DatasetConfig(path=str(path)), open_source(config), encoder, skip_bad=False
    )
    assert cache_key([reader], 64) != cache_key([plain], 64)
    with pytest.raises(DataError, match="'messages' must be a list of turns"):
        plain.read()


def test_a_single_part_may_have_another_name() -> None:
    fields = DatasetConfig(path="x", message_field_content="text")
    record = {"conversations": [{"from": "human", "text": "Q"}]}
    assert normalize(record, fields).messages[0].content == "Q"
    fields = DatasetConfig(path="x", field_messages="chat", roles={"tool": ["caller"]})
    with pytest.raises(RecordError, match="turn 1 has the role tool"):
        normalize({"chat": [{"role": "caller", "content": "Q"}]}, fields)
    with pytest.raises(RecordError, match="expected the keys 'chat'"):
        normalize({"messages": TURNS}, fields)


def test_a_chat_without_anything_around_it_is_read(tmp_path: Path, make_tokenizer: Make) -> None:
    """As create_data.py of the Medusa repository writes them: a list of lists of turns."""
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([TURNS, TURNS[:1]]))
    result = read(path, ChatEncoder(make_tokenizer()))
    assert [len(chat.messages) for chat in result.conversations] == [2, 1]
    assert [prompt.turns for prompt in read_prompts(path)] == [("Q1",), ("Q1",)]
    with pytest.raises(RecordError, match="this is a list"):
        normalize([1, 2])
