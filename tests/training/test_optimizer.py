"""Steps of one process: clipping, skipped steps, resuming, and loss scaling for float16."""

import copy
import math

import pytest
import torch
from torch import nn

from medusa_train.errors import TargetModelError
from medusa_train.models.loading import loading_options
from medusa_train.training.optimizer import (
    LocalStrategy,
    LossScale,
    build_optimizer,
    build_scheduler,
    parameter_groups,
)
from medusa_train.training.schedule import warmup_warning


def make_strategy(model, max_grad_norm=1.0, momentum=0.9):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return LocalStrategy(optimizer, build_scheduler("cosine", optimizer, 2, 10), max_grad_norm)


def accumulate(strategy, loss):
    strategy.forward_backward(lambda grad_scale: (grad_scale * loss).backward())


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_norm_is_measured_before_clipping_and_the_step_is_clipped(max_grad_norm):
    """0 clips nothing."""
    model = linear()
    strategy = make_strategy(model, max_grad_norm=max_grad_norm, momentum=0.0)
    accumulate(strategy, model(torch.ones(1, 3)).sum())
    strategy.step()  # warm-up begins at zero
    before = [p.detach().clone() for p in model.parameters()]
    accumulate(strategy, model(torch.ones(1, 3)).sum())
    lr = strategy.lr
    norm, was_overscaled = strategy.step()
    assert not was_overscaled
    assert norm == pytest.approx(math.sqrt(8))  # 6 weights and 2 biases with gradient 1
    moved = torch.cat(
        [(a - b).detach().flatten() for a, b in zip(before, model.parameters(), strict=True)]
    )
    assert float(moved.norm()) == pytest.approx(lr * (max_grad_norm or norm), rel=1e-4)
    assert all(p.grad is None for p in model.parameters())


def test_the_optimizers_memory_is_free_after_training():
    """It may be needed to choose the tree."""
    model = linear()
    strategy = make_strategy(model)
    accumulate(strategy, model(torch.ones(1, 3)).sum())
    strategy.step()
    assert strategy.optimizer.state
    strategy.release([])
    assert not strategy.optimizer.state


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = linear()
    strategy = make_strategy(model)
    before, lr = [p.detach().clone() for p in model.parameters()], strategy.lr
    accumulate(strategy, model(torch.full((1, 3), float("inf"))).sum())
    norm, was_overscaled = strategy.step()
    assert not math.isfinite(norm)
    assert not was_overscaled
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert strategy.lr == lr


