"""The losses as a textbook writes them, in float64 with all logits at once, and instruments for the
chunked ones.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.linear_loss import LossSums, Teacher, linear_loss
from medusa_train.models.lm_head import LMHead, LowRank

N, D, V, RANK = 37, 12, 29, 3
D_TEACHER, AHEAD = 7, 2
VARIANTS: list[dict[str, Any]] = [
    {},
    {"softcap": 3.0},
    {"rank": RANK},
    {"bias": True, "softcap": 2.0, "scale": 1.7, "rank": RANK},
]
#: A Markov bias; its hidden states carry the embedding of the token before.
TOKEN_BIAS: dict[str, Any] = {"bias": True, "softcap": 2.0, "scale": 1.7, "token_rank": RANK}


def name(variant: dict[str, Any]) -> str:
    return "+".join(variant) or "plain"


class Random:
    """Leaves of one seed, made in float64 and rounded, so that every dtype gets the same numbers."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def leaf(self, *shape: int) -> Tensor:
        return (
            torch.randn(*shape, generator=self.generator, dtype=torch.float64)
            .to(self.dtype)
            .requires_grad_()
        )

    def unembedding(
        self,
        vocab: int,
        width: int,
        *,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        rank: int = 0,
        token_rank: int = 0,
        dropout: Callable[[Tensor], Tensor] = lambda h: h,
    ) -> LMHead:
        weight = self.leaf(vocab, width)
        low_rank = (
            LowRank(self.leaf(rank, width), self.leaf(vocab, rank), 0.5, dropout) if rank else None
        )
        token_bias = self.leaf(vocab, token_rank) if token_rank else None
        return LMHead(
            weight,
            self.leaf(vocab) if bias else None,
            softcap,
            scale,
            low_rank,
            token_bias=token_bias,
        )


def leaves(head: LMHead) -> list[Tensor]:
    found = [head.weight, head.bias, head.token_bias]
    if head.low_rank is not None:
        found += [head.low_rank.a, head.low_rank.b]
    return [tensor for tensor in found if tensor is not None and tensor.requires_grad]


