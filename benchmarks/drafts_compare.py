"""What `drafts.py` has to show, as lines with yes or no and an interval: a pure function of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from medusa_train.errors import DataError
from medusa_train.evaluation.bootstrap import PAIRED_RESAMPLES, Counts, Interval, compare_rates, interval, resample

Found = Mapping[str, Any]
Questions = dict[str, Counts]

OWN, EQUAL, CHAIN, WHOLE = "own", "equal", "chain", "whole chain"
#: The last one is of Kangaroo alone: others never leave a part of their chain out.
TREES = {OWN: "own trees", EQUAL: "equal trees", CHAIN: "chains, with eta", WHOLE: "chains, eta 0"}
AGAINST = "medusa1"
LONGER = {"amphista": 1.10, "hydra++": 1.15}  # of Medusa-1's tokens per step
WINDOWS = (2, 3, 4)  # w of CTAR(w) in which Kangaroo has to lead
SMALLER = 0.25  # of Medusa's extra parameters, and of the backbone's layers
#: Who is faster than whom in the papers (Amphista, table 1; Kangaroo, table 1).
PUBLISHED_ORDER = (
    ("hydra++", "medusa1"),
    ("amphista", "medusa1"),
    ("amphista", "hydra++"),
    ("amphista-alpha", "amphista"),
    ("kangaroo", "medusa1"),
)


class Line(NamedTuple):
    """A comparison: whether it holds, and in words what was found."""

    text: str
    holds: bool
    answer: str

    def __str__(self) -> str:
        return f"- {self.answer if self.holds else f'**{self.answer}**'}: {self.text}"


def lines(found: Found) -> Iterator[Line]:
    """Everything that can be told by now."""
    cases = {case["name"]: case for case in found["cases"]}
    if AGAINST not in cases:
        return
    if "kangaroo" in cases:
        yield from _sizes(cases["kangaroo"], cases[AGAINST])
    for bench, result in found["counts"].items():
        drafts, titles = result["drafts"], {name: case["title"] for name, case in cases.items()}
        for name, bar in LONGER.items():
            if name in drafts:
                yield from _lengths(drafts, name, bar, titles, bench)
        if "amphista" in drafts:
            yield from _last_heads(drafts["amphista"], drafts[AGAINST], bench)
        if "kangaroo" in drafts:
            yield from _windows(drafts["kangaroo"], drafts[AGAINST], bench)
    for bench, result in found["times"].items():
        yield from _order(result["drafts"], found["counts"][bench]["drafts"], cases, bench)


def _sizes(kangaroo: Found, medusa: Found) -> Iterator[Line]:
    share = kangaroo["parameters"] / medusa["parameters"]
    text = f"Kangaroo has {kangaroo['parameters']:,} extra parameters, {share:.1%} of Medusa's {medusa['parameters']:,}"
    yield _plain(f"{text}; at most {SMALLER:.0%}", share <= SMALLER)
    layers, exit_layer = kangaroo["backbone_layers"], kangaroo["draft"]["exit_layer"]
    text = f"Kangaroo leaves the backbone after {exit_layer} of its {layers} layers; at most {SMALLER:.0%}"
    yield _plain(text, exit_layer <= SMALLER * layers)


def _lengths(drafts: Found, name: str, bar: float, titles: Mapping[str, str], bench: str) -> Iterator[Line]:
    for tree in (OWN, EQUAL):
        first, second = taken(drafts[AGAINST], tree), taken(drafts[name], tree)
        try:
            one = compare_rates(first, second)
        except DataError:
            continue  # too few questions to say anything
        text = (
            f"{bench}, {TREES[tree]}: {titles[name]} {one.second:.3f} tokens per step, Medusa-1 {one.first:.3f}: ratio "
            f"{one.ratio:.3f} {between(one.ratio_interval)}, at least {bar:.2f}"
        )
        yield _judged(text, one.ratio, one.ratio_interval, bar)


def _last_heads(amphista: Found, medusa: Found, bench: str) -> Iterator[Line]:
    depth = min(_depth(amphista), _depth(medusa))
    for k in range(max(depth - 1, 1), depth + 1):
        first, second = guessed(medusa, k), guessed(amphista, k)
        difference, found = paired_difference(first, second)
        text = (
            f"{bench}, head {k}: top-1 Amphista {_rate(second):.3f}, Medusa-1 {_rate(first):.3f}: "
            f"{difference:+.3f} {between(found, '+.3f')}, above 0"
        )
        yield _judged(text, difference, found, 0.0)


def _windows(kangaroo: Found, medusa: Found, bench: str) -> Iterator[Line]:
    for tree in TREES:
        for window in WINDOWS:
            first, second = reached(medusa, tree, window), reached(kangaroo, tree, window)
            difference, found = paired_difference(first, second)
            text = (
                f"{bench}, {TREES[tree]}: CTAR({window}) Kangaroo {_rate(second):.3f}, Medusa-1 {_rate(first):.3f}: "
                f"{difference:+.3f} {between(found, '+.3f')}, above 0"
            )
            yield _judged(text, difference, found, 0.0)


def _order(drafts: Found, counts: Found, cases: Mapping[str, Found], bench: str) -> Iterator[Line]:
    for faster, slower in PUBLISHED_ORDER:
        if faster not in drafts or slower not in drafts:
            continue
        one, other = drafts[faster][OWN], drafts[slower][OWN]
        text = (
            f"{bench}, {TREES[OWN]}: {cases[faster]['title']} is faster than {cases[slower]['title']}, as published: "
            f"{_speed(one, counts[faster])} against {_speed(other, counts[slower])}"
        )
        yield _plain(text, one["speedup_over_fastest"] > other["speedup_over_fastest"])


def _speed(times: Found, counts: Found) -> str:
    """The speedup, and why: what a step brings and what it costs."""
    return (
        f"{times['speedup_over_fastest']:.2f}x {between(times['intervals']['speedup_over_fastest'], '.2f')} "
        f"({counts['trees'][OWN]['acceleration_rate']:.2f} tokens per step, overhead {times['overhead']:.2f})"
    )


def taken(draft: Found, tree: str) -> Questions:
    """By question the tokens that steps brought, and steps."""
    questions = draft["trees"][tree]["questions"]
    return {name: Counts(one["tokens"], sum(one["accepted"])) for name, one in questions.items()}


def reached(draft: Found, tree: str, window: int) -> Questions:
    """By question the steps that accepted `window` guesses or more, and all: CTAR (Kangaroo, definition 1)."""
    questions = draft["trees"].get(tree, draft["trees"][CHAIN])["questions"]
    return {name: Counts(sum(one["accepted"][window:]), sum(one["accepted"])) for name, one in questions.items()}


def guessed(draft: Found, k: int) -> Questions:
    """By question how often head k's first guess was right, and of how many."""
    return {name: Counts(*depths[k - 1]) for name, depths in draft["hits"].items()}


