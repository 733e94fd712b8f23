"""The products and the logit transform of an lm_head in place, for the chunked losses."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.models.lm_head import LMHead


def product_dtype(matrix: Tensor, autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which products with a matrix run: autocast's, if any, else the matrix's."""
    return matrix.dtype if autocast is None or matrix.dtype == torch.float64 else autocast


def low_rank_matrix(lm_head: LMHead) -> Tensor | None:
    """Return the matrix [V, r] that adds a low-rank part to W h: LoRA's B or the token bias; None
    without one.
    """
    return lm_head.token_bias if lm_head.low_rank is None else lm_head.low_rank.b


def low_rank_input(hidden: Tensor, lm_head: LMHead, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split `hidden`, [N, d] or with a token bias [N, d + r], into what W reads, [N, d], and z at
    `rows`, [M, r].

    z is the input of `low_rank_matrix`; autograd handles what leads to it (LoRA's A and dropout, or
    an embedding).
    """
    if lm_head.token_bias is not None:
        width = lm_head.weight.shape[1]
        return hidden[:, :width], hidden[rows, width:]
    return hidden, None if lm_head.low_rank is None else lm_head.low_rank.project_down(hidden[rows])


class Projection:
    """The products and logit transform of an lm_head, detached from the graph and cast to the
    products' dtype.

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
        """Cast the matrices to `autocast`, if any; reuse the cast weight of `shared` if it has the
        same source.
        """
        self.source = lm_head.weight
        self.dtype = torch.float64 if self.source.dtype == torch.float64 else torch.float32
        if shared is not None and shared.source is self.source:
            self.weight = shared.weight
        else:
            self.weight = self.source.detach().to(product_dtype(self.source, autocast))
        self.bias = None if lm_head.bias is None else lm_head.bias.detach().to(self.dtype)
        up = low_rank_matrix(lm_head)
        self.up = None if up is None else up.detach().to(product_dtype(up, autocast))
        # the buffer holds W h, and later the gradient that goes through both matrices
        self.buffer_dtype = torch.promote_types(
            self.weight.dtype, (self.weight if self.up is None else self.up).dtype
        )
        self.scale = lm_head.scale
        self.softcap = lm_head.softcap

    def product(self, states: Tensor, out: Tensor) -> None:
        """Write W h of states [C, d] into `out` [C, V] of `buffer_dtype`."""
        if out.dtype == self.weight.dtype:
            torch.mm(states, self.weight.t(), out=out)
        else:
            out.copy_(states @ self.weight.t())

    def raw_logits(self, product: Tensor, z: Tensor | None) -> Tensor:
        """Return logits [C, V] before scale and soft cap, from W h (which may be overwritten) and z
        [C, r].
        """
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
        """Apply scale and soft cap in place."""
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def transform_grad_(self, grad: Tensor, logits: Tensor) -> None:
        """Turn `grad` into the raw logits' gradient in place; overwrites the transformed `logits`."""
        if self.softcap is not None:
            # tanh' = 1 - tanh^2
            grad.addcmul_(grad, logits.div_(self.softcap).square_(), value=-1.0)
        if self.scale != 1.0:
            grad *= self.scale
