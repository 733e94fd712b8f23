"""Cross-entropy and distillation losses fused with the lm_head product, so that no [N, V] logits are kept.

Logits are computed a chunk of rows at a time, and their gradients in the forward pass, while the chunk is in memory (as
in Liger Kernel's fused linear cross-entropy, https://arxiv.org/abs/2410.10989). A chunk is one matrix product; softmax
and loss run over blocks of it that fit the caches, and write the gradient over the logits in the products' dtype, so
float32 logits exist for one block only.

Every target is a distribution: the label, a teacher's prediction, or a mixture. The loss is a cross-entropy up to a
constant, and its gradient with respect to the logits is softmax minus target.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax

from medusa_train.data.targets import IGNORE_INDEX
from medusa_train.losses.logits import LMHeadLike, Projection, product_dtype

_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
_MIN_ROWS = 512
_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


class LossSums(NamedTuple):
    """Sums over the supervised rows of one call, float32 (float64 for float64 weights).

    Attributes:
        loss_sum: the loss in nats; the only differentiable one.
        correct: long scalar, rows whose argmax is the label.
        ce_sum: cross-entropy against the labels, in nats.
        kl_sum: KL(teacher || student) in nats; 0 without a teacher.
    """

    loss_sum: Tensor
    correct: Tensor
    ce_sum: Tensor
    kl_sum: Tensor


def linear_cross_entropy(hidden: Tensor, lm_head: LMHeadLike, targets: Tensor, *, chunk: int | None = None) -> LossSums:
    """Sum of `cross_entropy(logits(hidden), targets)` without the [N, V] logits.

    Rows with target IGNORE_INDEX are removed before every product. `hidden` and the lm_head's tensors get gradients if
    they require them; the loss is float32 whatever the dtype of the products.

    Args:
        hidden: [N, d].
        lm_head: weight [V, d], bias [V] or None, softcap, scale, low_rank.
        targets: long [N], rows of the weight (token ids, unless there is a token_map) or IGNORE_INDEX.
        chunk: rows per chunk; default `chunk_rows`.

    Raises:
        IndexError: a target is neither IGNORE_INDEX nor in [0, V).
    """
    return linear_loss(hidden, lm_head, targets, None, chunk)


def linear_kl(
    hidden: Tensor,
    lm_head: LMHeadLike,
    teacher_hidden: Tensor,
    teacher_lm_head: LMHeadLike,
    targets: Tensor,
    *,
    ahead: int = 0,
    chunk: int | None = None,
) -> LossSums:
    """Sum over rows of `KL(p_teacher || p_student)` in nats, without the [N, V] logits of either.

    The language model's loss in self-distillation (Medusa, Self-Distillation). The teacher gets no gradients. If its
    distribution equals the student's bit for bit, the loss and its gradients are exactly 0.

    Args:
        hidden: [N, d] of the student.
        lm_head: of the student; see `linear_cross_entropy`.
        teacher_hidden: [N, d'].
        teacher_lm_head: over the same V tokens; its LoRA branch is applied without dropout.
        targets: long [N]. Rows with IGNORE_INDEX are removed before every product; other values only affect
            `correct` and `ce_sum`.
        ahead: row n is compared with row n + ahead of the teacher.
        chunk: rows per chunk; default `chunk_rows`.

    Raises:
        IndexError: a target is neither IGNORE_INDEX nor in [0, V), or a supervised row n has no teacher row n + ahead.
        ValueError: the teacher has a different number of rows or tokens.
    """
    teacher = Teacher(teacher_hidden, teacher_lm_head, ahead, share=1.0, divergence=True)
    return linear_loss(hidden, lm_head, targets, teacher, chunk)


def linear_soft_cross_entropy(
    hidden: Tensor,
    lm_head: LMHeadLike,
    teacher_hidden: Tensor,
    teacher_lm_head: LMHeadLike,
    targets: Tensor,
    rho: float,
    *,
    ahead: int = 0,
    chunk: int | None = None,
) -> LossSums:
    """Sum over rows of the cross-entropy against `rho * p_teacher + (1 - rho) * onehot(target)`, in nats.

    The soft target of `medusa_distillation_regularization`, and of heads distilled from the backbone: head k at
    position t uses `ahead` = k, since the teacher at t + k predicts the same token t + k + 1.

    Further arguments and errors as in `linear_kl`.

    Args:
        rho: weight of the teacher in the target; 0 is cross-entropy against labels, 1 against the teacher.

    Raises:
        ValueError: rho is not in [0, 1].
    """
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"rho must be in [0, 1], got {rho}")
    teacher = Teacher(teacher_hidden, teacher_lm_head, ahead, share=rho, divergence=False)
    return linear_loss(hidden, lm_head, targets, teacher, chunk)


class Teacher(NamedTuple):
    """The teacher's part of the target; it gets no gradients.

    Attributes:
        hidden: [N, d'], aligned with the student's rows.
        lm_head: over the same V tokens; its LoRA branch is applied without dropout.
        ahead: row n of the student is compared with row n + ahead of the teacher.
        share: weight of the teacher in the target; the label has the rest.
        divergence: subtract the teacher's entropy: KL instead of cross-entropy, with the same gradient.
    """

    hidden: Tensor
    lm_head: LMHeadLike
    ahead: int
    share: float
    divergence: bool


def linear_loss(
    hidden: Tensor, lm_head: LMHeadLike, targets: Tensor, teacher: Teacher | None, chunk: int | None
) -> LossSums:
    """Sum over rows of the cross-entropy (or divergence) between the target distribution and the student's.

    `hidden`, weight, bias and LoRA matrices get gradients in their own dtype if they require them. Products run in the
    weight's dtype or autocast's (a float32 master weight is cast once per call); softmax and loss are float32.

    Args:
        hidden, lm_head, targets, chunk: as in `linear_cross_entropy`.
        teacher: None for labels only.

    Raises:
        IndexError, ValueError: as in `linear_kl`.
    """
    rows = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    labels = targets[rows]
    vocab = lm_head.weight.shape[0]
    if labels.numel():
        low, high = labels.aminmax()
        if low < 0 or high >= vocab:
            raise IndexError(f"targets from {int(low)} to {int(high)} do not fit a vocabulary of {vocab}")
    student = Projection(lm_head)
    low_rank = lm_head.low_rank
    call = _Inputs(
        rows,
        labels,
        student,
        None if teacher is None else _TeacherRows(teacher, rows, hidden.shape[0], student),
        chunk or chunk_rows(vocab, hidden.device.type, student.buffer_dtype.itemsize),
        block_rows(vocab, hidden.device.type),
        torch.is_grad_enabled(),
    )
    # autograd handles LoRA's A and dropout: z is only [M, r]
    z = None if low_rank is None else low_rank.project_down(hidden[rows])
    up = None if low_rank is None else low_rank.b
    return LossSums(*_LinearLoss.apply(hidden, lm_head.weight, lm_head.bias, z, up, call))


def chunk_rows(vocab: int, device: str, itemsize: int = 4) -> int:
    """Return the rows of one chunk: its logits (`itemsize` bytes each) stay small compared with the weights.

    At least 512, since every chunk reads the whole weight and, if trained, its whole gradient.
    """
    return max(_MIN_ROWS, _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"]) // (itemsize * vocab))


def block_rows(vocab: int, device: str) -> int:
    """Return the rows of one softmax: few enough for the CPU's caches, many enough to fill a GPU."""
    return max(1, _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"]) // (4 * vocab))


class _TeacherRows:
    """The teacher's log-probabilities for the student's supervised rows [M].

    Args:
        rows: [M], indices of the supervised rows. total: N, all rows of the student.
    """

    def __init__(self, teacher: Teacher, rows: Tensor, total: int, student: Projection) -> None:
        ours, theirs = student.weight.shape[0], teacher.lm_head.weight.shape[0]
        if ours != theirs or teacher.hidden.shape[0] != total:
            raise ValueError(
                f"the teacher has {teacher.hidden.shape[0]} rows and {theirs} tokens, "
                f"the student {total} rows and {ours} tokens"
            )
        self.rows = rows + teacher.ahead
        if rows.numel() and not 0 <= int(rows[0]) + teacher.ahead <= int(rows[-1]) + teacher.ahead < total:
            raise IndexError(f"ahead {teacher.ahead:+} reaches beyond the teacher's {total} rows")
        self.hidden = teacher.hidden.detach()
        self.matrix = Projection(teacher.lm_head, shared=student)
        self.share, self.divergence = teacher.share, teacher.divergence
        self.z: Tensor | None = None
        low_rank = teacher.lm_head.low_rank
        if low_rank is not None:
            a = low_rank.a.detach().to(product_dtype(low_rank.a))
            self.z = (self.hidden[self.rows].to(a.dtype) @ a.t()) * low_rank.scaling  # without dropout

    def product(self, part: slice, out: Tensor) -> None:
        """Write W h of a chunk of supervised rows into `out` [C, V]."""
        self.matrix.product(self.hidden[self.rows[part]].to(self.matrix.weight.dtype), out)

    def log_probs(self, product: Tensor, part: slice) -> Tensor:
        """Return log-probabilities [b, V] of a block from its W h, which may be overwritten."""
        logits = self.matrix.raw_logits(product, None if self.z is None else self.z[part])
        return log_softmax(self.matrix.transform_(logits), dim=1)


class _Inputs(NamedTuple):
    """Inputs of one call besides the tensors that may get gradients."""

    rows: Tensor  # [M], indices of the supervised rows
    labels: Tensor  # [M]
    student: Projection
    teacher: _TeacherRows | None
    chunk: int
    block: int
    grad_enabled: bool


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor | None,
        up: Tensor | None,
        call: _Inputs,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = (hidden, weight, bias, z, up)
        wanted = [call.grad_enabled and needed for needed in ctx.needs_input_grad[: len(inputs)]]
        # all casts below are explicit
        with torch.autocast(weight.device.type, enabled=False):
            sums = _Accumulator(inputs, wanted, call)
            for start in range(0, call.rows.shape[0], call.chunk):
                sums.add_chunk(hidden, z, start)
        ctx.save_for_backward(*sums.grads)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        ctx.mark_non_differentiable(sums.correct, sums.ce, sums.kl)
        return sums.loss(), sums.correct, sums.ce, sums.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # In place, since the gradient of the weight is as large as the weight; autograd detects a second backward pass.
        # Scale (1 / number of targets, loss scaling) before casting: sums may exceed float16's range
        grads = [
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None)


class _Accumulator:
    """Losses, hits and gradients accumulated over chunks, in float32 (float64 for float64 weights)."""

    def __init__(self, inputs: tuple[Tensor | None, ...], wanted: list[bool], call: _Inputs) -> None:
        self.call = call
        self.dtype = dtype = call.student.dtype
        self.correct = call.labels.new_zeros(())
        self.ce, self.kl, self.entropy = (call.student.weight.new_zeros((), dtype=dtype) for _ in range(3))
        # rows of hidden and z are written once; gradients of matrices are accumulated over chunks
        kinds = (None, dtype, dtype, None, dtype)
        self.grads = [
            torch.zeros_like(tensor, dtype=kind) if tensor is not None and want else None
            for tensor, want, kind in zip(inputs, wanted, kinds, strict=True)
        ]
        self.any_grad = any(wanted)
        rows, vocab = min(call.chunk, call.rows.shape[0]), call.student.weight.shape[0]
        self.buffer = call.student.weight.new_empty(rows, vocab, dtype=call.student.buffer_dtype)
        self.theirs: Tensor | None = None
        if call.teacher is not None:
            self.theirs = call.student.weight.new_empty(rows, vocab, dtype=call.teacher.matrix.buffer_dtype)

    def loss(self) -> Tensor:
        """Return the loss from the sums so far."""
        if (teacher := self.call.teacher) is None:
            return self.ce.clone()
        soft = self.kl if teacher.divergence else self.kl + self.entropy
        return teacher.share * soft + (1.0 - teacher.share) * self.ce

    def add_chunk(self, hidden: Tensor, z: Tensor | None, start: int) -> None:
        """Add the chunk that starts at index `start` of the supervised rows."""
        call, student = self.call, self.call.student
        part = slice(start, start + call.chunk)
        rows = call.rows[part]
        states = hidden[rows].to(student.weight.dtype)
        logits = self.buffer[: len(rows)]
        student.product(states, logits)
        if call.teacher is not None and self.theirs is not None:
            call.teacher.product(part, self.theirs[: len(rows)])
        for first in range(0, len(rows), call.block):
            self._add_block(z, slice(first, min(first + call.block, len(rows))), start)
        if self.any_grad:
            self._add_grads(logits, states, None if z is None else z[part], rows, part)

    def _add_block(self, z: Tensor | None, block: slice, start: int) -> None:
        """Add a block of the chunk that starts at `start`; overwrite its raw logits with their gradient."""
        call, student = self.call, self.call.student
        part = slice(start + block.start, start + block.stop)
        product, index = self.buffer[block], call.labels[part].unsqueeze(1)
        logits = student.raw_logits(product, None if z is None else z[part])  # [b, V]
        self.correct += (logits.argmax(dim=1, keepdim=True) == index).sum()  # scale and soft cap are monotonic
        log_probs = log_softmax(student.transform_(logits), dim=1)
        self.ce -= log_probs.gather(1, index).sum()
        soft = None
        if call.teacher is not None and self.theirs is not None:
            soft = self._add_teacher(call.teacher, call.teacher.log_probs(self.theirs[block], part), log_probs)
        if not self.any_grad:
            return
        grad = log_probs.exp_()  # d loss / d logits = softmax - target
        if soft is not None:
            grad -= soft
        label_share = 1.0 if call.teacher is None else 1.0 - call.teacher.share
        if label_share:
            grad.scatter_add_(1, index, grad.new_full((1, 1), -label_share).expand_as(index))
        student.transform_grad_(grad, logits)
        if (grad_bias := self.grads[2]) is not None:
            grad_bias += grad.sum(dim=0)
        product.copy_(grad)

    def _add_teacher(self, teacher: _TeacherRows, theirs: Tensor, log_probs: Tensor) -> Tensor:
        """Add KL and entropy; return the teacher's part of the target [b, V]."""
        theirs = theirs.to(self.dtype)
        probs = theirs.exp()
        if not teacher.divergence:
            self.entropy -= (probs * theirs).sum()
        # sum differences of logarithms: a difference of two cross-entropies would cancel for small KL
        self.kl += theirs.sub_(log_probs).mul_(probs).sum()
        return probs.mul_(teacher.share)

    def _add_grads(self, grad: Tensor, states: Tensor, z: Tensor | None, rows: Tensor, part: slice) -> None:
        """Backpropagate the raw logits' gradient [C, V] to weights, LoRA and hidden states."""
        grad_hidden, grad_weight, _, grad_z, grad_up = self.grads
        student = self.call.student
        if student.up is not None and z is not None:
            narrow = grad.to(student.up.dtype)
            if grad_z is not None:
                grad_z[part] = (narrow @ student.up).to(grad_z.dtype)
            if grad_up is not None:
                _add_product(grad_up, narrow, z.to(narrow.dtype))
            del narrow
        grad = grad.to(student.weight.dtype)
        if grad_hidden is not None:
            grad_hidden.index_copy_(0, rows, (grad @ student.weight).to(grad_hidden.dtype))
        if grad_weight is not None:
            _add_product(grad_weight, grad, states)


def _add_product(total: Tensor, grad: Tensor, states: Tensor) -> None:
    """`total += grad^T states`, in place: [V, d], [C, V], [C, d]."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), states)
        return
    # a product of lower precision needs a temporary: a few rows at a time, which stay in the caches
    rows = block_rows(states.shape[1], states.device.type)
    for part, columns in zip(total.split(rows), grad.split(rows, dim=1), strict=True):
        part += columns.t() @ states
