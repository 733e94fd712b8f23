"""The logits of an lm_head at many positions, a chunk at a time, and the gradients of its matrices.

Logits are computed a chunk of positions at a time, and used while the chunk is in memory (as in
Liger Kernel's fused linear cross-entropy, https://arxiv.org/abs/2410.10989):

    hidden [N, d] -- positions with a target --> states [C, d] of a chunk
        |  1. one product W h
    products [C, V]
        |  2. block by block: logits [b, V] -> the caller's loss -> its gradient
        |     (the gradient overwrites the products)
    gradient [C, V]
        |  3. two products
    gradients with respect to W [V, d] and states [C, d]

A block of logits fits into the caches. Only blocks are float32: chunks have the products' dtype.
Shapes are those of `losses.linear_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_train.models.lm_head import LMHead

#: Bytes of a chunk's logits; a teacher needs a second buffer of this size.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
#: On a GPU, chunks grow up to this many bytes or this share of its memory, whichever is smaller.
_MAX_CHUNK_BYTES = 2 << 30
_MEMORY_SHARE = 1 / 32
#: Fewest positions of a chunk.
_LEAST_CHUNK = 512
#: Bytes of a block's float32 logits.
_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


class LogitTensors(NamedTuple):
    """The tensors from which logits are computed; None if there is no such tensor.

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

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    z: Tensor | None = None
    up: Tensor | None = None


class LogitGradients(NamedTuple):
    """The gradients of `LogitTensors`, in the same order and shapes; None if not needed."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    z: Tensor | None = None
    up: Tensor | None = None


def logit_tensors(lm_head: LMHead, hidden: Tensor, positions: Tensor) -> LogitTensors:
    """Return the tensors for an lm_head's logits at `positions` [M] of `hidden` [N, d (+ r)]."""
    weight, bias = lm_head.weight, lm_head.bias
    if lm_head.token_bias is not None:
        width = weight.shape[1]  # d
        z = hidden[positions, width:]
        return LogitTensors(hidden[:, :width], weight, bias, z, lm_head.token_bias)
    if lm_head.low_rank is not None:
        z = lm_head.low_rank.project_down(hidden[positions])
        return LogitTensors(hidden, weight, bias, z, lm_head.low_rank.b)
    return LogitTensors(hidden, weight, bias)


def zero_gradients(
    tensors: LogitTensors, trained: Sequence[bool], in_place: bool = False
) -> LogitGradients:
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
    return LogitGradients(**grads)


def _softmax_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of logits, softmax and loss: float32, or float64 for float64 weights."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class ChunkedLogits:
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
        tensors: LogitTensors,
        lm_head: LMHead,
        positions: Tensor,
        autocast: torch.dtype | None,
        shared: ChunkedLogits | None = None,
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

    def multiply(self, chunk: slice) -> None:
        """Compute W h of a chunk of the M positions."""
        self._start = chunk.start
        states = self.tensors.hidden[self.positions[chunk]].to(self.weight.dtype)  # [C, d]
        products = self.products_at(chunk)  # [C, V]
        if products.dtype == self.weight.dtype:
            torch.mm(states, self.weight.t(), out=products)
        else:
            products.copy_(states @ self.weight.t())

    def products_at(self, block: slice) -> Tensor:
        """Return the buffer's part [b, V] for a block of the current chunk, or for all of it."""
        return self._products[block.start - self._start : block.stop - self._start]

    def raw_logits(self, block: slice) -> Tensor:
        """Return the logits of a block before scale and soft cap, [b, V]. This may overwrite its
        products.
        """
        logits = self.products_at(block).to(self.dtype)  # [b, V]
        if self.tensors.bias is not None:
            logits += self.tensors.bias.to(self.dtype)
        if self.up is not None and self.tensors.z is not None:
            z = self.tensors.z[block].to(self.up.dtype)  # [b, r]
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

    def add_gradients(self, chunk: slice, grads: LogitGradients, scale: float) -> None:
        """Add `scale` times the gradients of both matrices and their inputs, for a chunk. The
        buffer must hold the gradient of the raw logits instead of the products.
        """
        tensors = self.tensors
        if self.up is not None and tensors.z is not None:
            self._add_product(self.up, tensors.z, grads.z, grads.up, chunk, chunk, scale)
        positions = self.positions[chunk]  # [C] indices into N
        self._add_product(
            self.weight, tensors.hidden, grads.hidden, grads.weight, chunk, positions, scale
        )

    def _add_product(
        self,
        matrix: Tensor,
        inputs: Tensor,
        input_grad: Tensor | None,
        matrix_grad: Tensor | None,
        chunk: slice,
        at: slice | Tensor,
        scale: float,
    ) -> None:
        """Add the gradients of one matrix product.

        Args:
            matrix: [V, d] or [V, r].
            inputs: inputs of the product, [.., d] or [.., r].
            input_grad, matrix_grad: gradients to add to; None if not needed.
            chunk: the chunk.
            at: indices of its positions in `inputs`.
            scale: factor on the gradients.
        """
        grad = self.products_at(chunk).to(matrix.dtype)  # [C, V]
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


def parts(start: int, stop: int, size: int) -> Iterator[slice]:
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
