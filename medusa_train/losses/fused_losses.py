"""Cross-entropy and distillation losses fused with the lm_head product, so that no [N, V] logits
are kept.

Logits are computed a chunk of positions at a time, and used while the chunk is in memory (as in Liger
Kernel's fused linear cross-entropy, https://arxiv.org/abs/2410.10989): see `chunked_loss.py`.
Gradients are computed in one of two ways:

- with `grad_scale`, together with the loss. The factor that the caller will apply to the loss is
  given beforehand, so gradients of trained matrices are added to their `.grad` without a copy of
  that size, and the logits are computed once. For training in one process.
- without it, by autograd's backward pass, from logits that are computed a second time. A matrix's
  gradient then exists only while that pass visits its loss, and hooks on the matrix see it, as
  DeepSpeed needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.chunked_loss import ChunkedLoss, Gradients, LossInputs, Teacher
from medusa_train.losses.logits import low_rank_input, low_rank_matrix
from medusa_train.models.lm_head import LMHead
from medusa_train.models.precision import autocast_dtype


class LossTensors(NamedTuple):
    """The tensors that may be trained by a loss, in the order of `Gradients`.

    Attributes:
        hidden: states, [N, d].
        weight: the lm_head's matrix, [V, d].
        bias: the lm_head's bias, [V].
        z: input of the low-rank matrix, [M, r].
        up: low-rank matrix, [V, r].
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    z: Tensor | None
    up: Tensor | None


class LossSums(NamedTuple):
    """Sums over the supervised positions of one call, float32 (float64 for float64 weights).

    Attributes:
        loss_sum: the loss in nats; the only differentiable one, without `grad_scale`.
        correct: long scalar, positions whose argmax is the label.
        ce_sum: cross-entropy against the labels, in nats.
        kl_sum: KL(teacher || student) in nats; 0 without a teacher.
    """

    loss_sum: Tensor
    correct: Tensor
    ce_sum: Tensor
    kl_sum: Tensor


def linear_loss(
    hidden: Tensor,
    lm_head: LMHead,
    targets: Tensor,
    teacher: Teacher | None = None,
    *,
    chunk: int | None = None,
    grad_scale: float | None = None,
) -> LossSums:
    """Sum over positions of the cross-entropy (or divergence) between the target distribution and
    the student's.

    Positions with target IGNORE_INDEX are removed before every product. `hidden`, weight, bias and
    low-rank matrices get gradients in their own dtype if they require them, the teacher gets none.
    Products run in the weight's dtype or autocast's (a float32 master weight is cast once per
    pass); softmax and loss are float32. A divergence from a teacher whose distribution equals the
    student's bit for bit, and its gradients, are exactly 0.

    Args:
        hidden: [N, d].
        lm_head: weight [V, d], bias [V] or None, softcap, scale, low_rank or token_bias (hidden is
            then [N, d + r]).
        targets: long [N], indices of logits (token ids, unless there is a token_map) or
            IGNORE_INDEX.
        teacher: its part of the target distribution; None for labels only.
        chunk: positions per chunk; default `chunk_size`.
        grad_scale: if given, `grad_scale` times the gradients are computed now, and the returned
            loss has no graph. Gradients of leaf matrices in the softmax's dtype are added to
            `.grad` directly, without running hooks; the other gradients go through the tensors'
            graphs, which are freed.

    Raises:
        IndexError: a target is neither IGNORE_INDEX nor in [0, V).
    """
    # 1. the positions with a target, and what the matrices read there
    positions, labels = _supervised_positions(targets, lm_head)
    hidden, z = low_rank_input(hidden, lm_head, positions)
    autocast = autocast_dtype(hidden.device.type)
    inputs = LossInputs(positions, labels, lm_head, teacher, autocast, chunk)
    # 2. the sums over them, with gradients at once or in autograd's backward pass
    up = low_rank_matrix(lm_head)
    tensors = LossTensors(hidden, lm_head.weight, lm_head.bias, z, up)
    if grad_scale is not None:
        return _loss_and_gradients(tensors, inputs, grad_scale)
    return LossSums(*_LinearLoss.apply(*tensors, inputs))


def _supervised_positions(targets: Tensor, lm_head: LMHead) -> tuple[Tensor, Tensor]:
    """Return the indices of the positions with a target, and their targets, long [M] each.

    Raises:
        IndexError: a target is none of the lm_head's logits.
    """
    positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    labels = targets[positions]
    vocab = lm_head.weight.shape[0]
    if labels.numel():
        low, high = torch.stack(labels.aminmax()).tolist()  # one transfer from the device
        if low < 0 or high >= vocab:
            raise IndexError(f"targets from {low} to {high} do not fit a vocabulary of {vocab}")
    return positions, labels


