"""What a device computes fast in. Knows devices; no keys, no model."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; without it a CPU is slower than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        # the only public sign of it; torch names no other for CPUs
        return bool(torch.cpu._is_avx512_bf16_supported())
    return False


@dataclass(frozen=True)
class Precision:
    """The backbone is loaded in `dtype`; heads keep float32 masters and multiply in `dtype` by autocast."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[object]:
        """Context for whatever touches the heads; does nothing in float32."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_precision(bf16: bool | Literal["auto"], device: torch.device, *, fp16: bool = False) -> Precision:
    """Pick bfloat16 where it is asked for, or left to us and fast; float16 where a GPU is asked for it; else float32.

    CPUs compute float16 slowly and with few operations: float32 takes its place there.
    """
    if fp16:
        return Precision(device, torch.float16 if device.type == "cuda" else torch.float32)
    wanted = has_fast_bf16(device) if bf16 == "auto" else bf16
    return Precision(device, torch.bfloat16 if wanted else torch.float32)


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
