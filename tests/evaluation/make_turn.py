"""Turns as an evaluation measures them, for the tests of what is computed from them."""

from collections.abc import Mapping
from typing import Any

from medusa_train.evaluation.turns import TimedAnswer, Turn


def make_turn(
    question_id: int | str,
    category: str,
    turn: int,
    prompt_ids: tuple[int, ...],
    tree: TimedAnswer | None,
    plain: TimedAnswer,
    generate: TimedAnswer | None = None,
    text: str = "",
    others: Mapping[str, TimedAnswer] | None = None,
    **fields: Any,
) -> Turn:
    named = {"tree": tree, "plain": plain, "generate": generate, **(others or {})}
    answers = {name: answer for name, answer in named.items() if answer is not None}
    return Turn(question_id, category, turn, prompt_ids, answers, text=text, **fields)
