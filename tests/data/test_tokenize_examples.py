import random
from collections.abc import Callable
from typing import Any

import pytest

from medusa_train.data.conversation import Conversation
from medusa_train.data.examples import Example, Outcome, encode_examples, select_validation
from medusa_train.data.tokenize import ChatEncoder

Chat = Callable[..., Conversation]


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> ChatEncoder:
    # a line break follows each answer: trimming has something to do
    return ChatEncoder(tokenizer, "chatml")


def encode_example(
    conversation: Conversation, encoder: ChatEncoder, max_length: int
) -> tuple[Example | None, Outcome]:
    """The only row of a conversation."""
    examples, outcome, *_ = encode_examples(conversation, encoder, max_length)
    assert len(examples) <= 1
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


def test_holding_out_ignores_order_and_takes_the_share() -> None:
    keys = [f"k{n}" for n in range(40)] + ["twin", "twin", "twin"]
    chosen = select_validation(keys, 0.2, 1)
    assert select_validation(random.Random(0).sample(keys, len(keys)), 0.2, 1) == chosen
    assert sum(key in chosen for key in keys) == round(0.2 * 43)
    assert chosen != select_validation(keys, 0.2, 2)


@pytest.mark.parametrize("seed", range(5))
def test_the_rarest_content_is_held_out_where_none_is_rare_enough(seed: int) -> None:
    assert len(select_validation(list("aabbcc"), 0.05, seed)) == 1
    assert select_validation(list("aaabbcccc"), 0.05, seed) == {"b"}


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.001, 1), (0.999, 9)])
def test_holding_out_at_the_edges(share: float, count: int) -> None:
    assert len(select_validation([f"k{n}" for n in range(10)], share, 0)) == count
    assert select_validation(["a", "a", "a"], share, 0) == select_validation([], share, 0) == set()
