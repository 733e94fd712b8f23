"""Tell how a machine was set up, and whether it was busy, while an evaluation was timed on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_train.io import HUGE_PAGES_VARIABLE

#: Load by other processes, as a share of the cores, from which a machine is called busy.
BUSY_SHARE = 0.25
#: How much longer the slowest of equal plain steps may take than the fastest on a quiet machine.
BUSY_SPREAD = 0.2
#: Where Linux says who gets huge pages.
HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def load_average() -> float | None:
    """Return the processes that ran or waited in the last minute, on average; None on Windows."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def huge_pages(device: torch.device, setting: Path = HUGE_PAGES_SETTING) -> bool | None:
    """Return whether torch allocates large tensors in huge pages; None on a GPU, and where it cannot
    be known. Weights that stay mapped from their file are in none.

    Linux gives them to all programs (`always`), to those that ask (`madvise`) or to none (`never`);
    the choice stands in brackets in `setting`.
    """
    if device.type != "cpu":
        return None
    try:
        choices = setting.read_text(encoding="utf-8")
    except OSError:
        return None
    if "[madvise]" in choices:
        return os.environ.get(HUGE_PAGES_VARIABLE) == "1"
    return "[always]" in choices


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
        cores: of the machine. threads: with which the evaluation computed.
        load_before, load_after: load averages of a minute, when it started and when the last answer
            was timed; None where the system has none.
        plain_step_spread: of the times of equal plain steps, some timed before the bench and some
            after it, see `spread`.
    """

    cores: int
    threads: int
    load_before: float | None
    load_after: float | None
    plain_step_spread: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the entry `machine_load` of the report's meta."""
        return asdict(self)

    def signs(self) -> list[str]:
        """List what says that other processes used the machine; empty for a quiet one."""
        found = []
        limit = BUSY_SHARE * self.cores
        if self.load_before is not None and self.load_before > limit:
            found.append(f"load average {self.load_before:.1f} on {self.cores} cores before it")
        if self.load_after is not None and self.load_after - self.threads > limit:
            found.append(
                f"load average {self.load_after:.1f} on {self.cores} cores at its end, of which"
                f" {self.threads} its own"
            )
        if self.plain_step_spread is not None and self.plain_step_spread > BUSY_SPREAD:
            found.append(f"equal plain steps took up to {self.plain_step_spread:.0%} longer")
        return found
