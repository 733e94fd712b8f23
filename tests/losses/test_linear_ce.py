"""Chunked linear cross-entropy against plain `F.cross_entropy` on full logits: value, gradients, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_train.data.targets import IGNORE
from medusa_train.losses.linear_ce import chunk_rows, linear_cross_entropy

N, D, V = 37, 12, 29


@dataclass(frozen=True)
class Head:
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0


def make(
    dtype: torch.dtype, *, bias: bool = False, softcap: float | None = None, scale: float = 1.0
) -> tuple[Tensor, Head, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    hidden = leaf(N, D)
    head = Head(leaf(V, D), leaf(V) if bias else None, softcap, scale)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < 0.4] = IGNORE
    return hidden, head, targets


def plain(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """The loss as a textbook writes it, in float64, with all logits at once."""
    logits = hidden.double() @ head.weight.double().t()
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def gradients(loss: Tensor, hidden: Tensor, head: Head) -> list[Tensor]:
    leaves = [t for t in (hidden, head.weight, head.bias) if t is not None and t.requires_grad]
    return list(torch.autograd.grad(loss, leaves))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"softcap": 3.0},
    {"scale": 0.4},
    {"bias": True, "softcap": 2.0, "scale": 1.7},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v) or "plain")
@pytest.mark.parametrize("chunk", [1, 5, N, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_value_and_gradients_are_those_of_full_logits(
    variant: dict[str, Any], chunk: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, head, targets = make(dtype, **variant)
    result = linear_cross_entropy(hidden, head, targets, chunk=chunk)
    wanted = plain(hidden, head, targets)
    assert result.loss_sum.dtype == dtype
    assert abs(result.loss_sum.item() - wanted.item()) <= tolerance * wanted.item()
    # gradients of the mean, as a recipe takes them
    count = int((targets != IGNORE).sum())
    ours = gradients(result.loss_sum / count, hidden, head)
    theirs = gradients(wanted / count, hidden, head)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v) or "plain")
def test_gradcheck(variant: dict[str, Any]) -> None:
    hidden, head, targets = make(torch.float64, **variant)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        changed = Head(weight, bias, head.softcap, head.scale)
        return linear_cross_entropy(hidden, changed, targets, chunk=4).loss_sum

    assert torch.autograd.gradcheck(loss, (hidden, head.weight, head.bias))


def test_hits_are_counted_over_valid_rows_only() -> None:
    hidden, head, targets = make(torch.float32, bias=True)
    best = (hidden @ head.weight.t() + head.bias).argmax(dim=1)
    targets[:10] = best[:10]
    targets[10:12] = IGNORE
    valid = targets != IGNORE
    wanted = int((best == targets)[valid].sum())
    assert wanted >= 10
    assert linear_cross_entropy(hidden, head, targets, chunk=6).correct.item() == wanted


@pytest.mark.parametrize("how", ["bf16 weights", "autocast, float32 master weights"])
def test_bf16_products_keep_a_float32_loss(how: str) -> None:
    """Only the products may round: bf16 keeps 8 bits, so a logit of size L is off by at most L * 2^-9.

    Compared with float64 on the same bf16-rounded inputs: logits here stay below 16, so each moves by at most 1/32,
    and by far less on average over rows; probabilities by 1/32 relative, plus 2^-8 of the gradient's own products.
    """
    hidden, head, targets = make(torch.bfloat16, bias=True)
    if how == "bf16 weights":
        result = linear_cross_entropy(hidden, head, targets, chunk=8)
        leaves: tuple[Tensor, ...] = (hidden, head.weight)
    else:
        assert head.bias is not None
        master = Head(head.weight.detach().float().requires_grad_(), head.bias.detach().float())
        states = hidden.detach().float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = linear_cross_entropy(states, master, targets, chunk=8)
        leaves = (states, master.weight)
    wanted = plain(hidden, head, targets)
    assert result.loss_sum.dtype == torch.float32
    assert abs(result.loss_sum.item() - wanted.item()) < 2e-3 * wanted.item()
    ours = torch.autograd.grad(result.loss_sum, leaves)
    theirs = torch.autograd.grad(wanted, (hidden, head.weight))
    for mine, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert mine.dtype == leaf.dtype
        torch.testing.assert_close(mine.double(), other.double(), rtol=0.05, atol=0.05)


def test_loss_is_not_rounded_to_bf16() -> None:
    """Equal logits give log V to the precision of float32, though every input is bf16."""
    hidden = torch.zeros(3, D, dtype=torch.bfloat16)
    head = Head(torch.zeros(1000, D, dtype=torch.bfloat16))
    result = linear_cross_entropy(hidden, head, torch.tensor([1, 2, IGNORE]))
    wanted = 2 * torch.log(torch.tensor(1000.0, dtype=torch.float64)).item()
    assert result.loss_sum.item() == pytest.approx(wanted, rel=1e-6)


def test_products_under_autocast_run_in_bf16() -> None:
    """A value that bf16 can't hold shows in which dtype the product ran."""
    hidden = torch.tensor([[1.001]])
    head = Head(torch.tensor([[40.0], [0.0]]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = linear_cross_entropy(hidden, head, torch.tensor([1])).loss_sum
    assert rounded.item() == 40.0
    assert linear_cross_entropy(hidden, head, torch.tensor([1])).loss_sum.item() == pytest.approx(40.04, rel=1e-6)


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


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nothing_larger_than_one_chunk_of_logits(softcap: float | None) -> None:
    rows, width, vocab, chunk = 512, 4, 600, 32
    hidden = torch.randn(rows, width, requires_grad=True)
    head = Head(torch.randn(vocab, width, requires_grad=True), softcap=softcap)
    targets = torch.randint(0, vocab, (rows,))
    with Largest() as ours:
        linear_cross_entropy(hidden, head, targets, chunk=chunk).loss_sum.backward()
    assert ours.numel == chunk * vocab
    with Largest() as naive:
        plain(hidden, head, targets)
    assert naive.numel == rows * vocab  # the instrument does see full logits


class Products(TorchDispatchMode):
    """Counts rows that are multiplied with the [V, d] matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.weight_grads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[1] == V:
            self.rows += out.shape[0]
        if func in (torch.ops.aten.addmm_.default, torch.ops.aten.mm.default) and out.shape == (V, D):
            self.weight_grads += 1
        return out


def test_masked_rows_and_frozen_weights_cost_no_product() -> None:
    hidden, head, targets = make(torch.float32)
    with Products() as trained:
        linear_cross_entropy(hidden, head, targets).loss_sum.backward()
    assert trained.rows == int((targets != IGNORE).sum())
    assert trained.weight_grads == 1
    with Products() as frozen:
        linear_cross_entropy(hidden, Head(head.weight.detach()), targets).loss_sum.backward()
    assert frozen.weight_grads == 0


def test_frozen_weight_gets_no_gradient_and_hidden_still_does() -> None:
    hidden, head, targets = make(torch.float64)
    frozen = Head(head.weight.detach())
    linear_cross_entropy(hidden, frozen, targets).loss_sum.backward()
    assert frozen.weight.grad is None
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(plain(hidden, head, targets), hidden)[0])


def test_trained_weight_over_states_without_a_graph() -> None:
    hidden, head, targets = make(torch.float64)
    linear_cross_entropy(hidden.detach(), head, targets).loss_sum.backward()
    wanted = torch.autograd.grad(plain(hidden, head, targets), head.weight)[0]
    torch.testing.assert_close(head.weight.grad, wanted)


@pytest.mark.parametrize("rows", [0, 5])
def test_no_valid_row_gives_zero_and_zero_gradients(rows: int) -> None:
    hidden = torch.randn(rows, D, requires_grad=True)
    head = Head(torch.randn(V, D, requires_grad=True), torch.randn(V, requires_grad=True))
    result = linear_cross_entropy(hidden, head, torch.full((rows,), IGNORE))
    assert (result.loss_sum.item(), result.correct.item()) == (0.0, 0)
    for grad in gradients(result.loss_sum, hidden, head):
        assert torch.count_nonzero(grad) == 0


def test_no_grad_gives_the_value_without_a_graph() -> None:
    hidden, head, targets = make(torch.float64)
    with torch.no_grad(), Products() as seen:
        result = linear_cross_entropy(hidden, head, targets)
    assert not result.loss_sum.requires_grad
    assert seen.weight_grads == 0
    assert result.loss_sum.item() == pytest.approx(plain(hidden, head, targets).item(), rel=1e-12)


@pytest.mark.parametrize("token", [V, -1])
def test_target_outside_the_vocabulary_is_named(token: int) -> None:
    hidden, head, targets = make(torch.float32)
    targets[3] = token
    with pytest.raises(IndexError, match=f"vocabulary of {V}"):
        linear_cross_entropy(hidden, head, targets)


def test_chunks_stay_small_for_any_vocabulary() -> None:
    assert chunk_rows(2_000, "cpu") > 1_000
    assert chunk_rows(128_000, "cpu") == 256
    assert chunk_rows(32_000, "cuda") > chunk_rows(32_000, "cpu")
