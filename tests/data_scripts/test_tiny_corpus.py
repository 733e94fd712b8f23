"""Tests of data/tiny/corpus.py and chats.py: reading the sources, wordings, chats, tokenizer and chat template."""

from __future__ import annotations

from random import Random

import chats
import corpus
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from medusa_train.config.paths import PROJECT_ROOT


def test_sources_are_cleaned(module: str) -> None:
    answer = "There are 3*12=<<3*12=36>>36 pencils.\n#### 36"
    assert corpus.clean_answer(answer) == "There are 3*12=36 pencils.\nThe answer is 36."
    (function,) = corpus.functions_in(module)
    assert (function.name, function.is_method) == ("label", True)
    assert function.signature == "label(self, text: str='x', *rest, size=3, **more)"
    assert function.bare_signature == "label(self, text, *rest, size, **more)"
    assert function.description == "Return the label of the box."
    assert "Doc inside" not in function.answer
    assert function.answer.startswith("def label(")
    assert '"""' not in function.answer


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return x, e.g. 3. More text.", "Return x, e.g. 3."),
        ("Return the\n   longest one\n\nMore.", "Return the longest one"),
        ("Too short.", ""),
        (">>> f(1) is the first thing here", ""),
    ],
)
def test_first_sentence(docstring: str, sentence: str) -> None:
    assert corpus.first_sentence(docstring) == sentence


@pytest.mark.parametrize(
    ("description", "clause"),
    [
        ("Return the sum of x.", "returns the sum of x"),
        ("Matches a pattern", "matches a pattern"),
        ("Copy all files.", "copies all files"),
        ("Go to the end.", "goes to the end"),
        ("The number of files.", None),
    ],
)
def test_descriptions_become_clauses(description: str, clause: str | None) -> None:
    assert corpus.as_clause(description) == clause


def test_every_item_comes_once_an_epoch_and_the_split_is_stable() -> None:
    items = [corpus.Problem(f"Question {n}?", f"The answer is {n}.") for n in range(500)]
    short = corpus.short_chats(items, Random(2))
    assert sorted(answer for chat in short for _, answer in chat) == sorted(item.answer for item in items)
    assert {len(chat) for chat in short} == {1, 2, 3}
    held_out = [item for item in items if corpus.is_held_out(item)]
    assert 2 <= len(held_out) <= 40
    assert held_out == [item for item in reversed(items) if corpus.is_held_out(item)][::-1]


def test_long_chats_have_three_turns_and_2000_tokens(module: str) -> None:
    (function,) = corpus.functions_in(module)
    items = [function, corpus.Problem("How many?", "The answer is 3.")] * 5
    long = corpus.long_chats(items, [700, 90] * 5, 20_000, Random(1))
    assert len(long) >= 5
    for chat in long:
        assert len(chat) == 3
        assert sum(700 * a.count("def label") + 90 * a.count("The answer is") for _, a in chat) >= 2000


def test_requests_are_half_code_and_a_third_from_the_items(module: str, tokenizer: Tokenizer) -> None:
    (function,) = corpus.functions_in(module)
    problems = [corpus.Problem(f"Ada has {n} boxes. How many?", "The answer is 3.") for n in (12, 345, 6789)]
    items = corpus.Corpus([function, *problems], tokenizer, seed=0)
    requests = items.requests(60, 0)
    assert [request.is_code for request in requests] == [False, True] * 30
    for index, request in enumerate(requests):
        is_from_items = "Ada has" in request.text or "label" in request.text
        assert is_from_items == (index % 3 == 0), request.text
        assert is_from_items or not request.history
    assert any(request.history for request in requests)
    assert any(request.follow_up for request in requests)
    assert requests == items.requests(60, 0)


def test_digits_are_single_tokens_and_text_survives(module: str, tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("12 and 345", add_special_tokens=False).ids]
    assert [piece for piece in pieces if piece.isdigit()] == list("12345")
    for text in (module, " leading", "trailing \n\n", "ünïcode → 漢字\t"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_encoded_chats_equal_the_shipped_chat_template() -> None:
    shipped = PROJECT_ROOT / "data" / "tiny"
    assert (shipped / "chat_template.jinja").read_text(encoding="utf-8") == chats.CHAT_TEMPLATE
    fast = AutoTokenizer.from_pretrained(shipped)
    assert fast.convert_tokens_to_ids(list(chats.SPECIAL)) == list(range(6))
    turns = [("Add 1 and 2.", " def f():\n    return 3\n"), (" again ", "3")]
    messages = [{"role": r, "content": c} for turn in turns for r, c in zip(("user", "assistant"), turn, strict=True)]
    (encoded,) = chats.encode_chats(fast.backend_tokenizer, [turns])
    rendered = fast.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.ids == rendered["input_ids"]
    assert [int(mark) for mark in encoded.assistant] == rendered["assistant_masks"]
    answers = [i for i, mark in zip(encoded.ids, encoded.assistant, strict=True) if mark]
    assert fast.decode(answers) == " def f():\n    return 3\n</s>3</s>"
