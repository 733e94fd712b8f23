"""Where the time of one step goes: torch.profiler's table of its operators. Knows neither cases nor tables of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

OPERATORS = 25  # lines of a table
STEPS = 10


def profile_step(call: Callable[[], object], device: torch.device, steps: int = STEPS) -> str:
    """The operators that take most time of their own over so many steps: the GPU's where there is one, then the CPU's.

    The profiler itself makes small operators slower; shares count, not sums.
    """
    for _ in range(3):
        call()
    activities = [ProfilerActivity.CPU]
    orders = ["self_cpu_time_total"]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        orders.insert(0, "self_cuda_time_total")
        torch.cuda.synchronize()
    with profile(activities=activities) as seen:
        for _ in range(steps):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    found = seen.key_averages()
    return "\n".join(found.table(sort_by=order, row_limit=OPERATORS, max_name_column_width=60) for order in orders)
