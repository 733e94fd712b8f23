"""What all losses on hidden states share: logits a chunk at a time, gradients at once; knows no model and no recipe.

The gradients are computed in the forward pass, while a chunk's logits are at hand, so that nothing of size [N, V] is
ever kept for the backward pass (the idea of Liger Kernel's fused linear cross-entropy, https://arxiv.org/abs/2410.10989).
A chunk is what one matrix product takes; softmax and what follows run over it block by block, while a block is in the
caches, and leave the gradient where the logits were, in the products' dtype: float32 logits exist for a block alone.
A row's target is a distribution: the label's, a teacher's, or a mix. Whichever it is, the loss is a cross-entropy up to
a constant, and its gradient with respect to the logits is softmax minus target.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax

from medusa_train.data.targets import IGNORE_INDEX
from medusa_train.losses.projection import LMHeadLike, Projection, product_dtype

_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
_MIN_ROWS = 512
_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


class LossSums(NamedTuple):
    """What one pass over N rows gives; every sum is over the rows that count, float32 (float64 for float64 weights).

    Attributes:
        loss_sum: what is minimised, in nats; the only one that is differentiable.
        correct: long scalar, rows whose most probable token is the label.
        ce_sum: cross-entropy against the labels, in nats.
        kl_sum: KL(teacher || student) in nats; 0 without a teacher.
    """

    loss_sum: Tensor
    correct: Tensor
    ce_sum: Tensor
    kl_sum: Tensor


class Teacher(NamedTuple):
    """Whose distributions are (part of) the target; nothing flows back into it.

    Attributes:
        hidden: [N, d'], row by row beside the student's; d' may differ.
        unembedding: of the same V tokens. Its LoRA branch, if it has one, counts without dropout.
        ahead: row n of the student is compared with row n + ahead of the teacher.
        share: of the teacher in the target; the rest is the label's.
        divergence: leave the teacher's entropy out of the loss: KL instead of cross-entropy, same gradient.
    """

    hidden: Tensor
    unembedding: LMHeadLike
    ahead: int
    share: float
    divergence: bool


def linear_loss(
    hidden: Tensor, unembedding: LMHeadLike, targets: Tensor, teacher: Teacher | None, chunk: int | None
) -> LossSums:
    """Sum over rows of the cross-entropy (or divergence) between the target distribution and the student's.

    Rows with target IGNORE_INDEX are dropped before every product and cost nothing. Gradients flow to `hidden`,
    `weight`, `bias` and the LoRA matrices, each only if it requires one, in its own dtype. The products run in the
    matrix's dtype or, under autocast, in autocast's (a float32 master weight is cast once per call); softmax and
    loss are float32 all the same.

    Args:
        hidden: [N, d]. unembedding: weight [V, d], bias [V] or None, softcap, scale, low_rank.
        targets: long [N], rows of the weight (token ids, unless it has a token_map) or IGNORE_INDEX.
        teacher: without one the labels are the target.
        chunk: rows per chunk; by default `chunk_rows`.

    Raises:
        IndexError: a target is neither IGNORE_INDEX nor in [0, V), or a row that counts has no row `ahead` of it.
        ValueError: the teacher has another number of rows or tokens.
    """
    rows = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    labels = targets[rows]
    vocab = unembedding.weight.shape[0]
    if labels.numel():
        low, high = labels.aminmax()
        if low < 0 or high >= vocab:
            raise IndexError(f"targets from {int(low)} to {int(high)} do not fit a vocabulary of {vocab}")
    student = Projection(unembedding)
    low_rank = unembedding.low_rank
    job = _Job(
        rows,
        labels,
        student,
        None if teacher is None else _TeacherRows(teacher, rows, hidden.shape[0], student),
        chunk or chunk_rows(vocab, hidden.device.type, student.buffer_dtype.itemsize),
        block_rows(vocab, hidden.device.type),
        torch.is_grad_enabled(),
    )
    # A and the dropout before it get their gradients from ordinary autograd: z is only r wide
    z = None if low_rank is None else low_rank.project_down(hidden[rows])
    up = None if low_rank is None else low_rank.b
    return LossSums(*_LinearLoss.apply(hidden, unembedding.weight, unembedding.bias, z, up, job))


def chunk_rows(vocab: int, device: str, itemsize: int = 4) -> int:
    """Rows of one product: its logits, of `itemsize` bytes, are small beside the matrices and their gradients.

    Never fewer than 512: each chunk reads the whole weight and, when that is trained, its whole gradient.
    """
    return max(_MIN_ROWS, _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"]) // (itemsize * vocab))


def block_rows(vocab: int, device: str) -> int:
    """Rows that go through softmax at once: few enough for the caches (CPU), many enough for the kernels (GPU)."""
    return max(1, _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"]) // (4 * vocab))


class _TeacherRows:
    """A teacher's rows for the student's rows [M] that count."""

    def __init__(self, teacher: Teacher, rows: Tensor, total: int, student: Projection) -> None:
        """`total` is N, the student's rows, dropped ones included."""
        ours, theirs = student.weight.shape[0], teacher.unembedding.weight.shape[0]
        if ours != theirs or teacher.hidden.shape[0] != total:
            raise ValueError(
                f"a teacher of {teacher.hidden.shape[0]} rows and {theirs} tokens beside {total} rows and {ours} tokens"
            )
        self.rows = rows + teacher.ahead
        if rows.numel() and not 0 <= int(rows[0]) + teacher.ahead <= int(rows[-1]) + teacher.ahead < total:
            raise IndexError(f"a row that counts has no row {teacher.ahead:+} of it among the teacher's {total}")
        self.hidden = teacher.hidden.detach()
        self.matrix = Projection(teacher.unembedding, sharing=student)
        self.share, self.divergence = teacher.share, teacher.divergence
        self.z: Tensor | None = None
        low_rank = teacher.unembedding.low_rank
        if low_rank is not None:
            a = low_rank.a.detach().to(product_dtype(low_rank.a))
            self.z = (self.hidden[self.rows].to(a.dtype) @ a.t()) * low_rank.scaling  # no dropout: it is the teacher

    def product(self, part: slice, out: Tensor) -> None:
        """Write W h of a chunk of the rows that count into `out` [C, V]."""
        self.matrix.product(self.hidden[self.rows[part]].to(self.matrix.weight.dtype), out)

    def log_probs(self, product: Tensor, part: slice) -> Tensor:
        """Log-probabilities [b, V] of a block, from its W h; may use that up."""
        logits = self.matrix.raw_logits(product, None if self.z is None else self.z[part])
        return log_softmax(self.matrix.transform_(logits), dim=1)


class _Job(NamedTuple):
    """What a pass needs beside the tensors that may get gradients."""

    rows: Tensor  # [M], the rows that count
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
        job: _Job,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = (hidden, weight, bias, z, up)
        wanted = [job.grad_enabled and needed for needed in ctx.needs_input_grad[: len(inputs)]]
        # autocast must not touch the float32 parts below: the casts are explicit
        with torch.autocast(weight.device.type, enabled=False):
            sums = _Sums(inputs, wanted, job)
            for start in range(0, job.rows.shape[0], job.chunk):
                sums.add_chunk(hidden, z, start)
        ctx.save_for_backward(*sums.grads)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        ctx.mark_non_differentiable(sums.correct, sums.ce, sums.kl)
        return sums.loss(), sums.correct, sums.ce, sums.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # In place, for a matrix's gradient is as large as the matrix; autograd notices a second pass and refuses it.
        # The factor (1 / number of targets, loss scaling) comes before the cast: sums may exceed float16's range
        grads = [
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None)


class _Sums:
    """Losses, hits and gradients, summed over chunks in float32 (float64 for float64 weights)."""

    def __init__(self, inputs: tuple[Tensor | None, ...], wanted: list[bool], job: _Job) -> None:
        self.job = job
        self.dtype = dtype = job.student.dtype
        self.correct = job.labels.new_zeros(())
        self.ce, self.kl, self.entropy = (job.student.weight.new_zeros((), dtype=dtype) for _ in range(3))
        # rows of hidden and z are written once each; the matrices' gradients are sums over chunks
        kinds = (None, dtype, dtype, None, dtype)
        self.grads = [
            torch.zeros_like(tensor, dtype=kind) if tensor is not None and want else None
            for tensor, want, kind in zip(inputs, wanted, kinds, strict=True)
        ]
        self.any_grad = any(wanted)
        rows, vocab = min(job.chunk, job.rows.shape[0]), job.student.weight.shape[0]
        self.buffer = job.student.weight.new_empty(rows, vocab, dtype=job.student.buffer_dtype)
        self.theirs: Tensor | None = None
        if job.teacher is not None:
            self.theirs = job.student.weight.new_empty(rows, vocab, dtype=job.teacher.matrix.buffer_dtype)

    def loss(self) -> Tensor:
        """What is minimised, from the sums so far."""
        if (teacher := self.job.teacher) is None:
            return self.ce.clone()
        soft = self.kl if teacher.divergence else self.kl + self.entropy
        return teacher.share * soft + (1.0 - teacher.share) * self.ce

    def add_chunk(self, hidden: Tensor, z: Tensor | None, start: int) -> None:
        """Add the chunk of the rows that count that begins with row `start` of job.rows, of z and of the teacher's."""
        job, student = self.job, self.job.student
        part = slice(start, start + job.chunk)
        rows = job.rows[part]
        states = hidden[rows].to(student.weight.dtype)
        logits = self.buffer[: len(rows)]
        student.product(states, logits)
        if job.teacher is not None and self.theirs is not None:
            job.teacher.product(part, self.theirs[: len(rows)])
        for first in range(0, len(rows), job.block):
            self._add_block(z, slice(first, min(first + job.block, len(rows))), start)
        if self.any_grad:
            self._add_grads(logits, states, None if z is None else z[part], rows, part)

    def _add_block(self, z: Tensor | None, block: slice, start: int) -> None:
        """Add a block of the chunk that begins with row `start`; put its raw logits' gradient in their place."""
        job, student = self.job, self.job.student
        part = slice(start + block.start, start + block.stop)
        product, index = self.buffer[block], job.labels[part].unsqueeze(1)
        logits = student.raw_logits(product, None if z is None else z[part])  # [b, V]
        self.correct += (logits.argmax(dim=1, keepdim=True) == index).sum()  # scale and soft cap keep the order
        log_probs = log_softmax(student.transform_(logits), dim=1)
        self.ce -= log_probs.gather(1, index).sum()
        soft = None
        if job.teacher is not None and self.theirs is not None:
            soft = self._add_teacher(job.teacher, job.teacher.log_probs(self.theirs[block], part), log_probs)
        if not self.any_grad:
            return
        grad = log_probs.exp_()  # d loss / d logits = softmax - target
        if soft is not None:
            grad -= soft
        label_share = 1.0 if job.teacher is None else 1.0 - job.teacher.share
        if label_share:
            grad.scatter_add_(1, index, grad.new_full((1, 1), -label_share).expand_as(index))
        student.transform_grad_(grad, logits)
        if (grad_bias := self.grads[2]) is not None:
            grad_bias += grad.sum(dim=0)
        product.copy_(grad)

    def _add_teacher(self, teacher: _TeacherRows, theirs: Tensor, log_probs: Tensor) -> Tensor:
        """Add divergence and entropy; return the teacher's part of the target [b, V]."""
        theirs = theirs.to(self.dtype)
        probs = theirs.exp()
        if not teacher.divergence:
            self.entropy -= (probs * theirs).sum()
        # from the difference of the logarithms: that of two cross-entropies would lose a small divergence
        self.kl += theirs.sub_(log_probs).mul_(probs).sum()
        return probs.mul_(teacher.share)

    def _add_grads(self, grad: Tensor, states: Tensor, z: Tensor | None, rows: Tensor, part: slice) -> None:
        """Carry the raw logits' gradient [C, V] on to the matrices and to what they multiply."""
        grad_hidden, grad_weight, _, grad_z, grad_up = self.grads
        student = self.job.student
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
    # a narrower product is made before it is added: a few rows of it at a time, which stay in the caches
    rows = block_rows(states.shape[1], states.device.type)
    for part, columns in zip(total.split(rows), grad.split(rows, dim=1), strict=True):
        part += columns.t() @ states


def linear_cross_entropy(
    hidden: Tensor, unembedding: LMHeadLike, targets: Tensor, *, chunk: int | None = None
) -> LossSums:
    """Sum of `cross_entropy(logits(hidden), targets)` without the [N, V] logits.

    Rows with target IGNORE_INDEX are dropped before every product and cost nothing. Gradients flow to `hidden` and to
    the unembedding's tensors, each only if it requires one; the loss is float32 whatever the products' dtype.

    Args:
        hidden: [N, d]. unembedding: weight [V, d], bias [V] or None, softcap, scale, low_rank.
        targets: long [N], rows of the weight (token ids, unless it has a token_map) or IGNORE_INDEX.
        chunk: rows per chunk; by default `chunk_rows`.

    Raises:
        IndexError: a target is neither IGNORE_INDEX nor in [0, V).
    """
    return linear_loss(hidden, unembedding, targets, None, chunk)


def linear_kl(
    hidden: Tensor,
    unembedding: LMHeadLike,
    teacher_hidden: Tensor,
    teacher_lm_head: LMHeadLike,
    targets: Tensor,
    *,
    ahead: int = 0,
    chunk: int | None = None,
) -> LossSums:
    """Sum over rows of `KL(p_teacher || p_student)` in nats, without the [N, V] logits of either.

    Self-distillation's loss of the language model (Medusa, section 2.3.2; SPEC 1). Nothing flows back into the
    teacher. Where its distribution is the student's to the bit, value and gradients are exactly 0.

    Args:
        hidden: [N, d], the student's. unembedding: weight [V, d], bias [V] or None, softcap, scale, low_rank.
        teacher_hidden: [N, d']. teacher_lm_head: the teacher's, of the same V tokens; its LoRA branch, if it has
            one, counts without dropout.
        targets: long [N]. Rows with IGNORE_INDEX are dropped before every product; the others' token ids serve
            `correct` and `ce_sum` only.
        ahead: row n is compared with the teacher's row n + ahead.
        chunk: rows per chunk; by default `chunk_rows`.

    Raises:
        IndexError: a target is neither IGNORE_INDEX nor in [0, V), or a row that counts has no row `ahead` of it.
        ValueError: the teacher has another number of rows or tokens.
    """
    teacher = Teacher(teacher_hidden, teacher_lm_head, ahead, share=1.0, divergence=True)
    return linear_loss(hidden, unembedding, targets, teacher, chunk)


def linear_soft_cross_entropy(
    hidden: Tensor,
    unembedding: LMHeadLike,
    teacher_hidden: Tensor,
    teacher_lm_head: LMHeadLike,
    targets: Tensor,
    rho: float,
    *,
    ahead: int = 0,
    chunk: int | None = None,
) -> LossSums:
    """Sum over rows of the cross-entropy against `rho * p_teacher + (1 - rho) * onehot(target)`, in nats.

    The soft target of `medusa_distillation_regularization` (SPEC 6; the teacher's probabilities, where the fork took
    the student's own), and of heads that learn from distributions: head k at position t has `ahead` = k, for the
    teacher at t + k predicts the token at t + k + 1, as the head does.

    Arguments and errors as in `linear_kl`, and:

    Args:
        rho: share of the teacher in the target; 0 is plain cross-entropy, 1 that against the teacher alone.

    Raises:
        ValueError: rho is not in [0, 1].
    """
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"rho is the teacher's share of the target, a number in [0, 1], not {rho}")
    teacher = Teacher(teacher_hidden, teacher_lm_head, ahead, share=rho, divergence=False)
    return linear_loss(hidden, unembedding, targets, teacher, chunk)
