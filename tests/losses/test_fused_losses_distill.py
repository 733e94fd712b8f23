"""Chunked KL and soft cross-entropy against the formulas on full probabilities: value, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.chunks import Teacher
from medusa_train.losses.fused_losses import LossSums, linear_loss
from medusa_train.models.lm_head import LMHead
from tests.losses.plain import RANK, VARIANTS, Largest, Random, Rows, assert_equal, leaves, name, plain_logits

N, D, V = 37, 12, 29
D_TEACHER = 7
AHEAD = 2


class Case(NamedTuple):
    hidden: Tensor
    head: LMHead
    teacher_hidden: Tensor
    teacher: LMHead
    targets: Tensor

    def kl(self, shift: int = 0, **options: Any) -> LossSums:
        teacher = Teacher(self.teacher_hidden, self.teacher, shift, divergence=True)
        return linear_loss(self.hidden, self.head, self.targets, teacher, **options)

    def soft(self, rho: float, shift: int = 0, **options: Any) -> LossSums:
        teacher = Teacher(self.teacher_hidden, self.teacher, shift, rho)
        return linear_loss(self.hidden, self.head, self.targets, teacher, **options)

    def assert_equal(self, compute: Callable[..., LossSums], wanted: Tensor, tolerance: float = 1e-10) -> None:
        count = int((self.targets != IGNORE_INDEX).sum())
        assert_equal(compute, wanted, [self.hidden, *leaves(self.head)], tolerance, count)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [self.hidden, *leaves(self.head)]))


def half(hidden: Tensor) -> Tensor:
    """A dropout that a teacher must not have."""
    return hidden * (torch.arange(hidden.shape[-1]) % 2).to(hidden.dtype)


def make(dtype: torch.dtype, variant: dict[str, Any], teacher: dict[str, Any] | None = None) -> Case:
    """BackboneRecipe and teacher of different widths and transforms; the last AHEAD rows have no target."""
    random = Random(11, dtype)
    hidden, head = random.leaf(N, D), random.unembedding(V, D, **variant)
    teacher_hidden = random.leaf(N, D_TEACHER)
    other = random.unembedding(V, D_TEACHER, dropout=half, **({} if teacher is None else teacher))
    targets = torch.randint(0, V, (N,), generator=random.generator)
    targets[torch.rand(N, generator=random.generator) < 0.4] = IGNORE_INDEX
    targets[N - AHEAD :] = IGNORE_INDEX
    return Case(hidden, head, teacher_hidden, other, targets)


def log_probs(case: Case, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Valid rows' log-probabilities of student and teacher [M, V], and their labels [M]; float64."""
    rows = (case.targets != IGNORE_INDEX).nonzero()[:, 0]
    ours = log_softmax(plain_logits(case.hidden, case.head), dim=1)[rows]
    theirs = log_softmax(plain_logits(case.teacher_hidden, case.teacher, dropout=False), dim=1)[rows + shift]
    return ours, theirs.detach(), case.targets[rows]


def plain_kl(case: Case, shift: int = 0) -> Tensor:
    ours, theirs, _ = log_probs(case, shift)
    return (theirs.exp() * (theirs - ours)).sum()


def plain_soft(case: Case, rho: float, shift: int = 0) -> Tensor:
    ours, theirs, labels = log_probs(case, shift)
    target = rho * theirs.exp() + (1 - rho) * one_hot(labels, V).double()
    return -(target * ours).sum()


@pytest.mark.parametrize("teacher", VARIANTS, ids=name)
@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_kl_is_that_of_full_logits(variant: dict[str, Any], teacher: dict[str, Any]) -> None:
    case = make(torch.float64, variant, teacher)
    result = case.kl(shift=AHEAD, chunk=5)
    case.assert_equal(partial(case.kl, shift=AHEAD, chunk=5), plain_kl(case, AHEAD))
    assert result.kl_sum.item() == result.loss_sum.item()


def test_float32() -> None:
    case = make(torch.float32, VARIANTS[-1], VARIANTS[-1])
    case.assert_equal(partial(case.kl, chunk=5), plain_kl(case), 2e-6)
    case.assert_equal(partial(case.soft, 0.4, chunk=5), plain_soft(case, 0.4), 2e-6)


def test_side_figures_are_those_of_the_same_rows() -> None:
    """Whatever is minimised, cross-entropy against the labels, KL and hits are told as well."""
    case = make(torch.float64, {"rank": RANK})
    wanted = linear_loss(case.hidden, case.head, case.targets)
    assert wanted.kl_sum.item() == 0.0
    for result in (case.kl(), case.soft(0.3)):
        assert result.ce_sum.item() == pytest.approx(wanted.loss_sum.item(), rel=1e-12)
        assert result.kl_sum.item() == pytest.approx(plain_kl(case).item(), rel=1e-12)
        assert result.correct == wanted.correct
        assert not result.ce_sum.requires_grad
        assert not result.kl_sum.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kl_of_a_student_to_itself_is_zero_and_so_are_its_gradients(dtype: torch.dtype) -> None:
    """To the bit: joint training starts with LoRA's B = 0, where nothing may push the backbone anywhere."""
    case = make(dtype, VARIANTS[-1])
    assert case.head.low_rank is not None
    with torch.no_grad():
        case.head.low_rank.b.zero_()
    without = LMHead(case.head.weight, case.head.bias, case.head.softcap, case.head.scale)
    same = case._replace(teacher_hidden=case.hidden, teacher=without)
    result = same.kl(chunk=6)
    assert result.loss_sum.item() == 0.0
    for grad in same.gradients(result.loss_sum):
        assert torch.count_nonzero(grad) == 0
    assert case.kl().loss_sum.item() > 1.0  # another teacher is seen


