"""Weights laid out ahead for a CPU's matrix kernels, where that is faster; knows no model, no draft and no decoding.

A product of few rows on a CPU spends much of its time on the way to the kernel: oneDNN lays the weights out anew in
every call, or torch takes a path that reads them slowly. Laid out once they are read as the kernel wants them, for one
row (plain decoding) as for the rows of a tree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from medusa_train.models.precision import free_memory

_DTYPES = (torch.float32, torch.bfloat16)
_SHARE = 0.4  # of the free memory that a second copy of the weights may take
_SAMPLE = 16  # of the weights are timed, spread over the model
_TRIALS = 40


class PrepackedWeight:
    """One weight [out, in] as oneDNN wants it: a copy, as large as the weight."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`linear(x, weight, bias)`: [..., in] -> [..., out]; without gradients."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


class PrepackedLinear(nn.Linear):
    """A linear map over the same parameters, with a layout beside them that products without gradients use.

    torch.compile lays out the weights that it is given itself.
    """

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, bias=False, device="meta")
        self.weight, self.bias = like.weight, like.bias
        self._layout: PrepackedWeight | None = PrepackedWeight(like.weight)
        self.train(like.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self._layout is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        return self._layout.linear(input, self.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PrepackedLinear:
        self._layout = None  # other weights from here on
        super()._apply(fn, recurse)
        return self


def prepack_linears(module: nn.Module) -> bool:
    """Give the linear layers in `module` a layout, if they are on a CPU and faster with it; says whether.

    Layers of other classes (quantised, with an adapter) stay as they are. The layouts take as much memory again as the
    weights, so nothing is done where little is free.
    """
    found = [
        (owner, name, child)
        for owner in module.modules()
        for name, child in owner.named_children()
        if type(child) is nn.Linear
    ]
    if not found or not worth_prepacking([child.weight for _, _, child in found]):
        return False
    for owner, name, child in found:
        setattr(owner, name, PrepackedLinear(child))
    return True


def is_prepacked(module: nn.Module) -> bool:
    """Whether linear layers in `module` have a layout."""
    return any(isinstance(child, PrepackedLinear) for child in module.modules())


def worth_prepacking(weights: Sequence[Tensor]) -> bool:
    """Whether these weights can be laid out, fit into memory a second time, and one-row products are faster so."""
    if not weights:
        return False
    device, dtype = weights[0].device, weights[0].dtype
    if device.type != "cpu" or dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    free = free_memory(device)
    if free is not None and sum(weight.numel() * weight.element_size() for weight in weights) > _SHARE * free:
        return False
    return _faster(weights[:: -(-len(weights) // _SAMPLE)])


@torch.no_grad()
def _faster(weights: Sequence[Tensor]) -> bool:
    """Whether one row takes less time with layouts, measured in turns over several weights, as a model goes on."""
    rows = [torch.ones(1, 1, weight.shape[1], dtype=weight.dtype) for weight in weights]
    try:
        layouts = [PrepackedWeight(weight) for weight in weights]
    except (RuntimeError, AttributeError):  # a build of torch without these kernels
        return False
    stock: list[float] = []
    packed: list[float] = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        for row, weight in zip(rows, weights, strict=True):
            linear(row, weight)
        between = time.perf_counter()
        for row, layout in zip(rows, layouts, strict=True):
            layout.linear(row)
        stock.append(between - started)
        packed.append(time.perf_counter() - between)
    return statistics.median(packed) < statistics.median(stock)
