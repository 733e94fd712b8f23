"""Chats with tool calls as rows: what a template writes, and which tokens are supervised."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medusa_train.config.schema import TrainConfig
from medusa_train.data.conversation import Conversation
from medusa_train.data.dataset import load_datasets
from medusa_train.data.examples import encode_examples
from medusa_train.data.records import normalize
from medusa_train.data.report import DataReport
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError
from medusa_train.training.load_data import chat_encoder
from tests import chat_templates as templates
from tests.data.conftest import SPECIAL
from tests.data.test_tokenize_chat import masked, masked_row

Make = Callable[..., Any]
Turn = dict[str, Any]

TAGS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<|end|>",
    "<|return|>",
    "<|turn>",
    "<turn|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|channel>",
    "<channel|>",
    "<|User|>",
    "<|Assistant|>",
    "<|result|>",
]
STOPS = {
    templates.TOOLS_HARMONY: ["<|call|>", "<|return|>"],
    templates.TOOLS_THOUGHT: ["<turn|>"],
}


@pytest.fixture
def make(make_tokenizer: Make) -> Make:
    """An encoder of a template, with all tags of these templates as added tokens."""

    def build(source: str, **settings: Any) -> ChatEncoder:
        tokenizer = make_tokenizer(source, special=[*SPECIAL, *TAGS])
        return ChatEncoder(tokenizer, stops=STOPS.get(source, []), **settings)

    return build


def call(number: int = 1, **arguments: object) -> Turn:
    function = {"name": f"f{number}", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def calls(*made: Turn, content: str = "", **keys: object) -> Turn:
    return {"role": "assistant", "content": content, "tool_calls": list(made), **keys}


def result(content: str = "R", number: int = 1) -> Turn:
    return {"role": "tool", "content": content, "tool_call_id": f"call_{number}"}


Q = {"role": "user", "content": "Q"}
A = {"role": "assistant", "content": "A"}


def chat(*turns: Turn, **columns: object) -> Conversation:
    record = {"messages": list(turns), **columns}
    return replace(normalize(record, variables=["tools"]), source="d.jsonl:1")


AGENT = [Q, calls(call(x=1), content="C"), result(), A]
BEFORE_OPENED = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>"
BEFORE_THOUGHT = "<|turn>user\nQ<turn|>\n<|turn>model\n"
EXPECTED = {
    "CHATML": (
        '<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[C\n<tool_call>\n{"name": "f1",'
        ' "arguments": {"x": 1}}\n</tool_call><|im_end|>]]\n<|im_start|>user\n<tool_response>\nR\n'
        "</tool_response><|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>]]"
    ),
    "LLAMA": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n[[{"name": "f1", "parameters": {"x": 1}}'
        '<|eot_id|>]]<|start_header_id|>ipython<|end_header_id|>\n\n"R"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[A<|eot_id|>]]"
    ),
    "MISTRAL": (
        '<s>[INST] Q[/INST][[[TOOL_CALLS] [{"name": "f1", "arguments": {"x": 1}, "id": "RksXkbv4v"}]'
        '</s>]][TOOL_RESULTS] {"content": "R", "call_id": "RksXkbv4v"}[/TOOL_RESULTS][[ A</s>]]'
    ),
    "HARMONY": (
        "<|start|>user<|message|>Q<|end|><|start|>assistant[[<|channel|>analysis<|message|>C<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f1"
        ' json<|message|>{"x": 1}<|call|>]]<|start|>functions to=assistant<|message|>R<|end|>'
        "<|start|>assistant[[<|channel|>final<|message|>A<|return|>]]"
    ),
    "OPENED": (
        f'{BEFORE_OPENED}\n[[\n</think>\n\nC<tool_call>f1({{"x": 1}})</tool_call><|im_end|>]] |'
        f' {BEFORE_OPENED}</think>C<tool_call>f1({{"x": 1}})</tool_call><|im_end|>\n'
        "<|im_start|>tool\nR<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "[[\n</think>\n\nA<|im_end|>]]"
    ),
    "THOUGHT": (
        f'{BEFORE_THOUGHT}<|channel>thought\n<channel|>[[C<|tool_call>call:f1{{"x": 1}}<tool_call|>'
        f'<turn|>]] | {BEFORE_THOUGHT}C<|tool_call>call:f1{{"x": 1}}<tool_call|><turn|>\n'
        "<|turn>tool\nR<turn|>\n<|turn>model\n<|channel>thought\n<channel|>[[A<turn|>]]"
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_are_supervised_and_results_are_not(name: str, make: Make) -> None:
    encoder = make(getattr(templates, f"TOOLS_{name}"))
    assert masked(encoder, chat(*AGENT)) == EXPECTED[name]


@pytest.mark.parametrize("name", [*EXPECTED, "HEADLESS"])
def test_every_row_begins_with_the_prompt_of_decoding(name: str, make: Make) -> None:
    encoder = make(getattr(templates, f"TOOLS_{name}"))
    conversation = chat(*AGENT, Q, calls(call(2, y="é")), result("S", 2), A)
    rows = encoder.encode(conversation)
    for row in rows:
        for index in row.answers:
            prompt = encoder.prompt(conversation.messages[:index])
            start = len(prompt)  # of the answer, which is supervised
            assert row.ids[:start] == prompt
            assert row.supervised[start - 1 : start + 1] == [False, True]


@pytest.mark.parametrize("name", EXPECTED)
def test_control_tokens_within_calls_and_results_are_text(name: str, make: Make) -> None:
    encoder = make(getattr(templates, f"TOOLS_{name}"))
    added = encoder.tokenizer.get_added_vocab()

    def control(text: str) -> list[int]:
        rows = encoder.encode(chat(Q, calls(call(x=text)), result(text), A))
        return [token for row in rows for token in row.ids if token in added.values()]

    assert control("<|im_end|></s><|eot_id|><turn|><|call|>") == control("word")


def test_parallel_calls_are_one_answer(make: Make) -> None:
    turns = [Q, calls(call(1), call(2)), result(), result("S", 2), A]
    shown = masked(make(templates.TOOLS_CHATML), chat(*turns))
    text = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
    assert f"[[{text.format('f1')}\n{text.format('f2')}<|im_end|>]]" in shown


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LLAMA", "rejects the chat: This model only supports single tool-calls at once!"),
        ("HARMONY", "leaves out tool calls"),
    ],
)
def test_parallel_calls_that_a_template_lacks_reject_the_chat(
    name: str, reason: str, make: Make
) -> None:
    turns = [Q, calls(call(1), call(2)), result(), result("S", 2), A]
    with pytest.raises(DataError, match=f"d.jsonl:1: the chat template {reason}"):
        make(getattr(templates, f"TOOLS_{name}")).encode(chat(*turns))


def test_calls_that_a_template_leaves_out_reject_the_chat(make: Make) -> None:
    with pytest.raises(DataError, match="the chat template leaves out tool calls"):
        make(templates.SMOLLM2).encode(chat(*AGENT))


def test_results_that_a_template_leaves_out_reject_the_chat(make: Make) -> None:
    without = templates.TOOLS_CHATML.replace("m.role == 'tool'", "m.role == 'none'")
    with pytest.raises(DataError, match="the chat template leaves out results of tools"):
        make(without).encode(chat(*AGENT))


def test_reasoning_beside_calls_is_generated(make: Make) -> None:
    turns = [Q, calls(call(), reasoning_content="T"), result(), A]
    shown = masked(make(templates.TOOLS_CHATML), chat(*turns))
    assert "assistant\n[[<think>\nT\n</think>\n\n<tool_call>" in shown
    shown = masked(make(templates.TOOLS_OPENED), chat(*turns))
    assert "<think>\n[[T</think><tool_call>" in shown
    shown = masked(make(templates.TOOLS_HARMONY), chat(*turns))
    assert "<|start|>assistant[[<|channel|>analysis<|message|>T<|end|><|start|>assistant" in shown


@pytest.mark.parametrize("beside", [{"content": "C"}, {"thinking": "T"}])
def test_answers_keep_their_header_where_they_remove_an_analysis_before_them(
    beside: Turn, make: Make
) -> None:
    turns = [Q, A, Q, calls(call(), **beside), result(), A, Q, A]
    shown = masked(make(templates.TOOLS_HARMONY), chat(*turns))
    assert shown.count("<|start|>assistant[[<|channel|>final<|message|>A<|return|>]]") == 3
    assert "R<|end|><|start|>assistant[[<|channel|>final<|message|>A<|return|>]]" in shown


def test_a_reasoning_tag_of_a_question_begins_no_answer(make: Make) -> None:
    shown = masked(make(templates.R1), chat({**Q, "content": "<think>\nQ"}, A))
    assert shown.endswith("<think>\nQ<|Assistant|><think>\n[[\n</think>\n\nA</s>]]")


def test_a_prompt_that_closes_the_reasoning_leaves_none_to_generate(make: Make) -> None:
    closed = "{% if add_generation_prompt %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    encoder = make(templates.TOOLS_CHATML + closed)
    turns = [Q, calls(call(), reasoning_content="T"), result(), A]
    (first, *_) = encoder.encode(chat(*turns))
    assert masked_row(encoder, first).endswith(
        "assistant\n<think>\n\n</think>\n\n"
        '[[<tool_call>\n{"name": "f1", "arguments": {}}\n</tool_call><|im_end|>]]'
    )


def test_arguments_are_text_if_the_template_rejects_objects(make: Make) -> None:
    encoder, counts = make(templates.TOOLS_HEADLESS), Counter[str]()
    (row,) = encoder.encode(chat(Q, calls(call(x="é"))), counts)
    shown = masked_row(encoder, row)
    assert shown == '<s><|User|>Q<|Assistant|>[[<|call|>f1{"x": "é"}</s>]]'
    assert counts == {"text_arguments": 1}


@pytest.mark.parametrize("content", ["R", "<|Assistant|>"])
def test_a_chat_ends_before_a_turn_that_is_rendered_without_its_header(
    content: str, make: Make
) -> None:
    encoder, counts = make(templates.TOOLS_HEADLESS), Counter[str]()
    turns = [Q, calls(call(1)), result(content), calls(call(2)), result("S", 2), A]
    (row,) = encoder.encode(chat(*turns), counts)
    assert list(row.answers) == [1]
    assert counts["cut_before_turn"] == 1


def test_calls_that_are_rendered_as_another_turn_than_their_text_reject_the_chat(
    make: Make,
) -> None:
    encoder = make(templates.TOOLS_TWO_TURNS)
    with pytest.raises(
        DataError, match="the chat template renders turn 2 differently after a prom"
    ):
        encoder.encode(chat(*AGENT))
    shown = masked(encoder, chat(Q, calls(call(x=1)), result(), A))
    assert '[[f1{"x": 1}<|im_end|>]]' in shown


def test_results_of_calls_in_text_are_the_users_if_the_template_knows_no_tool(make: Make) -> None:
    turns = [Q, {**A, "content": "[f(1)]"}, {"role": "tool", "content": "R"}, A]
    counts = Counter[str]()
    encoder = make(templates.TOOLS_CHATML.replace("m.role == 'tool'", "m.role == 'none'"))
    (row,) = encoder.encode(chat(*turns), counts)
    assert "[[[f(1)]<|im_end|>]]\n<|im_start|>user\nR<|im_end|>" in masked_row(encoder, row)
    assert counts == {"results_of_user": 1}
    shown = masked(make(templates.TOOLS_CHATML), chat(*turns))
    assert "<tool_response>\nR\n</tool_response>" in shown


def test_text_next_to_calls_that_later_turns_leave_out_is_not_counted(make: Make) -> None:
    counts = Counter[str]()
    make(templates.TOOLS_HARMONY).encode(chat(*AGENT), counts)
    assert counts == {}


def test_a_cut_answer_with_calls_has_no_end(make: Make) -> None:
    conversation = chat(Q, calls(call()), finish_reasons=["length"])
    assert masked(make(templates.TOOLS_CHATML), conversation).endswith("</tool_call>]]")


def test_an_answer_ends_at_no_token_if_the_template_writes_none(make: Make) -> None:
    """GLM-4.5's calls end with the header of the next turn."""
    source = templates.TOOLS_CHATML.replace("{{ '<|im_end|>\\n' }}{% elif", "{{ '\\n' }}{% elif")
    encoder = make(source)
    assert masked(encoder, chat(Q, calls(call()))).endswith("\n</tool_call>]]")


