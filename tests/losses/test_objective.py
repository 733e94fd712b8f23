"""Which positions the heads' loss counts, and the weights of its terms: schedules of lambda0, D-PACE."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.objective import Objective, lambda0
from medusa_train.models.features import Features
from tests.losses.toy import DECAY, B, D, Heads, K, Rows, T, one_document


def test_a_copying_task_pins_the_target() -> None:
    """States that spell out the token k + 1 shift, for k = 1: head 1 then has no loss, its neighbours much."""
    heads = Heads()
    states = torch.randint(0, D, (1, T), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for inner, outer in zip(heads.inner, heads.outer, strict=True):
            inner.copy_(torch.eye(D))
            outer.zero_()
            outer[:D] = 50 * torch.eye(D)
    feats = Features(functional.one_hot(states.roll(-2, dims=1), D).double())
    rows = one_document(states)
    objective = Objective(heads, DECAY)
    out = objective.loss(feats, rows, objective.target_counts(rows))
    assert out.head_counts.tolist() == [T - 2, T - 3, T - 4]
    assert out.head_correct[0] == T - 2
    assert out.head_sums[0].item() < 1e-6
    assert all(out.head_sums[1:] > 10)


def test_a_prompt_position_may_predict_a_supervised_token(feats: Features) -> None:
    labels = torch.full((B, T), IGNORE_INDEX)
    labels[:, 5:] = 1
    rows = one_document(labels)
    objective = Objective(Heads(), DECAY)
    # head k sees targets 5..T-1 from t = 4-k onwards
    assert objective.target_counts(rows).tolist() == [B * (T - 5)] * K


def test_nothing_of_joint_training_acts_here(batch: Rows, feats: Features) -> None:
    """lambda0 belongs to joint training: under `sine` a first step without loss would be the fork's mistake."""
    objective = Objective(Heads(), DECAY)
    counts = objective.target_counts(batch)
    first, last = (objective.loss(feats, batch, counts, progress=s) for s in (0.0, 1.0))
    assert first.loss.item() == last.loss.item() > 0
    assert first.lm is None
    assert not objective.needs_teacher


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.25, 0.5, 1.0]),
        ("sine", [0.0, math.sin(math.pi / 8), math.sqrt(0.5), 1.0]),
        ("sine_0.5", [0.0, math.sqrt(0.5), 1.0, 1.0]),
    ],
)
def test_schedules(schedule: str, values: list[float]) -> None:
    assert [lambda0(schedule, s) for s in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(values)
    assert lambda0(schedule, 1.5) == pytest.approx(values[-1])
    assert lambda0(schedule, -0.1) == values[0]


@pytest.mark.parametrize("schedule", ["cosine", "sine_", "sine_x", "sine_0", "sine_1.5", "sine_nan", ""])
def test_unknown_schedules_are_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"sine_R|unknown schedule"):
        lambda0(schedule, 0.5)
