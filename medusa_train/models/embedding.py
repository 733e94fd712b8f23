"""From tokens to what the first decoder layer reads: matrix and scale in one place; knows no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Embedding:
    """The backbone's input embedding E, frozen: a draft that holds it neither trains nor saves it.

    Attributes:
        table: token ids [...] -> vectors [..., d], the backbone's own module.
        scale: what the backbone multiplies them by on their way to its first layer (Granite's multiplier).
    """

    table: Callable[[Tensor], Tensor]
    scale: float = 1.0

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Token ids, long [...] -> [..., d]."""
        vectors = self.table(tokens)
        return vectors if self.scale == 1.0 else vectors * self.scale
