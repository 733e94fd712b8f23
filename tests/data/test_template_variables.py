"""Columns of records that are variables of the chat template."""

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
from medusa_train.data.tokenize_datasets import DatasetReader
from medusa_train.errors import DataError
from tests.data.test_tokenize_chat import masked

Make = Callable[..., Any]

TURNS = [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}]
WITH_TOOLS = (
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% if mode is defined %}{{ '(' + mode + ')' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, encoder: ChatEncoder) -> ReadResult:
    config = DatasetConfig(path=str(path))
    return DatasetReader(config, open_source(config), encoder, skip_bad=False).read()


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
    assert result.report.notes == []
    (chat,) = result.conversations
    assert masked(encoder, chat) == f"{start}<|user|>Q1</s><|assistant|>[[A1</s>]]"
    variables = json.loads(chat.variables or "{}")
    decoding = ChatEncoder(make_tokenizer(WITH_TOOLS), template_kwargs=variables)
    (row,) = encoder.encode(chat)
    prompt = decoding.prompt(chat.messages[:1])
    assert row.ids[: len(prompt)] == prompt


def test_chats_with_other_tools_are_other_chats() -> None:
    records = [{"messages": TURNS, "tools": [{"name": name}]} for name in "fg"]
    chats = [normalize(record, variables=["tools"]) for record in records]
    assert chats[0].content_key != chats[1].content_key
    assert chats[0].first(1).variables == chats[0].variables
    assert normalize(records[0]).content_key == normalize({"messages": TURNS}).content_key


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
        normalize({"messages": TURNS, **columns}, variables=["tools", "mode"])


def test_the_variables_of_a_template_are_those_that_it_reads(make_tokenizer: Make) -> None:
    assert ChatEncoder(make_tokenizer(WITH_TOOLS)).template.variables == {"tools", "mode"}
    assert ChatEncoder(make_tokenizer()).template.variables == set()
    for name in ("chatml", "llama-3", "vicuna_v1.1"):
        assert "messages" not in ChatEncoder(make_tokenizer(), name).template.variables


def test_templates_by_name_without_a_default_are_named(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"rag": "{{ messages }}", "tool_use": "{{ messages }}"}
    with pytest.raises(DataError, match=r"several names \(rag, tool_use\) and none"):
        ChatEncoder(tokenizer)
    tokenizer.chat_template["default"] = make_tokenizer().chat_template
    assert ChatEncoder(tokenizer).template.source == make_tokenizer().chat_template
