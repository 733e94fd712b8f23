import pytest
import torch
from torch import nn

from medusa_train.errors import ConfigError
from medusa_train.training.lr import build_scheduler, count_warmup_steps, warmup_warning


def rates(name, warmup, total, lowest=0.0):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = build_scheduler(name, optimizer, warmup, total, lowest)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*found, optimizer.param_groups[0]["lr"]]


def test_cosine_rises_to_the_peak_and_falls_to_zero():
    found = rates("cosine", 2, 10)
    assert found[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert found[6] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.0)


def test_cosine_may_end_at_a_share_of_its_peak():
    found = rates("cosine", 2, 10, 1 / 3)
    assert found[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert found[6] == pytest.approx(2 / 3)
    assert found[-1] == pytest.approx(1 / 3)


def test_linear_and_constants():
    assert rates("linear", 0, 4) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates("constant", 2, 4) == pytest.approx([1.0] * 5)
    assert rates("constant_with_warmup", 2, 4) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("steps", "ratio", "expected"), [(40, None, 40), (0, None, 0), (None, 0.05, 6), (None, None, 0)]
)
def test_warmup_from_steps_or_ratio(steps, ratio, expected):
    assert count_warmup_steps(steps, ratio, 101) == expected


def test_a_warmup_that_outlasts_the_run_is_told():
    for name in ("cosine", "linear", "constant_with_warmup"):
        assert warmup_warning(name, 9, 10) is None
        assert max(rates(name, 9, 10)) == 1.0
        warning = warmup_warning(name, 20, 11)
        assert warning is not None
        assert "20 steps of warm-up in a run of 11" in warning
        assert "50% of it at the end" in warning
        assert max(rates(name, 20, 11)[:-1]) == 0.5
    assert warmup_warning("constant", 20, 10) is None


def test_an_unknown_schedule_lists_the_known_ones():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"polynomial.*cosine"):
        build_scheduler("polynomial", optimizer, 0, 10)
