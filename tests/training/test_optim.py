import pytest
import torch
from torch import nn

from medusa_train.errors import ConfigError
from medusa_train.training.optim import assert_exhaustive, build_optimizer, parameter_groups

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


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"adafactor.*adamw_torch"):
        build_optimizer("adafactor", parameter_groups(heads().parameters(), 0.01, [], 1.0, 0.0), CPU)
