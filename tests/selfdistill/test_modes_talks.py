from __future__ import annotations

import pytest

from medusa_train.selfdistill.modes import is_looping

SENTENCE = "one two three four five six seven eight "


@pytest.mark.parametrize(
    ("text", "looping"),
    [
        (SENTENCE * 3, True),
        (SENTENCE * 2, False),
        ("one two three four five six seven " * 3, False),  # a sequence of seven: one of eight comes twice
        (SENTENCE + "x " + SENTENCE + "y " + SENTENCE, True),
        ("no no no no no no no no no no", True),
        ("ja ja ja ja ja ja ja ja ja", False),  # nine words: a sequence of eight comes twice
        ("-" * 80 + "\n" + "=" * 80, False),
        ("| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |", False),
        ("\u54c8" * 12, True),
        ("", False),
    ],
)
def test_looping_is_a_sequence_of_eight_words_three_times(text: str, looping: bool) -> None:
    assert is_looping(text) is looping
