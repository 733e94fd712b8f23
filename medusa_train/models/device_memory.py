"""How much memory a device has left; knows no model."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on the device; None where it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # A CPU's memory can be promised and not be there: the process is killed, and no exception tells of it.
        found = re.search(
            r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
        )
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])
