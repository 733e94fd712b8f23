"""Cross-entropy and distillation losses of an lm_head that keep only a chunk of its logits in
memory.

`losses.chunked_logits` computes logits and the gradients of matrices; here is the loss of a block
of logits, and its gradient. The gradients are computed in one of two ways:

- Now: with `grad_scale`, together with the loss. The caller gives the factor on the loss
  beforehand, so the logits are computed once, and gradients of trained matrices are added to their
  `.grad` without a temporary of that size. For training in one process.
- In backward: without it, in autograd's backward pass, which computes the logits again. A matrix's
  gradient then exists only while the pass visits its loss, and hooks on the matrix see it, as
  DeepSpeed needs.

Every target is a distribution: the label, a teacher's prediction, or a mixture. The loss is a
cross-entropy up to a constant, and its gradient with respect to the logits is softmax minus target.

Shapes:
    N: positions (B x T of a micro-batch, flattened).
    M: positions with a target.
    C: positions of a chunk.
    b: positions of a block.
    V: vocabulary size.
    d: width of hidden states.
    r: rank of a low-rank part (LoRA, or a bias that depends on the previous token).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.chunked_logits import (
    ChunkedLogits,
    LogitGradients,
    LogitTensors,
    block_size,
    chunk_size,
    gpu_bytes,
    logit_tensors,
    parts,
    zero_gradients,
)
from medusa_train.models.lm_head import LMHead
from medusa_train.models.precision import autocast_dtype


class Teacher(NamedTuple):
    """The teacher's part of the target; it gets no gradients.

    Attributes:
        hidden: the teacher's hidden states [N, d'], at the same positions as the student's.
        lm_head: the teacher's lm_head over the same V tokens; its LoRA branch is applied without
            dropout.
        shift: position n of the student is compared with position n + shift of the teacher. For
            every position with a target, both are in the same row.
        teacher_weight: weight of the teacher in the target; the label has weight 1 -
            teacher_weight.
        divergence: subtract the teacher's entropy: KL instead of cross-entropy, with the same
            gradient.
    """

    hidden: Tensor
    lm_head: LMHead
    shift: int = 0
    teacher_weight: float = 1.0
    divergence: bool = False


class LossSums(NamedTuple):
    """Sums over the supervised positions of one call, float32 (float64 for float64 weights).

    Attributes:
        loss_sum: the loss in nats. Without `grad_scale` it is differentiable; the other sums are
            not.
        correct: number of positions whose argmax is the label, long scalar.
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
    """Sum the cross-entropy (or divergence) between the target distribution and the student's over
    all positions with a target; with `grad_scale`, also run the backward pass.

    Positions with target IGNORE_INDEX are removed before every product. `hidden`, weight, bias and
    low-rank matrices get gradients in their own dtype if they require them; the teacher gets none.
    Products run in the weight's dtype or autocast's (a float32 master weight is cast once per
    pass); softmax and loss are float32. If the teacher's distribution equals the student's bit for
    bit, the divergence and its gradients are exactly 0.

    A plain version keeps all logits in memory; `logits(head, h)` computes the head's products,
    scale and soft cap:

        at = (targets != IGNORE_INDEX).nonzero().squeeze(1)  # [M]
        log_q = log_softmax(logits(lm_head, hidden[at]), dim=1)  # [M, V]
        target = one_hot(targets[at], V)  # [M, V]
        if teacher is not None:
            w = teacher.teacher_weight
            p = softmax(logits(teacher.lm_head, teacher.hidden[at + teacher.shift]), dim=1)
            target = w * p + (1 - w) * target  # [M, V]
        loss_sum = -(target * log_q).sum()  # with `divergence` also + w * (p * p.log()).sum()
        (grad_scale * loss_sum).backward()

    Args:
        hidden: the student's hidden states, [N, d].
        lm_head: weight [V, d], bias [V] or None, softcap, scale, low_rank or token_bias (then
            `hidden` is [N, d + r]).
        targets: indices of logits (token ids, unless there is a token_map) or IGNORE_INDEX, long
            [N].
        teacher: the teacher's part of the target distribution; None for labels only.
        chunk: positions per chunk; by default `chunk_size`.
        grad_scale: if given, `grad_scale` times the gradients are computed now, and the returned
            loss has no graph. Gradients of leaf matrices in the softmax's dtype are added to
            `.grad` directly, without running hooks. The other gradients flow through the tensors'
            graphs, which are freed.

    Raises:
        IndexError: a target is neither IGNORE_INDEX nor in [0, V).
    """
    # 1. the positions with a target
    positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)  # [M]
    labels = targets[positions]  # [M]
    vocab = lm_head.weight.shape[0]
    if labels.numel():
        low, high = torch.stack(labels.aminmax()).tolist()  # one transfer from the device
        if low < 0 or high >= vocab:
            raise IndexError(f"targets from {low} to {high} do not fit a vocabulary of {vocab}")
    # 2. the tensors from which student and teacher compute logits
    tensors = logit_tensors(lm_head, hidden, positions)
    teacher_tensors: LogitTensors | None = None
    if teacher is not None:
        teacher_tensors = _teacher_tensors(teacher, positions)
    autocast = autocast_dtype(hidden.device.type)
    loss = _ChunkedLoss(lm_head, labels, positions, teacher, teacher_tensors, autocast, chunk)
    # 3. the sums, with gradients now or in autograd's backward pass
    if grad_scale is None:
        return LossSums(*_GradientsInBackward.apply(loss, *tensors))
    return _gradients_now(loss, tensors, grad_scale)


