"""Cross-entropy and distillation losses that keep only one chunk of an lm_head's logits in memory.

Logits are computed a chunk of positions at a time, and used while the chunk is in memory (as in
Liger Kernel's fused linear cross-entropy, https://arxiv.org/abs/2410.10989):

    hidden [N, d] -- positions with a target --> states [C, d] of a chunk
        |  1. one product W h
    products [C, V]
        |  2. block by block: log-softmax [b, V] -> sums of the loss -> gradient
        |     (the gradient overwrites the products)
    gradient [C, V]
        |  3. two products
    gradients with respect to W [V, d] and states [C, d]

A block of logits fits into the caches. Only blocks are float32: chunks have the products' dtype.

Gradients are computed in one of two ways:

- With `grad_scale`, together with the loss. The caller gives the factor on the loss beforehand, so
  the logits are computed once, and gradients of trained matrices are added to their `.grad` without
  a temporary of that size. For training in one process.
- Without it, in autograd's backward pass, which computes the logits again. A matrix's gradient then
  exists only while the pass visits its loss, and hooks on the matrix see it, as DeepSpeed needs.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.models.lm_head import LMHead
from medusa_train.models.precision import autocast_dtype

#: Bytes of a chunk's logits; a teacher needs a second buffer of this size.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
#: On a GPU, chunks grow up to this many bytes or this share of its memory, whichever is smaller.
_MAX_CHUNK_BYTES = 2 << 30
_MEMORY_SHARE = 1 / 32
#: Fewest positions of a chunk.
_LEAST_CHUNK = 512
#: Bytes of a block's float32 logits.
_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


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
    all positions with a target.

    Positions with target IGNORE_INDEX are removed before every product. `hidden`, weight, bias and
    low-rank matrices get gradients in their own dtype if they require them; the teacher gets none.
    Products run in the weight's dtype or autocast's (a float32 master weight is cast once per
    pass); softmax and loss are float32. If the teacher's distribution equals the student's bit for
    bit, the divergence and its gradients are exactly 0.

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
    tensors = _tensors_of(lm_head, hidden, positions)
    teacher_tensors: _Tensors | None = None
    if teacher is not None:
        teacher_tensors = _teacher_tensors(teacher, positions)
    autocast = autocast_dtype(hidden.device.type)
    loss = _ChunkedLoss(lm_head, labels, positions, teacher, teacher_tensors, autocast, chunk)
    # 3. the sums, with gradients now or in autograd's backward pass
    if grad_scale is None:
        return LossSums(*_LinearLoss.apply(loss, *tensors))
    trained = [tensor is not None and tensor.requires_grad for tensor in tensors]
    with torch.autocast(hidden.device.type, enabled=False):  # all casts are explicit
        with torch.no_grad():
            grads = _zero_gradients(tensors, trained, in_place=True)
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


class GraphCut:
    """Detaches states from their graphs and collects their gradients, for one backward pass through
    these graphs later.
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
        """Run the backward pass with the gradients of the leaves."""
        pairs = [(state, leaf.grad) for state, leaf in self._pairs if leaf.grad is not None]
        self._pairs.clear()
        if pairs:
            states, grads = zip(*pairs, strict=True)
            with torch.autocast(states[0].device.type, enabled=False):
                torch.autograd.backward(states, grads)