def test_small_divergences_keep_their_digits() -> None:
    """In float32 the difference of two cross-entropies of about 3 nats would be off by 1e-7 per row and more."""
    case = make(torch.float32, {})
    random = Random(3, torch.float32)
    near = case.hidden.detach() + 3e-3 * random.leaf(N, D).detach()
    close = case._replace(teacher_hidden=near, teacher=case.head)
    wanted = plain_kl(close).item()
    rows = int((case.targets != IGNORE_INDEX).sum())
    assert wanted / rows < 1e-4
    assert close.kl().loss_sum.item() == pytest.approx(wanted, abs=rows * 1e-7)


def test_nothing_flows_into_the_teacher() -> None:
    case = make(torch.float64, {}, {"bias": True, "rank": RANK})
    case.soft(0.5).loss_sum.backward()
    case.kl().loss_sum.backward()
    for tensor in (case.teacher_hidden, *leaves(case.teacher)):
        assert tensor.requires_grad
        assert tensor.grad is None
    assert case.hidden.grad is not None


def test_rows_without_a_target_count_for_nothing() -> None:
    case = make(torch.float64, {})
    noisy_hidden, noisy_teacher = case.hidden.detach().clone(), case.teacher_hidden.detach().clone()
    noisy_hidden[case.targets == IGNORE_INDEX] = torch.nan
    noisy_teacher[case.targets == IGNORE_INDEX] = torch.nan
    noisy = case._replace(hidden=noisy_hidden.requires_grad_(), teacher_hidden=noisy_teacher)
    for clean, result in ((case.kl(), noisy.kl()), (case.soft(0.3), noisy.soft(0.3))):
        assert result.loss_sum.item() == clean.loss_sum.item()
        for mine, other in zip(noisy.gradients(result.loss_sum), case.gradients(clean.loss_sum), strict=True):
            assert torch.equal(mine, other)
    with Rows(V, (V, D)) as seen:
        case.kl()
    assert seen.rows == 2 * int((case.targets != IGNORE_INDEX).sum())


@pytest.mark.parametrize("rows", [0, 5])
def test_no_valid_row_gives_zero_and_zero_gradients(rows: int) -> None:
    case = make(torch.float32, VARIANTS[-1], VARIANTS[-1])
    empty = case._replace(
        hidden=case.hidden[:rows].detach().requires_grad_(),
        teacher_hidden=case.teacher_hidden[:rows],
        targets=torch.full((rows,), IGNORE_INDEX),
    )
    for result in (empty.kl(), empty.soft(0.5)):
        assert result.loss_sum.item() == 0.0
        for grad in empty.gradients(result.loss_sum):
            assert torch.count_nonzero(grad) == 0


def test_bf16_autocast_keeps_a_float32_loss() -> None:
    """Only the products may round, by 2^-9 of a logit; logits here stay below 16, so each moves by at most 1/32.

    A student's logits moved by e change a row's KL by at most 2e, a teacher's by at most e * E_p|log(p/q) - KL|. Over
    the rows these cancel but for a small part: 1 % of the sum. Gradients as in cross-entropy: softmax minus target
    differ by 1/32 of each probability.
    """
    case = make(torch.bfloat16, {}, {})
    masters = Case(
        *(
            LMHead(part.weight.detach().float().requires_grad_())
            if isinstance(part, LMHead)
            else (part.detach().float().requires_grad_() if part.is_floating_point() else part)
            for part in case
        )
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = masters.kl(chunk=8), masters.soft(0.4, chunk=8)
    for result, wanted in zip(results, (plain_kl(masters), plain_soft(masters, 0.4)), strict=True):
        assert result.loss_sum.dtype == torch.float32
        assert result.loss_sum.item() != wanted.item()
        assert abs(result.loss_sum.item() - wanted.item()) < 0.01 * wanted.item()
        for mine, other in zip(masters.gradients(result.loss_sum), masters.gradients(wanted), strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, other, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rho", [None, 0.5])
def test_nothing_larger_than_one_chunk_of_logits(softcap: float | None, rho: float | None) -> None:
    rows, width, vocab, chunk = 512, 4, 600, 32
    random = Random(5, torch.float32)
    head = random.unembedding(vocab, width, softcap=softcap, rank=RANK)
    teacher = random.unembedding(vocab, width, softcap=softcap, rank=RANK)
    case = Case(random.leaf(rows, width), head, random.leaf(rows, width), teacher, torch.arange(rows))
    with Largest() as ours:
        (case.kl(chunk=chunk) if rho is None else case.soft(rho, chunk=chunk)).loss_sum.backward()
    assert ours.numel == chunk * vocab
    with Largest() as naive:
        plain_kl(case)
    assert naive.numel == rows * vocab  # the instrument does see full logits


@pytest.mark.parametrize("shift", [N, -N])
def test_a_row_beyond_the_teachers_is_refused(shift: int) -> None:
    with pytest.raises(IndexError, match="teacher"):
        make(torch.float64, {}).kl(shift=shift)


def test_a_teacher_that_does_not_fit_is_refused() -> None:
    case = make(torch.float64, {})
    with pytest.raises(ValueError, match=f"{N - 1} rows and {V} tokens, the student {N} rows"):
        case._replace(teacher_hidden=case.teacher_hidden[1:]).kl()
    with pytest.raises(ValueError, match=f"{V - 1} tokens, the student"):
        case._replace(teacher=LMHead(case.teacher.weight[1:])).kl()
