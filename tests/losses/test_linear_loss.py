"""Chunked cross-entropy and divergences against the formulas on full logits: value, gradients,
products, memory.
"""

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.chunked_logits import chunk_size, gpu_bytes
from medusa_train.losses.linear_loss import linear_loss
from medusa_train.models.lm_head import LMHead, LowRank
from tests.losses.plain import (
    AHEAD,
    RANK,
    TOKEN_BIAS,
    VARIANTS,
    Case,
    D,
    Largest,
    N,
    Random,
    Rows,
    V,
    accumulated,
    half,
    leaves,
    make,
    name,
    plain_logits,
)


def gradients(loss: Tensor, case: Case) -> list[Tensor]:
    return list(torch.autograd.grad(loss, case.trained))


@pytest.mark.parametrize("variant", [*VARIANTS, TOKEN_BIAS], ids=name)
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-6)])
def test_value_and_gradients_are_those_of_full_logits(
    variant: dict[str, Any], chunk: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    case = make(dtype, variant, VARIANTS[-1])
    assert case.ce().loss_sum.dtype == dtype
    case.assert_equal(partial(case.ce, chunk=chunk), case.plain_soft(), tolerance)
    case.assert_equal(
        partial(case.soft, 0.4, AHEAD, chunk=chunk), case.plain_soft(0.4, AHEAD), tolerance
    )
    case.assert_equal(partial(case.kl, AHEAD, chunk=chunk), case.plain_kl(AHEAD), tolerance)


@pytest.mark.parametrize("teacher", VARIANTS, ids=name)
def test_every_kind_of_teacher(teacher: dict[str, Any]) -> None:
    case = make(torch.float64, {"rank": RANK}, teacher)
    case.assert_equal(partial(case.kl, chunk=5), case.plain_kl())


def test_side_figures_are_those_of_the_same_rows() -> None:
    """Whatever is minimised, cross-entropy against the labels, KL and hits are told as well."""
    case = make(torch.float64, {"rank": RANK})
    best = plain_logits(case.hidden, case.head).argmax(dim=1)
    case.targets[:10] = best[:10]
    case.targets[10:12] = IGNORE_INDEX
    for result in (case.ce(chunk=6), case.kl(), case.soft(0.3)):
        assert result.ce_sum.item() == pytest.approx(case.plain_soft().item(), rel=1e-12)
        assert result.correct == int((best == case.targets).sum()) >= 10
        assert not result.ce_sum.requires_grad
    assert case.ce().kl_sum.item() == 0.0
    assert case.soft(0.3).kl_sum.item() == pytest.approx(case.plain_kl().item(), rel=1e-12)


@pytest.mark.parametrize("how", ["bf16 weights", "autocast, float32 master weights"])
def test_bf16_products_keep_a_float32_loss(how: str) -> None:
    """Only the products may round: bf16 keeps 8 bits, so a logit of size L is off by at most L *
    2^-9.

    Compared with float64 on the same bf16-rounded inputs: logits here stay below 16, so each moves
    by at most 1/32, and by far less on average over rows; probabilities by 1/32 relative, plus 2^-8
    of the gradient's own products. A row's KL changes by at most 2e for a student's logits moved by
    e; over the rows all but 1 % cancel.
    """
    case = wide = make(torch.bfloat16, {"bias": True})
    if how != "bf16 weights":
        heads = (LMHead(*(t if t is None else t.detach().float().requires_grad_() for t in (h.weight, h.bias)))
                 for h in (case.head, case.teacher))  # fmt: skip
        states = (t.detach().float().requires_grad_() for t in (case.hidden, case.teacher_hidden))
        wide = Case(next(states), next(heads), next(states), next(heads), case.targets)
    losses = {"ce": (wide.ce, case.plain_soft()), "kl": (wide.kl, case.plain_kl()),
              "soft": (partial(wide.soft, 0.4), case.plain_soft(0.4))}  # fmt: skip
    for kind, (compute, wanted) in losses.items():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how != "bf16 weights"):
            result = compute(chunk=8)
            at_once = accumulated(partial(compute, chunk=8, grad_scale=1.0), wide.trained)
        assert result.loss_sum.dtype == torch.float32
        assert (
            0
            < abs(result.loss_sum.item() - wanted.item())
            < (2e-3 if kind == "ce" else 0.01) * wanted.item()
        )
        for mine, direct, other in zip(
            gradients(result.loss_sum, wide), at_once, gradients(wanted, case), strict=True
        ):
            assert mine.dtype == direct.dtype
            torch.testing.assert_close(mine.double(), other.double(), rtol=0.05, atol=0.1)
            # the backward pass computes in the forward pass's dtype
            torch.testing.assert_close(mine, direct)


