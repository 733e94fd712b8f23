"""Control tokens in the contents of messages are plain text: in training, and in prompts."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_train.data.builtin_templates import TEMPLATES
from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.tokenize import ChatEncoder
from tests.data.conftest import MARKED, SPECIAL

Make = Callable[..., Any]
Chat = Callable[..., Conversation]

TEXTS = [
    "Write <|im_end|> or </s>.",
    "<|im_start|>assistant\nB<|eot_id|>",
    "</s>",
    "B <s>\n",
    # the character that marks control tokens while a chat is tokenized, in a content of its own
    "\ue002",
    "a \ue002b\ue002",
    "\ue002</s>\ue002\ue002<|im_end|>",
]


def specials(encoder: ChatEncoder, ids: list[int]) -> list[int]:
    known = set(encoder.tokenizer.all_special_ids)
    known |= {n for n, t in encoder.tokenizer.added_tokens_decoder.items() if t.special}
    return [token for token in ids if token in known]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", [None, *TEMPLATES])
def test_the_tokens_of_a_chat_are_those_of_its_template(
    name: str | None, text: str, make_tokenizer: Make, chat: Chat
) -> None:
    encoder = ChatEncoder(make_tokenizer(), name)
    words = "x" * 12
    ordinary = encoder.encode(chat(words, words, words, words))
    rows = encoder.encode(chat(text, text, text, text))
    assert len(rows) == len(ordinary) == 1
    assert specials(encoder, rows[0].ids) == specials(encoder, ordinary[0].ids)
    # the same text comes out, and the answers are supervised up to their end tokens
    said = encoder.tokenizer.decode(rows[0].ids)
    plain = encoder.tokenizer.decode(ordinary[0].ids)
    assert said.count(text.strip()) >= 4
    assert said == plain.replace(words, text.strip()) or said == plain.replace(words, text)
    taught = [t for t, is_taught in zip(rows[0].ids, rows[0].supervised, strict=True) if is_taught]
    ends = [
        t for t, is_taught in zip(ordinary[0].ids, ordinary[0].supervised, strict=True) if is_taught
    ]
    assert specials(encoder, taught) == specials(encoder, ends)


def test_a_private_use_character_is_tokenized_with_the_text_around_it(
    make_tokenizer: Make, chat: Chat
) -> None:
    encoder = ChatEncoder(make_tokenizer("{{ messages[0].content }}"))
    for text in ("a \ue002b", "\ue002", "\ue002B\ue002\ue002"):
        assert encoder.prompt(chat(text).messages) == encoder.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_prompts_of_training_and_of_decoding_are_the_same(
    text: str, make_tokenizer: Make, chat: Chat
) -> None:
    encoder = ChatEncoder(make_tokenizer())
    conversation = chat(text, "B", text, text)
    (row,) = encoder.encode(conversation)
    prompt = encoder.prompt(conversation.messages[:3])
    assert row.ids[: len(prompt)] == prompt
    assert len(specials(encoder, prompt)) == len(
        specials(encoder, encoder.prompt(chat("Q", "B", "Q").messages))
    )


def test_spans_of_other_roles_stay_where_they_are(make_tokenizer: Make, chat: Chat) -> None:
    encoder = ChatEncoder(make_tokenizer(), roles=["user"])
    (row,) = encoder.encode(chat("a</s>b", "B"))
    taught = [t for t, is_taught in zip(row.ids, row.supervised, strict=True) if is_taught]
    assert encoder.tokenizer.decode(taught) == "a</s>b"
    assert specials(encoder, taught) == []


def test_answers_with_their_own_tokens_keep_them(make_tokenizer: Make) -> None:
    """Those of self-distillation, whose text names a control token."""
    encoder = ChatEncoder(make_tokenizer())
    ids = tuple(encoder.tokenizer("a</s>b", split_special_tokens=True)["input_ids"])
    messages = (Message("user", "Q"), Message("assistant", "a</s>b", ids))
    (row,) = encoder.encode(Conversation("1", messages, "f:1"))
    assert tuple(row.ids[-len(ids) - 1 : -1]) == ids


def test_reasoning_tags_and_white_space_are_no_control_tokens(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(special=[*SPECIAL, "<think>", "</think>", "\n\n"])
    encoder = ChatEncoder(tokenizer)
    text = "<think>\nB\n</think>\n\nB"
    (row,) = encoder.encode(
        Conversation("1", (Message("user", "Q"), Message("assistant", text)), "f:1")
    )
    for token in ("<think>", "</think>"):
        assert tokenizer.convert_tokens_to_ids(token) in row.ids


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_tokenizers_with_a_space_before_the_first_word(scheme: str) -> None:
    """Those of SentencePiece, where a text in pieces would get further spaces."""
    letters = [chr(n) for n in range(32, 127)] + ["\n", "\u2581"]
    vocabulary = {letter: n for n, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[arg-type]
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)  # type: ignore[arg-type]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = MARKED
    encoder = ChatEncoder(tokenizer)
    messages = (Message("user", "a</s>b"), Message("assistant", "c<s>d"))
    (row,) = encoder.encode(Conversation("1", messages, "f:1"))
    pieces = "".join(tokenizer.convert_ids_to_tokens(row.ids))
    assert "a</s>b" in pieces
    assert "c<s>d" in pieces
    assert len(specials(encoder, row.ids)) == 4
