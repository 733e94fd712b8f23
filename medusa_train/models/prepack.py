"""Prepack the weights of linear layers for matrix products of few rows on a CPU.

Without prepacking, oneDNN reorders a weight in every call, or torch uses a slower kernel. Weights
that are reordered once make products of few rows (plain decoding, or the nodes of a tree) faster.
Other devices are not affected.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from medusa_train.models.precision import free_memory
from medusa_train.rounding import ceil_div

_DTYPES = (torch.float32, torch.bfloat16)
_MEMORY_SHARE = 0.4  # share of the free memory that prepacked copies may use
_TIMED_WEIGHTS = 16  # number of timed weights, spread over the model
_TRIALS = 40


class PrepackedWeight:
    """A copy of a weight [out, in] in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `linear(x, weight, bias)` without gradients, [..., in] -> [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


class PrepackedLinear(nn.Linear):
    """A linear layer with the parameters of `layer`, and a prepacked copy for passes without
    gradients.

    Under torch.compile the parameters are used, because it prepacks weights itself. Moving or
    converting the layer drops the copy.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._prepacked: PrepackedWeight | None = PrepackedWeight(layer.weight)
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer, [..., in] -> [..., out]."""
        if self._prepacked is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        return self._prepacked.linear(input, self.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PrepackedLinear:
        self._prepacked = None  # it is a copy of the old weights
        super()._apply(fn, recurse)
        return self


def prepack_linears(module: nn.Module) -> bool:
    """Replace the linear layers in `module` by `PrepackedLinear`, if `worth_prepacking`.

    Subclasses of `nn.Linear` (quantized layers, layers with an adapter) are left unchanged.

    Returns:
        Whether layers were replaced.
    """
    linears = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not worth_prepacking([child.weight for _, _, child in linears]):
        return False
    for parent, name, child in linears:
        setattr(parent, name, PrepackedLinear(child))
    return True


def is_prepacked(module: nn.Module) -> bool:
    """Return whether `module` contains prepacked linear layers."""
    return any(isinstance(child, PrepackedLinear) for child in module.modules())


def copies_fit(weights: Iterable[Tensor]) -> bool:
    """Return whether prepacked copies of the weights leave enough free memory."""
    total = 0
    device = torch.device("cpu")
    for weight in weights:
        total += weight.numel() * weight.element_size()
        device = weight.device
    free = free_memory(device)
    return free is None or total <= _MEMORY_SHARE * free


def worth_prepacking(weights: Sequence[Tensor]) -> bool:
    """Return whether prepacked copies of the weights are supported, fit into free memory, and make
    products of one row faster.
    """
    if not weights:
        return False
    device, dtype = weights[0].device, weights[0].dtype
    if device.type != "cpu" or dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if not copies_fit(weights):
        return False
    every = ceil_div(len(weights), _TIMED_WEIGHTS)
    return _is_faster(weights[::every])


@torch.no_grad()
def _is_faster(weights: Sequence[Tensor]) -> bool:
    """Time products of one row over several weights, alternately with and without prepacking, and
    compare the medians.
    """
    rows = [torch.ones(1, 1, weight.shape[1], dtype=weight.dtype) for weight in weights]
    try:
        prepacked = [PrepackedWeight(weight) for weight in weights]
    except (RuntimeError, AttributeError):  # torch built without these kernels
        return False
    stock_seconds: list[float] = []
    prepacked_seconds: list[float] = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        for row, weight in zip(rows, weights, strict=True):
            linear(row, weight)
        middle = time.perf_counter()
        for row, packed in zip(rows, prepacked, strict=True):
            packed.linear(row)
        stock_seconds.append(middle - started)
        prepacked_seconds.append(time.perf_counter() - middle)
    return statistics.median(prepacked_seconds) < statistics.median(stock_seconds)
