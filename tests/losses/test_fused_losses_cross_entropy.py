"""Chunked linear cross-entropy against plain `F.cross_entropy` on full logits: value, gradients, memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.chunks import chunk_rows, free_bytes
from medusa_train.losses.fused_losses import linear_loss
from medusa_train.models.lm_head import LMHead, LowRank
from tests.losses.plain import (
    RANK,
    VARIANTS,
    Random,
    Rows,
    accumulated,
    assert_equal,
    leaves,
    name,
    plain_logits,
)

N, D, V = 37, 12, 29


def make(dtype: torch.dtype, **variant: Any) -> tuple[Tensor, LMHead, Tensor]:
    random = Random(7, dtype)
    hidden = random.leaf(N, D)
    head = random.unembedding(V, D, **variant)
    targets = torch.randint(0, V, (N,), generator=random.generator)
    targets[torch.rand(N, generator=random.generator) < 0.4] = IGNORE_INDEX
    return hidden, head, targets


def plain(hidden: Tensor, head: LMHead, targets: Tensor) -> Tensor:
    return functional.cross_entropy(plain_logits(hidden, head), targets, ignore_index=IGNORE_INDEX, reduction="sum")


def gradients(loss: Tensor, hidden: Tensor, head: LMHead) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *leaves(head)]))


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
@pytest.mark.parametrize("chunk", [1, 5, N, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_value_and_gradients_are_those_of_full_logits(
    variant: dict[str, Any], chunk: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, head, targets = make(dtype, **variant)
    compute = partial(linear_loss, hidden, head, targets, chunk=chunk)
    assert compute().loss_sum.dtype == dtype
    count = int((targets != IGNORE_INDEX).sum())  # gradients of the mean, as a recipe takes them
    assert_equal(compute, plain(hidden, head, targets), [hidden, *leaves(head)], tolerance, count)


def test_hits_are_counted_over_valid_rows_only() -> None:
    hidden, head, targets = make(torch.float32, bias=True)
    best = (hidden @ head.weight.t() + head.bias).argmax(dim=1)
    targets[:10] = best[:10]
    targets[10:12] = IGNORE_INDEX
    valid = targets != IGNORE_INDEX
    wanted = int((best == targets)[valid].sum())
    assert wanted >= 10
    assert linear_loss(hidden, head, targets, chunk=6).correct.item() == wanted


@pytest.mark.parametrize("how", ["bf16 weights", "autocast, float32 master weights"])
def test_bf16_products_keep_a_float32_loss(how: str) -> None:
    """Only the products may round: bf16 keeps 8 bits, so a logit of size L is off by at most L * 2^-9.

    Compared with float64 on the same bf16-rounded inputs: logits here stay below 16, so each moves by at most 1/32,
    and by far less on average over rows; probabilities by 1/32 relative, plus 2^-8 of the gradient's own products.
    """
    hidden, head, targets = make(torch.bfloat16, bias=True)
    trained = head
    if how == "bf16 weights":
        result = linear_loss(hidden, head, targets, chunk=8)
        tensors: tuple[Tensor, ...] = (hidden, head.weight)
    else:
        assert head.bias is not None
        trained = master = LMHead(head.weight.detach().float().requires_grad_(), head.bias.detach().float())
        states = hidden.detach().float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = linear_loss(states, master, targets, chunk=8)
        tensors = (states, master.weight)
    wanted = plain(hidden, head, targets)
    assert result.loss_sum.dtype == torch.float32
    assert abs(result.loss_sum.item() - wanted.item()) < 2e-3 * wanted.item()
    ours = torch.autograd.grad(result.loss_sum, tensors)
    theirs = torch.autograd.grad(wanted, (hidden, head.weight))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how != "bf16 weights"):
        at_once = accumulated(lambda: linear_loss(tensors[0], trained, targets, chunk=8, grad_scale=1.0), tensors)
    for mine, direct, other, leaf in zip(ours, at_once, theirs, tensors, strict=True):
        assert mine.dtype == direct.dtype == leaf.dtype
        torch.testing.assert_close(mine.double(), other.double(), rtol=0.05, atol=0.05)
        torch.testing.assert_close(mine, direct)  # the backward pass computes in the forward pass's dtype


def test_products_under_autocast_run_in_bf16() -> None:
    """A value that bf16 can't hold shows in which dtype the product ran."""
    hidden = torch.tensor([[1.001]])
    head = LMHead(torch.tensor([[40.0], [0.0]]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = linear_loss(hidden, head, torch.tensor([1])).loss_sum
    assert rounded.item() == 40.0
    assert linear_loss(hidden, head, torch.tensor([1])).loss_sum.item() == pytest.approx(40.04, rel=1e-6)


@pytest.mark.parametrize(("grad_scale", "passes"), [(0.5, 1), (None, 2)])
def test_masked_rows_and_frozen_weights_cost_no_product(grad_scale: float | None, passes: int) -> None:
    """Logits are computed once if gradients are computed with the loss, else again in the backward pass."""

    def run(head: LMHead) -> None:
        result = linear_loss(hidden, head, targets, grad_scale=grad_scale)
        if grad_scale is None:
            result.loss_sum.backward()

    hidden, head, targets = make(torch.float32)
    with Rows(V, (V, D)) as trained:
        run(head)
    assert trained.rows == passes * int((targets != IGNORE_INDEX).sum())
    assert trained.weight_grads == 1
    with Rows(V, (V, D)) as frozen:
        run(LMHead(head.weight.detach()))
    assert frozen.weight_grads == 0


def test_trained_weight_over_states_without_a_graph() -> None:
    hidden, head, targets = make(torch.float64)
    linear_loss(hidden.detach(), head, targets).loss_sum.backward()
    wanted = torch.autograd.grad(plain(hidden, head, targets), head.weight)[0]
    torch.testing.assert_close(head.weight.grad, wanted)


def drop_some(hidden: Tensor) -> Tensor:
    """A dropout that drops the same of every row, whichever rows it is given."""
    keep = (torch.arange(hidden.shape[-1]) % 3 != 0).to(hidden.dtype)
    return hidden * keep / 0.75


def test_dropout_acts_in_the_low_rank_branch_only() -> None:
    hidden, head, targets = make(torch.float64, rank=RANK, dropout=drop_some)
    wanted = plain(hidden, head, targets)
    undropped = functional.cross_entropy(
        plain_logits(hidden, head, dropout=False), targets, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    assert abs(wanted.item() - undropped.item()) > 1e-3
    assert_equal(partial(linear_loss, hidden, head, targets, chunk=5), wanted, [hidden, *leaves(head)])


def test_lora_over_a_frozen_matrix_drops_rows_before_every_product() -> None:
    hidden, head, targets = make(torch.float64, bias=True, rank=RANK)
    assert head.bias is not None
    assert head.low_rank is not None
    frozen = LMHead(head.weight.detach(), head.bias.detach(), low_rank=head.low_rank)
    kept = int((targets != IGNORE_INDEX).sum())
    with Rows(V, (V, D)) as wide:
        linear_loss(hidden, frozen, targets, grad_scale=1.0)
    with Rows(RANK, (V, D)) as narrow:
        linear_loss(hidden, frozen, targets, grad_scale=1.0)
    result = linear_loss(hidden, frozen, targets)
    assert wide.rows == kept
    assert narrow.rows == 2 * kept  # z, and its gradient
    assert wide.weight_grads == 0
    wanted = plain(hidden, frozen, targets)
    assert frozen.weight.grad is None
    for mine, other in zip(gradients(result.loss_sum, hidden, frozen), gradients(wanted, hidden, frozen), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("autocast", [False, True])
def test_float32_lora_on_a_bf16_matrix(autocast: bool) -> None:
    """As PEFT puts it there. Only the product with W rounds, under autocast LoRA's two as well.

    The loss's tolerance is that of bf16 products above, twice under autocast: logits have two rounded parts then.
    A row's gradient is off by at most 1/32 of itself; over 22 rows, in both directions, 2 % of the largest element.
    """
    hidden, head, targets = make(torch.bfloat16, rank=RANK)
    assert head.low_rank is not None
    a, b = (tensor.detach().float().requires_grad_() for tensor in (head.low_rank.a, head.low_rank.b))
    mixed = LMHead(head.weight.detach(), low_rank=LowRank(a, b, head.low_rank.scaling, lambda h: h))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = linear_loss(hidden.float(), mixed, targets, chunk=8)
    wanted = plain(hidden, mixed, targets)
    assert result.loss_sum.dtype == torch.float32
    assert abs(result.loss_sum.item() - wanted.item()) < (4e-3 if autocast else 2e-3) * wanted.item()
    ours, theirs = torch.autograd.grad(result.loss_sum, (a, b)), torch.autograd.grad(wanted, (a, b))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0, atol=0.02 * float(other.abs().max()))


def test_no_grad_gives_the_value_without_a_graph() -> None:
    hidden, head, targets = make(torch.float64)
    with torch.no_grad(), Rows(V, (V, D)) as seen:
        result = linear_loss(hidden, head, targets)
    assert not result.loss_sum.requires_grad
    assert seen.weight_grads == 0
    assert result.loss_sum.item() == pytest.approx(plain(hidden, head, targets).item(), rel=1e-12)


@pytest.mark.parametrize("token", [V, -1])
def test_target_outside_the_vocabulary_is_named(token: int) -> None:
    hidden, head, targets = make(torch.float32)
    targets[3] = token
    with pytest.raises(IndexError, match=f"vocabulary of {V}"):
        linear_loss(hidden, head, targets)


@pytest.mark.parametrize(("free", "rows"), [(0, 1_048), (4 << 30, 2_097), (9 << 30, 4_194), (70 << 30, 8_388)])
def test_chunks_of_a_gpu_grow_with_its_free_memory(free: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk reads the whole weight and its gradient again."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    free_there, free_here = free_bytes(torch.device("cuda")), free_bytes(torch.device("cpu"))
    assert (free_there, free_here) == (free, 0)
    assert chunk_rows(128_000, "cuda", 2, free_there) == rows
    assert chunk_rows(128_000, "cpu", 2, free_here) == 512


def test_sums_beyond_float16_are_scaled_before_they_are_rounded() -> None:
    """Every loss scale would overflow otherwise, since they are sums over rows."""
    rows, scale = 600, 64.0 / 600  # a loss scale over the number of targets
    hidden = torch.full((rows, 4), 200.0, requires_grad=True)
    weight, bias = (torch.zeros(shape, requires_grad=True) for shape in ((8, 4), (8,)))
    gradients = []
    for dtype in (torch.float32, torch.float16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.float16):
            hidden.grad = weight.grad = bias.grad = None
            targets = torch.zeros(rows, dtype=torch.long)
            linear_loss(hidden, LMHead(weight, bias), targets, grad_scale=scale)
            gradients.append([tensor.grad for tensor in (hidden, weight, bias)])
    assert abs(gradients[0][1]).max() * rows / 64 > 65504  # type: ignore[arg-type]
    for half, single in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(half, single, rtol=2e-3, atol=0)
