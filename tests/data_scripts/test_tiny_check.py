"""The figures by which greedy answers are judged."""

from check import Answer, judge, loops


def test_figures_see_loops_repeats_and_broken_code() -> None:
    assert loops([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    assert not loops([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    good = Answer("coding", "q", list(range(60)), "def f():\n    return 1", True)
    bad = Answer("coding", "q", [1] * 256, "def f(", False)
    figures = judge([good, good, bad, Answer("math", "q", [1, 2], "not code (", True)])
    assert (figures.ended, figures.looping, figures.distinct, figures.parsing) == (0.75, 0.25, 0.75, 2 / 3)
    assert figures.median_tokens == 60
