"""Memory that does not suffice: recognises it, gives back what was held, foresees it. Knows no bench and no clock."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass

import torch
from torch import nn

from medusa_train.models.device_memory import free_memory

# Of CPU allocators (Linux, Windows) and CUDA calls; PyTorch's own CUDA allocator has an exception of its own.
_MESSAGES = re.compile(
    r"DefaultCPUAllocator|not enough memory|CUDA error: out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory did not suffice, on a CPU or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def release_memory() -> None:
    """Give back what nobody refers to any more, for the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Weights:
    """What a model's weights take: `numbers` of them are stored in the dtype, `packed` bytes are quantised ones."""

    device: torch.device
    numbers: int
    packed: int

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> Weights:
        """Count those of a loaded model."""
        parameters = list(model.parameters())
        return cls(
            device,
            sum(p.numel() for p in parameters if p.is_floating_point()),
            sum(p.numel() * p.element_size() for p in parameters if not p.is_floating_point()),
        )

    def fit(self, dtype: str) -> bool:
        """Whether the weights alone would fit into what is free now, loaded once more in `dtype`."""
        free = free_memory(self.device)
        return free is None or self.numbers * getattr(torch, dtype).itemsize + self.packed <= free