def accumulated(compute: Callable[[], Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that `compute` leaves in `.grad`, where there was none."""
    for tensor in tensors:
        tensor.grad = None
    compute()
    return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]


def assert_gradients(
    fused: Callable[[float | None], Tensor],
    wanted: Tensor,
    tensors: Sequence[Tensor],
    tolerance: float = 1e-10,
) -> None:
    """Compare with those of `wanted`: gradients of a backward pass, and those computed with the
    loss (`grad_scale`).
    """
    theirs = torch.autograd.grad(wanted, tensors)
    in_backward, at_once = (
        torch.autograd.grad(fused(None), tensors),
        accumulated(lambda: fused(1.0), tensors),
    )
    for mine, direct, other in zip(in_backward, at_once, theirs, strict=True):
        assert mine.dtype == direct.dtype
        torch.testing.assert_close(mine, other.to(mine.dtype), rtol=0, atol=tolerance)
        torch.testing.assert_close(direct, other.to(mine.dtype), rtol=0, atol=tolerance)


def plain_logits(hidden: Tensor, head: LMHead, *, dropout: bool = True) -> Tensor:
    states = hidden.double()[:, : head.weight.shape[1]]
    logits = states @ head.weight.double().t()
    if head.low_rank is not None:
        kept = head.low_rank.dropout(states) if dropout else states
        logits = logits + head.low_rank.scaling * (
            kept @ head.low_rank.a.double().t() @ head.low_rank.b.double().t()
        )
    if head.token_bias is not None:
        logits = logits + hidden.double()[:, head.weight.shape[1] :] @ head.token_bias.double().t()
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits


class Case(NamedTuple):
    """States [N, D], an lm_head, a teacher's [N, D'], and targets; the formulas' losses and the
    chunked ones.
    """

    hidden: Tensor
    head: LMHead
    teacher_hidden: Tensor
    teacher: LMHead
    targets: Tensor

    @property
    def trained(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, *leaves(self.head)) if tensor.requires_grad]

    @property
    def count(self) -> int:
        return int((self.targets != IGNORE_INDEX).sum())

    def ce(self, **options: Any) -> LossSums:
        return linear_loss(self.hidden, self.head, self.targets, **options)

    def kl(self, shift: int = 0, **options: Any) -> LossSums:
        teacher = Teacher(self.teacher_hidden, self.teacher, shift, divergence=True)
        return linear_loss(self.hidden, self.head, self.targets, teacher, **options)

    def soft(self, rho: float, shift: int = 0, **options: Any) -> LossSums:
        teacher = Teacher(self.teacher_hidden, self.teacher, shift, rho)
        return linear_loss(self.hidden, self.head, self.targets, teacher, **options)

    def log_probs(self, shift: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities of student and teacher in the rows with a target, float64."""
        rows = (self.targets != IGNORE_INDEX).nonzero()[:, 0]
        ours = log_softmax(plain_logits(self.hidden, self.head), dim=1)[rows]
        theirs = plain_logits(self.teacher_hidden, self.teacher, dropout=False)
        return ours, log_softmax(theirs, dim=1)[rows + shift].detach()

    def plain_kl(self, shift: int = 0) -> Tensor:
        ours, theirs = self.log_probs(shift)
        return (theirs.exp() * (theirs - ours)).sum()

    def plain_soft(self, rho: float = 0.0, shift: int = 0) -> Tensor:
        """The cross-entropy against the labels, of which the teacher has the part `rho`."""
        ours, theirs = self.log_probs(shift)
        labels = self.targets[self.targets != IGNORE_INDEX]
        target = (
            rho * theirs.exp() + (1 - rho) * one_hot(labels, self.head.weight.shape[0]).double()
        )
        return -(target * ours).sum()

    def assert_equal(
        self, compute: Callable[..., LossSums], wanted: Tensor, tolerance: float = 1e-10
    ) -> None:
        """Compare `compute().loss_sum` with `wanted`, and the gradients of their means over the
        rows with a target.
        """
        assert compute().loss_sum.item() == pytest.approx(wanted.item(), rel=tolerance)

        def mean(scale: float | None) -> Tensor:
            total: Tensor = compute(grad_scale=scale and scale / self.count).loss_sum
            return total if scale else total / self.count

        assert_gradients(mean, wanted / self.count, self.trained, tolerance)


def make(
    dtype: torch.dtype, variant: dict[str, Any] | None = None, teacher: dict[str, Any] | None = None
) -> Case:
    """Student and teacher of different widths and transforms; the last AHEAD rows have no target."""
    random, variant = Random(11, dtype), variant or {}
    hidden = random.leaf(N, D + variant.get("token_rank", 0))
    head = random.unembedding(V, D, **variant)
    teacher_hidden = random.leaf(N, D_TEACHER)
    other = random.unembedding(V, D_TEACHER, dropout=half, **(teacher or {}))
    targets = torch.randint(0, V, (N,), generator=random.generator)
    targets[torch.rand(N, generator=random.generator) < 0.4] = IGNORE_INDEX
    targets[N - AHEAD :] = IGNORE_INDEX
    return Case(hidden, head, teacher_hidden, other, targets)


def half(hidden: Tensor) -> Tensor:
    """A dropout that drops the same of every row, whichever rows it is given; a teacher must not
    have it.
    """
    return hidden * (torch.arange(hidden.shape[-1]) % 2).to(hidden.dtype)


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
    """Counts rows that come out of products of the given width, and products of a weight gradient's
    shape.
    """

    def __init__(self, width: int, gradient: tuple[int, int]) -> None:
        super().__init__()
        self.width, self.gradient = width, gradient
        self.rows = 0
        self.weight_grads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
            and out.shape[1] == self.width
        ):
            self.rows += out.shape[0]
        if (
            func in (torch.ops.aten.addmm_.default, torch.ops.aten.mm.default)
            and out.shape == self.gradient
        ):
            self.weight_grads += 1
        return out


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak of the bytes that torch's allocator holds beyond those before `run`."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = peak = 0
    for event in sorted(
        profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
