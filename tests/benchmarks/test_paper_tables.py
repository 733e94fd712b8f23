"""The ratio of two drafts' rates, and its paired bootstrap interval."""

import math

import pytest
import torch
from paper_tables import compare_rates

from medusa_train.errors import DataError
from medusa_train.evaluation.metrics import Counts


def runs(
    first: torch.Tensor, second: torch.Tensor, steps: int = 10_000
) -> tuple[dict[str, Counts], dict[str, Counts]]:
    """Two runs whose questions all took `steps` steps, with these rates."""
    totals = []
    for rates in (first, second):
        totals.append(
            {f"q{i}": Counts(round(steps * rate), steps) for i, rate in enumerate(rates.tolist())}
        )
    return totals[0], totals[1]


def test_the_interval_of_a_ratio_of_normal_rates_is_that_of_the_delta_method() -> None:
    torch.manual_seed(0)
    n = 400
    first = 2.0 + 0.3 * torch.randn(n, dtype=torch.float64)
    second = first + 0.2 + 0.1 * torch.randn(n, dtype=torch.float64)
    result, bounds = compare_rates(*runs(first, second))
    ratio = float(second.mean() / first.mean())
    spread = 1.96 * float(((second - ratio * first) / first.mean()).std()) / math.sqrt(n)
    assert result == pytest.approx(ratio, abs=1e-4)
    assert bounds == pytest.approx((ratio - spread, ratio + spread), abs=0.06 * spread + 1e-4)


def test_rates_are_ratios_of_sums() -> None:
    long = {f"long {n}": Counts(300, 100) for n in range(4)}
    first = {"short": Counts(10, 10), "no steps": Counts(0, 0), **long}
    second = {"short": Counts(40, 10), "no steps": Counts(50, 10), **long}
    ratio, (low, high) = compare_rates(first, second)
    assert ratio == pytest.approx(1240 / 1210)
    assert low == 1.0  # samples of the long ones alone
    assert high > ratio


def test_other_questions_are_refused() -> None:
    with pytest.raises(DataError, match="only one of the two runs answered c"):
        compare_rates(
            {"a": Counts(1, 1), "b": Counts(1, 1)},
            {"a": Counts(1, 1), "b": Counts(1, 1), "c": Counts(1, 1)},
        )


def test_four_questions_are_too_few_to_compare_two_runs() -> None:
    few = {name: Counts(1, 1) for name in "abcd"}
    with pytest.raises(DataError, match="5 or more questions"):
        compare_rates(few, few)