def _loss_and_gradients(tensors: LossTensors, inputs: LossInputs, scale: float) -> LossSums:
    """Compute the sums and `scale` times the gradients."""
    device = tensors.hidden.device
    # all casts are explicit, and no backward pass runs under autocast
    with torch.autocast(device.type, enabled=False):
        # 1. the sums, and the gradients over these tensors
        with torch.no_grad():
            trained = [tensor is not None and tensor.requires_grad for tensor in tensors]
            grads = _zero_gradients(tensors, trained, in_place=True)
            sums = ChunkedLoss(inputs, device, grads, scale)
            sums.add_all(tensors.hidden, tensors.z)
        # 2. the gradients that were not added to `.grad` directly go through the tensors' graphs
        outputs: list[Tensor] = []
        output_grads: list[Tensor] = []
        for tensor, grad in zip(tensors, grads, strict=True):
            if tensor is None or grad is None:
                continue
            if tensor.is_leaf and grad is tensor.grad:
                continue
            outputs.append(tensor)
            output_grads.append(grad.to(tensor.dtype))
        if outputs:
            torch.autograd.backward(outputs, output_grads)
    return LossSums(sums.loss(), sums.correct, sums.ce, sums.kl)


class GraphCut:
    """States detached from their graphs, whose gradients are collected for one backward pass into
    these graphs.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def detach(self, state: Tensor) -> Tensor:
        """Return a leaf with the values of `state`, or `state` itself if it needs no gradient."""
        if not state.requires_grad:
            return state
        leaf = state.detach().requires_grad_()
        self._pairs.append((state, leaf))
        return leaf

    def backward(self) -> None:
        """Pass on the gradients that the leaves have got."""
        states: list[Tensor] = []
        grads: list[Tensor] = []
        for state, leaf in self._pairs:
            if leaf.grad is not None:
                states.append(state)
                grads.append(leaf.grad)
        self._pairs.clear()
        if states:
            with torch.autocast(states[0].device.type, enabled=False):
                torch.autograd.backward(states, grads)


class _LinearLoss(torch.autograd.Function):
    """The sums, whose gradients are computed in the backward pass, from logits that are computed
    again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor | None,
        up: Tensor | None,
        inputs: LossInputs,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):  # all casts are explicit
            sums = ChunkedLoss(inputs, hidden.device)
            sums.add_all(hidden, z)
        ctx.inputs = inputs
        ctx.save_for_backward(hidden, weight, bias, z, up)
        ctx.mark_non_differentiable(sums.correct, sums.ce, sums.kl)
        return sums.loss(), sums.correct, sums.ce, sums.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        tensors = LossTensors(*ctx.saved_tensors)
        grads = _zero_gradients(tensors, ctx.needs_input_grad[: len(tensors)])
        # the factor (1 / number of targets, loss scaling) comes before casting: sums may exceed
        # float16's range
        sums = ChunkedLoss(ctx.inputs, tensors.hidden.device, grads, float(grad_loss))
        sums.add_all(tensors.hidden, tensors.z)
        cast: list[Tensor | None] = []
        for tensor, grad in zip(tensors, grads, strict=True):
            if tensor is None or grad is None:
                cast.append(None)
            else:
                cast.append(grad.to(tensor.dtype))
        return (*cast, None)


def _zero_gradients(
    tensors: LossTensors, trained: Sequence[bool], in_place: bool = False
) -> Gradients:
    """Return a zero gradient for each tensor that is trained.

    Gradients of matrices are float32 (float64 for float64 weights), since they are sums over many
    positions.

    Args:
        trained: whether each of the tensors is trained.
        in_place: return the matrices' `.grad` where it can be added to directly, zeros if there is
            none so far.
    """
    dtype = torch.float32
    if tensors.weight.dtype == torch.float64:
        dtype = torch.float64
    hidden_trained, weight_trained, bias_trained, z_trained, up_trained = trained
    return Gradients(
        hidden=_zeros_like(tensors.hidden, hidden_trained),
        weight=_zero_sums(tensors.weight, weight_trained, dtype, in_place),
        bias=_zero_sums(tensors.bias, bias_trained, dtype, in_place),
        z=_zeros_like(tensors.z, z_trained),
        up=_zero_sums(tensors.up, up_trained, dtype, in_place),
    )


def _zeros_like(states: Tensor | None, is_trained: bool) -> Tensor | None:
    """Return a zero gradient of states, in their dtype; None if they are not trained."""
    if states is None or not is_trained:
        return None
    return torch.zeros_like(states)


def _zero_sums(
    matrix: Tensor | None, is_trained: bool, dtype: torch.dtype, in_place: bool
) -> Tensor | None:
    """Return a zero gradient of a matrix in `dtype`, or its `.grad`; None if it is not trained.

    Args:
        in_place: as in `_zero_gradients`.
    """
    if matrix is None or not is_trained:
        return None
    if not in_place or not matrix.is_leaf or matrix.dtype != dtype:
        return torch.zeros_like(matrix, dtype=dtype)
    if matrix.grad is None:
        matrix.grad = torch.zeros_like(matrix)
    return matrix.grad
