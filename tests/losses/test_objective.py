"""The Medusa-1 objective against the formula written out on stacked logits: micro-batches; schedules of lambda0."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.objective import Objective, ObjectiveOutput, head_weight, lambda0
from medusa_train.models.features import Features
from medusa_train.models.lm_head import LMHead
from tests.losses.plain import accumulated
from tests.losses.toy import DECAY, B, D, Heads, K, Rows, T, V, mean_term, one_document, part


def reference(heads: Heads, feats: Features, batch: Rows, shift: int = 1) -> Tensor:
    """The Medusa-1 loss on stacked logits [K, B, T, V]; `shift` = 1 is right: head k predicts t + k + 1."""
    stacked = torch.stack([hidden @ heads.outer[k].t() for k, hidden in enumerate(heads.head_states(feats, batch))])
    return sum(DECAY**k * mean_term(stacked[k - 1], batch, k, shift=shift) for k in range(1, K + 1))


def test_value_and_gradients_are_those_of_stacked_logits(batch: Rows, feats: Features) -> None:
    heads = Heads()
    objective = Objective(heads, DECAY)
    out = objective.loss(feats, batch, objective.target_counts(batch))
    wanted = reference(heads, feats, batch)
    torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=0)
    parameters = list(heads.parameters())
    ours = torch.autograd.grad(out.loss, parameters)
    theirs = torch.autograd.grad(wanted, parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_a_copying_task_pins_the_target() -> None:
    """States that spell out the token k + 1 shift, for k = 1: head 1 then has no loss, its neighbours much."""
    heads = Heads()
    states = torch.randint(0, D, (1, T), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for inner, outer in zip(heads.inner, heads.outer, strict=True):
            inner.copy_(torch.eye(D))
            outer.zero_()
            outer[:D] = 50 * torch.eye(D)
    feats = Features(functional.one_hot(states.roll(-2, dims=1), D).double())
    rows = one_document(states)
    objective = Objective(heads, DECAY)
    out = objective.loss(feats, rows, objective.target_counts(rows))
    assert out.head_counts.tolist() == [T - 2, T - 3, T - 4]
    assert out.head_correct[0] == T - 2
    assert out.head_sums[0].item() < 1e-6
    assert all(out.head_sums[1:] > 10)


def run(objective: Objective, feats: Features, batch: Rows, parts: list[slice]) -> list[ObjectiveOutput]:
    rows = [batch.part(place) for place in parts]
    total = torch.stack([objective.target_counts(micro) for micro in rows]).sum(dim=0)
    return [objective.loss(part(feats, place), micro, total) for place, micro in zip(parts, rows, strict=True)]


class Stem(Heads):
    """Heads on a trained layer that they share."""

    def __init__(self) -> None:
        super().__init__(independent=False)
        self.stem = nn.Parameter(torch.randn(D, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64))

    def head_states(self, feats: Features, batch: Rows) -> Iterator[Tensor]:
        yield from super().head_states(Features(torch.tanh(feats.hidden @ self.stem)), batch)


def test_heads_that_share_a_layer_pass_through_it_once(batch: Rows, feats: Features) -> None:
    heads = Stem()
    objective = Objective(heads, DECAY)
    counts = objective.target_counts(batch)
    parameters = list(heads.parameters())
    wanted = torch.autograd.grad(reference(heads, feats, batch), parameters)
    ours = accumulated(lambda: objective.loss(feats, batch, counts, grad_scale=1.0), parameters)
    for mine, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
    heads.independent_heads = True
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        objective.loss(feats, batch, counts, grad_scale=1.0)


def test_a_prompt_position_may_predict_a_supervised_token(feats: Features) -> None:
    labels = torch.full((B, T), IGNORE_INDEX)
    labels[:, 5:] = 1
    rows = one_document(labels)
    objective = Objective(Heads(), DECAY)
    # head k sees targets 5..T-1 from t = 4-k onwards
    assert objective.target_counts(rows).tolist() == [B * (T - 5)] * K


def test_nothing_of_joint_training_acts_here(batch: Rows, feats: Features) -> None:
    """lambda0 belongs to joint training: under `sine` a first step without loss would be the fork's mistake."""
    objective = Objective(Heads(), DECAY)
    counts = objective.target_counts(batch)
    first, last = (objective.loss(feats, batch, counts, progress=s) for s in (0.0, 1.0))
    assert first.loss.item() == last.loss.item() > 0
    assert first.lm is None
    assert not objective.needs_teacher


def test_soft_heads_learn_from_the_frozen_backbone(batch: Rows, feats: Features) -> None:
    heads = Heads()
    share = 0.7
    objective = Objective(heads, DECAY, soft_heads=share)
    own = LMHead(torch.randn(V, D, generator=torch.Generator().manual_seed(8), dtype=torch.float64))
    out = objective.loss(feats, batch, objective.target_counts(batch), teacher=feats.hidden, teacher_lm_head=own)

    teacher = own.logits(feats.hidden)
    logits = [hidden @ heads.outer[i].t() for i, hidden in enumerate(heads.head_states(feats, batch))]
    wanted = sum(DECAY**k * mean_term(logits[k - 1], batch, k, teacher=teacher, share=share) for k in range(1, K + 1))
    torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=0)
    parameters = list(heads.parameters())
    theirs = torch.autograd.grad(wanted, parameters)
    for mine, other in zip(torch.autograd.grad(out.loss, parameters), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
    hard = Objective(heads, DECAY).loss(feats, batch, objective.target_counts(batch))
    torch.testing.assert_close(out.head_sums, hard.head_sums)  # both are told against the labels
    assert torch.equal(out.head_correct, hard.head_correct)


def test_head_weights_are_powers_of_the_decay() -> None:
    assert [head_weight(k, 0.8) for k in (1, 2, 3)] == pytest.approx([0.8, 0.64, 0.512])
    assert head_weight(4, 1.0) == 1.0


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.25, 0.5, 1.0]),
        ("sine", [0.0, math.sin(math.pi / 8), math.sqrt(0.5), 1.0]),
        ("sine_0.5", [0.0, math.sqrt(0.5), 1.0, 1.0]),
        ("sine_1", [0.0, math.sin(math.pi / 8), math.sqrt(0.5), 1.0]),
    ],
)
def test_schedules(schedule: str, values: list[float]) -> None:
    assert [lambda0(schedule, s) for s in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(values)


def test_progress_beyond_the_ends_is_held() -> None:
    assert lambda0("linear", 1.2) == 1.0
    assert lambda0("linear", -0.1) == 0.0
    assert lambda0("sine", 1.5) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "sine_", "sine_x", "sine_0", "sine_1.5", "sine_nan", ""])
def test_unknown_schedules_are_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"sine_R|unknown schedule"):
        lambda0(schedule, 0.5)
