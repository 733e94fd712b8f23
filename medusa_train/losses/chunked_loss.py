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

#: Bytes of a chunk's logits; a teacher has a buffer of its own for as many.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
#: Chunks of a GPU grow up to so many bytes, or to this fraction of its memory: the smaller of both.
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
    """What a loss is computed from, besides the student's hidden states and z: these two autograd
    saves for the backward pass, and what is here is kept as it is.

    z [M, r] is the input of a low-rank part, which adds `up z` to W h. With LoRA z is scaling * A h
    and up is B; with a token bias z is the embedding e and up is R.

    Attributes:
        positions: those with a target, long [M], indices among N.
        labels: their targets, long [M], indices of logits.
        lm_head: of the student. teacher: None for labels only.
        autocast: the products' dtype under autocast; None without autocast: the weights' own.
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

    They are in the order in which `losses.fused_losses` passes the tensors that they belong to.

    Attributes:
        hidden, z: [N, d] and [M, r], zeros: each supervised position is assigned once. That of
            `hidden` excludes what flows to hidden through z, which autograd adds.
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

        # 1. whether the gradient is scaled before or after the products that sum over positions
        self.scale = scale
        is_float16 = student.weight.dtype == torch.float16
        if is_float16:  # before: so the sums stay in range, for every loss scale
            self.scale_before = scale
            self.scale_after = 1.0
        else:  # after: there are fewer numbers to multiply
            self.scale_before = 1.0
            self.scale_after = scale

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
        self.chunk_size = chunk
        self.block_size = block_size(vocab, device.type)

        # 4. [C, V]: W h of a chunk, and later the gradient over it
        largest = min(chunk, len(inputs.positions))
        self.products = student.weight.new_empty(largest, vocab, dtype=student.buffer_dtype)
        self.teacher: _TeacherLogits | None = None
        if inputs.teacher is not None:
            self.teacher = _TeacherLogits(inputs.teacher, inputs, student, largest)

    def add_all(self, hidden: Tensor, z: Tensor | None) -> None:
        """Add all supervised positions, of states [N, d] and low-rank z [M, r]."""
        count = len(self.inputs.positions)  # M
        for start in range(0, count, self.chunk_size):
            stop = min(start + self.chunk_size, count)
            self._add_chunk(hidden, z, slice(start, stop))

    def loss(self) -> Tensor:
        """Return the loss from the sums so far."""
        if self.teacher is None:
            return self.ce.clone()  # autograd must not get one tensor for two outputs
        soft = self.kl
        if not self.teacher.divergence:
            soft = soft + self.entropy  # cross-entropy
        weight = self.teacher.teacher_weight
        return weight * soft + (1.0 - weight) * self.ce

    def _add_chunk(self, hidden: Tensor, z: Tensor | None, in_all: slice) -> None:
        """Add a chunk: the C supervised positions `in_all`, of M."""
        # 1. the products of the whole chunk
        positions = self.inputs.positions[in_all]  # [C] indices among N
        count = len(positions)
        states = hidden[positions].to(self.student.weight.dtype)  # [C, d]
        z_chunk: Tensor | None = None
        if z is not None:
            z_chunk = z[in_all]  # [C, r]
        products = self.products[:count]  # [C, V]
        self.student.multiply_into(states, products)
        if self.teacher is not None:
            self.teacher.multiply_chunk(in_all)
        # 2. loss, and the gradient over the raw logits in the products' place, block by block
        for start in range(0, count, self.block_size):
            stop = min(start + self.block_size, count)
            self._add_block(z_chunk, slice(start, stop), in_all.start)
        # 3. from there to weights and states
        if self.any_grad:
            logit_grad = products  # [C, V] which now hold the gradient
            self._add_grads(logit_grad, states, z_chunk, positions, in_all)

    def _add_block(self, z_chunk: Tensor | None, in_chunk: slice, chunk_start: int) -> None:
        """Add a block: the b positions `in_chunk` of the chunk that starts at `chunk_start`, of M.
        Their products become the gradient over them.
        """
        student = self.student
        teacher = self.teacher
        in_all = slice(chunk_start + in_chunk.start, chunk_start + in_chunk.stop)  # b of M
        products = self.products[in_chunk]  # [b, V]
        labels = self.inputs.labels[in_all].unsqueeze(1)  # [b, 1]
        z_block: Tensor | None = None
        if z_chunk is not None:
            z_block = z_chunk[in_chunk]  # [b, r]

        # 1. the student's log-probabilities. The logits may share memory with `products`, which are
        # not read again; step 5 reads the logits for the last time and writes the gradient there
        raw_logits = student.raw_logits(products, z_block)  # [b, V]
        # scale and soft cap, which follow, are monotonic
        best = raw_logits.argmax(dim=1, keepdim=True)  # [b, 1]
        self.correct += (best == labels).sum()
        logits = student.transform_(raw_logits)  # [b, V] in the place of the raw ones
        log_probs = log_softmax(logits, dim=1)  # [b, V] log q

        # 2. against the labels
        self.ce -= log_probs.gather(1, labels).sum()

        # 3. against the teacher's distribution p
        soft_target: Tensor | None
        if teacher is None:
            label_weight = 1.0
            soft_target = None
        else:
            label_weight = 1.0 - teacher.teacher_weight
            teacher_log_probs = teacher.log_probs(in_chunk, in_all).to(student.dtype)  # [b, V]
            teacher_probs = teacher_log_probs.exp()  # [b, V] p
            if not teacher.divergence:
                # the entropy is - sum p log p
                self.entropy -= (teacher_probs * teacher_log_probs).sum()
            # sum p (log p - log q): a difference of two cross-entropies would cancel for small KL.
            # Each tensor takes the place of the one before, which is not read again
            log_ratio = teacher_log_probs.sub_(log_probs)  # [b, V] log p - log q
            kl_terms = log_ratio.mul_(teacher_probs)  # [b, V]
            self.kl += kl_terms.sum()
            soft_target = teacher_probs.mul_(teacher.teacher_weight)  # [b, V]
        if not self.any_grad:
            return

        # 4. the gradient over the logits: softmax minus target
        logit_grad = log_probs.exp_()  # [b, V] q, in the place of log q
        if soft_target is not None:
            logit_grad.sub_(soft_target)
        if label_weight > 0.0:
            # a tensor, since `scatter_add_` takes no number
            minus_weight = logit_grad.new_full((1, 1), -label_weight).expand_as(labels)  # [b, 1]
            logit_grad.scatter_add_(1, labels, minus_weight)

        # 5. the gradient over the raw logits: through soft cap and scale, whose derivative is
        # computed from the capped logits, which it overwrites
        student.transform_grad_(logit_grad, logits)
        if self.grads.bias is not None:
            # summed here in the softmax's dtype, so that the scale is applied here, too
            self.grads.bias.add_(logit_grad.sum(dim=0), alpha=self.scale)
        if self.scale_before != 1.0:
            logit_grad.mul_(self.scale_before)
        products.copy_(logit_grad)

    def _add_grads(
        self,
        logit_grad: Tensor,
        states: Tensor,
        z_chunk: Tensor | None,
        positions: Tensor,
        in_all: slice,
    ) -> None:
        """Backpropagate the raw logits' gradient to weights, z and hidden states.

        Args:
            logit_grad: [C, V], times `scale_before`.
            states: [C, d]. z_chunk: [C, r].
            positions: of the chunk among N, long [C]. in_all: of the chunk among M.
        """
        student = self.student
        grads = self.grads
        # 1. through the low-rank part, up [V, r] z [C, r]
        if student.up is not None and z_chunk is not None:
            grad_in_up_dtype = logit_grad.to(student.up.dtype)  # [C, V]
            if grads.z is not None:
                grad_z = grad_in_up_dtype @ student.up  # [C, r]
                grad_z = grad_z.to(grads.z.dtype)
                grads.z[in_all] = grad_z.mul_(self.scale_after)
            if grads.up is not None:
                z_in_up_dtype = z_chunk.to(student.up.dtype)  # [C, r]
                _add_product(grads.up, grad_in_up_dtype, z_in_up_dtype, self.scale_after)
            del grad_in_up_dtype  # may be a copy of [C, V], as the next one
        # 2. through W h
        grad_in_weight_dtype = logit_grad.to(student.weight.dtype)  # [C, V]
        if grads.hidden is not None:
            grad_states = grad_in_weight_dtype @ student.weight  # [C, d]
            grad_states = grad_states.to(grads.hidden.dtype)
            grads.hidden.index_copy_(0, positions, grad_states.mul_(self.scale_after))
        if grads.weight is not None:
            _add_product(grads.weight, grad_in_weight_dtype, states, self.scale_after)


def _add_product(total: Tensor, logit_grad: Tensor, inputs: Tensor, scale: float) -> None:
    """`total += scale * logit_grad^T inputs`, in place: [V, d], [C, V], [C, d]; for `up` and z r in
    place of d.
    """
    if logit_grad.dtype == total.dtype:
        total.addmm_(logit_grad.t(), inputs, alpha=scale)
        return
    # a product of lower precision needs a temporary: of a few tokens at a time, which stay in the
    # caches
    num_tokens = block_size(inputs.shape[1], inputs.device.type)
    total_parts = total.split(num_tokens)  # [tokens, d] each
    grad_parts = logit_grad.split(num_tokens, dim=1)  # [C, tokens] each
    for total_part, grad_part in zip(total_parts, grad_parts, strict=True):
        total_part.add_(grad_part.t() @ inputs, alpha=scale)


class _TeacherLogits:
    """The teacher's log-probabilities for the student's supervised positions [M].

    Args:
        teacher: whose lm_head has no token bias: no target model's has one.
        inputs: of the loss: the student's positions, and the dtype of products.
        student: its W is used again where the teacher has the same.
        largest: positions of the largest chunk.
    """

    def __init__(
        self, teacher: Teacher, inputs: LossInputs, student: Projection, largest: int
    ) -> None:
        assert teacher.lm_head.token_bias is None
        self.teacher_weight = teacher.teacher_weight
        self.divergence = teacher.divergence
        self.positions = inputs.positions + teacher.shift  # [M]
        self.hidden = teacher.hidden.detach()
        # the student's W in the products' dtype may be a copy, which need not be made again
        self.projection = Projection(teacher.lm_head, inputs.autocast, shared=student)
        weight = self.projection.weight
        # [C, V]: W h of a chunk
        vocab = weight.shape[0]
        self.products = weight.new_empty(largest, vocab, dtype=self.projection.buffer_dtype)
        self.z: Tensor | None = None  # [M, r]
        low_rank = teacher.lm_head.low_rank
        if low_rank is not None:
            # without dropout. z is small, so all of it is computed at once; the copy of M states is
            # freed before the first chunk
            a = low_rank.a.detach().to(product_dtype(low_rank.a, inputs.autocast))  # [r, d']
            states = self.hidden[self.positions].to(a.dtype)  # [M, d']
            self.z = (states @ a.t()) * low_rank.scaling

    def multiply_chunk(self, in_all: slice) -> None:
        """Compute W h of a chunk, the supervised positions `in_all` of M, into `products`."""
        positions = self.positions[in_all]  # [C]
        states = self.hidden[positions].to(self.projection.weight.dtype)  # [C, d']
        self.projection.multiply_into(states, self.products[: len(states)])

    def log_probs(self, in_chunk: slice, in_all: slice) -> Tensor:
        """Return log-probabilities [b, V] of a block, the positions `in_chunk` of the chunk and
        `in_all` of M; their products may be overwritten.
        """
        z_block: Tensor | None = None
        if self.z is not None:
            z_block = self.z[in_all]  # [b, r]
        raw_logits = self.projection.raw_logits(self.products[in_chunk], z_block)  # [b, V]
        logits = self.projection.transform_(raw_logits)  # in the place of the raw ones
        return log_softmax(logits, dim=1)


def chunk_size(vocab: int, device: str, itemsize: int = 4, memory: int = 0) -> int:
    """Return the positions of one chunk: its logits (`itemsize` bytes each) stay small compared with the
    weights.

    At least `_LEAST_CHUNK`, since every chunk reads the whole weight and, if trained, its whole
    gradient. On a GPU more, in powers of two. Its total memory decides, not its free memory: else
    chunks, and so rounding, would differ next to other processes and after a resume.

    Args:
        device: its type. memory: its total bytes; 0, as for CPUs: the chunk does not grow.
    """
    size = _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"])
    while 2 * size <= min(_MAX_CHUNK_BYTES, _MEMORY_SHARE * memory):
        size *= 2
    return max(_LEAST_CHUNK, size // (itemsize * vocab))


@cache
def gpu_bytes(device: torch.device) -> int:
    """Return the memory of a GPU; 0 on a CPU, where chunks do not grow.

    Kept, since this is asked for every loss of every micro-batch.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def block_size(width: int, device: str) -> int:
    """Return how many rows of `width` float32 numbers are computed at a time on a type of device:
    few enough for the CPU's caches, many enough to fill a GPU.
    """
    block_bytes = _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"])
    rows = block_bytes // (4 * width)
    return max(1, rows)