@pytest.mark.filterwarnings("error")
def test_a_skipped_step_moves_the_schedule_alone():
    model, other = linear(), linear()
    strategy, plain = make_strategy(model, momentum=0.0), make_strategy(other, momentum=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    accumulate(strategy, model(torch.full((1, 3), float("nan"))).sum())
    strategy.skip()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    accumulate(plain, 0 * other(torch.ones(1, 3)).sum())
    plain.step()
    assert strategy.lr == plain.lr == pytest.approx(0.05)


def test_a_resumed_run_has_its_own_learning_rate_and_weight_decay():
    def engine_with(lr, decay, total, steps=0):
        model = linear()
        groups = [
            {"params": [model.weight], "lr": lr, "weight_decay": decay},
            {"params": [model.bias], "lr": 2 * lr},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        strategy = LocalStrategy(optimizer, build_scheduler("linear", optimizer, 0, total), 1.0)
        for _ in range(steps):
            accumulate(strategy, model(torch.ones(1, 3)).square().sum())
            strategy.step()
        return strategy

    def settings(strategy):
        return [
            (group["lr"], group["initial_lr"], group["weight_decay"])
            for group in strategy.optimizer.param_groups
        ]

    before = engine_with(0.1, 0.01, 10, steps=3)
    wanted = engine_with(0.5, 0.2, 20, steps=3)
    resumed = engine_with(0.5, 0.2, 20)
    resumed.load_state_dict(copy.deepcopy(before.state_dict()))
    assert settings(resumed) == settings(wanted)
    assert resumed.lr == pytest.approx(0.5 * 17 / 20)
    assert resumed.scheduler.get_last_lr() == wanted.scheduler.get_last_lr()
    assert resumed.scheduler.base_lrs == [0.5, 1.0]
    for strategy in (resumed, wanted):
        strategy.scheduler.step()
    assert settings(resumed) == settings(wanted)  # the schedule continues from there
    assert torch.equal(
        *[
            next(iter(strategy.optimizer.state.values()))["exp_avg"]
            for strategy in (before, resumed)
        ]
    )


def test_the_state_of_another_optimizer_is_refused():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    strategy = LocalStrategy(optimizer, build_scheduler("constant", optimizer, 0, 10), 1.0)
    saved = strategy.state_dict()
    saved["optimizer"]["state"] = {0: {"state1": torch.zeros(2), "step": 1}}
    with pytest.raises(ValueError, match="another optimizer"):
        strategy.load_state_dict(saved)


def test_the_scale_falls_at_an_overflow_and_grows_after_a_while():
    scale = LossScale(8.0)
    assert scale.update(overflowed=True)
    assert scale.value == 4.0
    for _ in range(LossScale.WINDOW - 1):
        assert not scale.update(overflowed=False)
    assert scale.value == 4.0
    scale.update(overflowed=False)
    assert scale.value == 8.0
    scale = LossScale(8.0, good=LossScale.WINDOW - 1)
    scale.update(overflowed=True)  # which ends the steps in a row
    scale.update(overflowed=False)
    assert (scale.value, scale.good) == (4.0, 1)
    lowest = LossScale(2.0)  # at 1 an overflow has another cause
    assert [lowest.update(overflowed=True) for _ in range(3)] == [True, False, False]
    assert lowest.value == 1.0


def make_scaled(loss_scale):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, LocalStrategy(
        optimizer, build_scheduler("constant", optimizer, 0, 10), 0.5, loss_scale
    )


def test_scaled_steps_are_the_plain_ones_to_the_bit():
    (plain, one), (scaled, two) = make_scaled(None), make_scaled(LossScale())
    for step in range(3):
        for model, strategy in ((plain, one), (scaled, two)):
            accumulate(strategy, model(torch.full((1, 3), 1.0 + step)).square().sum())
        norm, was_overscaled = one.step()
        assert math.isfinite(norm)
        assert two.step() == (norm, was_overscaled) == (norm, False)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True)
    )


def test_an_overflow_leaves_everything_and_is_blamed_on_the_scale():
    model, strategy = make_scaled(LossScale())
    before = [p.detach().clone() for p in model.parameters()]
    # times 65536: infinite in float32 too
    accumulate(strategy, model(torch.full((1, 3), 1e36)).sum())
    norm, was_overscaled = strategy.step()
    assert not math.isfinite(norm)
    assert was_overscaled
    strategy.skip()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    accumulate(strategy, model(torch.ones(1, 3)).sum())
    assert math.isfinite(strategy.step()[0])
    assert strategy.state_dict()["loss_scale"] == {"value": 32768.0, "good": 1}
    resumed = make_scaled(LossScale())[1]
    resumed.load_state_dict(strategy.state_dict())
    assert resumed.loss_scale == strategy.loss_scale


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_resumed_paged_optimizer_is_paged_and_goes_on_as_before(monkeypatch):
    """bitsandbytes' own `load_state_dict` moves all states to the memory of the GPU."""
    optim = pytest.importorskip("bitsandbytes").optim
    zeros = optim.PagedAdamW8bit.get_state_buffer

    def paged(self, parameter, dtype):
        buffer = zeros(self, parameter, dtype)
        buffer.is_paged = True
        return buffer

    monkeypatch.setattr(optim.PagedAdamW8bit, "get_state_buffer", paged)
    monkeypatch.setattr(optim.PagedAdamW8bit, "prefetch_state", lambda self, parameter: None)
    torch.manual_seed(0)
    first = nn.Linear(128, 64)  # its bias keeps float32 states
    second = copy.deepcopy(first)
    strategies = [
        LocalStrategy(optimizer, build_scheduler("constant", optimizer, 0, 10), 0.0)
        for model in (first, second)
        for optimizer in [optim.PagedAdamW8bit(model.parameters(), lr=0.01)]
    ]
    inputs = torch.randn(3, 5, 128)

    def train(index, step):
        model, strategy = (first, second)[index], strategies[index]
        accumulate(strategy, model(inputs[step]).square().mean())
        strategy.step()

    train(0, 0)
    train(0, 1)
    second.load_state_dict(first.state_dict())
    strategies[1].load_state_dict(copy.deepcopy(strategies[0].state_dict()))
    states = list(strategies[1].optimizer.state.values())
    assert [state["state1"].dtype for state in states] == [torch.uint8, torch.float32]
    assert all(state[name].is_paged for state in states for name in ("state1", "state2"))
    train(0, 2)
    train(1, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


# Optimizer and schedule

CPU = torch.device("cpu")


def heads():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8, bias=False))


