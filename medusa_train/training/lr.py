"""The learning-rate schedule over optimizer steps. Knows only an optimizer and two step counts."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from medusa_train.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")


def count_warmup_steps(warmup_steps: int | None, warmup_ratio: float | None, total_steps: int) -> int:
    """Steps of linear warm-up: `warmup_steps`, else the share `warmup_ratio` of the run, rounded up."""
    if warmup_steps is not None:
        return warmup_steps
    return math.ceil((warmup_ratio or 0.0) * total_steps)


def warmup_warning(name: str, warmup_steps: int, total_steps: int) -> str | None:
    """Say so where the run with schedule `name` is over before its warm-up is."""
    if name == "constant" or warmup_steps < total_steps:
        return None
    return (
        f"note: {warmup_steps:,} steps of warm-up in a run of {total_steps:,}, so the learning rate never reaches its "
        f"peak ({(total_steps - 1) / warmup_steps:.0%} of it at the end); lower warmup_steps, or train longer"
    )


def build_scheduler(
    name: str, optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int, lowest: float = 0.0
) -> LambdaLR:
    """Build transformers' own schedule `name`; `constant` has no warm-up, as there.

    Args:
        lowest: where `cosine` ends, as a share of the peak.

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
