"""Seconds of one call, on a CPU or a GPU. Knows nothing of what is called."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Clock:
    """Times single calls on `device`: CUDA events where there are any, for calls are done before their kernels are.

    An event pair also spans the time in which the GPU waits for Python, which decoding has to pay as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def seconds(self, call: Callable[[], object]) -> float:
        """How long `call` took, with everything that it started on the device."""
        if not self._cuda:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def fastest(self, call: Callable[[], object], seconds: float, least: int = 3) -> float:
        """The shortest of several calls, `least` of them or as many as fit into `seconds`, after one to warm up."""
        call()
        found: list[float] = []
        while len(found) < least or sum(found) < seconds:
            found.append(self.seconds(call))
        return min(found)