def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    draft = heads()
    groups = parameter_groups(draft.parameters(), 0.01, [], 1.0, weight_decay=0.1)
    by_decay = {group["weight_decay"]: group["params"] for group in groups}
    assert {p.ndim for p in by_decay[0.1]} == {2}
    assert {p.ndim for p in by_decay[0.0]} == {1}
    assert sum(len(group["params"]) for group in groups) == len(list(draft.parameters()))
    assert {group["lr"] for group in groups} == {0.01}
    optimizer, notice = build_optimizer("adamw_torch", groups, CPU)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"]
    assert notice is None


@pytest.mark.parametrize(
    ("device", "reason"), [("cpu", "is slow on CPU"), ("cuda", "has no library for CUDA")]
)
def test_eight_bits_where_they_cannot_run_fall_back_with_one_line(device, reason, monkeypatch):
    """bitsandbytes itself raises in the first step."""
    monkeypatch.setattr(
        pytest.importorskip("bitsandbytes.functional").lib, "compiled_with_cuda", False
    )
    groups = parameter_groups(heads().parameters(), 0.01, [], 1.0, 0.0)
    optimizer, notice = build_optimizer("paged_adamw_8bit", groups, torch.device(device))
    assert type(optimizer) is torch.optim.AdamW
    assert notice.startswith("optimizer: paged_adamw_8bit ")
    assert reason in notice
    assert notice.endswith("; using adamw_torch")
    with pytest.raises(TargetModelError, match=r"load_in_4bit.*has no library for CUDA"):
        loading_options("nf4", torch.bfloat16, torch.device("cuda"))


def rates(name, warmup, total, lowest=0.0):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = build_scheduler(name, optimizer, warmup, total, lowest)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*found, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (("cosine", 2, 10), [0.0, 0.5, 1.0, None, None, None, 0.5, None, None, None, 0.0]),
        (
            ("cosine", 2, 10, 1 / 3),
            [0.0, 0.5, 1.0, None, None, None, 2 / 3, None, None, None, 1 / 3],
        ),
        (("linear", 0, 4), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (("constant", 2, 4), [1.0] * 5),
        (("constant_with_warmup", 2, 4), [0.0, 0.5, 1.0, 1.0, 1.0]),
    ],
    ids=str,
)
def test_schedules(schedule, expected):
    found = [
        None if wanted is None else rate
        for rate, wanted in zip(rates(*schedule), expected, strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-9)


def test_a_warmup_that_outlasts_the_run_is_told():
    for name in ("cosine", "linear", "constant_with_warmup"):
        assert warmup_warning(9, 10) is None
        assert max(rates(name, 9, 10)) == 1.0
        warning = warmup_warning(20, 11)
        assert warning is not None
        assert "20 warmup steps in a run of 11" in warning
        assert "50% of it at the end" in warning
        assert max(rates(name, 20, 11)[:-1]) == 0.5


def test_betas_and_epsilon_reach_the_optimizer_and_outlive_a_resume():
    groups = parameter_groups(heads().parameters(), 0.01, [], 1.0, 0.0)
    optimizer, _ = build_optimizer("adamw_torch", groups, CPU, betas=(0.8, 0.95), epsilon=1e-6)
    groups = parameter_groups(heads().parameters(), 0.01, [], 1.0, 0.0)
    before, _ = build_optimizer("adamw_torch", groups, CPU)
    saved = LocalStrategy(before, build_scheduler("constant", before, 0, 10), 1.0).state_dict()
    resumed = LocalStrategy(optimizer, build_scheduler("constant", optimizer, 0, 10), 1.0)
    resumed.load_state_dict(saved)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}
