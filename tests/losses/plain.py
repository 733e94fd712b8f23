"""The losses as a textbook writes them, in float64 with all logits at once, and instruments for the chunked ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_train.models.lm_head import LMHead, LowRank

RANK = 3
VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"softcap": 3.0},
    {"scale": 0.4},
    {"rank": RANK},
    {"bias": True, "softcap": 2.0, "scale": 1.7, "rank": RANK},
]


def name(variant: dict[str, Any]) -> str:
    return "+".join(variant) or "plain"


class Random:
    """Leaves of one seed, made in float64 and rounded, so that every dtype gets the same numbers."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def leaf(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.dtype).requires_grad_()

    def unembedding(
        self,
        vocab: int,
        width: int,
        *,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        rank: int = 0,
        dropout: Callable[[Tensor], Tensor] = lambda h: h,
    ) -> LMHead:
        weight = self.leaf(vocab, width)
        low_rank = LowRank(self.leaf(rank, width), self.leaf(vocab, rank), 0.5, dropout) if rank else None
        return LMHead(weight, self.leaf(vocab) if bias else None, softcap, scale, low_rank)


def leaves(unembedding: LMHead) -> list[Tensor]:
    low_rank = unembedding.low_rank
    found = [unembedding.weight, unembedding.bias]
    if low_rank is not None:
        found += [low_rank.a, low_rank.b]
    return [tensor for tensor in found if tensor is not None and tensor.requires_grad]


def accumulated(compute: Callable[[], Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that `compute` leaves in `.grad`, where there was none."""
    for tensor in tensors:
        tensor.grad = None
    compute()
    return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]


def assert_gradients(
    fused: Callable[[float | None], Tensor], wanted: Tensor, tensors: Sequence[Tensor], tolerance: float = 1e-10
) -> None:
    """Compare with those of `wanted`: gradients of a backward pass, and those computed with the loss (`grad_scale`)."""
    theirs = torch.autograd.grad(wanted, tensors)
    in_backward, at_once = torch.autograd.grad(fused(None), tensors), accumulated(lambda: fused(1.0), tensors)
    for mine, direct, other in zip(in_backward, at_once, theirs, strict=True):
        assert mine.dtype == direct.dtype
        torch.testing.assert_close(mine, other.to(mine.dtype), rtol=0, atol=tolerance)
        torch.testing.assert_close(direct, other.to(mine.dtype), rtol=0, atol=tolerance)


def assert_equal(
    compute: Callable[..., Any], wanted: Tensor, tensors: Sequence[Tensor], tolerance: float = 1e-10, count: int = 1
) -> None:
    """Compare `compute().loss_sum` with `wanted`, and the gradients of their means over `count` rows."""
    assert compute().loss_sum.item() == pytest.approx(wanted.item(), rel=tolerance)

    def mean(scale: float | None) -> Tensor:
        total: Tensor = compute(grad_scale=scale and scale / count).loss_sum
        return total if scale else total / count

    assert_gradients(mean, wanted / count, tensors, tolerance)


def plain_logits(hidden: Tensor, head: LMHead, *, dropout: bool = True) -> Tensor:
    hidden = hidden.double()
    logits = hidden @ head.weight.double().t()
    if head.low_rank is not None:
        kept = head.low_rank.dropout(hidden) if dropout else hidden
        logits = logits + head.low_rank.scaling * (kept @ head.low_rank.a.double().t() @ head.low_rank.b.double().t())
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


class Rows(TorchDispatchMode):
    """Counts rows that come out of products of the given width, and products of a weight gradient's shape."""

    def __init__(self, width: int, gradient: tuple[int, int]) -> None:
        super().__init__()
        self.width, self.gradient = width, gradient
        self.rows = 0
        self.weight_grads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out) and out.shape[1] == self.width:
            self.rows += out.shape[0]
        if func in (torch.ops.aten.addmm_.default, torch.ops.aten.mm.default) and out.shape == self.gradient:
            self.weight_grads += 1
        return out


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak of the bytes that torch's allocator holds beyond those before `run`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