@pytest.mark.parametrize(("grad_scale", "passes"), [(0.5, 1), (None, 2)])
def test_masked_rows_and_frozen_weights_cost_no_product(
    grad_scale: float | None, passes: int
) -> None:
    """Logits are computed once if gradients are computed with the loss, else again in the backward
    pass.
    """

    def run(case: Case) -> None:
        result = case.ce(grad_scale=grad_scale)
        if grad_scale is None:
            result.loss_sum.backward()

    case = make(torch.float32)
    with Rows(V, (V, D)) as trained:
        run(case)
    assert trained.rows == passes * case.count
    assert trained.weight_grads == 1
    with Rows(V, (V, D)) as frozen:
        run(case._replace(head=LMHead(case.head.weight.detach())))
    assert frozen.weight_grads == 0
    with torch.no_grad(), Rows(V, (V, D)) as seen:
        result = case.ce()
    assert not result.loss_sum.requires_grad
    assert seen.weight_grads == 0


def test_frozen_states_leave_the_weights_gradient() -> None:
    case = make(torch.float64)
    frozen = case._replace(hidden=case.hidden.detach())
    frozen.assert_equal(frozen.ce, case.plain_soft())


def test_dropout_acts_in_the_low_rank_branch_only() -> None:
    case = make(torch.float64, {"rank": RANK, "dropout": half})
    undropped = torch.nn.functional.cross_entropy(
        plain_logits(case.hidden, case.head, dropout=False), case.targets, reduction="sum"
    )
    assert abs(case.plain_soft().item() - undropped.item()) > 1e-3
    case.assert_equal(partial(case.ce, chunk=5), case.plain_soft())


def test_lora_over_a_frozen_matrix_drops_rows_before_every_product() -> None:
    case = make(torch.float64, {"rank": RANK})
    frozen = case._replace(head=LMHead(case.head.weight.detach(), low_rank=case.head.low_rank))
    with Rows(V, (V, D)) as wide:
        frozen.ce(grad_scale=1.0)
    with Rows(RANK, (V, D)) as narrow:
        frozen.ce(grad_scale=1.0)
    assert wide.rows == case.count
    assert narrow.rows == 2 * case.count  # z, and its gradient
    assert wide.weight_grads == 0
    frozen.assert_equal(frozen.ce, frozen.plain_soft())
    assert frozen.head.weight.grad is None


@pytest.mark.parametrize("autocast", [False, True])
def test_float32_lora_on_a_bf16_matrix(autocast: bool) -> None:
    """As PEFT puts it there. Only the product with W rounds, under autocast LoRA's two as well.

    The loss's tolerance is that of bf16 products above, twice under autocast: logits have two
    rounded parts then. A row's gradient is off by at most 1/32 of itself; over 22 rows, in both
    directions, 2 % of the largest element.
    """
    case = make(torch.bfloat16, {"rank": RANK})
    assert case.head.low_rank is not None
    a, b = (
        tensor.detach().float().requires_grad_()
        for tensor in (case.head.low_rank.a, case.head.low_rank.b)
    )
    head = LMHead(
        case.head.weight.detach(), low_rank=LowRank(a, b, case.head.low_rank.scaling, lambda h: h)
    )
    mixed = case._replace(hidden=case.hidden.detach().float(), head=head)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = mixed.ce(chunk=8)
    wanted = mixed.plain_soft()
    assert result.loss_sum.dtype == torch.float32
    assert (
        abs(result.loss_sum.item() - wanted.item()) < (4e-3 if autocast else 2e-3) * wanted.item()
    )
    for mine, other in zip(
        gradients(result.loss_sum, mixed), gradients(wanted, mixed), strict=True
    ):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0, atol=0.02 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kl_of_a_student_to_itself_is_zero_and_so_are_its_gradients(dtype: torch.dtype) -> None:
    """To the bit: joint training starts with LoRA's B = 0, where nothing may push the target model
    anywhere.
    """
    case = make(dtype, VARIANTS[-1])
    assert case.head.low_rank is not None
    with torch.no_grad():
        case.head.low_rank.b.zero_()
    without = LMHead(case.head.weight, case.head.bias, case.head.softcap, case.head.scale)
    same = case._replace(teacher_hidden=case.hidden, teacher=without)
    result = same.kl(chunk=6)
    assert result.loss_sum.item() == 0.0
    assert all(torch.count_nonzero(grad) == 0 for grad in gradients(result.loss_sum, same))
    assert case.kl().loss_sum.item() > 1.0  # another teacher is seen


def test_small_divergences_keep_their_digits() -> None:
    """In float32 the difference of two cross-entropies of about 3 nats would be off by 1e-7 per row
    and more.
    """
    case = make(torch.float32)
    near = case.hidden.detach() + 3e-3 * Random(3, torch.float32).leaf(N, D).detach()
    close = case._replace(teacher_hidden=near, teacher=case.head)
    wanted = close.plain_kl().item()
    assert wanted / case.count < 1e-4
    assert close.kl().loss_sum.item() == pytest.approx(wanted, abs=case.count * 1e-7)


