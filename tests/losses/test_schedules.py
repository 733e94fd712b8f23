"""Weights of the heads and schedules of lambda0, as numbers."""

from __future__ import annotations

import math

import pytest

from medusa_train.losses.schedules import head_weight, lambda0


def test_head_weights_are_powers_of_the_decay() -> None:
    assert [head_weight(k, 0.8) for k in (1, 2, 3)] == pytest.approx([0.8, 0.64, 0.512])
    assert head_weight(4, 1.0) == 1.0


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.25, 0.5, 1.0]),
        ("sine", [0.0, math.sin(math.pi / 8), math.sqrt(0.5), 1.0]),
        ("sine_0.5", [0.0, math.sqrt(0.5), 1.0, 1.0]),
        ("sine_1", [0.0, math.sin(math.pi / 8), math.sqrt(0.5), 1.0]),
    ],
)
def test_schedules(schedule: str, values: list[float]) -> None:
    assert [lambda0(schedule, s) for s in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(values)


def test_progress_beyond_the_ends_is_held() -> None:
    assert lambda0("linear", 1.2) == 1.0
    assert lambda0("linear", -0.1) == 0.0
    assert lambda0("sine", 1.5) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "sine_", "sine_x", "sine_0", "sine_1.5", "sine_nan", ""])
def test_unknown_schedules_are_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"sine_R|unknown schedule"):
        lambda0(schedule, 0.5)
