"""Answers as they were generated: their own tokens, and no end token where the length limit cut
them.
"""

from collections.abc import Callable
from typing import Any

import pytest

from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.json_values import RecordError
from medusa_train.data.records import normalize
from medusa_train.data.tokenize import ChatEncoder, Row

USER = Message("user", "Ask")
MORE = Message("user", "More")


@pytest.fixture
def encoder(make_tokenizer: Callable[..., Any]) -> ChatEncoder:
    return ChatEncoder(make_tokenizer(), "chatml")


def supervised(encoder: ChatEncoder, row: Row) -> list[int]:
    return [token for token, is_target in zip(row.ids, row.supervised, strict=True) if is_target]


def encode(encoder: ChatEncoder, *messages: Message) -> list[Row]:
    return encoder.encode(Conversation("x", messages, "x:1"))


def other_tokens(encoder: ChatEncoder, text: str) -> tuple[int, ...]:
    """The tokens of every character of `text` alone, which differ from those of the whole text."""
    ids = tuple(token for character in text for token in encoder.tokenize_continuation(character))
    assert list(ids) != encoder.tokenize_continuation(text)
    assert encoder.tokenizer.decode(ids) == text
    return ids


def test_an_answer_is_trained_as_the_tokens_that_were_generated(encoder: ChatEncoder) -> None:
    ids = other_tokens(encoder, "A B")
    (row,) = encode(encoder, USER, Message("assistant", "A B", ids))
    end = encoder.tokenize_continuation("<|im_end|>")
    assert supervised(encoder, row) == [*ids, *end]
    assert row.ids[: -len(ids) - len(end)] == encoder.prompt([USER])


@pytest.mark.parametrize("space", ["\n", " ", "\n\n", " \n"])
def test_white_space_before_the_end_token_is_not_added_to_generated_tokens(
    make_tokenizer: Callable[..., Any], space: str
) -> None:
    """It would be one of them if the model had generated it; a template adds it to the text alone."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '"
        + space.replace("\n", "\\n")
        + "<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% endif %}"
    )
    encoder = ChatEncoder(make_tokenizer(template))
    end = encoder.tokenize_continuation("<|im_end|>")
    assert len(end) == 1
    # without tokens of its own, the answer is the text that the template writes
    (row,) = encode(encoder, USER, Message("assistant", "A B"))
    assert supervised(encoder, row) == encoder.tokenize_continuation(f"A B{space}<|im_end|>")
    # its own tokens are kept, those of white space among them
    for ids in (other_tokens(encoder, "A B"), other_tokens(encoder, f"A B{space}")):
        (row,) = encode(encoder, USER, Message("assistant", "A B", ids))
        assert supervised(encoder, row) == [*ids, *end]


def test_tokens_after_an_opened_reasoning_are_used_where_the_end_is_text(
    make_tokenizer: Callable[..., Any],
) -> None:
    """The prompt opens the reasoning, so the tokens are those of the text behind its tag."""
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' # End\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: <think>\\n' }}{% endif %}"
    )
    encoder = ChatEncoder(make_tokenizer(template))
    ids = other_tokens(encoder, "hel</think>B")
    (row,) = encode(encoder, USER, Message("assistant", "<think>\nhel</think>B", ids))
    assert supervised(encoder, row) == [*ids, *encoder.tokenize_continuation("# End")]


def test_as_history_it_has_the_tokens_of_its_text(encoder: ChatEncoder) -> None:
    ids = other_tokens(encoder, "A B")
    first, second = encode(
        encoder, USER, Message("assistant", "A B", ids), MORE, Message("assistant", "C")
    )
    assert supervised(encoder, first)[: len(ids)] == list(ids)
    prompt = encoder.prompt([USER, Message("assistant", "A B"), MORE])
    assert second.ids[: len(prompt)] == prompt
    assert supervised(encoder, second) == encoder.tokenize_continuation("C<|im_end|>")


def test_tokens_of_another_text_are_not_used(encoder: ChatEncoder) -> None:
    """As when another model's tokenizer made them, or the text was edited."""
    for wrong in ("C B", "A"):
        (row,) = encode(
            encoder, USER, Message("assistant", "A B", tuple(encoder.tokenize_continuation(wrong)))
        )
        assert supervised(encoder, row) == encoder.tokenize_continuation("A B<|im_end|>")


@pytest.mark.parametrize("with_ids", [False, True])
def test_an_answer_at_the_length_limit_has_no_end_token_to_learn(
    encoder: ChatEncoder, with_ids: bool
) -> None:
    ids = other_tokens(encoder, "A B") if with_ids else None
    cut = Message("assistant", "A B", ids, is_cut=True)
    (row,) = encode(encoder, USER, cut)
    assert supervised(encoder, row) == list(ids or encoder.tokenize_continuation("A B"))
    rows = encode(encoder, USER, cut, MORE, Message("assistant", "C"))
    targets = [token for row in rows for token in supervised(encoder, row)]
    assert targets == [
        *(ids or encoder.tokenize_continuation("A B")),
        *encoder.tokenize_continuation("C<|im_end|>"),
    ]
    # as history it is followed by the end token, as the template renders it when the chat goes on
    assert rows[-1].ids[-len(encoder.tokenize_continuation("C<|im_end|>")) :] == targets[-2:]
    prompt = encoder.prompt([USER, Message("assistant", "A B"), MORE])
    assert rows[-1].ids[: len(prompt)] == prompt


def record(**more: Any) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": "Ask"},
        {"role": "assistant", "content": "A B", "token_ids": [3, 4]},
    ]
    return {
        "messages": [
            *turns,
            {"role": "user", "content": "More"},
            {"role": "assistant", "content": "C"},
        ],
        **more,
    }


@pytest.mark.parametrize("reason", ["length", "context", "possibly cut"])
def test_records_of_self_distillation_say_how_answers_were_generated(reason: str) -> None:
    _, first, _, second = normalize(record(finish_reasons=[reason, "stop"])).messages
    assert (first.token_ids, first.is_cut) == ((3, 4), True)
    assert (second.token_ids, second.is_cut) == (None, False)


@pytest.mark.parametrize("reasons", [None, "length", ["length"], ["stop", "stop", "length"]])
def test_finish_reasons_that_are_not_one_for_each_answer_are_ignored(reasons: Any) -> None:
    assert not any(message.is_cut for message in normalize(record(finish_reasons=reasons)).messages)


@pytest.mark.parametrize("ids", ["3", [1.5], [True], [-1], [1 << 31], {"a": 1}])
def test_token_ids_that_are_none_are_refused(ids: Any) -> None:
    broken = record()
    broken["messages"][1]["token_ids"] = ids
    with pytest.raises(RecordError, match="turn 2: 'token_ids' must be a list of token ids"):
        normalize(broken)
