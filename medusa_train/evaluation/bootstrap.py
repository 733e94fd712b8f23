"""Bootstrap intervals of speed ratios over the questions of a bench. Knows no model and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_train.errors import DataError
from medusa_train.evaluation.records import TimedAnswer, TurnRecord

Interval = tuple[float, float]

RESAMPLES = 2000
SEED = 20


def interval(draws: Tensor, share: float = 0.95) -> Interval | None:
    """The middle `share` of the drawn values [R]; None where a tenth or more of them is no number."""
    finite = draws[torch.isfinite(draws)]
    if len(finite) < 0.9 * len(draws):
        return None
    tail = (1 - share) / 2
    low, high = torch.quantile(finite, torch.tensor([tail, 1 - tail], dtype=finite.dtype)).tolist()
    return low, high


def resample(rows: Tensor, resamples: int = RESAMPLES, seed: int = SEED) -> Tensor:
    """Sums [R, C] of R samples of the n rows [n, C], each drawn n times with replacement."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(rows), (resamples, len(rows)), generator=generator)
    counts = torch.zeros(resamples, len(rows), dtype=rows.dtype)
    counts.scatter_add_(1, chosen, torch.ones_like(counts))
    return counts @ rows


def speed_intervals(records: Sequence[TurnRecord]) -> dict[str, Interval | None]:
    """95 % percentile bootstrap intervals of the ratios in a summary, by the same names.

    Whole questions are drawn, all their turns together, since the turns of a conversation are not independent. A
    ratio of sums is computed anew for every sample. Empty with fewer than two questions or without a tree.
    """
    if not records or records[0].tree is None:
        return {}
    questions: dict[int | str, list[TurnRecord]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    if len(questions) < 2:
        return {}
    names = ["tree", *records[0].baselines]
    rows = torch.tensor([_row(turns, names) for turns in questions.values()], dtype=torch.float64)
    sums = dict(zip(names, resample(rows).split(len(_sums([])), dim=1), strict=True))
    return {name: interval(draws) for name, draws in _ratios(sums).items()}


def _row(turns: Sequence[TurnRecord], names: Sequence[str]) -> list[float]:
    made: list[float] = []
    for name in names:
        answers = [turn.tree if name == "tree" else turn.baselines[name] for turn in turns]
        made += _sums([answer for answer in answers if answer is not None])
    return made


def _sums(answers: Sequence[TimedAnswer]) -> list[float]:
    """Tokens, seconds; and of the decoding steps alone: tokens, steps, seconds."""
    return [
        sum(len(answer.tokens) for answer in answers),
        sum(answer.seconds for answer in answers),
        sum(len(answer.tokens) - 1 for answer in answers),
        sum(answer.steps for answer in answers),
        sum(answer.decode_seconds for answer in answers),
    ]


def _ratios(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ratios [R] of the sums [R, 5] of every decoder."""
    tree, plain = sums["tree"], sums["plain"]
    speed = {name: part[:, 0] / part[:, 1] for name, part in sums.items()}
    over = {name: speed["tree"] / rate for name, rate in speed.items() if name != "tree"}
    return {
        "acceleration_rate": tree[:, 2] / tree[:, 3],
        "overhead": tree[:, 4] / tree[:, 3] / (plain[:, 4] / plain[:, 3]),
        "speedup": over["plain"],
        "speedup_over_generate": over["generate"],
        "speedup_over_fastest": speed["tree"] / torch.maximum(speed["plain"], speed["generate"]),
        "tokens_per_s": speed["tree"],
        **{f"over_{name}": ratio for name, ratio in over.items()},
    }


PAIRED_RESAMPLES = 10_000


class Counts(NamedTuple):
    """What a question's answers took: tokens that steps brought (the prefill's left out), and steps."""

    tokens: int
    steps: int


@dataclass(frozen=True)
class RateComparison:
    """The acceleration rates of two runs on the same questions, and how sure their difference is.

    Attributes:
        first, second: tokens per decoding step.
        difference, ratio: of the second to the first, with 95 % intervals.
        questions: how many this rests on.
    """

    first: float
    second: float
    difference: float
    difference_interval: Interval
    ratio: float
    ratio_interval: Interval
    questions: int


def compare_rates(
    first: Mapping[str, Counts], second: Mapping[str, Counts], resamples: int = PAIRED_RESAMPLES
) -> RateComparison:
    """Compare two runs question by question: percentile bootstrap, whole questions drawn, both runs' together.

    A question that is easy to foresee is so for both runs, so drawing them in pairs takes that out of the difference
    (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapters 8 and 13). A rate is a ratio of sums
    over the drawn questions, and the turns of a question, which are not independent, are one unit.

    Args:
        first, second: by question, summed over its turns.

    Raises:
        DataError: other questions, or fewer than two in which both runs made steps.
    """
    if set(first) != set(second):
        odd = sorted(set(first) ^ set(second))[:5]
        raise DataError(f"only one of the two runs answered {', '.join(odd)}: measure both on the same questions")
    asked = [question for question in sorted(first) if first[question].steps and second[question].steps]
    if len(asked) < 2:
        raise DataError("it takes two questions or more to compare two runs")
    rows = torch.tensor([[*first[name], *second[name]] for name in asked], dtype=torch.float64)
    tokens, steps, other_tokens, other_steps = resample(rows, resamples).unbind(dim=1)
    draws = torch.stack([tokens / steps, other_tokens / other_steps])
    sums = rows.sum(dim=0).tolist()
    one, two = sums[0] / sums[1], sums[2] / sums[3]
    return RateComparison(
        one,
        two,
        two - one,
        _of(draws[1] - draws[0]),
        two / one,
        _of(draws[1] / draws[0]),
        len(asked),
    )


def _of(draws: torch.Tensor) -> Interval:
    found = interval(draws)
    assert found is not None  # every drawn question has steps
    return found