def _depth(draft: Found) -> int:
    return min(len(depths) for depths in draft["hits"].values())


def _rate(questions: Questions) -> float:
    return sum(one.tokens for one in questions.values()) / max(sum(one.steps for one in questions.values()), 1)


def paired_difference(first: Questions, second: Questions) -> tuple[float, Interval | None]:
    """How much larger the second rate is, with its 95 % bootstrap interval over questions, both drawn together.

    Unlike `compare_rates` it forms no ratio, so rates may be zero.
    """
    rows = torch.tensor([[*first[name], *second[name]] for name in sorted(first)], dtype=torch.float64)
    hits, of, other_hits, other_of = resample(rows, PAIRED_RESAMPLES).unbind(dim=1)
    found = interval(other_hits / other_of - hits / of) if len(rows) > 1 else None
    return _rate(second) - _rate(first), found


def between(found: Sequence[float] | None, form: str = ".3f") -> str:
    """An interval, or that there is none."""
    return "[no interval]" if found is None else f"[{found[0]:{form}}, {found[1]:{form}}]"


def _judged(text: str, value: float, found: Interval | None, bar: float) -> Line:
    """Whether the value reaches the bar (or exceeds one of 0), and whether its interval agrees."""
    holds, *ends = (end >= bar if bar else end > bar for end in (value, *(found or ())))
    answer = "yes" if holds else "no"
    return Line(text, holds, answer if all(end == holds for end in ends) else f"{answer}, but not for sure")


def _plain(text: str, holds: bool) -> Line:
    return Line(text, holds, "yes" if holds else "no")
