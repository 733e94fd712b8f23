import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from medusa_train.data.batch import Example
from medusa_train.data.conversation import Conversation
from medusa_train.data.dataset import select_validation
from medusa_train.data.examples import encode_examples
from medusa_train.data.report import DataReport
from medusa_train.data.tokenize import ChatEncoder
from tests.chat_templates import QWEN3

Chat = Callable[..., Conversation]

OUTCOMES = {"complete", "truncated", "too_long", "unsupervised"}


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> ChatEncoder:
    # a line break follows each answer: trimming has something to do
    return ChatEncoder(tokenizer, "chatml")


def encode_example(
    conversation: Conversation, encoder: ChatEncoder, max_length: int
) -> tuple[Example | None, str]:
    """The only row of a conversation, and what became of it."""
    report = DataReport(max_length)
    examples = encode_examples(conversation, encoder, report)
    assert len(examples) <= 1
    (outcome,) = OUTCOMES & set(report.counts)
    return (examples[0] if examples else None), outcome


def text(encoder: ChatEncoder, example: Any) -> str:
    return encoder.tokenizer.decode(example.tokens.tolist())


FIRST = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB 1.<|im_end|>"
SECOND = FIRST + "\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\nD<|im_end|>"


def test_every_limit_cuts_at_the_end_of_an_answer(encoder: ChatEncoder, chat: Chat) -> None:
    conversation = chat("A", "B 1.", "C", "D", "E", "F" * 9, "G")
    whole, outcome = encode_example(conversation, encoder, 10_000)
    assert outcome == "complete"
    assert whole is not None
    assert text(encoder, whole).endswith("F" * 9 + "<|im_end|>")  # the unanswered G is gone

    lengths = {name: len(encoder.tokenizer(name)["input_ids"]) for name in (FIRST, SECOND)}
    for limit in range(1, len(whole) + 2):
        example, outcome = encode_example(conversation, encoder, limit)
        if limit < lengths[FIRST]:
            assert (example, outcome) == (None, "too_long")
            continue
        assert example is not None
        assert len(example) <= limit
        assert bool(example.supervised[-1])
        if limit < lengths[SECOND]:
            assert (text(encoder, example), outcome) == (FIRST, "truncated")
        elif limit < len(whole):
            assert (text(encoder, example), outcome) == (SECOND, "truncated")
        else:
            assert (len(example), outcome) == (len(whole), "complete")


def test_what_follows_the_first_answer_makes_no_difference_to_the_key(
    encoder: ChatEncoder, chat: Chat
) -> None:
    one, two, three = (
        chat("A", "B 1.", *more) for more in (("C", "D" * 99), ("E", "F" * 99), ("G",))
    )
    parts = [encode_example(conversation, encoder, 60)[0] for conversation in (one, two, three)]
    assert parts[0] is not None
    assert {part.key for part in parts if part} == {chat("A", "B 1.").content_key}
    whole, _ = encode_example(one, encoder, 10_000)
    assert whole is not None
    assert whole.key == parts[0].key


def test_prompts_end_where_answers_start(encoder: ChatEncoder, chat: Chat) -> None:
    conversation = chat("A", "B 1.", "C", "D")
    example, _ = encode_example(conversation, encoder, 10_000)
    assert example is not None
    assert example.prompts() == [encoder.prompt(conversation.messages[:n]) for n in (1, 3)]
    everything, _ = encode_example(
        conversation, encoder.with_settings(train_on_inputs=True), 10_000
    )
    assert everything is not None
    assert everything.prompts() == []
    assert encode_example(chat("A"), encoder, 100) == (None, "unsupervised")
    assert encode_example(chat("A", "B"), encoder.with_settings(roles=["system"]), 100) == (
        None,
        "unsupervised",
    )


def test_the_prompt_is_the_first_user_turn_with_what_stands_before_it(
    encoder: ChatEncoder, chat: Chat
) -> None:
    whole = chat("S: Be brief.", "A", "B 1.", "C", "D")
    example, _ = encode_example(whole, encoder, 10_000)
    assert example is not None
    assert example.prompt == whole.first(2).content_key
    others = [
        chat("A", "B 1."),
        chat("S: Be long.", "A", "B 1."),
        chat("S: Be brief.", "C", "B 1."),
    ]
    assert example.prompt not in {
        encode_examples(c, encoder, DataReport(99))[0].prompt for c in others
    }


def test_all_rows_of_a_conversation_have_its_prompt(
    make_tokenizer: Callable[..., Any], chat: Chat
) -> None:
    """The template drops the reasoning of earlier answers, so each answer has a row."""
    encoder = ChatEncoder(make_tokenizer(QWEN3))
    conversation = chat("A", "<think>x</think>B", "C", "<think>y</think>D")
    rows = encode_examples(conversation, encoder, DataReport(10_000))
    assert [row.row for row in rows] == [0, 1]
    assert {row.prompt for row in rows} == {conversation.first(1).content_key}


def rows_of(prompts: Sequence[str]) -> list[Example]:
    """A conversation for each prompt, with an answer of its own."""
    empty = torch.zeros(0)
    return [
        Example(empty, empty, key=f"{prompt}{n}", source="", prompt=prompt)
        for n, prompt in enumerate(prompts)
    ]


def test_holding_out_ignores_order_and_takes_the_share() -> None:
    rows = rows_of([f"k{n}" for n in range(40)] + ["twin", "twin", "twin"])
    chosen = select_validation(rows, 0.2, 1)
    assert select_validation(random.Random(0).sample(rows, len(rows)), 0.2, 1) == chosen
    assert sum(row.prompt in chosen for row in rows) == round(0.2 * 43)
    assert chosen != select_validation(rows, 0.2, 2)


def test_prompts_with_many_answers_are_held_out_no_more_often() -> None:
    """A prompt is ranked once, however many answers it has."""
    held_out = 0
    for seed in range(60):
        rows = rows_of([f"k{n}" for n in range(40)] + ["many"] * 4)
        held_out += "many" in select_validation(rows, 0.25, seed)
    assert 3 <= held_out <= 27  # a quarter of 60, give or take


def test_later_rows_of_a_conversation_are_not_counted() -> None:
    rows = rows_of([f"k{n}" for n in range(10)])
    later = [replace(row, row=1) for row in rows for _ in range(5)]
    assert select_validation([*rows, *later], 0.2, 1) == select_validation(rows, 0.2, 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_rarest_prompt_is_held_out_where_none_is_rare_enough(seed: int) -> None:
    assert len(select_validation(rows_of("aabbcc"), 0.05, seed)) == 1
    assert select_validation(rows_of("aaabbcccc"), 0.05, seed) == {"b"}


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.001, 1), (0.999, 9)])
def test_holding_out_at_the_edges(share: float, count: int) -> None:
    rows = rows_of([f"k{n}" for n in range(10)])
    assert len(select_validation(rows, share, 0)) == count
    assert select_validation(rows_of("aaa"), share, 0) == select_validation([], share, 0) == set()


def test_the_split_of_chats_with_one_answer_each_is_that_of_earlier_versions() -> None:
    """Runs of before resume, and what they held out stays held out."""
    rows = rows_of([f"p{n}" for n in range(30)])
    order = sorted(rows, key=lambda row: hashlib.sha256(f"7/{row.key}".encode()).digest())
    assert select_validation(rows, 0.2, 7) == {row.prompt for row in order[:6]}
