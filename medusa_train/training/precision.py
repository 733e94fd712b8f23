"""In which floating-point format a run computes. Knows devices, and the keys that name a format; no model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from medusa_train.models.precision import has_fast_bf16


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
