"""Joint training's objective against its formula in plain loops: value, gradients, alignment,
micro-batches.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.graph_cut import GraphCut
from medusa_train.losses.objective import Objective, ObjectiveOutput
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_states import HiddenStates
from tests.losses.formula import term
from tests.losses.plain import Random, accumulated, leaves
from tests.losses.toy import DECAY, B, D, Heads, K, Rows, T, V, features, one_document, part

LAMBDA = 0.2
RECIPES: list[dict[str, Any]] = [
    {"lm": "ce"},
    {"lm": "kl"},
    {"lm": "ce", "rho": 0.3},
    {"lm": "ce", "soft_targets": 0.6},
    {"lm": "kl", "soft_targets": 1.0},
]


def name(recipe: dict[str, Any]) -> str:
    return "+".join(str(value) for value in recipe.values())


class Joint:
    """A target model with LoRA on its lm_head, whose features stem from trained states; its teacher;
    the heads.
    """

    def __init__(self) -> None:
        random = Random(5, torch.float64)
        self.heads = Heads()
        self.states = features(3).final.requires_grad_()
        self.student = random.unembedding(V, D, softcap=6.0, rank=2)
        self.teacher_states = features(4)
        frozen = self.student.weight.detach()
        self.teacher = LMHead(frozen, softcap=6.0)
        assert self.student.low_rank is not None
        self.student = LMHead(frozen, softcap=6.0, low_rank=self.student.low_rank)

    @property
    def trained(self) -> list[Tensor]:
        return [self.states, *leaves(self.student), *self.heads.parameters()]

    def loss(
        self,
        objective: Objective,
        batch: Rows,
        counts: Tensor,
        rows: slice = slice(0, B),
        **options: Any,
    ) -> ObjectiveOutput:
        cut = GraphCut()
        states = self.states[rows]
        out = objective.loss_and_gradients(
            HiddenStates(cut.detach(states) if options else states),
            batch,
            counts,
            progress=0.5,
            lm_head=self.student,
            teacher=(part(self.teacher_states, rows).final, self.teacher),
            **options,
        )
        cut.backward()
        return out

    def reference(
        self, batch: Rows, recipe: dict[str, Any], teacher_ahead: int = 0, shift: int = 1
    ) -> Tensor:
        """The two terms of the Medusa-2 loss; lambda0 is linear and the run half done."""
        theirs = self.teacher.logits(self.teacher_states.final)
        rho = 1.0 if recipe["lm"] == "kl" else recipe.get("rho", 0.0)
        logits = self.student.logits(self.states)
        total = term(logits, batch, 0, teacher=theirs, share=rho, divergence=recipe["lm"] == "kl")
        soft = {
            "share": recipe.get("soft_targets", 0.0),
            "shift": shift,
            "teacher_ahead": teacher_ahead,
        }
        for k, hidden in enumerate(
            self.heads.head_states(HiddenStates(self.states), batch), start=1
        ):
            loss = term(hidden @ self.heads.outer[k - 1].t(), batch, k, teacher=theirs, **soft)
            total = total + LAMBDA * 0.5 * DECAY**k * loss
        return total


@pytest.fixture
def joint() -> Joint:
    return Joint()


def objective(joint: Joint, **recipe: Any) -> Objective:
    return Objective(joint.heads, DECAY, heads_coefficient=LAMBDA, schedule="linear", **recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize(
    "parts", [[slice(0, B)], [slice(0, 1), slice(1, 2), slice(2, B)]], ids=["whole", "parts"]
)
def test_gradients_computed_with_the_loss_are_those_of_the_formula(
    joint: Joint, batch: Rows, recipe: dict[str, Any], independent: bool, parts: list[slice]
) -> None:
    """Of one batch, and accumulated over three micro-batches."""
    joint.heads.independent_heads = independent
    ours = objective(joint, **recipe)
    counts = ours.target_counts(batch)
    losses: list[Tensor] = []

    def accumulate() -> None:
        losses.extend(
            joint.loss(ours, batch.part(rows), counts, rows, grad_scale=8.0).loss for rows in parts
        )

    wanted = joint.reference(batch, recipe)
    theirs = torch.autograd.grad(8.0 * wanted, joint.trained)
    for mine, other in zip(accumulated(accumulate, joint.trained), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.stack(losses).sum(), wanted.detach(), rtol=1e-10, atol=0)
    assert not any(loss.requires_grad for loss in losses)


@pytest.mark.parametrize(
    "mistake", [{"teacher_ahead": -1}, {"teacher_ahead": 1}, {"shift": 0}, {"shift": 2}], ids=str
)
def test_a_shift_that_is_off_by_one_is_a_different_loss(
    joint: Joint, batch: Rows, mistake: dict[str, int]
) -> None:
    recipe = {"lm": "kl", "soft_targets": 0.6}
    ours = objective(joint, **recipe)
    out = joint.loss(ours, batch, ours.target_counts(batch))
    assert abs(out.loss.item() - joint.reference(batch, recipe, **mistake).item()) > 1e-3


class Copying(Heads):
    """Head k says at t what the target model says at t + k."""

    def __init__(self, states: Tensor, unembedding: LMHead) -> None:
        super().__init__()
        self.states, self.unembedding = states, unembedding

    def head_states(self, hidden_states: HiddenStates, batch: Rows) -> Iterator[Tensor]:
        for k in range(1, K + 1):
            yield self.states.roll(-k, dims=1)

    def lm_head(self, k: int) -> LMHead:
        return self.unembedding


def test_head_k_is_held_against_the_teacher_k_positions_on(joint: Joint, batch: Rows) -> None:
    ours = Objective(
        Copying(joint.teacher_states.final, joint.teacher), DECAY, lm="kl", soft_targets=1.0
    )
    out = joint.loss(ours, batch, ours.target_counts(batch))
    assert out.lm is not None
    assert out.lm.kl.item() > 0.1
    heads = ours._head_terms(
        HiddenStates(joint.states),
        batch,
        ours._head_targets(batch),
        (joint.teacher_states.final, joint.teacher),
        [None] * K,
    )
    assert all(sums.kl_sum == 0 for sums in heads)


def test_a_teacher_in_another_document_is_never_read(joint: Joint) -> None:
    """Every other document of the batch is NaN to the teacher: nothing of it may arrive."""
    segments = torch.zeros(B, T, dtype=torch.long)
    segments[:, 4:8] = 1
    segments[:, 8:] = 2
    labels = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(6))
    labels = torch.where(segments == 1, labels, IGNORE_INDEX)
    joint.teacher_states = HiddenStates(
        joint.teacher_states.final.masked_fill((segments != 1)[..., None], torch.nan)
    )
    batch = Rows(labels, segments)
    ours = objective(joint, lm="kl", soft_targets=0.5)
    assert ours.target_counts(batch).tolist() == [B * 3, B * 2, B * 1, 0]
    out = joint.loss(ours, batch, ours.target_counts(batch))
    assert torch.isfinite(out.loss)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.loss, joint.trained))


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_nothing_supervised_gives_zero_not_nan(joint: Joint, recipe: dict[str, Any]) -> None:
    batch = one_document(torch.full((B, T), IGNORE_INDEX))
    ours = objective(joint, **recipe)
    out = joint.loss(ours, batch, ours.target_counts(batch))
    assert out.loss.item() == 0.0
    for grad in torch.autograd.grad(out.loss, joint.trained):
        assert torch.count_nonzero(grad) == 0


def test_a_fresh_adapter_is_pushed_nowhere_by_kl(joint: Joint, batch: Rows) -> None:
    """B = 0 and the same features: the language model's loss and gradients are 0 to the bit."""
    assert joint.student.low_rank is not None
    with torch.no_grad():
        joint.student.low_rank.b.zero_()
    joint.teacher_states = HiddenStates(joint.states)
    ours = Objective(joint.heads, DECAY, lm="kl", heads_coefficient=0.0)
    out = joint.loss(ours, batch, ours.target_counts(batch))
    assert out.loss.item() == 0.0
    out.loss.backward()
    for tensor in (joint.states, *leaves(joint.student)):
        assert torch.count_nonzero(tensor.grad) == 0


def test_figures_are_told_against_labels_and_teacher(joint: Joint, batch: Rows) -> None:
    """They compare runs with different recipes, so they do not depend on the recipe."""
    outs = [
        joint.loss(ours, batch, ours.target_counts(batch))
        for ours in (objective(joint, **recipe) for recipe in RECIPES)
    ]
    for out in outs:
        assert out.lm is not None
        torch.testing.assert_close(out.lm.ce, outs[0].lm.ce)
        assert torch.equal(out.head_correct, outs[0].head_correct)
    assert outs[0].lm.kl.item() == 0.0
    torch.testing.assert_close(outs[1].lm.kl, outs[2].lm.kl)


def test_counts_of_heads_are_told_from_that_of_the_language_model(
    joint: Joint, batch: Rows
) -> None:
    ours = objective(joint, lm="kl")
    counts = ours.target_counts(batch)
    out = joint.loss(ours, batch, counts)
    assert out.lm is not None
    assert torch.equal(torch.stack([out.lm.count, *out.head_in_vocab]), counts)
    assert torch.equal(out.head_in_vocab, out.head_counts)  # these heads have all tokens
    assert counts[0] > counts[1]  # or this shows nothing
