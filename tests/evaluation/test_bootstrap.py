import math
import statistics

import pytest
import torch

from medusa_train.errors import DataError
from medusa_train.evaluation.bootstrap import Counts, compare_rates, interval, resample, speed_intervals
from medusa_train.evaluation.records import TimedAnswer, TurnRecord


def runs(first: torch.Tensor, second: torch.Tensor, steps: int = 10_000) -> tuple[dict[str, Counts], dict[str, Counts]]:
    """Two runs whose questions all took `steps` steps, with these rates."""
    totals = []
    for rates in (first, second):
        totals.append({f"q{i}": Counts(round(steps * rate), steps) for i, rate in enumerate(rates.tolist())})
    return totals[0], totals[1]


def test_the_interval_of_normal_differences_is_the_normal_one() -> None:
    """With equal steps a rate is a mean over questions: the paired difference lies in mean +- 1.96 s / sqrt n."""
    torch.manual_seed(0)
    n = 400
    first = 2.0 + 0.3 * torch.randn(n, dtype=torch.float64)
    differences = 0.2 + 0.1 * torch.randn(n, dtype=torch.float64)
    result = compare_rates(*runs(first, first + differences))
    mean, width = float(differences.mean()), 1.96 * float(differences.std()) / math.sqrt(n)
    assert result.questions == n
    assert result.difference == pytest.approx(mean, abs=1e-4)
    assert result.difference_interval == pytest.approx((mean - width, mean + width), abs=0.06 * width + 1e-4)
    # the delta method for the ratio of two means
    ratio = float((first + differences).mean() / first.mean())
    residual = (first + differences - ratio * first) / float(first.mean())
    spread = 1.96 * float(residual.std()) / math.sqrt(n)
    assert result.ratio == pytest.approx(ratio, abs=1e-4)
    assert result.ratio_interval == pytest.approx((ratio - spread, ratio + spread), abs=0.06 * spread + 1e-4)


def test_hard_and_easy_questions_do_not_widen_a_paired_difference() -> None:
    rates = torch.linspace(1.2, 4.0, 48)
    result = compare_rates(*runs(rates, rates + 0.25))
    assert result.difference == pytest.approx(0.25, abs=1e-4)
    assert result.difference_interval == pytest.approx((0.25, 0.25), abs=1e-4)
    low, high = result.ratio_interval
    assert low < result.ratio < high


def test_rates_are_ratios_of_sums() -> None:
    first = {"short": Counts(10, 10), "long": Counts(300, 100)}
    second = {"short": Counts(40, 10), "long": Counts(300, 100)}
    result = compare_rates(first, second)
    assert (result.first, result.second) == (310 / 110, 340 / 110)
    assert result.difference == pytest.approx(30 / 110)
    assert result.ratio == pytest.approx(340 / 310)
    # the extremes draw one of the two questions twice
    assert result.ratio_interval == pytest.approx((1.0, 4.0))


def test_a_known_tie_spans_zero() -> None:
    torch.manual_seed(1)
    first, second = (2.0 + 0.3 * torch.randn(60, dtype=torch.float64) for _ in range(2))
    shift = statistics.fmean((second - first).tolist())
    result = compare_rates(*runs(first, second - shift))
    assert result.difference_interval[0] < 0 < result.difference_interval[1]
    assert result.ratio_interval[0] < 1 < result.ratio_interval[1]


def test_a_question_without_a_step_counts_for_neither_run() -> None:
    base = {"a": Counts(20, 10), "b": Counts(30, 10), "c": Counts(0, 0)}
    other = {"a": Counts(20, 10), "b": Counts(30, 10), "c": Counts(50, 10)}
    result = compare_rates(base, other)
    assert (result.questions, result.difference) == (2, 0.0)


def test_other_questions_are_refused() -> None:
    with pytest.raises(DataError, match="only one of the two runs answered c"):
        compare_rates({"a": Counts(1, 1), "b": Counts(1, 1)}, {"a": Counts(1, 1), "b": Counts(1, 1), "c": Counts(1, 1)})
    with pytest.raises(DataError, match="two or more questions"):
        compare_rates({"a": Counts(1, 1)}, {"a": Counts(2, 1)})


def turn(question: int, tree_seconds: float, turn: int = 1) -> TurnRecord:
    tokens = tuple(range(11))
    tree = TimedAnswer(tokens, tree_seconds, tree_seconds / 2, 4)
    return TurnRecord(question, "a", turn, (1,), tree, TimedAnswer(tokens, 2.0, 1.0, 10), TimedAnswer(tokens, 2.0))


def test_a_sample_draws_as_many_rows_as_there_are() -> None:
    sums = resample(torch.tensor([[1.0, 10.0], [1.0, 20.0], [1.0, 30.0]], dtype=torch.float64), resamples=500)
    assert sums.shape == (500, 2)
    assert (sums[:, 0] == 3).all()
    assert sums[:, 1].min() >= 30
    assert sums[:, 1].max() <= 90
    assert len(sums[:, 1].unique()) > 5
    assert torch.equal(sums, resample(torch.tensor([[1.0, 10.0], [1.0, 20.0], [1.0, 30.0]]).double(), resamples=500))


def test_the_interval_is_the_middle_95_percent() -> None:
    assert interval(torch.arange(1001.0)) == pytest.approx((25.0, 975.0))
    assert interval(torch.tensor([math.nan] * 5)) is None


def test_the_mean_of_normal_data_is_covered_about_19_times_in_20() -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(200):
        rows = torch.stack([5 + torch.randn(40, generator=generator).double(), torch.ones(40).double()], dim=1)
        sums = resample(rows, resamples=400)
        result = interval(sums[:, 0] / sums[:, 1])
        assert result is not None
        covered += result[0] <= 5 <= result[1]
    assert 180 <= covered <= 199


def test_intervals_hold_the_ratios_of_the_whole_bench() -> None:
    records = [turn(question, 1.0 + 0.1 * question) for question in range(8)]
    result = speed_intervals(records)
    speedup = sum(2.0 for _ in records) / sum(1.0 + 0.1 * question for question in range(8))
    low, high = result["speedup"] or (0, 0)
    assert 1.2 < low < speedup < high < 2.0
    assert result["acceleration_rate"] == pytest.approx((2.5, 2.5))  # the same for every question
    assert result["over_generate"] == result["speedup"]  # as fast as the plain loop here


def test_the_turns_of_a_question_are_drawn_together() -> None:
    # one turn of each question is fast, the other slow: whole questions are all alike
    records = [turn(question, seconds, place) for question in range(6) for place, seconds in ((1, 1.0), (2, 3.0))]
    assert speed_intervals(records)["speedup"] == pytest.approx((1.0, 1.0))


def test_one_question_or_no_tree_has_no_interval() -> None:
    assert speed_intervals([turn(1, 1.0), turn(1, 2.0, 2)]) == {}
    alone = [TurnRecord(n, "a", 1, (1,), None, TimedAnswer((1,), 1.0), TimedAnswer((1,), 1.0)) for n in range(3)]
    assert speed_intervals(alone) == {}
    assert speed_intervals([]) == {}


def test_answers_of_one_token_leave_step_ratios_open() -> None:
    one = TimedAnswer((1,), 1.0, 1.0, 0)
    result = speed_intervals([TurnRecord(n, "a", 1, (1,), one, one, one) for n in range(3)])
    assert result["acceleration_rate"] is None
    assert result["speedup"] == pytest.approx((1.0, 1.0))
