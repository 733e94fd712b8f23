"""How the tiny backbone is asked for functions."""

from random import Random

import corpus
import phrasing
import pytest
from tiny_samples import MODULE


@pytest.mark.parametrize(
    ("description", "clause"),
    [
        ("Return the sum of x.", "returns the sum of x"),
        ("Matches a pattern", "matches a pattern"),
        ("Copy all files.", "copies all files"),
        ("The number of files.", None),
    ],
)
def test_descriptions_become_clauses(description: str, clause: str | None) -> None:
    assert phrasing.as_clause(description) == clause


def test_requests_come_in_many_wordings_and_always_name_the_function() -> None:
    (function,) = corpus.functions_in(MODULE)
    rng = Random(0)
    asked = {phrasing.phrase_function(function, rng) for _ in range(2000)}
    assert all("label" in text for text in asked)
    assert len({text.replace("`", "").split("label")[0] for text in asked}) >= 25
