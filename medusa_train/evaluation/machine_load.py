"""Tell whether a machine was busy while an evaluation was timed on it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import psutil

#: Share of the machine's cores from which its use by other processes makes it busy.
BUSY_SHARE = 0.25
#: How much longer the slowest of equal plain steps may take than the fastest on a quiet machine.
BUSY_SPREAD = 0.2


class OtherProcesses:
    """Measures how much processor time other processes use from now on."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds = _seconds_of_others()

    def cores(self) -> float:
        """Return how many cores other processes have used so far, on average."""
        used = _seconds_of_others() - self._seconds
        # the system and the process count in ticks of their own, so the difference may be negative
        return round(max(0.0, used / (time.perf_counter() - self._started)), 2)


def _seconds_of_others() -> float:
    """Return the processor seconds of all processes but this one since the machine started."""
    # fields that this system lacks are 0; Linux counts guests in `user` and `nice` as well
    all_times = psutil.cpu_times()._asdict()
    system = sum(all_times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    own = psutil.Process().cpu_times()
    return system - own.user - own.system


def machine_load(others: OtherProcesses, plain_steps: Sequence[float]) -> dict[str, float | None]:
    """Return the entry `machine_load` of the report's meta: the machine's `cores`, how many of them
    other processes used on average (`other_cores`), and by which share the slowest of equal plain
    steps exceeds the fastest (`plain_step_spread`; None of fewer than two).
    """
    spread = None
    if len(plain_steps) > 1 and min(plain_steps) > 0:
        spread = max(plain_steps) / min(plain_steps) - 1
    return {
        "cores": os.cpu_count() or 1,
        "other_cores": others.cores(),
        "plain_step_spread": spread,
    }


def busy_signs(cores: int, other_cores: float, plain_step_spread: float | None) -> list[str]:
    """List what says that other processes used the machine; empty for a quiet one."""
    signs = []
    if other_cores > BUSY_SHARE * cores:
        signs.append(f"other processes used {other_cores:.1f} of {cores} cores meanwhile")
    if plain_step_spread is not None and plain_step_spread > BUSY_SPREAD:
        signs.append(f"equal plain steps took up to {plain_step_spread:.0%} longer")
    return signs
