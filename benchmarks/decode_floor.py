"""The least that a decoding step can take: what it must read and compute, over what the device reads and computes.

Knows no step and no table. The rates are measured, not looked up: a streaming read of a buffer that no cache holds,
and a large matrix product in each dtype, on all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from clock import Clock
from torch.nn.functional import linear


@dataclass(frozen=True)
class Sizes:
    """Numbers (not bytes) of a Llama-like model.

    Attributes:
        layers: L. hidden: d. vocab: V. body: of all layers' matrices. norms: of all norms.
        queries, keys: width of a position's queries (heads x head size), and of its keys or values.
    """

    layers: int
    hidden: int
    vocab: int
    body: int
    norms: int
    queries: int
    keys: int

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """From a configuration of transformers: attention, a gated MLP and two norms in every layer."""
        hidden, layers = config.hidden_size, config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config.intermediate_size
        return cls(layers, hidden, config.vocab_size, layers * layer, (2 * layers + 1) * hidden, queries, keys)

    @property
    def read(self) -> int:
        """Weights that a step reads: everything but the embedding table, of which it reads single rows."""
        return self.body + self.norms + self.vocab * self.hidden

    def cached(self, context: int, batch: int) -> int:
        """Keys and values of `context` positions in `batch` rows."""
        return 2 * self.layers * self.keys * context * batch

    def model_bytes(self, itemsize: int) -> int:
        """What the model takes in memory."""
        return (self.read + self.vocab * self.hidden) * itemsize

    def step_bytes(self, context: int, batch: int, itemsize: int) -> int:
        """What a pass behind `context` cached positions reads, however many nodes it verifies."""
        return (self.read + self.cached(context, batch)) * itemsize

    def step_operations(self, rows: int, context: int, batch: int) -> int:
        """Multiplications and additions of a pass over `rows` nodes, root included, in each row of the batch."""
        products = 2 * (self.body + self.vocab * self.hidden)
        attention = 4 * self.layers * self.queries * (context + rows)  # scores and values
        return batch * rows * (products + attention)

    def head_numbers(self, heads: int, *, shared: bool) -> int:
        """Weights of `heads` Medusa heads of one block; with a shared lm_head its matrix once."""
        return heads * (self.hidden**2 + self.hidden) + (1 if shared else heads) * self.vocab * self.hidden

    def head_operations(self, heads: int, batch: int) -> int:
        """Multiplications and additions of `heads` heads, at one state for each row of the batch."""
        return 2 * batch * heads * (self.hidden**2 + self.vocab * self.hidden)


@dataclass(frozen=True)
class Floor:
    """The least seconds, and what sets them: `bytes` or `operations`."""

    seconds: float
    bound: str


@dataclass(frozen=True)
class Rates:
    """What a device can do: bytes read per second, and operations per second by dtype."""

    bandwidth: float
    matrix: dict[str, float]

    def floor(self, size: float, operations: float, dtype: str) -> Floor:
        """max(bytes / bandwidth, operations / rate): reading and computing may overlap perfectly."""
        read, computed = size / self.bandwidth, operations / self.matrix[dtype]
        return Floor(read, "bytes") if read >= computed else Floor(computed, "operations")


def measure_rates(device: torch.device, dtypes: Sequence[str], seconds: float = 1.0) -> Rates:
    """Both rates, about so many seconds for each of them."""
    matrix = {dtype: matrix_rate(device, getattr(torch, dtype), seconds) for dtype in dtypes}
    return Rates(read_bandwidth(device, seconds), matrix)


def read_bandwidth(device: torch.device, seconds: float = 1.0, size: int | None = None) -> float:
    """Bytes per second of the fastest streaming read.

    No single operation is the fastest everywhere (a sum may be bound by its additions), so several are tried: sums,
    maxima, and products of a matrix and a vector, which is what decoding reads weights with.

    Args:
        size: bytes of the buffer; by default many times the largest caches there are.
    """
    size = size or (4 << 30 if device.type == "cuda" else 512 << 20)
    buffer = torch.ones(size // 4, device=device)
    clock = Clock(device)
    ways: list[Callable[[], object]] = [buffer.sum, buffer.amax]
    for dtype in (torch.float32, torch.bfloat16):
        matrix = buffer.view(dtype).view(-1, 4096)
        row = torch.ones(1, 4096, dtype=dtype, device=device)
        ways.append(partial(linear, row, matrix))
    return buffer.nbytes / min(clock.fastest(way, seconds / len(ways)) for way in ways)


def matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float = 1.0, width: int | None = None) -> float:
    """Operations per second of a square matrix product, 2 n^3 of them.

    Args:
        width: n; by default large enough for the device to be busy.
    """
    width = width or (8192 if device.type == "cuda" else 2048)
    left, right = (torch.rand(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * width**3 / Clock(device).fastest(lambda: torch.mm(left, right, out=out), seconds)
