"""Answers with their accepted draft tokens coloured by the head that guessed them, as HTML. Knows no chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from medusa_train.evaluation.page.svg import PALETTE
from medusa_train.evaluation.pieces import guessed_by

Answer = Mapping[str, Any]


def answers_section(answers: Sequence[Answer]) -> str:
    """All answers, folded, by category; the first of all is open. `answers` are the lines of answers.jsonl."""
    given = [answer for answer in answers if not answer.get("skipped")]
    if not given:
        return ""
    deepest = max((max(answer["accepted"], default=0) for answer in given), default=0)
    parts = [_legend(deepest)]
    categories: dict[str, list[Answer]] = {}
    for answer in given:
        categories.setdefault(answer["category"], []).append(answer)
    for number, (category, members) in enumerate(categories.items()):
        shown = "".join(_answer(answer, opened=number == 0 and place == 0) for place, answer in enumerate(members))
        counted = f"<span>{len(members)} answers</span>"
        opened = " open" if number == 0 else ""
        parts.append(f"<details{opened}><summary><b>{escape(category)}</b>{counted}</summary>{shown}</details>")
    skipped = len(answers) - len(given)
    if skipped:
        parts.append(
            f"<p class=soft>{skipped} turns were skipped: prompt and answer do not fit the model's context.</p>"
        )
    return "".join(parts)


def _legend(deepest: int) -> str:
    if not deepest:
        return "<p class=soft>No draft token was accepted in these answers.</p>"
    chips = "".join(f"<span class='chip {head_class(head)}'>head {head}</span>" for head in range(1, deepest + 1))
    return f"<p><span class='chip own'>the backbone itself</span>{chips}</p>"


def head_class(head: int) -> str:
    """The class that gives a head's tokens their background, counted from 1."""
    return f"h{(head - 1) % PALETTE + 1}"


def _answer(answer: Answer, *, opened: bool) -> str:
    tokens, steps = answer["tokens"], answer["steps"]
    facts = [f"turn {answer['turn']}", f"{tokens} tokens"]
    if steps:
        facts += [f"{steps} steps", f"{(tokens - 1) / steps:.2f} tokens per step"]
    if answer.get("loops"):
        facts.append("repeats itself")
    summary = f"question {escape(str(answer['question_id']))}<span>{', '.join(facts)}</span>"
    asked = f"<div class=asked>{escape(answer['asked'])}</div>" if answer.get("asked") else ""
    return (
        f"<details{' open' if opened else ''}><summary>{summary}</summary>{asked}"
        f"<div class=said>{coloured(answer)}</div></details>"
    )


def coloured(answer: Answer) -> str:
    """The answer's text with every run of tokens that heads guessed in its colours."""
    pieces = answer.get("pieces")
    if not pieces:
        return escape(answer["text"])
    by_head = zip(guessed_by(len(pieces), answer["accepted"]), pieces, strict=True)
    html = []
    for head, run in groupby(by_head, key=lambda pair: pair[0]):
        text = escape("".join(piece for _, piece in run))
        html.append(f"<i class={head_class(head)}>{text}</i>" if head and text else text)
    return "".join(html)
