"""The products and the logit transform of an lm_head in place, for the chunked losses."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.models.lm_head import LMHead


def product_dtype(matrix: Tensor, autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which products with a matrix run: autocast's, if any, else the matrix's."""
    if autocast is None or matrix.dtype == torch.float64:
        return matrix.dtype
    return autocast


def low_rank_matrix(lm_head: LMHead) -> Tensor | None:
    """Return the matrix [V, r] that adds a low-rank part to W h: LoRA's B or the token bias; None
    without one.
    """
    if lm_head.low_rank is not None:
        return lm_head.low_rank.b
    return lm_head.token_bias


def low_rank_input(
    hidden: Tensor, lm_head: LMHead, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Split `hidden`, [N, d] or with a token bias [N, d + r], into what W reads, [N, d], and z at
    `positions`, [M, r].

    z is the input of `low_rank_matrix`; autograd handles what leads to it (LoRA's A and dropout, or
    an embedding).
    """
    if lm_head.token_bias is not None:
        width = lm_head.weight.shape[1]  # d
        return hidden[:, :width], hidden[positions, width:]
    if lm_head.low_rank is not None:
        return hidden, lm_head.low_rank.project_down(hidden[positions])
    return hidden, None


class Projection:
    """The products and logit transform of an lm_head, detached from the graph and cast to the
    products' dtype.

    Args:
        autocast: dtype of the products, if any.
        shared: its cast weight is used again if it has the same source.

    Attributes:
        weight: [V, d], in the dtype of its products.
        up: LoRA's B or the token bias R, [V, r], in the dtype of its products, or None.
        buffer_dtype: dtype of the buffer for W h: the wider of the two.
        dtype: dtype of logits, bias, softmax and loss: float32 (float64 for float64 weights).
    """

    weight: Tensor

    def __init__(
        self, lm_head: LMHead, autocast: torch.dtype | None = None, shared: Projection | None = None
    ) -> None:
        # 1. W
        self.source = lm_head.weight
        if shared is not None and shared.source is self.source:
            self.weight = shared.weight
        else:
            self.weight = self.source.detach().to(product_dtype(self.source, autocast))
        # 2. the bias, in the dtype of logits
        self.dtype = torch.float32
        if self.source.dtype == torch.float64:
            self.dtype = torch.float64
        self.bias: Tensor | None = None
        if lm_head.bias is not None:
            self.bias = lm_head.bias.detach().to(self.dtype)
        # 3. the low-rank matrix; the buffer holds W h, and later the gradient that goes through
        # both matrices
        self.up: Tensor | None = None
        self.buffer_dtype = self.weight.dtype
        up = low_rank_matrix(lm_head)
        if up is not None:
            self.up = up.detach().to(product_dtype(up, autocast))
            self.buffer_dtype = torch.promote_types(self.weight.dtype, self.up.dtype)
        # 4. the transform
        self.scale = lm_head.scale
        self.softcap = lm_head.softcap

    def multiply_into(self, states: Tensor, out: Tensor) -> None:
        """Write W h of states [C, d] into `out` [C, V] of `buffer_dtype`."""
        if out.dtype == self.weight.dtype:
            torch.mm(states, self.weight.t(), out=out)
        else:
            out.copy_(states @ self.weight.t())

    def raw_logits(self, products: Tensor, z: Tensor | None) -> Tensor:
        """Return logits [b, V] before scale and soft cap, from W h [b, V] and z [b, r].

        They may share memory with `products`, which are then overwritten.
        """
        logits = products.to(self.dtype)
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
        """Apply scale and soft cap in place."""
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def transform_grad_(self, grad: Tensor, logits: Tensor) -> None:
        """Turn `grad` into the raw logits' gradient in place; overwrites the transformed `logits`."""
        if self.softcap is not None:
            tanh = logits.div_(self.softcap)
            grad.addcmul_(grad, tanh.square_(), value=-1.0)  # tanh' = 1 - tanh^2
        if self.scale != 1.0:
            grad *= self.scale
