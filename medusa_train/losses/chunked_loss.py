"""The loss of one predictor and its gradients, computed a chunk of positions at a time.

    hidden [N, d] -- positions with a target --> states [C, d] of a chunk
        |  1. one product W h
    products [C, V]
        |  2. block by block: log-softmax [b, V] -> sums of the loss -> gradient, in the products' place
    gradient [C, V]
        |  3. two products
    gradients over W [V, d] and over states [C, d]

A block of logits fits the caches, and only blocks are float32: chunks are in the products' dtype.

Nothing here is seen by autograd: `losses.fused_losses` calls it within its own backward formula and
passes the gradients on.

Every target is a distribution: the label, a teacher's prediction, or a mixture. The loss is a
cross-entropy up to a constant, and its gradient with respect to the logits is softmax minus target.

Letters: N positions (the B x T of a micro-batch, flattened), M of them with a target, C of a chunk, b
of a block; V tokens, d the width of states, r of a low-rank part (LoRA, or a bias of the token before).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from medusa_train.losses.logits import Projection, product_dtype
from medusa_train.models.lm_head import LMHead

#: Bytes of a chunk's logits.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
#: Chunks of a GPU grow up to so many bytes, and to this fraction of its memory.
_MAX_CHUNK_BYTES = 2 << 30
_MEMORY_SHARE = 1 / 32
#: Positions of the smallest chunk.
_LEAST_CHUNK = 512
#: Bytes of a block's float32 logits.
_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


class Teacher(NamedTuple):
    """The teacher's part of the target; it gets no gradients.

    Attributes:
        hidden: [N, d'], aligned with the student's positions.
        lm_head: over the same V tokens; its LoRA branch is applied without dropout.
        shift: position n of the student is compared with position n + shift of the teacher, which
            is in the same row for every position with a target.
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
    """What a loss is computed from, besides the student's hidden states and z [M, r], the input of
    a low-rank part: logits are W h + up z.

    Attributes:
        positions: those with a target, long [M], indices among N.
        labels: their targets, long [M], indices of logits.
        lm_head: of the student. teacher: None for labels only.
        autocast: the products' dtype under autocast.
        chunk: positions of a product; None: `chunk_size`.
    """

    positions: Tensor
    labels: Tensor
    lm_head: LMHead
    teacher: Teacher | None
    autocast: torch.dtype | None
    chunk: int | None


class Gradients(NamedTuple):
    """Tensors that receive a loss's gradients; None where none is needed.

    Attributes:
        hidden, z: [N, d] and [M, r], zeros: each supervised position is assigned once. That of
            `hidden` is of the path through W; z's path to it is the caller's.
        weight, bias, up: [V, d], [V] and [V, r], in the dtype of the softmax: gradients are added
            to them.
    """

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    z: Tensor | None = None
    up: Tensor | None = None


NO_GRADIENTS = Gradients()


class ChunkedLoss:
    """Sums over supervised positions, and the gradients of their loss.

    Args:
        device: of the states.
        grads: get `scale` times the gradients of the sum that `loss` returns.

    Attributes:
        correct: long scalar, positions whose argmax is the label.
        ce, kl: cross-entropy against the labels and KL(teacher || student) in nats, float32
            (float64 for float64 weights).
        entropy: the teacher's; it stays 0 for a loss that is the divergence alone.
    """

    def __init__(
        self,
        inputs: LossInputs,
        device: torch.device,
        grads: Gradients = NO_GRADIENTS,
        scale: float = 1.0,
    ) -> None:
        self.inputs = inputs
        self.grads = grads
        self.any_grad = any(grad is not None for grad in grads)
        student = Projection(inputs.lm_head, inputs.autocast)
        self.student = student

        # 1. where the gradient is scaled. In float16 before the products that sum over positions,
        # or the sums may exceed its range whatever the loss scale; else after them, where there is
        # less to multiply. The bias, summed in the softmax's dtype, is scaled on its own
        self.scale = scale
        is_half = student.weight.dtype == torch.float16
        self.scale_before = scale if is_half else 1.0
        self.scale_after = 1.0 if is_half else scale

        # 2. the sums
        self.correct = inputs.labels.new_zeros(())
        self.ce = student.weight.new_zeros((), dtype=student.dtype)
        self.kl = torch.zeros_like(self.ce)
        self.entropy = torch.zeros_like(self.ce)

        # 3. positions of a chunk and of a block
        vocab = student.weight.shape[0]
        chunk = inputs.chunk
        if chunk is None:
            itemsize = student.buffer_dtype.itemsize
            chunk = chunk_size(vocab, device.type, itemsize, gpu_bytes(device))
        self.chunk = chunk
        self.block = block_size(vocab, device.type)

        # 4. [C, V]: W h of a chunk, and later the gradient over it
        largest = min(chunk, len(inputs.positions))
        self.products = student.weight.new_empty(largest, vocab, dtype=student.buffer_dtype)
        self.teacher: _TeacherLogits | None = None
        if inputs.teacher is not None:
            self.teacher = _TeacherLogits(inputs.teacher, inputs, student, largest)

    def add_all(self, hidden: Tensor, z: Tensor | None) -> None:
        """Add all supervised positions, of states [N, d] and low-rank z [M, r]."""
        count = len(self.inputs.positions)  # M
        for start in range(0, count, self.chunk):
            end = min(start + self.chunk, count)
            self._add_chunk(hidden, z, slice(start, end))

    def loss(self) -> Tensor:
        """Return the loss from the sums so far."""
        if self.teacher is None:
            return self.ce.clone()
        soft = self.kl
        if not self.teacher.divergence:
            soft = soft + self.entropy  # cross-entropy
        weight = self.teacher.teacher_weight
        return weight * soft + (1.0 - weight) * self.ce

    def _add_chunk(self, hidden: Tensor, z: Tensor | None, part: slice) -> None:
        """Add the supervised positions in `part`, C of M."""
        # 1. the products of the whole chunk
        positions = self.inputs.positions[part]  # [C] indices among N
        count = len(positions)
        states = hidden[positions].to(self.student.weight.dtype)  # [C, d]
        products = self.products[:count]  # [C, V]
        self.student.product(states, products)
        if self.teacher is not None:
            self.teacher.product(part)
        # 2. loss, and the gradient over the logits in the products' place, block by block
        for first in range(0, count, self.block):
            last = min(first + self.block, count)
            self._add_block(z, slice(first, last), part.start)
        # 3. from there to weights and states
        if self.any_grad:
            if z is not None:
                z = z[part]  # [C, r]
            self._add_grads(products, states, z, positions, part)

    def _add_block(self, z: Tensor | None, block: slice, start: int) -> None:
        """Add the positions `block`, b of the chunk that starts at `start`; their products become
        the gradient over them.
        """
        student = self.student
        teacher = self.teacher
        part = slice(start + block.start, start + block.stop)  # among the supervised positions
        product = self.products[block]  # [b, V]
        labels = self.inputs.labels[part].unsqueeze(1)  # [b, 1]
        if z is not None:
            z = z[part]  # [b, r]

        # 1. the student's log-probabilities
        logits = student.raw_logits(product, z)  # [b, V]
        # scale and soft cap, which follow, are monotonic
        best = logits.argmax(dim=1, keepdim=True)  # [b, 1]
        self.correct += (best == labels).sum()
        logits = student.transform_(logits)  # in place: now scaled and soft-capped
        log_probs = log_softmax(logits, dim=1)  # [b, V]

        # 2. against the labels
        self.ce -= log_probs.gather(1, labels).sum()

        # 3. against the teacher's distribution
        label_weight = 1.0
        soft_target = None
        if teacher is not None:
            teacher_log_probs = teacher.log_probs(block, part).to(student.dtype)  # [b, V]
            teacher_probs = teacher_log_probs.exp()  # [b, V]
            if not teacher.divergence:
                self.entropy -= (teacher_probs * teacher_log_probs).sum()
            # sum differences of logarithms: a difference of two cross-entropies would cancel for
            # small KL
            self.kl += teacher_log_probs.sub_(log_probs).mul_(teacher_probs).sum()
            soft_target = teacher_probs.mul_(teacher.teacher_weight)
            label_weight = 1.0 - teacher.teacher_weight
        if not self.any_grad:
            return

        # 4. the gradient over the logits: softmax minus target
        grad = log_probs.exp_()  # [b, V]
        if soft_target is not None:
            grad -= soft_target
        if label_weight:
            minus_weight = grad.new_full((1, 1), -label_weight).expand_as(labels)  # [b, 1]
            grad.scatter_add_(1, labels, minus_weight)

        # 5. the gradient over the raw logits: through soft cap and scale, whose derivative is
        # computed from the capped logits
        student.transform_grad_(grad, logits)
        if self.grads.bias is not None:
            self.grads.bias.add_(grad.sum(dim=0), alpha=self.scale)
        if self.scale_before != 1.0:
            grad.mul_(self.scale_before)
        product.copy_(grad)

    def _add_grads(
        self, grad: Tensor, states: Tensor, z: Tensor | None, positions: Tensor, part: slice
    ) -> None:
        """Backpropagate the raw logits' gradient to weights, z and hidden states.

        Args:
            grad: [C, V], times `scale_before`.
            states: [C, d]. z: [C, r].
            positions: of the chunk among N, long [C]. part: of the chunk among M.
        """
        student = self.student
        grads = self.grads
        # 1. through the low-rank part, up [V, r] z [C, r]
        if student.up is not None and z is not None:
            narrow = grad.to(student.up.dtype)
            if grads.z is not None:
                grad_z = (narrow @ student.up).to(grads.z.dtype)  # [C, r]
                grads.z[part] = grad_z.mul_(self.scale_after)
            if grads.up is not None:
                _add_product(grads.up, narrow, z.to(narrow.dtype), self.scale_after)
            del narrow
        # 2. through W h
        grad = grad.to(student.weight.dtype)
        if grads.hidden is not None:
            grad_states = (grad @ student.weight).to(grads.hidden.dtype)  # [C, d]
            grads.hidden.index_copy_(0, positions, grad_states.mul_(self.scale_after))
        if grads.weight is not None:
            _add_product(grads.weight, grad, states, self.scale_after)


def _add_product(total: Tensor, grad: Tensor, states: Tensor, scale: float) -> None:
    """`total += scale * grad^T states`, in place: [V, d], [C, V], [C, d]."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), states, alpha=scale)
        return
    # a product of lower precision needs a temporary: of a few tokens at a time, which stay in the
    # caches
    tokens = block_size(states.shape[1], states.device.type)
    for weight_rows, columns in zip(total.split(tokens), grad.split(tokens, dim=1), strict=True):
        weight_rows.add_(columns.t() @ states, alpha=scale)


class _TeacherLogits:
    """The teacher's log-probabilities for the student's supervised positions [M].

    Args:
        chunk: positions of the largest chunk.
    """

    def __init__(
        self, teacher: Teacher, inputs: LossInputs, student: Projection, chunk: int
    ) -> None:
        self.teacher_weight = teacher.teacher_weight
        self.divergence = teacher.divergence
        self.positions = inputs.positions + teacher.shift  # [M]
        self.hidden = teacher.hidden.detach()
        # where it has the student's W, the copy of it in the products' dtype is used again
        self.projection = Projection(teacher.lm_head, inputs.autocast, shared=student)
        weight = self.projection.weight
        # [C, V]: W h of a chunk
        self.products = weight.new_empty(chunk, weight.shape[0], dtype=self.projection.buffer_dtype)
        self.z: Tensor | None = None  # [M, r]
        low_rank = teacher.lm_head.low_rank
        if low_rank is not None:  # without dropout
            a = low_rank.a.detach().to(product_dtype(low_rank.a, inputs.autocast))  # [r, d']
            states = self.hidden[self.positions].to(a.dtype)  # [M, d']
            self.z = (states @ a.t()) * low_rank.scaling

    def product(self, part: slice) -> None:
        """Compute W h of a chunk of supervised positions."""
        positions = self.positions[part]  # [C]
        states = self.hidden[positions].to(self.projection.weight.dtype)  # [C, d']
        self.projection.product(states, self.products[: len(states)])

    def log_probs(self, block: slice, part: slice) -> Tensor:
        """Return log-probabilities [b, V] of the positions `block` of the chunk, `part` of all M;
        their products may be overwritten.
        """
        z = self.z
        if z is not None:
            z = z[part]  # [b, r]
        logits = self.projection.raw_logits(self.products[block], z)  # [b, V]
        return log_softmax(self.projection.transform_(logits), dim=1)


def chunk_size(vocab: int, device: str, itemsize: int = 4, memory: int = 0) -> int:
    """Return the positions of one chunk: its logits (`itemsize` bytes each) stay small compared with the
    weights.

    At least 512, since every chunk reads the whole weight and, if trained, its whole gradient. On a
    GPU more, in powers of two, according to its whole `memory` in bytes. What is free of it differs
    beside other processes and after a resume, and with it the order in which gradients are summed.
    """
    size = _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"])
    while 2 * size <= min(_MAX_CHUNK_BYTES, _MEMORY_SHARE * memory):
        size *= 2
    return max(_LEAST_CHUNK, size // (itemsize * vocab))


@cache
def gpu_bytes(device: torch.device) -> int:
    """Return the memory of a GPU; 0 on a CPU, whose chunks fit its caches.

    Kept, since this is asked for every loss of every micro-batch.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def block_size(vocab: int, device: str) -> int:
    """Return how many rows of `vocab` float32 numbers are computed at a time: few enough for the
    CPU's caches, many enough to fill a GPU.
    """
    return max(1, _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"]) // (4 * vocab))
