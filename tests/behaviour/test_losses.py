"""Fused cross-entropies and divergences in float64 against whole rows of logits: value, gradients,
hits; with biases, soft caps, scales, adapters and token biases, of student and teacher.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour.seams import Matrix, loss_and_gradients

N, D, V, R, AHEAD = 23, 7, 19, 3, 2
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "soft cap": {"softcap": 3.0},
    "scale": {"scale": 0.4},
    "lora": {"lora": True},
    "markov": {"markov": True},
    "all": {"bias": True, "softcap": 2.0, "scale": 1.7, "lora": True},
    "all with a token bias": {"bias": True, "softcap": 2.0, "scale": 1.7, "markov": True},
}
#: The teacher's part in the target, and whether the loss is the divergence from it.
TARGETS = {"labels": (0.0, False), "mixed": (0.4, False), "soft": (1.0, False), "kl": (1.0, True)}


class Random:
    """Leaves in float64, of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def leaf(self, *shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return numbers.requires_grad_()

    def matrix(
        self,
        width: int,
        *,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        lora: bool = False,
        markov: bool = False,
    ) -> Matrix:
        return Matrix(
            self.leaf(V, width),
            self.leaf(V) if bias else None,
            softcap,
            scale,
            (self.leaf(R, width), self.leaf(V, R), 0.5) if lora else None,
            self.leaf(V, R) if markov else None,
        )


def leaves(matrix: Matrix) -> list[Tensor]:
    found = [matrix.weight, matrix.bias, matrix.markov, *(matrix.lora or ())]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def logits_of(states: Tensor, matrix: Matrix) -> Tensor:
    width = matrix.weight.shape[1]
    logits = states[:, :width] @ matrix.weight.T
    if matrix.lora is not None:
        a, b, factor = matrix.lora
        logits = logits + factor * states[:, :width] @ a.T @ b.T
    if matrix.markov is not None:
        logits = logits + states[:, width:] @ matrix.markov.T
    if matrix.bias is not None:
        logits = logits + matrix.bias
    logits = matrix.scale * logits
    if matrix.softcap is not None:
        logits = matrix.softcap * torch.tanh(logits / matrix.softcap)
    return logits


def plain_loss(
    logits: Tensor, targets: list[int | None], teacher: Tensor, part: float, kl: bool
) -> tuple[Tensor, float, float, int]:
    """Return the loss, cross-entropy, divergence, and hits, position by position."""
    total = torch.zeros((), dtype=torch.float64)
    ce = divergence = 0.0
    hits = 0
    for t, target in enumerate(targets):
        if target is None:
            continue
        log_p = logits[t].log_softmax(-1)
        log_q = teacher[t + AHEAD].log_softmax(-1).detach()
        if kl:
            total = total + (log_q.exp() * (log_q - log_p)).sum()
        else:
            total = total - (1 - part) * log_p[target] - part * (log_q.exp() * log_p).sum()
        ce -= float(log_p[target].detach())
        divergence += float((log_q.exp() * (log_q - log_p.detach())).sum())
        hits += int(logits[t].argmax()) == target
    return total, ce, divergence, hits


@pytest.mark.parametrize("at_once", [True, False], ids=["with the loss", "backward"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients(kind: str, target: str, at_once: bool) -> None:
    part, kl = TARGETS[target]
    for chunk, seed in ((5, 1), (None, 2)):
        random = Random(seed)
        states = random.leaf(N, D + (R if "markov" in KINDS[kind] else 0))
        matrix = random.matrix(D, **KINDS[kind])
        other_states, other = random.leaf(N, 4), random.matrix(4, bias=True, softcap=4.0, lora=True)
        draws = torch.rand(N, generator=random.generator).tolist()
        targets: list[int | None] = [int(V * p) if p > 0.3 else None for p in draws]
        targets[-AHEAD:] = [None] * AHEAD
        best = logits_of(states, matrix).argmax(-1).tolist()
        targets[3:6] = best[3:6]
        wanted, ce, divergence, hits = plain_loss(
            logits_of(states, matrix), targets, logits_of(other_states, other), part, kl
        )
        trained = [states, *leaves(matrix)]
        gradients = torch.autograd.grad(0.3 * wanted, trained)
        found = loss_and_gradients(
            states,
            matrix,
            targets,
            (other_states, other) if part else None,
            part=part,
            ahead=AHEAD,
            divergence=kl,
            factor=0.3,
            at_once=at_once,
            chunk=chunk,
        )
        torch.testing.assert_close(found.loss, wanted.detach(), rtol=1e-11, atol=1e-11)
        assert float(found.cross_entropy) == pytest.approx(ce, rel=1e-11)
        assert float(found.divergence) == pytest.approx(divergence if part else 0.0, rel=1e-10)
        assert found.hits == hits >= 3
        for leaf, expected in zip(trained, gradients, strict=True):
            torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-11)
        assert all(leaf.grad is None for leaf in (other_states, *leaves(other)))


@pytest.mark.parametrize("at_once", [True, False], ids=["with the loss", "backward"])
def test_gradients_of_two_losses_add_up(at_once: bool) -> None:
    random = Random(3)
    matrix = random.matrix(D)
    parts = [(random.leaf(N, D), [n % V for n in range(N)]) for _ in range(2)]
    total = sum(
        torch.nn.functional.cross_entropy(
            logits_of(states, matrix), torch.tensor(targets), reduction="sum"
        )
        for states, targets in parts
    )
    (expected,) = torch.autograd.grad(total, [matrix.weight])  # type: ignore[list-item]
    for states, targets in parts:
        loss_and_gradients(states, matrix, targets, at_once=at_once)
    torch.testing.assert_close(matrix.weight.grad, expected, rtol=0, atol=1e-11)


def test_positions_without_a_target_are_not_read() -> None:
    """Neither of the student nor of the teacher."""
    random = Random(4)
    matrix, other = random.matrix(D), random.matrix(D)
    states, theirs = random.leaf(N, D).detach(), random.leaf(N, D).detach()
    targets: list[int | None] = [None if n % 3 else n % V for n in range(N)]
    clean = loss_and_gradients(states, matrix, targets, (theirs, other), part=0.5)
    unread = [n for n in range(N) if targets[n] is None]
    states[unread] = theirs[unread] = torch.nan
    dirty = loss_and_gradients(states, matrix, targets, (theirs, other), part=0.5)
    assert clean.loss == dirty.loss


@pytest.mark.parametrize(("part", "kl"), [(0.0, False), (0.5, False), (1.0, True)])
def test_without_targets_loss_and_gradients_are_0(part: float, kl: bool) -> None:
    random = Random(5)
    matrix, states = random.matrix(D, lora=True), random.leaf(N, D)
    teacher = (random.leaf(N, D), random.matrix(D))
    found = loss_and_gradients(
        states, matrix, [None] * N, teacher, part=part, divergence=kl, at_once=True
    )
    assert found.loss == 0
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in (states, *leaves(matrix)))


def test_the_divergence_from_oneself_is_0_to_the_bit() -> None:
    random = Random(6)
    matrix = random.matrix(D, softcap=2.0, bias=True)
    states = random.leaf(N, D)
    found = loss_and_gradients(
        states, matrix, [0] * N, (states.detach(), matrix), divergence=True, at_once=True
    )
    assert found.loss == 0
    assert not states.grad.any()  # type: ignore[union-attr]


def test_frozen_tensors_get_no_gradient() -> None:
    random = Random(7)
    for frozen in itertools.product([True, False], repeat=2):
        states, matrix = random.leaf(N, D), random.matrix(D)
        states.requires_grad_(not frozen[0])
        matrix.weight.requires_grad_(not frozen[1])
        loss_and_gradients(states, matrix, [1] * N, at_once=True)
        assert (states.grad is None, matrix.weight.grad is None) == frozen


@pytest.mark.parametrize("target", [V, -1])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    random = Random(8)
    with pytest.raises(IndexError, match=str(V)):
        loss_and_gradients(random.leaf(N, D), random.matrix(D), [target] * N)


def test_half_precision_keeps_a_float32_loss() -> None:
    random = Random(9)
    states, matrix = random.leaf(N, D), random.matrix(D)
    exact = loss_and_gradients(states, matrix, [n % V for n in range(N)]).loss
    half = loss_and_gradients(
        states.detach().bfloat16(),
        Matrix(matrix.weight.detach().bfloat16()),
        [n % V for n in range(N)],
    ).loss
    assert half.dtype == torch.float32
    assert float(half) == pytest.approx(float(exact), rel=0.02)
