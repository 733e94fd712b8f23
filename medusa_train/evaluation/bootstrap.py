"""Whether one run decodes in fewer steps than another: paired bootstrap over questions. Knows no model and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from medusa_train.errors import DataError
from medusa_train.evaluation.intervals import Interval, interval, resample

RESAMPLES = 10_000


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
    first: Mapping[str, Counts], second: Mapping[str, Counts], resamples: int = RESAMPLES
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
