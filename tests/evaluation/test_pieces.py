from pathlib import Path

import pytest
from transformers import AutoTokenizer

from medusa_train.inference.detokenize import guessing_heads, token_pieces


def test_pieces_put_together_are_the_text_and_no_character_is_torn(backbone_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbone_dir)
    text = "Größe — 12 €<eos>"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    pieces = token_pieces(tokenizer, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text
    assert pieces[:4] == ("G", "r", "", "ö")  # two bytes, one character
    assert pieces[-1] == "<eos>"


def test_an_answer_that_ends_inside_a_character_shows_that(backbone_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbone_dir)
    tokens = tokenizer("aö", add_special_tokens=False).input_ids[:-1]
    assert token_pieces(tokenizer, tokens) == ("a", "\ufffd")
    assert token_pieces(tokenizer, []) == ()


@pytest.mark.parametrize(
    ("tokens", "accepted", "heads"),
    [
        (8, [2, 0, 2], [0, 1, 2, 0, 0, 1, 2, 0]),
        (7, [2, 0, 2], [0, 1, 2, 0, 0, 1, 2]),  # the answer ended with an accepted token
        (1, [], [0]),
        (3, [0, 0], [0, 0, 0]),
    ],
)
def test_accepted_tokens_are_the_heads_in_order_and_then_one_of_the_backbone(
    tokens: int, accepted: list[int], heads: list[int]
) -> None:
    assert guessing_heads(tokens, accepted) == heads
