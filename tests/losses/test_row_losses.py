"""The LK loss, and weights of rows, against the plain formulas in float64: value, gradients, memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.chunks import Teacher, log_mass
from medusa_train.losses.fused_losses import LossSums, linear_loss, linear_target_log_probs
from medusa_train.losses.row_losses import RowLoss
from medusa_train.models.lm_head import LMHead
from tests.losses.acceptance import lk, row
from tests.losses.plain import RANK, VARIANTS, Largest, Random, assert_equal, leaves, name, plain_logits

N, D, V, AHEAD = 23, 6, 29, 2
KEPT = torch.tensor([12, 3, 5, 0, 9, 16, 28])


class Case:
    """A student with `variant` over all tokens or KEPT, a teacher, and targets for about half of the rows."""

    def __init__(self, variant: dict[str, Any], kept: Tensor | None = None, dtype: torch.dtype = torch.float64) -> None:
        random = Random(5, dtype)
        self.kept, size = kept, V if kept is None else len(kept)
        self.hidden, self.head = random.leaf(N, D), random.unembedding(size, D, **variant)
        self.states = random.leaf(N, D).detach()
        self.teacher = random.unembedding(V, D, softcap=4.0, rank=RANK)
        self.weights = torch.rand(N, generator=random.generator, dtype=torch.float64).to(dtype)
        self.targets = torch.randint(0, size, (N,), generator=random.generator)
        self.targets[torch.rand(N, generator=random.generator) < 0.4] = IGNORE_INDEX
        self.targets[N - AHEAD :] = IGNORE_INDEX
        self.rows = (self.targets != IGNORE_INDEX).nonzero()[:, 0]

    def compute(self, share: float, row_loss: RowLoss, grad_scale: float | None = None) -> LossSums:
        options: dict[str, Any] = {"row_loss": row_loss, "chunk": 5, "grad_scale": grad_scale}
        if not share:
            return linear_loss(self.hidden, self.head, self.targets, **options)
        theirs, mass = self.teacher, None
        if self.kept is not None:
            theirs = self.teacher.restrict_to(self.kept)
            mass = log_mass(self.states, self.teacher, self.kept, self.rows + AHEAD, None)
        teacher = Teacher(self.states, theirs, AHEAD, share, log_mass=mass)
        return linear_loss(self.hidden, self.head, self.targets, teacher, **options)

    def plain(self, share: float, row_loss: RowLoss) -> Tensor:
        q = plain_logits(self.hidden, self.head).softmax(1)
        p = plain_logits(self.states, self.teacher).softmax(1).detach()
        losses = []
        for n in self.rows.tolist():
            loss = row(p[n + AHEAD], q[n], int(self.targets[n]), share, row_loss.eta, self.kept)
            losses.append(loss if row_loss.weights is None else loss * row_loss.weights[n])
        return torch.stack(losses).sum()

    def assert_formula(self, share: float, row_loss: RowLoss, tolerance: float = 1e-10) -> None:
        tensors = [self.hidden, *leaves(self.head)]
        assert_equal(partial(self.compute, share, row_loss), self.plain(share, row_loss), tensors, tolerance)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "reduced"])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("eta", [None, 0.0, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_are_the_formulas(
    weighted: bool, eta: float | None, share: float, kept: Tensor | None
) -> None:
    case = Case(VARIANTS[-1], kept)
    row_loss = RowLoss(eta, case.weights if weighted else None)
    case.assert_formula(share, row_loss)


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("eta", [None, 3.0])
def test_any_lm_head(eta: float | None, share: float, variant: dict[str, Any]) -> None:
    case, row_loss = Case(variant), RowLoss(eta)
    case.assert_formula(share, row_loss)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_float32(share: float) -> None:
    case, row_loss = Case(VARIANTS[-1], KEPT, torch.float32), RowLoss(3.0)
    case.assert_formula(share, row_loss, 2e-6)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "reduced"])
def test_alpha_is_summed_over_the_rows(kept: Tensor | None) -> None:
    case = Case({}, kept)
    q = plain_logits(case.hidden, case.head).softmax(1)
    p = plain_logits(case.states, case.teacher).softmax(1)
    wanted = sum(float(lk(p[n + AHEAD].detach(), q[n].detach(), 3.0, kept)[1]) for n in case.rows.tolist())
    assert case.compute(1.0, RowLoss(3.0, case.weights)).alpha_sum.item() == pytest.approx(wanted, rel=1e-10)
    wanted = sum(float(q[n, case.targets[n]].detach()) for n in case.rows.tolist())
    assert case.compute(0.0, RowLoss(3.0)).alpha_sum.item() == pytest.approx(wanted, rel=1e-10)


def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient() -> None:
    case = Case({})
    head = LMHead(case.head.weight)
    sums = linear_loss(case.hidden, head, case.targets, Teacher(case.hidden.detach(), head), row_loss=RowLoss(3.0))
    assert abs(sums.loss_sum.item()) < 1e-12
    assert sums.alpha_sum.item() == pytest.approx(len(case.rows))
    (grad,) = torch.autograd.grad(sums.loss_sum, case.hidden)
    assert torch.count_nonzero(grad) == 0


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.eye(2).mul(1e4).requires_grad_()
    head = LMHead(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], requires_grad=True))
    for targets in ([0, 1], [1, 2]):  # certain and right; certain and wrong
        for share in (0.0, 1.0):
            teacher = Teacher(hidden.detach().flip(0), head) if share else None
            sums = linear_loss(hidden, head, torch.tensor(targets), teacher, row_loss=RowLoss(3.0))
            assert torch.isfinite(sums.loss_sum)
            assert all(torch.isfinite(g).all() for g in torch.autograd.grad(sums.loss_sum, [hidden, head.weight]))


def test_target_log_probs() -> None:
    case = Case(VARIANTS[-1])
    found = linear_target_log_probs(case.hidden, case.head, case.targets)
    log_q = plain_logits(case.hidden, case.head).log_softmax(1)
    for n, target in enumerate(case.targets.tolist()):
        assert found[n].item() == (-torch.inf if target == IGNORE_INDEX else pytest.approx(log_q[n, target].item()))
    assert not found.requires_grad


def test_nothing_larger_than_one_chunk_of_logits() -> None:
    rows, width, vocab, kept, chunk = 256, 4, 600, 200, 32
    hidden, states = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)
    teacher, tokens = LMHead(torch.randn(vocab, width)), torch.arange(kept)
    head = LMHead(torch.randn(kept, width, requires_grad=True), token_map=tokens)
    targets = torch.randint(0, kept, (rows,))
    with Largest() as ours:
        mass = torch.zeros(rows)
        row_loss = RowLoss(3.0, torch.rand(rows))
        theirs = Teacher(states, teacher.restrict_to(tokens), log_mass=mass)
        linear_loss(hidden, head, targets, theirs, row_loss=row_loss, chunk=chunk, grad_scale=1.0)
    assert ours.numel == chunk * kept
