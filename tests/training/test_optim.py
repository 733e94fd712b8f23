import pytest
import torch
from torch import nn

from medusa_train.errors import BackboneError, ConfigError
from medusa_train.models.loading import quantized_loading
from medusa_train.training.optim import (
    assert_exhaustive,
    build_optimizer,
    build_scheduler,
    count_warmup_steps,
    parameter_groups,
    warmup_warning,
)

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


def test_frozen_parameters_stay_out():
    draft = heads()
    draft[1].weight.requires_grad_(False)
    assert len(parameter_groups(draft.parameters(), 0.01, [], 1.0, 0.0)) == 2
    assert all(
        p is not draft[1].weight
        for group in parameter_groups(draft.parameters(), 0.01, [], 1.0, 0.0)
        for p in group["params"]
    )


def test_a_forgotten_or_doubled_parameter_is_caught():
    draft = heads()
    parameters = list(draft.parameters())
    with pytest.raises(AssertionError, match="in no group"):
        assert_exhaustive([{"params": parameters[1:]}], parameters)
    with pytest.raises(AssertionError, match="two optimizer groups"):
        assert_exhaustive([{"params": parameters}, {"params": parameters[:1]}], parameters)


def test_adamw_is_fused_on_a_cpu_and_says_nothing():
    optimizer, notice = build_optimizer("adamw_torch", parameter_groups(heads().parameters(), 0.01, [], 1.0, 0.0), CPU)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"]
    assert notice is None


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"])
def test_eight_bits_on_a_cpu_fall_back_with_one_line(name):
    optimizer, notice = build_optimizer(name, parameter_groups(heads().parameters(), 0.01, [], 1.0, 0.0), CPU)
    assert type(optimizer) is torch.optim.AdamW
    assert name in notice
    assert "adamw_torch" in notice
    assert "\n" not in notice


def test_eight_bits_without_a_library_for_this_cuda_fall_back(monkeypatch):
    """bitsandbytes itself raises in the first step."""
    functional = pytest.importorskip("bitsandbytes.functional")
    monkeypatch.setattr(functional.lib, "compiled_with_cuda", False)
    groups = parameter_groups(heads().parameters(), 0.01, [], 1.0, 0.0)
    optimizer, notice = build_optimizer("adamw_bnb_8bit", groups, torch.device("cuda"))
    assert type(optimizer) is torch.optim.AdamW
    assert "has no library for CUDA" in notice
    with pytest.raises(BackboneError, match=r"load_in_4bit.*has no library for CUDA"):
        quantized_loading("nf4", torch.bfloat16, "cuda")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"adafactor.*adamw_torch"):
        build_optimizer("adafactor", parameter_groups(heads().parameters(), 0.01, [], 1.0, 0.0), CPU)


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
        assert "20 warmup steps in a run of 11" in warning
        assert "50% of it at the end" in warning
        assert max(rates(name, 20, 11)[:-1]) == 0.5
    assert warmup_warning("constant", 20, 10) is None


def test_an_unknown_schedule_lists_the_known_ones():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"polynomial.*cosine"):
        build_scheduler("polynomial", optimizer, 0, 10)
