"""Find weights that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def describe_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Describe the first tensor that contains NaN or infinity, with the number of such values; None
    if there is none.

    Integer tensors, such as quantized weights, are always finite.
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        wrong = int((~torch.isfinite(tensor)).sum())
        if wrong:
            are = "is" if wrong == 1 else "are"
            return f"{wrong:,} of the {tensor.numel():,} values of {name} {are} NaN or infinite"
    return None
