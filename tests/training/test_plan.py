import pytest

from medusa_train.training.plan import Plan, count_steps, interval


def due(happens, total):
    return [step for step in range(1, total + 1) if happens(step)]


@pytest.mark.parametrize(
    ("micro", "accumulation", "epochs", "max_steps", "expected"),
    [
        (10, 1, 2, None, (20, 10.0)),
        (10, 4, 1, None, (3, 2.5)),  # the last step of the epoch borrows from the next one
        (10, 4, 0.5, None, (2, 2.5)),
        (10, 1, 2, 7, (7, 10.0)),
        (10, 1, 1, 25, (25, 10.0)),  # max_steps takes the place of num_epochs, upwards too
        (1, 8, 1, None, (1, 0.125)),
    ],
)
def test_steps_of_a_run(micro, accumulation, epochs, max_steps, expected):
    assert count_steps(micro, accumulation, epochs, max_steps) == expected


@pytest.mark.parametrize(("value", "expected"), [(None, None), (5, 5), (0.25, 10), (0.001, 1)])
def test_an_interval_below_one_is_a_share_of_the_run(value, expected):
    assert interval(value, 40) == expected


def test_by_steps():
    plan = Plan(10, 5.0, logging_steps=4, eval_every=3, save_every=5)
    assert due(plan.logs, 10) == [4, 8, 10]
    assert due(plan.evaluates, 10) == [3, 6, 9, 10]
    assert due(plan.saves, 10) == [5, 10]


def test_by_epochs_of_broken_length():
    plan = Plan(10, 2.5, evals_per_epoch=1, saves_per_epoch=2)
    assert due(plan.evaluates, 10) == [3, 5, 8, 10]
    assert due(plan.saves, 10) == [2, 3, 4, 5, 7, 8, 9, 10]


def test_silent_plan_acts_at_the_end():
    plan = Plan(6, 3.0)
    assert due(plan.evaluates, 6) == due(plan.saves, 6) == [6]