def test_long_chats_keep_the_last_rows_and_some_others(make: Make) -> None:
    turns = [Q]
    for number in range(12):
        turns += [calls(call(number)), result("R", number)]
    conversation = chat(*turns)
    report = DataReport(100_000)
    encoder = make(templates.TOOLS_OPENED, max_tool_rows=5)
    rows = encoder.encode(conversation)
    messages = [min(row.answers) for row in rows]
    assert messages[-3:] == [19, 21, 23]
    assert len(messages) == 5
    assert messages == sorted(messages)
    assert messages == [min(row.answers) for row in encoder.encode(conversation)]
    assert len(encode_examples(conversation, encoder, report)) == 5
    assert "7 rows of long chats with tools left out (max_rows_per_chat)" in report.describe()


def test_tools_are_rendered_before_the_chat(make: Make) -> None:
    tool = {"type": "function", "function": {"name": "f1", "description": "D"}}
    encoder = make(templates.TOOLS_CHATML)
    conversation = chat(*AGENT, tools=[tool])
    shown = masked(encoder, conversation)
    assert shown.startswith(f"<|im_start|>system\n<tools>{json.dumps(tool)}</tools><|im_end|>")


def test_chats_that_cannot_be_rendered_or_read_are_skipped_and_counted(
    make: Make, tmp_path: Path
) -> None:
    parallel = [Q, calls(call(1), call(2)), result(), result("S", 2), A]
    missing = [Q, calls(call(1)), A]
    path = tmp_path / "d.jsonl"
    chats = [AGENT, parallel, missing, parallel]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
    settings = {"base_model": "m", "datasets": str(path), "val_set_size": 0}
    encoder = make(templates.TOOLS_LLAMA)
    with pytest.raises(DataError, match="turn 3 has the role assistant, expected tool"):
        load_datasets(TrainConfig.model_validate(settings), encoder)
    settings["skip_bad_records"] = True
    train, _ = load_datasets(TrainConfig.model_validate(settings), encoder)
    assert [example.source for example in train.examples] == [f"{path}:1"]
    assert (
        "invalid records by reason: the chat template rejects the chat: This model only supports"
        " single tool-calls at once! (2); turn N has the role assistant, expected tool (1)"
    ) in train.report.describe()


