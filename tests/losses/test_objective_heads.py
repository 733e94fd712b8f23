"""The heads' objective against plain loops: value, gradients, targets, accumulation; and the
schedules of lambda0.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.objective import Objective, lambda0
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_states import HiddenStates
from tests.losses.formula import objective as plain
from tests.losses.plain import accumulated
from tests.losses.toy import (
    DECAY,
    KEPT,
    B,
    D,
    Heads,
    K,
    ReducedHeads,
    Rows,
    Stem,
    T,
    V,
    one_document,
    part,
)

TEACHER = LMHead(torch.randn(V, D, generator=torch.Generator().manual_seed(8), dtype=torch.float64))


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("make", [Heads, Stem, ReducedHeads])
def test_value_and_gradients_are_the_formulas(
    make: Any, share: float, batch: Rows, hidden_states: HiddenStates
) -> None:
    """Independent heads, heads that share a layer, and heads over a reduced vocabulary; whole and
    in micro-batches.
    """
    heads = make()
    ours, parameters = Objective(heads, DECAY, soft_targets=share), list(heads.parameters())
    counts = ours.target_counts(batch)

    def run(rows: slice = slice(0, B), grad_scale: float | None = 1.0) -> Tensor:
        states, theirs = part(hidden_states, rows), (part(hidden_states, rows).final, TEACHER)
        return ours.loss_and_gradients(
            states, batch.part(rows), counts, teacher=theirs, grad_scale=grad_scale
        ).loss

    wanted = plain(heads, hidden_states, batch, teacher=TEACHER, decay=DECAY, share=share)
    loss = run(grad_scale=None)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=0)
    gradients = torch.autograd.grad(wanted, parameters)
    halves = [slice(0, 1), slice(1, B)]
    found = (
        torch.autograd.grad(loss, parameters),
        accumulated(run, parameters),
        accumulated(lambda: [run(rows) for rows in halves], parameters),
    )
    for three in zip(*found, gradients, strict=True):
        for mine in three[:-1]:
            torch.testing.assert_close(mine, three[-1], rtol=0, atol=1e-10)
    torch.testing.assert_close(
        sum(run(rows) for rows in halves), wanted.detach(), rtol=1e-10, atol=0
    )


def test_counts_and_hits_of_a_reduced_vocabulary(batch: Rows, hidden_states: HiddenStates) -> None:
    heads = ReducedHeads()
    objective = Objective(heads, DECAY)
    counts = objective.target_counts(batch)
    out = objective.loss_and_gradients(hidden_states, batch, counts)
    numbers = torch.zeros(3, K, dtype=torch.long)  # per head: valid targets, those in KEPT, hits
    for k, states in enumerate(heads.head_states(hidden_states, batch), start=1):
        best = KEPT[heads.lm_head(k).logits(states).argmax(-1)]
        for b in range(B):
            for t in range(T - k - 1):
                label = int(batch.labels[b, t + k + 1])
                if label != IGNORE_INDEX and batch.segments[b, t] == batch.segments[b, t + k + 1]:
                    numbers[:, k - 1] += torch.tensor([1, label in KEPT, label == best[b, t]])
    assert torch.equal(torch.stack([out.head_counts, out.head_in_vocab, out.head_correct]), numbers)
    assert torch.equal(counts, out.head_in_vocab)
    # or this shows nothing
    assert bool((out.head_in_vocab > 0).all() & (out.head_in_vocab < out.head_counts).all())


def test_nothing_supervised_gives_zero_not_nan(hidden_states: HiddenStates) -> None:
    heads = ReducedHeads()
    ours, teacher = Objective(heads, DECAY, soft_targets=1.0), (hidden_states.final, TEACHER)
    for label in (IGNORE_INDEX, 1):  # 1: not in KEPT
        rows = one_document(torch.full((B, T), label))
        out = ours.loss_and_gradients(
            hidden_states, rows, ours.target_counts(rows), teacher=teacher
        )
        assert out.loss.item() == 0.0
        assert out.head_counts.tolist() == [
            0 if label < 0 else B * (T - k - 1) for k in range(1, K + 1)
        ]
        assert out.head_in_vocab.tolist() == out.head_correct.tolist() == [0, 0, 0]
        assert all(
            torch.count_nonzero(grad) == 0
            for grad in torch.autograd.grad(out.loss, list(heads.parameters()))
        )


def test_a_copying_task_pins_the_target() -> None:
    """States that spell out the token at t + 2, in plain words: head 1 always hits, its neighbours
    seldom.
    """
    heads = Heads()
    tokens = torch.randint(0, D, (1, T), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for inner, outer in zip(heads.inner, heads.outer, strict=True):
            inner.copy_(torch.eye(D))
            outer.zero_()
            outer[:D] = 50 * torch.eye(D)
    rows, objective = one_document(tokens), Objective(heads, DECAY)
    out = objective.loss_and_gradients(
        HiddenStates(one_hot(tokens.roll(-2, dims=1), D).double()),
        rows,
        objective.target_counts(rows),
    )
    assert out.head_counts.tolist() == [T - 2, T - 3, T - 4]
    assert out.head_correct[0] == T - 2
    assert max(out.head_correct[1:]) < (T - 4) / 2


def test_a_prompt_position_may_predict_a_supervised_token() -> None:
    labels = torch.full((B, T), IGNORE_INDEX)
    labels[:, 5:] = 1
    # head k sees targets 5..T-1 from t = 4-k onwards
    assert (
        Objective(Heads(), DECAY).target_counts(one_document(labels)).tolist() == [B * (T - 5)] * K
    )


def test_nothing_of_joint_training_acts_on_a_frozen_target_model(
    batch: Rows, hidden_states: HiddenStates
) -> None:
    """lambda0 belongs to joint training: under `sine` a first step without loss would be the fork's
    mistake.
    """
    objective = Objective(Heads(), DECAY, schedule="sine")
    first, last = (
        objective.loss_and_gradients(
            hidden_states, batch, objective.target_counts(batch), progress=s
        )
        for s in (0.0, 1.0)
    )
    assert first.loss.item() == last.loss.item() > 0
    assert first.lm is None
    assert not objective.needs_teacher


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.25, 0.5, 1.0]),
        ("sine", [0.0, math.sin(math.pi / 8), math.sqrt(0.5), 1.0]),
        ("sine_0.5", [0.0, math.sqrt(0.5), 1.0, 1.0]),
    ],
)
def test_schedules(schedule: str, values: list[float]) -> None:
    assert [lambda0(schedule, s) for s in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(values)
    assert lambda0(schedule, 1.5) == pytest.approx(values[-1])
    assert lambda0(schedule, -0.1) == values[0]
