"""Cross-entropy straight from hidden states, a chunk of logits at a time; knows no model, draft or recipe.

The gradients are computed in the forward pass, while a chunk's logits are at hand, so that nothing of size [N, V] is
ever kept for the backward pass (the idea of Liger Kernel's fused linear cross-entropy, https://arxiv.org/abs/2410.10989).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax

from medusa_train.data.targets import IGNORE

_CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
_MIN_ROWS = 256


class UnembeddingLike(Protocol):
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
        """Factor on the logits before the soft cap."""


class LinearCE(NamedTuple):
    """What one pass over N rows gives.

    Attributes:
        loss_sum: sum of the cross-entropies in nats over the rows that count; differentiable; float32
            (float64 for float64 weights).
        correct: long scalar, rows whose most probable token is the target.
    """

    loss_sum: Tensor
    correct: Tensor


def linear_cross_entropy(
    hidden: Tensor, unembedding: UnembeddingLike, targets: Tensor, *, chunk: int | None = None
) -> LinearCE:
    """Sum of `cross_entropy(logits(hidden), targets)` without the [N, V] logits.

    Rows with target IGNORE are dropped before the product and cost nothing. Gradients flow to `hidden`, `weight` and
    `bias`, each only if it requires one, in its own dtype. The products run in the weight's dtype or, under autocast,
    in autocast's (a float32 master weight is cast once per call); softmax and loss are float32 all the same.

    Args:
        hidden: [N, d]. unembedding: weight [V, d], bias [V] or None, softcap, scale.
        targets: long [N], token ids or IGNORE.
        chunk: rows per chunk; by default `chunk_rows`.

    Raises:
        IndexError: a target is neither IGNORE nor in [0, V).
    """
    rows = (targets != IGNORE).nonzero().squeeze(1)
    vocab = unembedding.weight.shape[0]
    kept = targets[rows]
    if kept.numel():
        low, high = kept.aminmax()
        if low < 0 or high >= vocab:
            raise IndexError(f"targets from {int(low)} to {int(high)} do not fit a vocabulary of {vocab}")
    size = chunk or chunk_rows(vocab, hidden.device.type)
    dtype = _product_dtype(unembedding.weight)
    options = _Options(unembedding.softcap, unembedding.scale, size, dtype, torch.is_grad_enabled())
    return LinearCE(*_LinearCrossEntropy.apply(hidden, unembedding.weight, unembedding.bias, rows, kept, options))


def chunk_rows(vocab: int, device: str) -> int:
    """Rows whose float32 logits are small beside the caches (CPU) or the memory (GPU).

    Never fewer than 256: each chunk reads the whole weight and, when that is trained, its whole gradient.
    """
    return max(_MIN_ROWS, _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"]) // (4 * vocab))


class _Options(NamedTuple):
    softcap: float | None
    scale: float
    chunk: int
    dtype: torch.dtype
    grad_enabled: bool


def _product_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        wanted = [options.grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        # autocast must not touch the float32 parts below, so the casts are explicit and it is switched off
        with torch.autocast(weight.device.type, enabled=False):
            sums = _Sums(hidden, weight.to(options.dtype), bias, wanted)
            for place, target in zip(rows.split(options.chunk), targets.split(options.chunk), strict=True):
                sums.add_chunk(hidden, place, target, options)
        ctx.save_for_backward(sums.grad_hidden, sums.grad_weight, sums.grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(sums.correct)
        return sums.loss, sums.correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # the factor (1 / number of targets, loss scaling) comes before the cast: sums may exceed float16's range
        grads = [
            None if grad is None else (grad * grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None)


class _Sums:
    """Loss, hits and gradients, summed over chunks in float32 (float64 for float64 weights)."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> None:
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.weight = weight
        self.bias = None if bias is None else bias.to(self.dtype)
        self.loss = weight.new_zeros((), dtype=self.dtype)
        self.correct = weight.new_zeros((), dtype=torch.long)
        self.grad_hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.grad_weight = torch.zeros_like(weight, dtype=self.dtype) if wanted[1] else None
        self.grad_bias = weight.new_zeros(weight.shape[0], dtype=self.dtype) if wanted[2] else None
        self.any_grad = any(wanted)

    def add_chunk(self, hidden: Tensor, rows: Tensor, targets: Tensor, options: _Options) -> None:
        """Add the rows [C] of `hidden` with their targets [C]."""
        states = hidden[rows].to(self.weight.dtype)
        logits = (states @ self.weight.t()).to(self.dtype)  # [C, V]
        if self.bias is not None:
            logits += self.bias
        self.correct += (logits.argmax(dim=1) == targets).sum()  # scale and soft cap keep the order
        if options.scale != 1.0:
            logits *= options.scale
        if options.softcap is not None:
            logits = logits.div_(options.softcap).tanh_().mul_(options.softcap)
        log_probs = log_softmax(logits, dim=1)
        index = targets.unsqueeze(1)
        self.loss -= log_probs.gather(1, index).sum()
        if not self.any_grad:
            return
        grad = log_probs.exp_()  # d loss / d logits = softmax - one-hot
        grad.scatter_add_(1, index, grad.new_full((1, 1), -1.0).expand_as(index))
        if options.softcap is not None:
            slope = logits.div_(options.softcap).square_()
            grad.addcmul_(grad, slope, value=-1.0)  # tanh' = 1 - tanh^2
        if options.scale != 1.0:
            grad *= options.scale
        del logits
        self._add_grads(grad, states, rows)

    def _add_grads(self, grad: Tensor, states: Tensor, rows: Tensor) -> None:
        if self.grad_bias is not None:
            self.grad_bias += grad.sum(dim=0)
        grad = grad.to(self.weight.dtype)
        if self.grad_hidden is not None:
            self.grad_hidden.index_copy_(0, rows, (grad @ self.weight).to(self.grad_hidden.dtype))
        if self.grad_weight is None:
            return
        if self.weight.dtype == self.dtype:
            self.grad_weight.addmm_(grad.t(), states)
        else:
            self.grad_weight += grad.t() @ states
