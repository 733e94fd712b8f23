"""Columns and keys of turns that nothing reads are counted by name."""

import json
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.read_chats import ReadResult
from medusa_train.data.records import normalize, parse_user_turns
from medusa_train.data.report import COLUMNS, MAX_UNREAD, Unread
from medusa_train.data.sources import open_source
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.data.tokenize_datasets import DatasetReader
from medusa_train.evaluation.questions import load_benchmark
from medusa_train.selfdistill.prompts import read_prompts

Make = Callable[..., Any]


TURNS = [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}]


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
    assert read(path, ChatEncoder(make_tokenizer())).report.notes == [counted]
    unread = Unread()
    read_prompts(path, unread=unread)
    assert unread.describe(str(path)) == [counted]
    lines: list[str] = []
    load_benchmark(str(path), lines.append)
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
    normalize(record, unread=found)
    assert sorted(name for _, name in found) == unread
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
        (
            {"messages": [*TURNS, {"role": "user", "content": "Q2"}]},
            "turns of user after the last answer (1)",
        ),
    ],
)
def test_what_is_left_out_of_a_known_key_is_counted(record: dict[str, Any], sentence: str) -> None:
    found = Unread()
    normalize(record, unread=found)
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
    found.add(COLUMNS, *names)
    (line,) = found.describe("data")
    assert line.isprintable()
    assert len(line) < 300
    for shown in (r"'a\nb' (1)", r"'\x1b[31mred' (1)", "'' (1)", "' ' (1)", "[bold] (1)", "名 (1)"):
        assert shown in line


def test_many_columns_are_counted_in_one_line() -> None:
    found = Unread()
    found.add(COLUMNS, *random_names(MAX_UNREAD + 5))
    (line,) = found.describe("data")
    assert line.endswith("and 5 more")
    assert line.count("(1)") == MAX_UNREAD


def turn(role: str, content: str, **keys: object) -> dict[str, object]:
    return {"role": role, "content": content, **keys}
