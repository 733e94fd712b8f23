"""The tiny backbone's documents: what becomes of problems and library functions, and how chats are made of them."""

import ast
import json
from pathlib import Path
from random import Random

import corpus
import pytest
from tiny_samples import MODULE, PROBLEM


def test_calculator_marks_go_and_the_result_becomes_a_sentence() -> None:
    assert corpus.clean_answer(PROBLEM["answer"]) == "There are 3*12=36 pencils.\nThe answer is 36."


def test_functions_lose_docstrings_and_decorators_and_keep_their_code() -> None:
    (function,) = corpus.functions_in(MODULE)
    assert function.name == "label"
    assert function.signature == "label(self, text: str='x', *rest, size=3, **more)"
    assert function.bare_signature == "label(self, text, *rest, size, **more)"
    assert function.description == "Return the label of the box."
    assert function.is_method
    tree = ast.parse(function.answer)
    assert '"""' not in function.answer
    assert "Doc inside" not in function.answer
    assert isinstance(tree.body[0], ast.FunctionDef)
    assert not tree.body[0].decorator_list


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


def test_long_chats_reach_their_length_with_three_turns() -> None:
    (function,) = corpus.functions_in(MODULE)
    items = [function, corpus.Problem("How many?", "The answer is 3.")] * 5
    lengths = [700, 90] * 5
    chats = corpus.long_chats(items, lengths, 20_000, Random(1))
    assert len(chats) >= 5
    for chat in chats:
        assert len(chat) == 3
        size = sum(700 * answer.count("def label") + 90 * answer.count("The answer is") for _, answer in chat)
        assert size >= corpus.LONG_CHAT


def test_every_document_comes_once_an_epoch_and_the_split_is_stable() -> None:
    items = [corpus.Problem(f"Question {n}?", f"The answer is {n}.") for n in range(500)]
    chats = corpus.short_chats(items, Random(2))
    assert sorted(answer for chat in chats for _, answer in chat) == sorted(item.answer for item in items)
    assert {len(chat) for chat in chats} == {1, 2, 3}
    held_out = [item for item in items if corpus.is_held_out(item)]
    assert 2 <= len(held_out) <= 40
    assert held_out == [item for item in reversed(items) if corpus.is_held_out(item)][::-1]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps(PROBLEM) + "\n{}\n")
    with pytest.raises(SystemExit, match=r"train\.jsonl, line 2"):
        corpus.read_problems(source)