def test_nothing_flows_into_the_teacher() -> None:
    case = make(torch.float64, {}, {"bias": True, "rank": RANK})
    case.soft(0.5).loss_sum.backward()
    case.kl(grad_scale=1.0)
    for tensor in (case.teacher_hidden, *leaves(case.teacher)):
        assert tensor.requires_grad
        assert tensor.grad is None
    assert case.hidden.grad is not None


def test_rows_without_a_target_count_for_nothing() -> None:
    case = make(torch.float64)
    noisy_hidden, noisy_teacher = case.hidden.detach().clone(), case.teacher_hidden.detach().clone()
    noisy_hidden[case.targets == IGNORE_INDEX] = torch.nan
    noisy_teacher[case.targets == IGNORE_INDEX] = torch.nan
    noisy = case._replace(hidden=noisy_hidden.requires_grad_(), teacher_hidden=noisy_teacher)
    for clean, result in ((case.kl(), noisy.kl()), (case.soft(0.3), noisy.soft(0.3))):
        assert result.loss_sum.item() == clean.loss_sum.item()
        for mine, other in zip(
            gradients(result.loss_sum, noisy), gradients(clean.loss_sum, case), strict=True
        ):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("rows", [0, 5])
def test_no_valid_row_gives_zero_and_zero_gradients(rows: int) -> None:
    case = make(torch.float32, VARIANTS[-1], VARIANTS[-1])
    empty = case._replace(
        hidden=case.hidden[:rows].detach().requires_grad_(),
        teacher_hidden=case.teacher_hidden[:rows],
        targets=torch.full((rows,), IGNORE_INDEX),
    )
    for result in (empty.ce(), empty.kl(), empty.soft(0.5)):
        assert result.loss_sum.item() == 0.0
        assert all(torch.count_nonzero(grad) == 0 for grad in gradients(result.loss_sum, empty))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nothing_larger_than_one_chunk_of_logits(softcap: float | None) -> None:
    rows, width, vocab, chunk = 512, 4, 600, 32
    random = Random(5, torch.float32)
    head, teacher = (random.unembedding(vocab, width, softcap=softcap, rank=RANK) for _ in range(2))
    case = Case(
        random.leaf(rows, width), head, random.leaf(rows, width), teacher, torch.arange(rows)
    )
    for compute in (case.kl, partial(case.soft, 0.5)):
        with Largest() as ours:
            compute(chunk=chunk).loss_sum.backward()
        assert ours.numel == chunk * vocab
    with Largest() as naive:
        case.plain_kl()
    assert naive.numel == rows * vocab  # the instrument does see full logits


@pytest.mark.parametrize("token", [V, -1])
def test_target_outside_the_vocabulary_is_named(token: int) -> None:
    case = make(torch.float32)
    case.targets[3] = token
    with pytest.raises(IndexError, match=f"vocabulary of {V}"):
        case.ce()


@pytest.mark.parametrize(
    ("memory", "rows"), [(0, 1_048), (24 << 30, 2_097), (40 << 30, 4_194), (79 << 30, 8_388)]
)
def test_chunks_of_a_gpu_grow_with_its_memory(
    memory: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk reads the whole weight and its gradient again."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: asked.append(device) or Mock(total_memory=memory),
    )
    gpu_bytes.cache_clear()
    there = [gpu_bytes(torch.device("cuda", 0)) for _ in range(3)]
    gpu_bytes.cache_clear()
    assert there == [memory] * 3
    assert len(asked) == 1
    assert gpu_bytes(torch.device("cpu")) == 0
    assert chunk_size(128_000, "cuda", 2, memory) == rows
    assert chunk_size(128_000, "cpu", 2, 0) == 512


def test_sums_beyond_float16_are_scaled_before_they_are_rounded() -> None:
    """Every loss scale would overflow otherwise, since they are sums over rows."""
    rows, scale = 600, 64.0 / 600  # a loss scale over the number of targets
    hidden = torch.full((rows, 4), 200.0, requires_grad=True)
    weight, bias = (torch.zeros(shape, requires_grad=True) for shape in ((8, 4), (8,)))
    found = []
    for dtype in (torch.float32, torch.float16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.float16):
            targets = torch.zeros(rows, dtype=torch.long)
            run = partial(linear_loss, hidden, LMHead(weight, bias), targets, grad_scale=scale)
            found.append(accumulated(run, [hidden, weight, bias]))
    assert abs(found[0][1]).max() * rows / 64 > 65504
    for half_precision, single in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(half_precision, single, rtol=2e-3, atol=0)
