"""From a hidden state to logits: matrix, bias, scale and soft cap in one place; knows no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class Unembedding:
    """`softcap * tanh(scale * (W h + b) / softcap)`; without a soft cap `scale * (W h + b)`.

    Attributes:
        weight: W, [V, d].
        bias: b, [V], or None.
        softcap: Gemma's `final_logit_softcapping`, or None.
        scale: factor on the logits (Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def transform(self, logits: Tensor) -> Tensor:
        """Scale and soft-cap raw logits of any shape [..., V]."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., V]."""
        return self.transform(linear(hidden, self.weight, self.bias))
