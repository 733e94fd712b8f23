"""Texts are tokenized in pieces, with the tokens that the whole text has."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.data.conversation import REASONING_TAGS
from medusa_train.data.marked_text import MarkedTextTokenizer
from tests.data.conftest import SPECIAL

Make = Callable[..., Any]

TEXTS = [
    "<s><|im_start|>user\nA B é<|im_end|>\n<|im_start|>assistant\n\n\n B</s>",
    "no control token B",
    "  <|im_end|>  <|im_end|><|im_end|>\n\n",
    "<think>\nB\n</think>\n\nB<|im_end|>",
]


def with_spaces(scheme: str) -> Any:
    """A tokenizer in the manner of SentencePiece, which puts a space before the first word."""
    letters = [chr(n) for n in range(32, 127)] + ["\n", "é", "\u2581"]
    vocabulary = {letter: n for n, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[arg-type]
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)  # type: ignore[arg-type]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def shipped() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(PROJECT_ROOT / "data" / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def with_wide_end(make_tokenizer: Make) -> Any:
    """A tokenizer in the manner of Phi-3, whose control tokens include the white space after them."""
    tokenizer = make_tokenizer(special=["<s>", "</s>"])
    names = ("<|im_start|>", "<|im_end|>")
    tokenizer.add_tokens([AddedToken(name, rstrip=True, special=True) for name in names])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "always", "first", "never", "shipped", "rstrip"])
def test_pieces_have_the_tokens_of_the_whole_text(
    kind: str, text: str, make_tokenizer: Make
) -> None:
    if kind == "bytes":
        tokenizer = make_tokenizer()
    elif kind == "shipped":
        tokenizer = shipped()
    elif kind == "rstrip":
        tokenizer = with_wide_end(make_tokenizer)
    else:
        tokenizer = with_spaces(kind)
    texts = MarkedTextTokenizer(tokenizer, REASONING_TAGS)
    assert texts.ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_marked_token_and_the_same_token_of_the_template_are_told_apart(
    make_tokenizer: Make,
) -> None:
    tokenizer = make_tokenizer()
    texts = MarkedTextTokenizer(tokenizer, REASONING_TAGS)
    end = tokenizer.convert_tokens_to_ids("</s>")
    for _ in range(2):  # also from what is known by now
        assert texts.ids("</s>") == [end]
        plain = texts.ids(texts.mark("</s>"))
        assert end not in plain
        assert tokenizer.decode(plain) == "</s>"


def test_marks_are_taken_away(make_tokenizer: Make) -> None:
    texts = MarkedTextTokenizer(make_tokenizer(), REASONING_TAGS)
    for text in ("a</s>b", "\ue002", "\ue002</s>\ue002\ue002<|im_end|>", "B"):
        assert texts.unmark(texts.mark(text)) == text


def test_tokens_of_chosen_characters_are_found_behind_marks(make_tokenizer: Make) -> None:
    """Marks count as characters: </s> has one before it."""
    tokenizer = make_tokenizer()
    texts = MarkedTextTokenizer(tokenizer, REASONING_TAGS)
    text = texts.mark("ab</s>") + "cd"
    inside = texts.overlaps(text, [position in (0, 7) for position in range(len(text))])
    ids = texts.ids(text)
    found = [token for token, is_inside in zip(ids, inside, strict=True) if is_inside]
    assert tokenizer.decode(found) == "ac"
