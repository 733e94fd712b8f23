import math

import pytest
import torch

from medusa_train.evaluation.intervals import interval, resample, speed_intervals
from medusa_train.evaluation.records import TimedAnswer, TurnRecord


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
        found = interval(sums[:, 0] / sums[:, 1])
        assert found is not None
        covered += found[0] <= 5 <= found[1]
    assert 180 <= covered <= 199


def test_intervals_hold_the_ratios_of_the_whole_bench() -> None:
    records = [turn(question, 1.0 + 0.1 * question) for question in range(8)]
    found = speed_intervals(records)
    speedup = sum(2.0 for _ in records) / sum(1.0 + 0.1 * question for question in range(8))
    low, high = found["speedup"] or (0, 0)
    assert 1.2 < low < speedup < high < 2.0
    assert found["acceleration_rate"] == pytest.approx((2.5, 2.5))  # the same for every question
    assert found["over_generate"] == found["speedup"]  # as fast as the plain loop here


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
    found = speed_intervals([TurnRecord(n, "a", 1, (1,), one, one, one) for n in range(3)])
    assert found["acceleration_rate"] is None
    assert found["speedup"] == pytest.approx((1.0, 1.0))