@torch.no_grad()
def _teacher_tensors(teacher: Teacher, positions: Tensor) -> LogitTensors:
    """Return the tensors for the teacher's logits at the student's `positions`."""
    lm_head = teacher.lm_head
    if lm_head.low_rank is not None:
        without_dropout = replace(lm_head.low_rank, dropout=lambda states: states)
        lm_head = replace(lm_head, low_rank=without_dropout)
    return logit_tensors(lm_head, teacher.hidden, positions + teacher.shift)


# The two ways to gradients. Both run without autocast, because all casts are explicit


def _gradients_now(loss: _ChunkedLoss, tensors: LogitTensors, grad_scale: float) -> LossSums:
    """Return the sums, and compute `grad_scale` times the gradients with them."""
    trained = [tensor is not None and tensor.requires_grad for tensor in tensors]
    with torch.autocast(loss.labels.device.type, enabled=False):
        with torch.no_grad():
            grads = zero_gradients(tensors, trained, in_place=True)
            sums = loss.sums(tensors, grads, grad_scale)
        # the gradients that were not added to `.grad` directly go through the tensors' graphs
        outputs: list[Tensor] = []
        output_grads: list[Tensor] = []
        for tensor, grad in zip(tensors, grads, strict=True):
            if tensor is None or grad is None or (tensor.is_leaf and grad is tensor.grad):
                continue
            outputs.append(tensor)
            output_grads.append(grad.to(tensor.dtype))
        if outputs:
            torch.autograd.backward(outputs, output_grads)
    return sums


class _GradientsInBackward(torch.autograd.Function):
    """Computes the sums; its backward pass computes the logits again, and the gradients."""

    @staticmethod
    def forward(ctx: Any, loss: _ChunkedLoss, *tensors: Any) -> tuple[Tensor, ...]:
        with torch.autocast(loss.labels.device.type, enabled=False):
            sums = loss.sums(LogitTensors(*tensors))
        ctx.loss = loss
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        tensors = LogitTensors(*ctx.saved_tensors)
        grads = zero_gradients(tensors, ctx.needs_input_grad[1:])
        # apply the factor (1 / number of targets, loss scaling) before casting: unscaled sums may
        # exceed the range of float16
        ctx.loss.sums(tensors, grads, float(grad_loss))
        cast: list[Tensor | None] = [None]
        for tensor, grad in zip(tensors, grads, strict=True):
            cast.append(None if tensor is None or grad is None else grad.to(tensor.dtype))
        return tuple(cast)


