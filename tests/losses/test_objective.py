"""The Medusa-1 objective against the formula written out on stacked logits: value, gradients, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from medusa_train.data.targets import IGNORE
from medusa_train.losses.objective import Medusa1Objective, ObjectiveOutput

B, T, D, V, K, DECAY = 4, 11, 6, 17, 3, 0.8


@dataclass(frozen=True)
class Head:
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    low_rank: None = None


class Heads(nn.Module):
    """K linear heads with a matrix each: all that a loss needs of a draft."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = K
        generator = torch.Generator().manual_seed(1)
        self.inner = nn.ParameterList(torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(K))
        self.outer = nn.ParameterList(torch.randn(V, D, generator=generator, dtype=torch.float64) for _ in range(K))

    def hidden(self, feats: Tensor) -> Iterator[Tensor]:
        for inner in self.inner:
            yield feats @ inner

    def unembed(self, k: int) -> Head:
        return Head(self.outer[k - 1])


@dataclass(frozen=True)
class Rows:
    labels: Tensor
    segments: Tensor

    def part(self, start: int, stop: int) -> Rows:
        return Rows(self.labels[start:stop], self.segments[start:stop])


@pytest.fixture
def batch() -> Rows:
    """Prompts masked here and there, row 1 holds two documents, row 2 is half padding."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[torch.rand(B, T, generator=generator) < 0.3] = IGNORE
    segments = torch.zeros(B, T, dtype=torch.long)
    segments[1, 5:] = 1
    labels[2, 6:] = IGNORE
    segments[2, 6:] = -1
    return Rows(labels, segments)


@pytest.fixture
def feats() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def reference(heads: Heads, feats: Tensor, batch: Rows, ahead: int = 1) -> Tensor:
    """SPEC 1 on stacked logits [K, B, T, V]; `ahead` = 1 is right: head k predicts t + k + 1."""
    stacked = torch.stack([hidden @ heads.outer[k].t() for k, hidden in enumerate(heads.hidden(feats))])
    total = torch.zeros((), dtype=torch.float64)
    for k in range(1, K + 1):
        losses = [
            functional.cross_entropy(stacked[k - 1, b, t], batch.labels[b, t + k + ahead])
            for b in range(B)
            for t in range(T - k - ahead)
            if batch.labels[b, t + k + ahead] != IGNORE and batch.segments[b, t] == batch.segments[b, t + k + ahead]
        ]
        total = total + DECAY**k * sum(losses) / len(losses)
    return total


def test_value_and_gradients_are_those_of_stacked_logits(batch: Rows, feats: Tensor) -> None:
    heads = Heads()
    objective = Medusa1Objective(heads, DECAY)
    out = objective.loss(feats, batch, objective.counts(batch))
    wanted = reference(heads, feats, batch)
    torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=0)
    parameters = list(heads.parameters())
    ours = torch.autograd.grad(out.loss, parameters)
    theirs = torch.autograd.grad(wanted, parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_shift_that_is_off_by_one_is_a_different_loss(batch: Rows, feats: Tensor, ahead: int) -> None:
    heads = Heads()
    objective = Medusa1Objective(heads, DECAY)
    out = objective.loss(feats, batch, objective.counts(batch))
    assert abs(out.loss.item() - reference(heads, feats, batch, ahead).item()) > 1e-3


def test_a_copying_task_pins_the_target() -> None:
    """States that spell out the token k + 1 ahead, for k = 1: head 1 then has no loss, its neighbours much."""
    heads = Heads()
    states = torch.randint(0, D, (1, T), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for inner, outer in zip(heads.inner, heads.outer, strict=True):
            inner.copy_(torch.eye(D))
            outer.zero_()
            outer[:D] = 50 * torch.eye(D)
    feats = functional.one_hot(states.roll(-2, dims=1), D).double()
    rows = Rows(states, torch.zeros_like(states))
    objective = Medusa1Objective(heads, DECAY)
    out = objective.loss(feats, rows, objective.counts(rows))
    assert out.head_counts.tolist() == [T - 2, T - 3, T - 4]
    assert out.head_correct[0] == T - 2
    assert out.head_sums[0].item() < 1e-6
    assert all(out.head_sums[1:] > 10)


def run(objective: Medusa1Objective, feats: Tensor, batch: Rows, parts: list[slice]) -> list[ObjectiveOutput]:
    rows = [batch.part(part.start, part.stop) for part in parts]
    total = torch.stack([objective.counts(part) for part in rows]).sum(dim=0)
    return [objective.loss(feats[part], micro, total) for part, micro in zip(parts, rows, strict=True)]


def test_two_micro_batches_are_one_batch(batch: Rows, feats: Tensor) -> None:
    """With the counts of the global batch; the halves hold unequal numbers of targets."""
    heads = Heads()
    objective = Medusa1Objective(heads, DECAY)
    (whole,) = run(objective, feats, batch, [slice(0, B)])
    halves = run(objective, feats, batch, [slice(0, 1), slice(1, B)])
    assert halves[0].head_counts.tolist() != halves[1].head_counts.tolist()
    assert (halves[0].loss + halves[1].loss).item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert torch.equal(halves[0].head_correct + halves[1].head_correct, whole.head_correct)
    assert torch.equal(halves[0].head_counts + halves[1].head_counts, whole.head_counts)

    parameters = list(heads.parameters())
    wanted = torch.autograd.grad(whole.loss, parameters)
    for half in halves:
        half.loss.backward()
    for parameter, grad in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-12)


def test_a_head_without_targets_counts_nothing(feats: Tensor) -> None:
    """One supervised token at position 3 is a target of heads 1 and 2 only: head 3 would look from t = -1."""
    labels = torch.full((B, T), IGNORE)
    labels[0, 3] = 5
    rows = Rows(labels, torch.zeros_like(labels))
    heads = Heads()
    objective = Medusa1Objective(heads, DECAY)
    counts = objective.counts(rows)
    assert counts.tolist() == [1, 1, 0]
    out = objective.loss(feats, rows, counts)
    assert out.head_sums[2] == 0
    assert torch.isfinite(out.loss)
    assert out.loss.item() == pytest.approx(0.8 * out.head_sums[0].item() + 0.64 * out.head_sums[1].item())
    out.loss.backward()
    assert torch.count_nonzero(heads.outer[2].grad) == 0
    assert torch.count_nonzero(heads.outer[0].grad) > 0


def test_a_prompt_position_may_predict_a_supervised_token(feats: Tensor) -> None:
    labels = torch.full((B, T), IGNORE)
    labels[:, 5:] = 1
    rows = Rows(labels, torch.zeros_like(labels))
    objective = Medusa1Objective(Heads(), DECAY)
    # head k sees targets 5..T-1 from t = 4-k onwards
    assert objective.counts(rows).tolist() == [B * (T - 5)] * K


def test_nothing_supervised_gives_zero_not_nan(feats: Tensor) -> None:
    labels = torch.full((B, T), IGNORE)
    heads = Heads()
    objective = Medusa1Objective(heads, DECAY)
    rows = Rows(labels, torch.zeros_like(labels))
    out = objective.loss(feats, rows, objective.counts(rows))
    assert out.loss.item() == 0.0
    out.loss.backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in heads.parameters())