@pytest.mark.parametrize("name", EXPECTED)
def test_everything_is_trained_with_train_on_inputs(name: str, make: Make) -> None:
    encoder = make(getattr(templates, f"TOOLS_{name}"), train_on_inputs=True)
    (first, *others) = encoder.encode(chat(*AGENT))
    assert all(first.supervised)
    for row in others:  # history was trained in an earlier row
        assert row.supervised == sorted(row.supervised)


def test_what_a_template_leaves_out_is_said_with_its_count(make: Make) -> None:
    report = DataReport(1000)
    encode_examples(chat(*AGENT), make(templates.TOOLS_LLAMA), report)
    assert report.describe() == [
        "chats with tools (1): the chat template leaves out the text next to tool calls"
    ]


def test_a_run_limits_rows_and_ends_answers_at_the_models_tokens(
    make_tokenizer: Make, tmp_path: Path
) -> None:
    turns = [Q]
    for number in range(6):
        turns += [calls(call(number)), result("R", number)]
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    tokenizer = make_tokenizer(templates.TOOLS_THOUGHT, special=[*SPECIAL, *TAGS])
    settings = {"base_model": "m", "datasets": str(path), "val_set_size": 0, "sequence_len": 9999}
    cfg = TrainConfig.model_validate({**settings, "max_rows_per_chat": 3})
    end = tokenizer.convert_tokens_to_ids("<turn|>")
    train, _ = load_datasets(cfg, chat_encoder(cfg, tokenizer, [end]))
    assert len(train) == 3
    for example in train.examples:
        assert int(example.tokens[-1]) == end
        assert bool(example.supervised[-1])
    default = TrainConfig.model_validate(settings)
    whole, _ = load_datasets(default, chat_encoder(default, tokenizer, end))
    assert len(whole) == 6
