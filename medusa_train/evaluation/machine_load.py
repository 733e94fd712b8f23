"""Detect whether a machine was busy while an evaluation was timed on it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import psutil

#: A machine counts as busy if other processes use more than this share of its cores.
BUSY_SHARE = 0.25
#: On a quiet machine, the slowest of several equal plain steps takes at most this share longer than
#: the fastest.
BUSY_SPREAD = 0.2


class OtherProcesses:
    """Measures how much processor time other processes use from now on."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds = _seconds_of_others()

    def cores(self) -> float:
        """Return how many cores other processes have used so far, on average."""
        seconds = _seconds_of_others() - self._seconds
        # the system and the process count in different ticks, so the difference may be negative
        return round(max(0.0, seconds / (time.perf_counter() - self._started)), 2)


def _seconds_of_others() -> float:
    """Return the processor seconds of all processes except this one since the machine started."""
    # fields that a system lacks count as 0; Linux already includes guests in `user` and `nice`
    all_times = psutil.cpu_times()._asdict()
    system = sum(all_times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    own_times = psutil.Process().cpu_times()
    return system - own_times.user - own_times.system


def machine_load(
    other_processes: OtherProcesses, plain_steps: Sequence[float]
) -> dict[str, float | None]:
    """Return the entry `machine_load` of the report's meta.

    Returns:
        cores: number of cores of the machine.
        other_cores: how many of them other processes used on average.
        plain_step_spread: the share by which the slowest of equal plain steps took longer than the
            fastest; None with fewer than two steps.
    """
    spread = None
    if len(plain_steps) > 1 and min(plain_steps) > 0:
        spread = max(plain_steps) / min(plain_steps) - 1
    return {
        "cores": os.cpu_count() or 1,
        "other_cores": other_processes.cores(),
        "plain_step_spread": spread,
    }


def busy_signs(cores: int, other_cores: float, plain_step_spread: float | None) -> list[str]:
    """List the signs that other processes used the machine; empty for a quiet machine."""
    signs = []
    if other_cores > BUSY_SHARE * cores:
        signs.append(f"other processes used {other_cores:.1f} of {cores} cores meanwhile")
    if plain_step_spread is not None and plain_step_spread > BUSY_SPREAD:
        signs.append(f"equal plain steps took up to {plain_step_spread:.0%} longer")
    return signs
