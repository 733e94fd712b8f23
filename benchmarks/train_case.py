"""What `train.py` can measure, and its instruments: a clock, and memory at its peak. Knows no model and no table.

torch is imported where it is needed, so that the command line knows these for nothing.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Case:
    """What to measure.

    Attributes:
        what: `loss` (loss and backward over hidden states), `medusa1`, `medusa2` (the whole training step on the tiny
            backbone), `joint` (the whole joint step on a random Llama), `shape1`, `shape2` (the whole step at the
            shape of a 7B model: Medusa-1, and Medusa-2 with QLoRA).
        method: `naive` or `ours`; for `joint` `kept` or `recomputed` activations.
        dtype: of the products; parameters and gradients are float32.
        tokens, vocab, heads, width: T, V, K, d. masked: share of the positions that are not learnt.
        rows: of so many tokens each in a micro-batch (`shape1` and `shape2` only).
        repeats: measurements at most. seconds: after so many no further one begins.
    """

    what: str
    method: str
    dtype: str = "float32"
    tokens: int = 2048
    vocab: int = 32000
    heads: int = 5
    width: int = 1024
    masked: float = 0.0
    rows: int = 1
    repeats: int = 3
    seconds: float = 20.0


@dataclass
class Result:
    """What a case took.

    Attributes:
        fits: False where memory did not suffice; nothing else is known then.
        seconds: of each repeat. loss: the last one's, by which methods are seen to compute the same. tokens: in one.
        peak: bytes beyond parameters and gradients. accumulating: the same where gradients are there already.
        total, estimate: bytes in all, measured and by `--inspect`'s estimate (whole steps only).
        operations, nominal: of one step, as needed and as 6 x parameters x tokens; rate: a large product's operations
            per second. shape: which model (`shape1` and `shape2` only).
    """

    fits: bool
    seconds: list[float]
    loss: float = 0.0
    tokens: int = 0
    peak: int = 0
    accumulating: int | None = None
    total: int | None = None
    estimate: int | None = None
    operations: int = 0
    nominal: int = 0
    rate: float = 0.0
    shape: str = ""

    @property
    def median(self) -> float:
        """Seconds of the middle repeat."""
        return median(self.seconds)

    def and_also(self, other: Result) -> Result:
        """Both together: of another process that measured the same case."""
        if not (self.fits and other.fits):
            return Result(False, [])
        later = other.accumulating
        return replace(
            other,
            seconds=self.seconds + other.seconds,
            peak=max(self.peak, other.peak),
            accumulating=None if later is None else max(later, self.accumulating or 0),
            total=None if other.total is None else max(other.total, self.total or 0),
            rate=max(self.rate, other.rate),
        )


class Memory:
    """How much more a process held at its peak than when this was made."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda.is_available()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.before = _resident()

    def peak(self) -> int:
        """Bytes."""
        import torch

        return (torch.cuda.max_memory_allocated() if self.cuda else _highest()) - self.before


def _highest() -> int:
    """The most that this process ever had resident; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident() -> int:
    """What this process has resident now; where the system does not say, the most so far."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return _highest()


def timed(step: Callable[[], float], case: Case) -> tuple[list[float], list[float]]:
    """Seconds of each repeat of `step`, and what it returned (reading a number back waits for a GPU)."""
    seconds: list[float] = []
    values: list[float] = []
    while not seconds or (len(seconds) < case.repeats and sum(seconds) < case.seconds):
        started = time.perf_counter()
        values.append(step())
        seconds.append(time.perf_counter() - started)
    return seconds, values


def limit_memory(share: float = 0.9) -> None:
    """Let allocations fail before the machine has to kill somebody; a GPU says by itself when it is full."""
    import torch

    from medusa_train.evaluation.choose_dtype import free_memory

    free = free_memory(torch.device("cpu"))
    if free is not None and not torch.cuda.is_available():
        resource.setrlimit(resource.RLIMIT_DATA, (int(share * free),) * 2)
