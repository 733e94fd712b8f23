"""Scaling the loss for float16, on its own and inside a strategy. In float32 it must change nothing at all."""

import math

import torch
from torch import nn

from medusa_train.training.optim import build_scheduler
from medusa_train.training.strategy import LocalStrategy, LossScale


def test_the_scale_falls_at_an_overflow_and_grows_after_a_while():
    scale = LossScale(8.0)
    assert scale.update(overflowed=True)
    assert scale.value == 4.0
    for _ in range(LossScale.WINDOW - 1):
        assert not scale.update(overflowed=False)
    assert scale.value == 4.0
    scale.update(overflowed=False)
    assert scale.value == 8.0


def test_an_overflow_without_scaling_is_not_the_scales_fault():
    scale = LossScale(2.0)
    assert [scale.update(overflowed=True) for _ in range(3)] == [True, False, False]
    assert scale.value == 1.0


def test_its_state_goes_on():
    scale = LossScale(4.0, 17)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other == scale


def make_engine(loss_scale):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = build_scheduler("constant", optimizer, 0, 10)
    return model, LocalStrategy(list(model.parameters()), optimizer, scheduler, 0.5, loss_scale)


def test_scaled_steps_are_the_plain_ones_to_the_bit():
    (plain, one), (scaled, two) = make_engine(None), make_engine(LossScale())
    for step in range(3):
        for model, strategy in ((plain, one), (scaled, two)):
            strategy.backward(model(torch.full((1, 3), 1.0 + step)).square().sum())
        assert one.step() == two.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))
    assert not two.found_inf


def test_an_overflow_leaves_everything_and_is_blamed_on_the_scale():
    model, strategy = make_engine(LossScale())
    before = [p.detach().clone() for p in model.parameters()]
    strategy.backward(model(torch.full((1, 3), 1e36)).sum())  # times 65536: infinite in float32 too
    assert not math.isfinite(strategy.step())
    assert strategy.found_inf
    strategy.skip()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    strategy.backward(model(torch.ones(1, 3)).sum())
    assert math.isfinite(strategy.step())
    assert not strategy.found_inf
    assert strategy.state_dict()["loss_scale"] == {"value": 32768.0, "good": 1}