class _LinearLoss(torch.autograd.Function):
    """Computes the sums; its backward pass computes the logits again, and their gradients."""

    @staticmethod
    def forward(ctx: Any, loss: _ChunkedLoss, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch.autocast(loss.labels.device.type, enabled=False):  # all casts are explicit
            sums = loss.sums(_Tensors(*tensors))
        ctx.loss = loss
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        tensors = _Tensors(*ctx.saved_tensors)
        grads = _zero_gradients(tensors, ctx.needs_input_grad[1:])
        # apply the factor (1 / number of targets, loss scaling) before casting: unscaled sums may
        # exceed the range of float16
        ctx.loss.sums(tensors, grads, float(grad_loss))
        cast: list[Tensor | None] = [None]
        for tensor, grad in zip(tensors, grads, strict=True):
            cast.append(None if tensor is None or grad is None else grad.to(tensor.dtype))
        return tuple(cast)


class _Tensors(NamedTuple):
    """The tensors from which logits are computed, or the gradients of these tensors; None if there
    is no such tensor or gradient.

        raw logits = weight h + bias + up z

    With LoRA, z is scaling * A h and up is B. With a token bias, z is the embedding of the previous
    token and up is R. Autograd computes the gradients of everything before z.

    Attributes:
        hidden: h at all positions, [N, d]; only the supervised ones are read.
        weight: [V, d].
        bias: [V].
        z: z at the supervised positions, [M, r].
        up: [V, r].
    """

    hidden: Any = None
    weight: Any = None
    bias: Tensor | None = None
    z: Tensor | None = None
    up: Tensor | None = None


_NO_GRADIENTS = _Tensors()


def _tensors_of(lm_head: LMHead, hidden: Tensor, positions: Tensor) -> _Tensors:
    """Return the tensors for an lm_head's logits at `positions` [M] of `hidden` [N, d (+ r)]."""
    weight, bias = lm_head.weight, lm_head.bias
    if lm_head.token_bias is not None:
        width = weight.shape[1]  # d
        z = hidden[positions, width:]
        return _Tensors(hidden[:, :width], weight, bias, z, lm_head.token_bias)
    if lm_head.low_rank is not None:
        z = lm_head.low_rank.project_down(hidden[positions])
        return _Tensors(hidden, weight, bias, z, lm_head.low_rank.b)
    return _Tensors(hidden, weight, bias)


@torch.no_grad()
def _teacher_tensors(teacher: Teacher, positions: Tensor) -> _Tensors:
    """Return the tensors for the teacher's logits at the student's `positions`."""
    lm_head = teacher.lm_head
    if lm_head.low_rank is not None:
        without_dropout = replace(lm_head.low_rank, dropout=lambda states: states)
        lm_head = replace(lm_head, low_rank=without_dropout)
    return _tensors_of(lm_head, teacher.hidden, positions + teacher.shift)


def _zero_gradients(tensors: _Tensors, trained: Sequence[bool], in_place: bool = False) -> _Tensors:
    """Return a zero gradient for each tensor that is trained.

    Gradients of matrices are float32 (float64 for float64 weights), since they are sums over many
    positions.

    Args:
        tensors: the tensors.
        trained: for each tensor, whether it is trained.
        in_place: for matrices whose `.grad` can be added to directly, return `.grad`; create it if
            there is none.
    """
    dtype = _softmax_dtype(tensors.weight)
    grads: dict[str, Tensor] = {}
    for (name, tensor), is_trained in zip(tensors._asdict().items(), trained, strict=True):
        if tensor is None or not is_trained:
            continue
        if name in ("hidden", "z"):
            grads[name] = torch.zeros_like(tensor)
        elif in_place and tensor.is_leaf and tensor.dtype == dtype:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            grads[name] = tensor.grad
        else:
            grads[name] = torch.zeros_like(tensor, dtype=dtype)
    return _Tensors(**grads)


def _softmax_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of logits, softmax and loss: float32, or float64 for float64 weights."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


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
    teacher_tensors: _Tensors | None
    autocast: torch.dtype | None
    chunk: int | None

    def sums(
        self, tensors: _Tensors, grads: _Tensors = _NO_GRADIENTS, scale: float = 1.0
    ) -> LossSums:
        """Return the sums, and add `scale` times the gradients of the loss to `grads`. Uses neither
        autograd nor autocast.

        Args:
            tensors: the tensors for the student's logits.
            grads: gradients to add to. Those of `hidden` and `z` must be zeros: each supervised
                position is assigned once. The gradient of `hidden` excludes the part that flows
                through z, which autograd adds.
            scale: factor on the gradients.
        """
        # 1. the logits of student and teacher, and the sizes of chunks and blocks
        count = len(self.labels)  # M
        student = _Logits(tensors, self.lm_head, self.positions, self.autocast)
        vocab = student.weight.shape[0]
        device = self.labels.device
        chunk = self.chunk
        if chunk is None:
            itemsize = student.products_dtype.itemsize
            chunk = chunk_size(vocab, device.type, itemsize, gpu_bytes(device))
        student.allocate(min(chunk, count))
        teacher: _Logits | None = None
        if self.teacher is not None and self.teacher_tensors is not None:
            positions = self.positions + self.teacher.shift
            teacher = _Logits(
                self.teacher_tensors, self.teacher.lm_head, positions, self.autocast, student
            )
            teacher.allocate(min(chunk, count))
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
        for rows in _parts(0, count, chunk):
            student.multiply(rows)
            if teacher is not None:
                teacher.multiply(rows)
            for block in _parts(rows.start, rows.stop, block_size(vocab, device.type)):
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
                student.add_gradients(rows, grads, scale_after)
        return sums

    def _add_block(
        self,
        sums: LossSums,
        student: _Logits,
        teacher: _Logits | None,
        rows: slice,
        wants_gradient: bool,
    ) -> Tensor | None:
        """Add a block, the b positions `rows` of M, to `sums`; return the gradient of its loss with
        respect to the raw logits, [b, V], if `wants_gradient`.
        """
        labels = self.labels[rows, None]  # [b, 1]
        # 1. the student's log-probabilities; scale and soft cap keep the order of the logits
        raw_logits = student.raw_logits(rows)  # [b, V]
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
            log_p = log_softmax(teacher.transform_(teacher.raw_logits(rows)), dim=1)
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


class _Logits:
    """The logits of an lm_head at M positions, a chunk at a time.

    Args:
        tensors: the tensors from which they are computed.
        lm_head: gives soft cap and scale.
        positions: indices into N, long [M].
        autocast: dtype of products under autocast; None without autocast.
        shared: logits whose cast weight is used again if both have the same weight.

    Attributes:
        weight, up: [V, d], and [V, r] or None, each in the dtype of its products.
        products_dtype: dtype of the buffer for W h: the wider of these two dtypes, because the
            buffer later holds the gradient for both matrices.
        dtype: dtype of logits, bias, softmax and loss.
    """

    weight: Tensor

    def __init__(
        self,
        tensors: _Tensors,
        lm_head: LMHead,
        positions: Tensor,
        autocast: torch.dtype | None,
        shared: _Logits | None = None,
    ) -> None:
        self.tensors = tensors
        self.lm_head = lm_head
        self.positions = positions
        if shared is not None and shared.tensors.weight is tensors.weight:
            self.weight = shared.weight
        else:
            self.weight = _cast(tensors.weight, autocast)
        self.dtype = _softmax_dtype(tensors.weight)
        self.products_dtype = self.weight.dtype
        self.up: Tensor | None = None
        if tensors.up is not None:
            self.up = _cast(tensors.up, autocast)
            self.products_dtype = torch.promote_types(self.weight.dtype, self.up.dtype)

    def allocate(self, chunk: int) -> None:
        """Allocate the buffer for the products of a chunk."""
        vocab = self.weight.shape[0]
        self._products = self.weight.new_empty(chunk, vocab, dtype=self.products_dtype)  # [C, V]

    def multiply(self, rows: slice) -> None:
        """Compute W h of a chunk, the positions `rows` of M."""
        self._start = rows.start
        states = self.tensors.hidden[self.positions[rows]].to(self.weight.dtype)  # [C, d]
        products = self.products_at(rows)  # [C, V]
        if products.dtype == self.weight.dtype:
            torch.mm(states, self.weight.t(), out=products)
        else:
            products.copy_(states @ self.weight.t())

    def products_at(self, rows: slice) -> Tensor:
        """Return the buffer's part [b, V] for the positions `rows` of M, in the current chunk."""
        return self._products[rows.start - self._start : rows.stop - self._start]

    def raw_logits(self, rows: slice) -> Tensor:
        """Return the logits before scale and soft cap at the positions `rows` of M, [b, V]. This
        may overwrite the products there.
        """
        logits = self.products_at(rows).to(self.dtype)  # [b, V]
        if self.tensors.bias is not None:
            logits += self.tensors.bias.to(self.dtype)
        if self.up is not None and self.tensors.z is not None:
            z = self.tensors.z[rows].to(self.up.dtype)  # [b, r]
            if self.up.dtype == self.dtype:
                logits.addmm_(z, self.up.t())
            else:
                logits += z @ self.up.t()
        return logits

    def transform_(self, logits: Tensor) -> Tensor:
        """Apply scale and soft cap to raw logits in place."""
        if self.lm_head.scale != 1.0:
            logits *= self.lm_head.scale
        softcap = self.lm_head.softcap
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits

    def transform_grad_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Convert the gradient of `logits` to the gradient of the raw logits in place; overwrites
        `logits`.

        Autograd's derivative was 4 to 9 % slower, and needs memory for four more blocks.
        """
        if self.lm_head.softcap is not None:
            tanh = logits.div_(self.lm_head.softcap)
            grad.addcmul_(grad, tanh.square_(), value=-1.0)  # tanh' = 1 - tanh^2
        if self.lm_head.scale != 1.0:
            grad *= self.lm_head.scale
        return grad

    def add_gradients(self, rows: slice, grads: _Tensors, scale: float) -> None:
        """Add `scale` times the gradients of both matrices and their inputs. At `rows`, the buffer
        must hold the gradient of the raw logits instead of the products.
        """
        tensors = self.tensors
        if self.up is not None and tensors.z is not None:
            self._add_product(self.up, tensors.z, grads.z, grads.up, rows, rows, scale)
        positions = self.positions[rows]  # [C] indices into N
        self._add_product(
            self.weight, tensors.hidden, grads.hidden, grads.weight, rows, positions, scale
        )

    def _add_product(
        self,
        matrix: Tensor,
        inputs: Tensor,
        input_grad: Tensor | None,
        matrix_grad: Tensor | None,
        rows: slice,
        at: slice | Tensor,
        scale: float,
    ) -> None:
        """Add the gradients of one matrix product.

        Args:
            matrix: [V, d] or [V, r].
            inputs: inputs of the product, [.., d] or [.., r].
            input_grad, matrix_grad: gradients to add to; None if not needed.
            rows: the chunk, positions of M.
            at: indices of the chunk's positions in `inputs`.
            scale: factor on the gradients.
        """
        grad = self.products_at(rows).to(matrix.dtype)  # [C, V]
        if input_grad is not None:
            states_grad = (grad @ matrix).to(input_grad.dtype)  # [C, d]
            input_grad[at] = states_grad.mul_(scale)
        if matrix_grad is None:
            return
        states = inputs[at].to(matrix.dtype)  # [C, d]
        if matrix.dtype == matrix_grad.dtype:
            matrix_grad.addmm_(grad.t(), states, alpha=scale)
            return
        # a product of lower precision needs a temporary. Compute it for a few tokens at a time, so
        # that it stays in the caches
        tokens = block_size(states.shape[1], states.device.type)
        for total, part in zip(matrix_grad.split(tokens), grad.split(tokens, dim=1), strict=True):
            total.add_(part.t() @ states, alpha=scale)


def _cast(matrix: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return a detached matrix in the dtype of its products: autocast's, if there is autocast."""
    if autocast is None or matrix.dtype == torch.float64:
        return matrix.detach()
    return matrix.detach().to(autocast)


def _parts(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield consecutive parts of start .. stop - 1 of length `size`; the last may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def chunk_size(vocab: int, device: str, itemsize: int = 4, memory: int = 0) -> int:
    """Return the number of positions of a chunk, so that its logits stay small compared with the
    weights.

    It is at least `_LEAST_CHUNK`, because every chunk reads the whole weight and, if it is trained,
    its whole gradient. On a GPU the bytes of a chunk are doubled while they fit. The total memory
    decides, not the free memory: otherwise chunks, and so rounding, would depend on other processes
    and change after a resume.

    Args:
        vocab: number of logits per position, V.
        device: type of device.
        itemsize: bytes per logit.
        memory: total bytes of the device. With 0, as for CPUs, the chunk does not grow.
    """
    size = _CHUNK_BYTES.get(device, _CHUNK_BYTES["cuda"])
    while 2 * size <= min(_MAX_CHUNK_BYTES, _MEMORY_SHARE * memory):
        size *= 2
    return max(_LEAST_CHUNK, size // (itemsize * vocab))


@cache
def gpu_bytes(device: torch.device) -> int:
    """Return the memory of a GPU; 0 on a CPU, where chunks do not grow.

    The result is cached, because every loss of every micro-batch needs it.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def block_size(width: int, device: str) -> int:
    """Return how many rows of `width` float32 numbers to compute at a time on a type of device: few
    enough for a CPU's caches, many enough to use a GPU fully.
    """
    block_bytes = _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"])
    rows = block_bytes // (4 * width)
    return max(1, rows)
