"""The loss of one predictor and its gradients, computed a chunk of rows at a time.

A chunk is one matrix product; softmax and loss run over blocks of it that fit the caches, and write
the gradient over the logits in the products' dtype, so float32 logits exist for one block only.

Every target is a distribution: the label, a teacher's prediction, or a mixture. The loss is a
cross-entropy up to a constant, and its gradient with respect to the logits is softmax minus target.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from medusa_train.losses.logits import Projection, product_dtype
from medusa_train.models.lm_head import LMHead

_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
#: Chunks of a GPU grow up to so many bytes, and to this fraction of the memory that no process has
# taken.
_MAX_CHUNK_BYTES, _FREE_SHARE = 2 << 30, 1 / 8
_MIN_ROWS = 512
_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


class Teacher(NamedTuple):
    """The teacher's part of the target; it gets no gradients.

    Attributes:
        hidden: [N, d'], aligned with the student's rows.
        lm_head: over the same V tokens; its LoRA branch is applied without dropout.
        shift: row n of the student is compared with row n + shift of the teacher.
        teacher_weight: weight of the teacher in the target; the label has the rest.
        divergence: subtract the teacher's entropy: KL instead of cross-entropy, with the same
            gradient.
    """

    hidden: Tensor
    lm_head: LMHead
    shift: int = 0
    teacher_weight: float = 1.0
    divergence: bool = False


class LossInputs(NamedTuple):
    """What a loss is computed from, besides the student's hidden states and the low-rank z.

    Attributes:
        rows: long [M], indices of the supervised rows among N. labels: long [M], rows of the
            weight.
        autocast: the products' dtype under autocast. chunk: rows of a product; None: `chunk_rows`.
    """

    rows: Tensor
    labels: Tensor
    lm_head: LMHead
    teacher: Teacher | None
    autocast: torch.dtype | None
    chunk: int | None


class Gradients(NamedTuple):
    """Tensors that receive a loss's gradients; None where none is needed.

    Attributes:
        hidden: [N, d], z: [M, r], zeros: each supervised row is written once.
        weight: [V, d], bias: [V], up: [V, r], in the dtype of the softmax: gradients are added to
            them.
    """

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    z: Tensor | None = None
    up: Tensor | None = None


NO_GRADIENTS = Gradients()


class ChunkedLoss:
    """Sums over the supervised rows of one call, and the gradients of their loss.

    Attributes:
        correct: long scalar, rows whose argmax is the label. ce, kl: cross-entropy against the
        labels and KL(teacher || student) in nats, float32 (float64 for float64 weights). entropy:
        the teacher's.
    """

    def __init__(
        self,
        inputs: LossInputs,
        hidden: Tensor,
        z: Tensor | None,
        grads: Gradients = NO_GRADIENTS,
        scale: float = 1.0,
    ) -> None:
        """Compute the sums from states [N, d] and z [M, r], and add `scale` times the loss's
        gradients to `grads`.
        """
        self.inputs = inputs
        self.student = student = Projection(inputs.lm_head, inputs.autocast)
        self.teacher: _TeacherRows | None = None
        if inputs.teacher is not None:
            self.teacher = _TeacherRows(inputs.teacher, inputs, student)
        self.grads, self.scale = grads, scale
        # sums over rows may exceed float16's range whatever the loss scale, unless they are scaled
        # before
        half = student.weight.dtype == torch.float16
        self.scale_before, self.scale_after = (scale, 1.0) if half else (1.0, scale)
        self.any_grad = any(grad is not None for grad in grads)
        self.correct = inputs.labels.new_zeros(())
        self.ce, self.kl, self.entropy = (
            student.weight.new_zeros((), dtype=student.dtype) for _ in range(3)
        )

        vocab, device = student.weight.shape[0], hidden.device.type
        chunk = inputs.chunk or chunk_rows(
            vocab, device, student.buffer_dtype.itemsize, free_bytes(hidden.device)
        )
        self.block = block_rows(vocab, device)
        rows = min(chunk, inputs.rows.shape[0])
        self.buffer = student.weight.new_empty(rows, vocab, dtype=student.buffer_dtype)
        self.theirs: Tensor | None = None
        if self.teacher is not None:
            self.theirs = student.weight.new_empty(
                rows, vocab, dtype=self.teacher.matrix.buffer_dtype
            )
        for start in range(0, inputs.rows.shape[0], chunk):
            self._add_chunk(hidden, z, slice(start, start + chunk))

    def loss(self) -> Tensor:
        """Return the loss from the sums so far."""
        if (teacher := self.teacher) is None:
            return self.ce.clone()
        soft = self.kl if teacher.divergence else self.kl + self.entropy
        return teacher.teacher_weight * soft + (1.0 - teacher.teacher_weight) * self.ce

    def _add_chunk(self, hidden: Tensor, z: Tensor | None, part: slice) -> None:
        """Add the supervised rows in `part`."""
        student, rows = self.student, self.inputs.rows[part]
        states = hidden[rows].to(student.weight.dtype)
        logits = self.buffer[: len(rows)]
        student.product(states, logits)
        if self.teacher is not None and self.theirs is not None:
            self.teacher.product(part, self.theirs[: len(rows)])
        for first in range(0, len(rows), self.block):
            self._add_block(z, slice(first, min(first + self.block, len(rows))), part.start)
        if self.any_grad:
            self._add_grads(logits, states, None if z is None else z[part], rows, part)

    def _add_block(self, z: Tensor | None, block: slice, start: int) -> None:
        """Add a block of the chunk that starts at `start`; overwrite its raw logits with their
        gradient.
        """
        student = self.student
        part = slice(start + block.start, start + block.stop)
        product, index = self.buffer[block], self.inputs.labels[part].unsqueeze(1)
        logits = student.raw_logits(product, None if z is None else z[part])  # [b, V]
        # scale and soft cap are monotonic
        self.correct += (logits.argmax(dim=1, keepdim=True) == index).sum()
        log_probs = log_softmax(student.transform_(logits), dim=1)
        self.ce -= log_probs.gather(1, index).sum()
        theirs = None
        if self.teacher is not None and self.theirs is not None:
            theirs = self.teacher.log_probs(self.theirs[block], part).to(student.dtype)
        grad = self._add_sums(log_probs, index, theirs)
        if not self.any_grad:
            return
        student.transform_grad_(grad, logits)
        if self.grads.bias is not None:
            self.grads.bias.add_(grad.sum(dim=0), alpha=self.scale)
        if self.scale_before != 1.0:
            grad.mul_(self.scale_before)
        product.copy_(grad)

    def _add_sums(self, log_probs: Tensor, index: Tensor, theirs: Tensor | None) -> Tensor:
        """Add KL and entropy of a block; return its gradient over the logits, softmax minus target.

        `log_probs` [b, V] and the teacher's, `theirs`, are overwritten; `index` [b, 1] are the
        labels.
        """
        soft, label_weight = None, 1.0
        if self.teacher is not None and theirs is not None:
            probs = theirs.exp()
            if not self.teacher.divergence:
                self.entropy -= (probs * theirs).sum()
            # sum differences of logarithms: a difference of two cross-entropies would cancel for
            # small KL
            self.kl += theirs.sub_(log_probs).mul_(probs).sum()
            soft, label_weight = (
                probs.mul_(self.teacher.teacher_weight),
                1.0 - self.teacher.teacher_weight,
            )
        if not self.any_grad:
            return log_probs
        grad = log_probs.exp_()
        if soft is not None:
            grad -= soft
        if label_weight:
            grad.scatter_add_(1, index, grad.new_full((1, 1), -label_weight).expand_as(index))
        return grad

    def _add_grads(
        self, grad: Tensor, states: Tensor, z: Tensor | None, rows: Tensor, part: slice
    ) -> None:
        """Backpropagate the raw logits' gradient [C, V], times `scale_before`, to weights, z and
        hidden states.
        """
        student, grads = self.student, self.grads
        if student.up is not None and z is not None:
            narrow = grad.to(student.up.dtype)
            if grads.z is not None:
                grads.z[part] = (narrow @ student.up).to(grads.z.dtype).mul_(self.scale_after)
            if grads.up is not None:
                _add_product(grads.up, narrow, z.to(narrow.dtype), self.scale_after)
            del narrow
        grad = grad.to(student.weight.dtype)
        if grads.hidden is not None:
            grads.hidden.index_copy_(
                0, rows, (grad @ student.weight).to(grads.hidden.dtype).mul_(self.scale_after)
            )
        if grads.weight is not None:
            _add_product(grads.weight, grad, states, self.scale_after)


def _add_product(total: Tensor, grad: Tensor, states: Tensor, scale: float) -> None:
    """`total += scale * grad^T states`, in place: [V, d], [C, V], [C, d]."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), states, alpha=scale)
        return
    # a product of lower precision needs a temporary: a few rows at a time, which stay in the caches
    rows = block_rows(states.shape[1], states.device.type)
    for part, columns in zip(total.split(rows), grad.split(rows, dim=1), strict=True):
        part.add_(columns.t() @ states, alpha=scale)


class _TeacherRows:
    """The teacher's log-probabilities for the student's supervised rows [M]."""

    def __init__(self, teacher: Teacher, inputs: LossInputs, student: Projection) -> None:
        self.rows = inputs.rows + teacher.shift
        self.hidden = teacher.hidden.detach()
        self.matrix = Projection(teacher.lm_head, inputs.autocast, shared=student)
        self.teacher_weight, self.divergence = teacher.teacher_weight, teacher.divergence
        self.z: Tensor | None = None
        low_rank = teacher.lm_head.low_rank
        if low_rank is not None:
            a = low_rank.a.detach().to(product_dtype(low_rank.a, inputs.autocast))
            # without dropout
            self.z = (self.hidden[self.rows].to(a.dtype) @ a.t()) * low_rank.scaling

    def product(self, part: slice, out: Tensor) -> None:
        """Write W h of a chunk of supervised rows into `out` [C, V]."""
        self.matrix.product(self.hidden[self.rows[part]].to(self.matrix.weight.dtype), out)

    def log_probs(self, product: Tensor, part: slice) -> Tensor:
        """Return log-probabilities [b, V] of a block from its W h, which may be overwritten."""
        logits = self.matrix.raw_logits(product, None if self.z is None else self.z[part])
        return log_softmax(self.matrix.transform_(logits), dim=1)


def chunk_rows(vocab: int, device: str, itemsize: int = 4, free: int = 0) -> int:
    """Return the rows of one chunk: its logits (`itemsize` bytes each) stay small compared with the
    weights.

    At least 512, since every chunk reads the whole weight and, if trained, its whole gradient. On a
    GPU more, in powers of two so that few sizes occur, where `free` bytes leave room.
    """
    size = _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"])
    while 2 * size <= min(_MAX_CHUNK_BYTES, _FREE_SHARE * free):
        size *= 2
    return max(_MIN_ROWS, size // (itemsize * vocab))


def free_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that no tensor has taken; 0 on a CPU, whose chunks fit its caches."""
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def block_rows(vocab: int, device: str) -> int:
    """Return the rows of one softmax: few enough for the CPU's caches, many enough to fill a GPU."""
    return max(1, _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"]) // (4 * vocab))
