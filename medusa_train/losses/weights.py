"""Weights of the objective's terms: of the heads against the language model, and of each head."""

from __future__ import annotations

import math


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
