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
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_precision(bf16: bool | Literal["auto"], device: torch.device) -> Precision:
    """Pick bfloat16 where it is asked for, or left to us and fast; float32 otherwise."""
    wanted = has_fast_bf16(device) if bf16 == "auto" else bf16
    return Precision(device, torch.bfloat16 if wanted else torch.float32)
