"""What a device computes fast in. Knows devices; no keys, no model."""

from __future__ import annotations

import torch


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; without it a CPU is slower than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        # the only public sign of it; torch names no other for CPUs
        return bool(torch.cpu._is_avx512_bf16_supported())
    return False
