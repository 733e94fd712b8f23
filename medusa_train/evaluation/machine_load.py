"""Tell whether a machine was busy while an evaluation was timed on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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


def spread(seconds: Sequence[float]) -> float | None:
    """Return by which share the slowest of equal measurements exceeds the fastest; None of fewer
    than two.
    """
    if len(seconds) < 2 or min(seconds) <= 0:
        return None
    return max(seconds) / min(seconds) - 1


@dataclass(frozen=True)
class MachineLoad:
    """What else a machine did during an evaluation.

    Attributes:
        cores: of the machine.
        other_cores: how many of them other processes used while the benchmark was timed, on average.
        plain_step_spread: of the times of equal plain steps, some timed before the bench and some
            after it, see `spread`.
    """

    cores: int
    other_cores: float
    plain_step_spread: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the entry `machine_load` of the report's meta."""
        return asdict(self)

    def signs(self) -> list[str]:
        """List what says that other processes used the machine; empty for a quiet one."""
        found = []
        if self.other_cores > BUSY_SHARE * self.cores:
            found.append(
                f"other processes used {self.other_cores:.1f} of {self.cores} cores meanwhile"
            )
        if self.plain_step_spread is not None and self.plain_step_spread > BUSY_SPREAD:
            found.append(f"equal plain steps took up to {self.plain_step_spread:.0%} longer")
        return found