@dataclass(frozen=True)
class _ChunkedLoss:
    """The loss at M supervised positions.

    Attributes:
        lm_head: the student's lm_head.
        labels: indices of logits, long [M].
        positions: the supervised positions, indices into N, long [M].
        teacher: the teacher; None for labels only.
        teacher_tensors: the tensors for the teacher's logits.
        autocast: dtype of products under autocast; None without autocast: the weights' own dtype.
        chunk: positions per chunk; None: `chunk_size`.
    """

    lm_head: LMHead
    labels: Tensor
    positions: Tensor
    teacher: Teacher | None
    teacher_tensors: LogitTensors | None
    autocast: torch.dtype | None
    chunk: int | None

    def sums(
        self, tensors: LogitTensors, grads: LogitGradients = LogitGradients(), scale: float = 1.0
    ) -> LossSums:
        """Return the sums, and add `scale` times the gradients of the loss to `grads`. Uses neither
        autograd nor autocast.

        Args:
            tensors: the tensors for the student's logits.
            grads: gradients to add to. Those of `hidden` and `z` must be zeros: each supervised
                position is assigned once. z depends on `hidden`, too: autograd adds that part to
                the gradient of `hidden`, from the gradient of z.
            scale: factor on the gradients.
        """
        # 1. the logits of student and teacher, and the sizes of chunks and blocks
        count = len(self.labels)  # M
        student = ChunkedLogits(tensors, self.lm_head, self.positions, self.autocast)
        vocab = student.weight.shape[0]
        device = self.labels.device
        size = self.chunk
        if size is None:
            itemsize = student.products_dtype.itemsize
            size = chunk_size(vocab, device.type, itemsize, gpu_bytes(device))
        student.allocate(min(size, count))
        teacher: ChunkedLogits | None = None
        if self.teacher is not None and self.teacher_tensors is not None:
            positions = self.positions + self.teacher.shift
            teacher = ChunkedLogits(
                self.teacher_tensors, self.teacher.lm_head, positions, self.autocast, student
            )
            teacher.allocate(min(size, count))
        # 2. float16 gradients are scaled before the products that sum over positions, so that the
        # sums stay in range for every loss scale. Other gradients are scaled after these products,
        # because their results have fewer numbers
        scale_before, scale_after = 1.0, scale
        if student.weight.dtype == torch.float16:
            scale_before, scale_after = scale, 1.0
        # 3. chunk by chunk, C of the M positions, and block by block, b of the C positions
        zero = student.weight.new_zeros((), dtype=student.dtype)
        sums = LossSums(zero, self.labels.new_zeros(()), zero.clone(), zero.clone())
        any_grad = any(grad is not None for grad in grads)
        for chunk in parts(0, count, size):
            student.multiply(chunk)
            if teacher is not None:
                teacher.multiply(chunk)
            for block in parts(chunk.start, chunk.stop, block_size(vocab, device.type)):
                logit_grad = self._add_block(sums, student, teacher, block, any_grad)  # [b, V]
                if logit_grad is None:
                    continue
                if grads.bias is not None:  # sum in the softmax's dtype
                    grads.bias.add_(logit_grad.sum(dim=0), alpha=scale)
                if scale_before != 1.0:
                    logit_grad.mul_(scale_before)
                student.products_at(block).copy_(logit_grad)
                del logit_grad  # the next block uses its memory
            if any_grad:
                student.add_gradients(chunk, grads, scale_after)
        return sums

    def _add_block(
        self,
        sums: LossSums,
        student: ChunkedLogits,
        teacher: ChunkedLogits | None,
        block: slice,
        wants_gradient: bool,
    ) -> Tensor | None:
        """Add a block, b of the M positions, to `sums`; return the gradient of its loss with
        respect to the raw logits, [b, V], if `wants_gradient`.
        """
        labels = self.labels[block, None]  # [b, 1]
        # 1. the student's log-probabilities; scale and soft cap keep the order of the logits
        raw_logits = student.raw_logits(block)  # [b, V]
        best = raw_logits.argmax(dim=1, keepdim=True)  # [b, 1]
        sums.correct.add_((best == labels).sum())
        logits = student.transform_(raw_logits)  # [b, V]
        log_q = log_softmax(logits, dim=1)  # [b, V]

        # 2. the sums; the loss is a mixture of the teacher's part and the label's
        ce = -log_q.gather(1, labels).sum()
        sums.ce_sum.add_(ce)
        teacher_weight = 0.0
        if self.teacher is not None and teacher is not None:
            teacher_weight = self.teacher.teacher_weight
            log_p = log_softmax(teacher.transform_(teacher.raw_logits(block)), dim=1)
            log_p = log_p.to(log_q.dtype)  # [b, V]
            p = log_p.exp()  # [b, V]
            # sum p (log p - log q); computed as the difference of two cross-entropies, a small KL
            # would suffer from cancellation
            kl = log_p.sub_(log_q).mul_(p).sum()
            sums.kl_sum.add_(kl)
            soft = kl if self.teacher.divergence else -(p * log_q).sum()
            sums.loss_sum.add_(soft, alpha=teacher_weight)
        sums.loss_sum.add_(ce, alpha=1.0 - teacher_weight)
        if not wants_gradient:
            return None

        # 3. the gradient: softmax minus target, passed back through soft cap and scale
        grad = log_q.exp_()  # [b, V]
        if teacher_weight > 0.0:
            grad.sub_(p.mul_(teacher_weight))
        if teacher_weight < 1.0:
            # `scatter_add_` takes a tensor, not a number
            minus_weight = grad.new_full((1, 1), teacher_weight - 1.0).expand_as(labels)  # [b, 1]
            grad.scatter_add_(1, labels, minus_weight)
        return student.transform_grad_(grad, logits)
