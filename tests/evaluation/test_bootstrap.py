import math
import statistics

import pytest
import torch

from medusa_train.errors import DataError
from medusa_train.evaluation.bootstrap import Counts, compare_rates


def runs(first: torch.Tensor, second: torch.Tensor, steps: int = 10_000) -> tuple[dict[str, Counts], dict[str, Counts]]:
    """Two runs whose questions all took `steps` steps, with these rates."""
    made = []
    for rates in (first, second):
        made.append({f"q{i}": Counts(round(steps * rate), steps) for i, rate in enumerate(rates.tolist())})
    return made[0], made[1]


def test_the_interval_of_normal_differences_is_the_normal_one() -> None:
    """With equal steps a rate is a mean over questions: the paired difference lies in mean +- 1.96 s / sqrt n."""
    torch.manual_seed(0)
    n = 400
    first = 2.0 + 0.3 * torch.randn(n, dtype=torch.float64)
    differences = 0.2 + 0.1 * torch.randn(n, dtype=torch.float64)
    found = compare_rates(*runs(first, first + differences))
    mean, width = float(differences.mean()), 1.96 * float(differences.std()) / math.sqrt(n)
    assert found.questions == n
    assert found.difference == pytest.approx(mean, abs=1e-4)
    assert found.difference_interval == pytest.approx((mean - width, mean + width), abs=0.06 * width + 1e-4)
    # the delta method for the ratio of two means
    ratio = float((first + differences).mean() / first.mean())
    residual = (first + differences - ratio * first) / float(first.mean())
    spread = 1.96 * float(residual.std()) / math.sqrt(n)
    assert found.ratio == pytest.approx(ratio, abs=1e-4)
    assert found.ratio_interval == pytest.approx((ratio - spread, ratio + spread), abs=0.06 * spread + 1e-4)


def test_hard_and_easy_questions_do_not_widen_a_paired_difference() -> None:
    rates = torch.linspace(1.2, 4.0, 48)
    found = compare_rates(*runs(rates, rates + 0.25))
    assert found.difference == pytest.approx(0.25, abs=1e-4)
    assert found.difference_interval == pytest.approx((0.25, 0.25), abs=1e-4)
    low, high = found.ratio_interval
    assert low < found.ratio < high


def test_rates_are_ratios_of_sums() -> None:
    first = {"short": Counts(10, 10), "long": Counts(300, 100)}
    second = {"short": Counts(40, 10), "long": Counts(300, 100)}
    found = compare_rates(first, second)
    assert (found.first, found.second) == (310 / 110, 340 / 110)
    assert found.difference == pytest.approx(30 / 110)
    assert found.ratio == pytest.approx(340 / 310)
    # the extremes draw one of the two questions twice
    assert found.ratio_interval == pytest.approx((1.0, 4.0))


def test_a_known_tie_spans_zero() -> None:
    torch.manual_seed(1)
    first, second = (2.0 + 0.3 * torch.randn(60, dtype=torch.float64) for _ in range(2))
    shift = statistics.fmean((second - first).tolist())
    found = compare_rates(*runs(first, second - shift))
    assert found.difference_interval[0] < 0 < found.difference_interval[1]
    assert found.ratio_interval[0] < 1 < found.ratio_interval[1]


def test_a_question_without_a_step_counts_for_neither_run() -> None:
    base = {"a": Counts(20, 10), "b": Counts(30, 10), "c": Counts(0, 0)}
    other = {"a": Counts(20, 10), "b": Counts(30, 10), "c": Counts(50, 10)}
    found = compare_rates(base, other)
    assert (found.questions, found.difference) == (2, 0.0)


def test_other_questions_are_refused() -> None:
    with pytest.raises(DataError, match="only one of the two runs answered c"):
        compare_rates({"a": Counts(1, 1), "b": Counts(1, 1)}, {"a": Counts(1, 1), "b": Counts(1, 1), "c": Counts(1, 1)})
    with pytest.raises(DataError, match="two questions"):
        compare_rates({"a": Counts(1, 1)}, {"a": Counts(2, 1)})
