"""Llamas of known shapes with random weights, their sizes, and the least time that a decoding step
can take.

Latency and memory do not depend on the values of weights, so no 7B model has to be downloaded. The
device's rates are measured with streaming reads of a buffer larger than any cache, and with a large
matrix product for each dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_train.models.loading import keep_trainable_kernels
from medusa_train.models.precision import choose_kernels, default_device, emulates

#: Hidden size, MLP size, number of layers, attention heads and key/value heads, and the vocabulary
#: size if it is not `VOCAB_SIZE`. 1.5B is Qwen2.5 without its biases, 8B is Llama 3.1.
SHAPES: dict[str, tuple[int, ...]] = {
    "160M": (768, 3072, 12, 12, 12),
    "1B": (2048, 5632, 22, 32, 4),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "7B": (4096, 11008, 32, 32, 32),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "13B": (5120, 13824, 40, 40, 40),
}
SMALL_LLAMA = (128, 256, 2, 4, 4, 512)  # used in place of every other shape without a GPU
VOCAB_SIZE = 32000
CONTEXT = 8192
# this many random numbers are drawn once and copied; a prime, so that the rows of a matrix differ
RANDOM_BLOCK = 1_000_003


def llama_config(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab_size: int = VOCAB_SIZE
) -> LlamaConfig:
    """Configure a Llama with untied embeddings and no eos token."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def random_model(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, shared: Any = None
) -> Any:
    """Create a model with random weights directly in `dtype` on `device`.

    Args:
        shared: a model of the same shape, whose weights are used in place of new ones.
    """
    choose_kernels(default_device())
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    if shared is not None:
        model.load_state_dict(shared.state_dict(), assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
        return model.eval().requires_grad_(False)
    model.to_empty(device=device)
    # create the rotary buffers again, because to_empty discards their values
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    generator = torch.Generator(device=device).manual_seed(0)
    block = torch.empty(RANDOM_BLOCK, dtype=torch.float32, device=device)
    block = block.uniform_(-1.0, 1.0, generator=generator).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # norms
            continue
        flat = parameter.view(-1)
        # copying is faster than drawing billions of numbers
        for start in range(0, len(flat), len(block)):
            part = flat[start : start + len(block)]
            part.copy_(block[: len(part)]).mul_((3.0 / parameter.shape[1]) ** 0.5)
    return model.eval().requires_grad_(False)


def quantize_nf4(model: Any) -> None:
    """Quantize every linear layer except lm_head to NF4 in place, as loading in 4 bits does.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"compress_statistics": True, "quant_type": "nf4"}
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if not isinstance(layer, nn.Linear) or layer is model.get_output_embeddings():
                continue
            weight = layer.weight.data
            with torch.device("meta"):
                quantized = Linear4bit(
                    layer.in_features,
                    layer.out_features,
                    bias=False,
                    compute_dtype=weight.dtype,
                    **options,
                )
            quantized.weight = Params4bit(weight, requires_grad=False, module=quantized, **options)
            # `to` quantizes the weight, even if the device stays the same
            setattr(module, name, quantized.to(weight.device))
    model.is_loaded_in_4bit = True  # read by PEFT
    keep_trainable_kernels(model)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama-like model, in numbers of weights (not bytes).

    Attributes:
        layers: number of layers L.
        hidden: hidden size d.
        vocab: vocabulary size V.
        body: number of weights in the matrices of all layers.
        norms: number of weights of all norms.
        queries: width of one position's queries (heads x head size).
        keys: width of one position's keys, which is also the width of its values.
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
        """Read the sizes from a transformers configuration: attention, gated MLP and two norms in
        every layer.
        """
        hidden, layers = config.hidden_size, config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config.intermediate_size
        return cls(
            layers,
            hidden,
            config.vocab_size,
            layers * layer,
            (2 * layers + 1) * hidden,
            queries,
            keys,
        )

    @property
    def read(self) -> int:
        """Number of weights that a step reads: all except the embedding table, of which it reads
        only a few rows.
        """
        return self.body + self.norms + self.vocab * self.hidden

    @property
    def total(self) -> int:
        """Number of all weights."""
        return self.read + self.vocab * self.hidden

    def cached(self, context: int, batch: int) -> int:
        """Return the number of cached keys and values of `context` positions in `batch` rows."""
        return 2 * self.layers * self.keys * context * batch

    def step_operations(self, nodes: int, context: int, batch: int) -> int:
        """Return the multiplications and additions of a pass over `nodes` nodes per row, root
        included.
        """
        products = 2 * (self.body + self.vocab * self.hidden)
        attention = 4 * self.layers * self.queries * (context + nodes)  # scores and values
        return batch * nodes * (products + attention)

    def head_weights(self, heads: int) -> int:
        """Return the number of weights of `heads` Medusa heads with one block each."""
        return heads * (self.hidden**2 + self.hidden + self.vocab * self.hidden)

    def head_operations(self, heads: int, batch: int) -> int:
        """Return the multiplications and additions of `heads` heads for one state per row."""
        return 2 * batch * heads * (self.hidden**2 + self.vocab * self.hidden)


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device: bytes read per second, and operations per second by dtype."""

    bandwidth: float
    matrix: dict[str, float]

    def floor(self, size: float, operations: float, dtype: str) -> float:
        """Return the least seconds: max(bytes / bandwidth, operations / rate)."""
        return max(size / self.bandwidth, operations / self.matrix[dtype])


def measure_rates(device: torch.device, dtypes: Sequence[str], seconds: float = 1.0) -> Rates:
    """Measure bandwidth and matrix rates, about `seconds` for each."""
    matrix = {dtype: matrix_rate(device, getattr(torch, dtype), seconds) for dtype in dtypes}
    return Rates(read_bandwidth(device, seconds), matrix)


def default_dtypes() -> list[str]:
    """Return the dtypes that are measured by default: float32, and bfloat16 unless this is a CPU
    that emulates it.
    """
    device = default_device()
    if device.type == "cpu" and emulates(device, torch.bfloat16):
        return ["float32"]
    return ["float32", "bfloat16"]


def read_bandwidth(device: torch.device, seconds: float = 1.0, size: int | None = None) -> float:
    """Return bytes per second of the fastest of several streaming reads of a `size`-byte buffer.

    A sum may be limited by its additions, so maxima and matrix-vector products are also tried.
    """
    buffer = torch.ones(
        (size or (4 << 30 if device.type == "cuda" else 512 << 20)) // 4, device=device
    )
    reads: list[Callable[[], object]] = [buffer.sum, buffer.amax]
    for dtype in (torch.float32, torch.bfloat16):
        matrix = buffer.view(dtype).view(-1, 4096)
        reads.append(partial(linear, torch.ones(1, 4096, dtype=dtype, device=device), matrix))
    return buffer.nbytes / min(fastest_call(read, device, seconds / len(reads)) for read in reads)


def matrix_rate(
    device: torch.device, dtype: torch.dtype, seconds: float = 1.0, width: int | None = None
) -> float:
    """Return operations per second of an n x n matrix product, 2 n^3 operations each.

    The matrices contain positive and negative numbers: with sums that only grow, a GPU takes less
    power and may clock higher. A dtype that the device emulates would take minutes at the default
    width, so it gets a smaller width.
    """
    width = width or (8192 if device.type == "cuda" else 2048)
    if emulates(device, dtype):
        width = min(width, 256)
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * width**3 / fastest_call(lambda: torch.mm(left, right, out=out), device, seconds)


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call; on a GPU by CUDA events, which include waits for Python."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def fastest_call(
    call: Callable[[], object], device: torch.device, seconds: float, minimum: int = 3
) -> float:
    """Return the seconds of the fastest call, after a warm-up. At least `minimum` calls are timed,
    for about `seconds`.
    """
    call()
    times: list[float] = []
    while len(times) < minimum or sum(times) < seconds:
        times.append(time_call(call, device))
    return min(times)
