"""What a loss asks of an unembedding, and its products and logit transform in place; knows no loss and no model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LowRankLike(Protocol):
    """A LoRA branch beside W: it adds `scaling * B A dropout(h)`."""

    @property
    def a(self) -> Tensor:
        """A, [r, d]."""

    @property
    def b(self) -> Tensor:
        """B, [V, r]."""

    @property
    def scaling(self) -> float:
        """lora_alpha / r."""

    def project_down(self, hidden: Tensor) -> Tensor:
        """`scaling * A dropout(h)`, [..., d] -> [..., r]."""


class LMHeadLike(Protocol):
    """`softcap * tanh(scale * (W h + b) / softcap)`; without a soft cap `scale * (W h + b)`."""

    @property
    def weight(self) -> Tensor:
        """W, [V, d]."""

    @property
    def bias(self) -> Tensor | None:
        """b, [V], or None."""

    @property
    def softcap(self) -> float | None:
        """The soft cap on the logits, or None."""

    @property
    def scale(self) -> float:
        """Factor on the logits before the soft cap, positive."""

    @property
    def low_rank(self) -> LowRankLike | None:
        """A LoRA branch that adds to W h, or None."""

    @property
    def token_map(self) -> Tensor | None:
        """Which token each row stands for, long [V], where that is not its number."""

    def restrict_to(self, tokens: Tensor) -> LMHeadLike:
        """The rows of `tokens` (long [N]) alone, in that order."""

    def rows_of(self, tokens: Tensor) -> Tensor:
        """The row of each token of any shape, long; -1 where there is none."""


def product_dtype(matrix: Tensor) -> torch.dtype:
    """In which dtype products with a matrix run: its own, or autocast's where that is on."""
    device = matrix.device.type
    if torch.is_autocast_enabled(device) and matrix.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return matrix.dtype


class Projection:
    """An unembedding ready to multiply: outside the graph, in the dtype of the products.

    Attributes:
        weight: [V, d] and up (LoRA's B): [V, r] or None, in the products' dtypes.
        buffer_dtype: of what holds W h: the products', the wider one where the two differ.
        dtype: of the logits, bias and all that follows: float32 (float64 for float64 weights).
    """

    weight: Tensor

    def __init__(self, unembedding: LMHeadLike, sharing: Projection | None = None) -> None:
        """`sharing`: another one, whose weight is taken as it is where both are made from the same tensor."""
        self.source = unembedding.weight
        self.dtype = torch.float64 if self.source.dtype == torch.float64 else torch.float32
        if sharing is not None and sharing.source is self.source:
            self.weight = sharing.weight
        else:
            self.weight = self.source.detach().to(product_dtype(self.source))
        self.bias = None if unembedding.bias is None else unembedding.bias.detach().to(self.dtype)
        low_rank = unembedding.low_rank
        self.up = None if low_rank is None else low_rank.b.detach().to(product_dtype(low_rank.b))
        # what holds W h, and later the gradient that goes back through both matrices
        self.buffer_dtype = torch.promote_types(self.weight.dtype, (self.weight if self.up is None else self.up).dtype)
        self.scale = unembedding.scale
        self.softcap = unembedding.softcap

    def product(self, states: Tensor, out: Tensor) -> None:
        """Write W h of states [C, d] into `out` [C, V], of the weight's dtype or (LoRA in a wider one) LoRA's."""
        if out.dtype == self.weight.dtype:
            torch.mm(states, self.weight.t(), out=out)
        else:
            out.copy_(states @ self.weight.t())

    def raw_logits(self, product: Tensor, z: Tensor | None) -> Tensor:
        """Logits [C, V] from the product W h and LoRA's z [C, r], before scale and soft cap; may use up `product`."""
        logits = product.to(self.dtype)
        if self.bias is not None:
            logits += self.bias
        if self.up is not None and z is not None:
            z = z.to(self.up.dtype)
            if self.up.dtype == self.dtype:
                logits.addmm_(z, self.up.t())
            else:
                logits += z @ self.up.t()
        return logits

    def transform_(self, logits: Tensor) -> Tensor:
        """Scale and soft-cap in place."""
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def transform_grad_(self, grad: Tensor, logits: Tensor) -> None:
        """Turn `grad` into the raw logits' gradient in place; uses up the transformed `logits`."""
        if self.softcap is not None:
            slope = logits.div_(self.softcap).square_()
            grad.addcmul_(grad, slope, value=-1.0)  # tanh' = 1 - tanh^2
        if self.scale != 1.0:
            grad *= self.scale
