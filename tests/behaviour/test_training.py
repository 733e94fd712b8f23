"""Training against plain torch: losses, gradients, clipping, AdamW, the schedule and validation, for
every draft and recipe, from the files that a run writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour import plain
from tests.behaviour.conftest import KINDS, LOSSES, RunOf
from tests.behaviour.world import metrics

Documents = tuple[list[plain.Document], list[plain.Document]]
STEPS = 3
RATE = 1e-2


def initial(run_of: RunOf, kind: str, **keys: Any) -> Path:
    """Return a run whose weights stayed at their first values."""
    return run_of(kind, **{**keys, "learning_rate": 1e-30, "max_steps": 1})


def assert_close(ours: float, theirs: float, tolerance: float = 1e-5) -> None:
    assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-9)


def total(heads: list[plain.Sums], loss: plain.HeadsLoss) -> Tensor:
    terms = [loss.weight * loss.decay**k * head.mean() for k, head in enumerate(heads, start=1)]
    return torch.stack(terms).sum()


class PlainRun:
    """Trains the draft of a run's first weights in float64 on all documents in each step.

    Attributes:
        losses, norms, hits: of each step, before its update.
    """

    def __init__(self, heads: Path, model: Any, documents: list[plain.Document]) -> None:
        self.draft = plain.PlainDraft.read(heads, model)
        self.documents = documents
        self.states = {tuple(d.tokens): plain.run_model(model, d.tokens) for d in documents}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.hits: list[list[float]] = []

    def train(
        self,
        loss: plain.HeadsLoss,
        rate: Callable[[int], float],
        decay: float = 0.0,
        limit: float = 1.0,
    ) -> None:
        moments: dict[str, tuple[Tensor, Tensor]] = {}
        weights = self.draft.weights
        for step in range(STEPS):
            for weight in weights.values():
                weight.requires_grad_(True)
            heads = plain.head_terms(
                self.draft, self.documents, loss, lambda tokens: self.states[tuple(tokens)]
            )
            value = total(heads, loss)
            gradients = dict(
                zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True)
            )
            self.losses.append(float(value.detach()))
            self.hits.append([head.correct / max(1, head.count) for head in heads])
            self.norms.append(plain.clip(gradients, limit))
            for weight in weights.values():
                weight.requires_grad_(False)
            rates = dict.fromkeys(weights, rate(step))
            plain.adamw(weights, gradients, moments, step + 1, rates, decay=decay)


def assert_same_weights(run: Path, draft: plain.PlainDraft, tolerance: float = 2e-5) -> None:
    (path,) = (run / "heads").glob("*.safetensors")
    trained = plain.read_weights(path)
    trained.pop("token_map", None)
    assert set(trained) == set(draft.weights)
    for name, weight in draft.weights.items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_draft_are_those_of_plain_torch(
    kind: str, run_of: RunOf, exact_model: Any, documents: Documents
) -> None:
    reference = PlainRun(initial(run_of, kind) / "heads", exact_model, documents[0])
    reference.train(LOSSES[kind], lambda step: RATE * plain.cosine(step, STEPS))
    run = run_of(kind)
    records = metrics(run)
    assert len(records) == STEPS
    for step, record in enumerate(records):
        assert_close(record["loss"], reference.losses[step], 1e-4)
        assert_close(record["grad_norm"], reference.norms[step], 1e-3)
        assert_close(record["lr"], RATE * plain.cosine(step, STEPS))
        assert record["head_top1"] == pytest.approx(reference.hits[step])
        assert record["tokens"] == (step + 1) * sum(len(d.tokens) for d in documents[0])
        assert record["epoch"] == step + 1
    assert reference.norms[0] > 0.1
    assert_same_weights(run, reference.draft)
