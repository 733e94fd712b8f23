"""Weights of the objective's terms: of the heads against the language model, and of each head (depth) or its rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def head_weight(k: int, decay: float) -> float:
    """Return head k's loss weight `c^k`, k = 1..K (Medusa, Training Strategies); c is `medusa_decay_coefficient`."""
    return decay**k


def lambda0(schedule: str, progress: float) -> float:
    """Return the factor on the heads' loss in joint training, relative to `medusa_heads_coefficient`.

    Args:
        schedule: `constant` 1, `linear` s, `sine` sin(pi/2 s), `sine_R` sin(pi/2 s/R) until s = R and then 1.
        progress: s = step / max_steps, 0 at the start and 1 at the end; clamped to [0, 1].

    Raises:
        ValueError: unknown schedule, or R is not in (0, 1].
    """
    s = min(max(progress, 0.0), 1.0)
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return s
    if schedule == "sine":
        return math.sin(math.pi / 2 * s)
    if schedule.startswith("sine_"):
        return math.sin(math.pi / 2 * min(s / _ramp(schedule), 1.0))
    raise ValueError(f"unknown schedule {schedule!r}: use constant, linear, sine or sine_R, for example sine_0.5")


def _ramp(schedule: str) -> float:
    try:
        ramp = float(schedule.removeprefix("sine_"))
    except ValueError:
        ramp = math.nan
    if not 0.0 < ramp <= 1.0:
        raise ValueError(f"schedule {schedule!r}: R in sine_R is a fraction of the run, a number in (0, 1]")
    return ramp


def dpace_weights(q: Tensor, valid: Tensor, smoothing: float = 0.5) -> Tensor:
    """Return D-PACE's weights of depths (https://arxiv.org/abs/2605.18810), [K, N].

    `w_j = sum_{m >= j} P_m` with `P_m = s_1 * ... * s_m` and `s_j = (1 - smoothing) * q_j + smoothing`: the more
    probable the tokens before and after a depth are to the draft, the more the depth counts. Depths that are not valid
    have the factor 1 in the products and are absent from the sums.

    Args:
        q: [K, N], probability that head j gives its target; 0 where its vocabulary lacks the target.
        valid: bool [K, N], where depth j has a target.
    """
    chain = torch.where(valid, (1 - smoothing) * q + smoothing, 1.0).cumprod(dim=0)
    return torch.where(valid, chain, 0.0).flip(0).cumsum(dim=0).flip(0)
