"""Build parameter groups, the optimizer and the learning-rate schedule."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from medusa_train.errors import ConfigError
from medusa_train.models.loading import bitsandbytes_obstacle
from medusa_train.models.partitioned import full_shape

ParameterGroup = dict[str, Any]

TORCH = ("adamw_torch", "adamw_torch_fused")
#: Optimizer name -> class in bitsandbytes.
EIGHT_BIT = {
    "adamw_bnb_8bit": "AdamW8bit",
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
}
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")


def parameter_groups(
    heads: Iterable[nn.Parameter],
    heads_lr: float,
    backbone: Iterable[nn.Parameter],
    backbone_lr: float,
    weight_decay: float,
) -> list[ParameterGroup]:
    """Group the trained parameters by learning rate, and matrices (weight decay) apart from biases and norms (none).

    Heads train at `learning_rate * medusa_lr_multiplier`, the backbone's trained parameters at `learning_rate`
    (Medusa, Joint Training, differential learning rates). The groups are checked to cover every trained parameter,
    since one that is in no group would silently stay untrained.
    """
    groups: list[ParameterGroup] = []
    all_trained: list[nn.Parameter] = []
    for parameters, lr in ((heads, heads_lr), (backbone, backbone_lr)):
        trained = [p for p in parameters if p.requires_grad]
        all_trained += trained
        matrices = [len(full_shape(p)) >= 2 for p in trained]
        for decay, wanted in ((weight_decay, True), (0.0, False)):
            chosen = [p for p, matrix in zip(trained, matrices, strict=True) if matrix is wanted]
            groups.append({"params": chosen, "lr": lr, "weight_decay": decay})
    assert_exhaustive(groups, all_trained)
    return [group for group in groups if group["params"]]


def assert_exhaustive(groups: Iterable[ParameterGroup], trained: Iterable[nn.Parameter]) -> None:
    """Raise AssertionError unless every trained parameter is in exactly one group."""
    grouped = [id(p) for group in groups for p in group["params"]]
    expected = {id(p) for p in trained}
    assert len(grouped) == len(set(grouped)), "a parameter is in two optimizer groups"
    assert set(grouped) == expected, f"{len(expected ^ set(grouped))} parameters are in no group or in one too many"


def build_optimizer(
    name: str, groups: list[ParameterGroup], device: torch.device
) -> tuple[torch.optim.Optimizer, str | None]:
    """Build the optimizer `name`, or adamw_torch where it cannot run.

    Args:
        name: `adamw_torch`, `adamw_torch_fused`, `adamw_bnb_8bit`, `adamw_8bit` or `paged_adamw_8bit`.
        groups: parameter groups, each with its `lr` and `weight_decay`.
        device: where the parameters live.

    Returns:
        The optimizer, and one line for the user if it is another than `name`.

    Raises:
        ConfigError: `name` is none of the above.
    """
    if name in TORCH:
        return _adamw(groups), None
    if name not in EIGHT_BIT:
        names = ", ".join([*TORCH, *EIGHT_BIT])
        raise ConfigError([f"optimizer: {name!r} is not one of {names}"])
    if device.type != "cuda":
        return _adamw(groups), f"optimizer: {name} is slow on {device.type.upper()}; using adamw_torch"
    if (obstacle := bitsandbytes_obstacle(device)) is not None:
        return _adamw(groups), f"optimizer: {name} needs bitsandbytes ({obstacle}); using adamw_torch"
    optimizer: torch.optim.Optimizer = getattr(importlib.import_module("bitsandbytes.optim"), EIGHT_BIT[name])(groups)
    return optimizer, None


def _adamw(groups: list[ParameterGroup]) -> torch.optim.Optimizer:
    """Build AdamW, fused where the device supports it."""
    try:
        return torch.optim.AdamW(groups, fused=True)
    except RuntimeError:
        return torch.optim.AdamW(groups)


def count_warmup_steps(warmup_steps: int | None, warmup_ratio: float | None, total_steps: int) -> int:
    """Return the linear warmup steps: `warmup_steps`, else `warmup_ratio` of the run, rounded up."""
    if warmup_steps is not None:
        return warmup_steps
    return math.ceil((warmup_ratio or 0.0) * total_steps)


def warmup_warning(name: str, warmup_steps: int, total_steps: int) -> str | None:
    """Return a warning if a run with schedule `name` ends before its warmup does."""
    if name == "constant" or warmup_steps < total_steps:
        return None
    return (
        f"note: {warmup_steps:,} warmup steps in a run of {total_steps:,}: the learning rate never reaches its peak "
        f"({(total_steps - 1) / warmup_steps:.0%} of it at the end); lower warmup_steps or train longer"
    )


def build_scheduler(
    name: str, optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int, lowest: float = 0.0
) -> LambdaLR:
    """Build transformers' schedule `name`; as there, `constant` has no warmup.

    Args:
        lowest: final learning rate of `cosine`, as a fraction of the peak.

    Raises:
        ConfigError: `name` is none of `SCHEDULES`.
    """
    if name not in SCHEDULES:
        raise ConfigError([f"lr_scheduler: {name!r} is not one of {', '.join(SCHEDULES)}"])
    if name == "cosine" and lowest:
        name, options = "cosine_with_min_lr", {"min_lr_rate": lowest}
    else:
        options = None
    scheduler: LambdaLR = get_scheduler(name, optimizer, warmup_steps, total_steps, options)
    return scheduler
