"""Losses of heads with a Markov bias: the plain formulas in value and gradient, with the offsets of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from medusa_train.data.batch import IGNORE_INDEX, Batch
from medusa_train.losses.chunks import Teacher
from medusa_train.losses.fused_losses import linear_loss
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Features
from medusa_train.models.lm_head import LMHead
from tests.losses import formula
from tests.losses.plain import Random, assert_gradients

N, D, R, V = 23, 6, 3, 17
TRANSFORMS: list[dict[str, Any]] = [{}, {"softcap": 2.0, "scale": 1.7}]


def plain_logits(states: Tensor, head: LMHead) -> Tensor:
    """Logits of [h ; e]: `W h + b + R e`, then scale and soft cap."""
    assert head.bias is not None
    assert head.token_bias is not None
    logits = head.scale * (states[:, :D] @ head.weight.T + head.bias + states[:, D:] @ head.token_bias.T)
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


@pytest.mark.parametrize("kind", ["labels", "teacher"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "transformed"])
def test_value_and_gradients_of_a_loss(transform: dict[str, Any], kind: str) -> None:
    random = Random(5, torch.float64)
    states, theirs = random.leaf(N, D + R), random.leaf(N, D).detach()
    head = LMHead(random.leaf(V, D), random.leaf(V), token_bias=random.leaf(V, R), **transform)
    teacher = LMHead(random.leaf(V, D).detach())
    targets = torch.randint(0, V, (N,), generator=random.generator)
    targets[::4] = IGNORE_INDEX
    targets[-1] = IGNORE_INDEX  # the teacher's row lies shift
    assert head.bias is not None
    assert head.token_bias is not None
    tensors = [states, head.weight, head.bias, head.token_bias]

    def fused(grad_scale: float | None) -> Tensor:
        common: dict[str, Any] = {"chunk": 5, "grad_scale": grad_scale}
        if kind == "teacher":
            return linear_loss(states, head, targets, Teacher(theirs, teacher, 1, 0.6), **common).loss_sum
        return linear_loss(states, head, targets, **common).loss_sum

    log_probs = log_softmax(plain_logits(states, head), dim=1)
    valid = (targets != IGNORE_INDEX).nonzero()[:, 0]
    goal = one_hot(targets[valid], V).double()
    if kind == "teacher":
        goal = 0.6 * teacher.logits(theirs)[valid + 1].softmax(1) + 0.4 * goal
    wanted = -(goal * log_probs[valid]).sum()
    torch.testing.assert_close(fused(None), wanted, rtol=1e-12, atol=0)
    assert_gradients(fused, wanted, tensors, 1e-12)


#: Two documents in the first row, one and padding in the second.
SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, -1, -1, -1]])
KEPT = torch.tensor([12, 3, 5, 0, 9, 16, 7, 8])


def trained_heads(*, reduced: bool) -> MedusaDraft:
    token_map = KEPT if reduced else None
    draft = MedusaDraft(D, V, 3, token_map=token_map, markov_rank=R, dtype=torch.float64)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0, 0.7)
    return draft


class Plain:
    """The same heads as a formula, position by position: head k at t reads the token t + k."""

    def __init__(self, draft: MedusaDraft) -> None:
        self.draft, self.trained_heads = draft, draft.num_heads
        self.state = dict(draft.named_parameters())

    def head_states(self, feats: Features, batch: Batch) -> Iterator[Tensor]:
        """Logits, since `lm_head` leaves them as they are."""
        e, r = self.state["markov.embedding.weight"], self.state["markov.output.weight"]
        for k in range(1, self.draft.num_heads + 1):
            logits = self.draft.head_logits(feats.hidden, k)
            rows = [
                [
                    logits[b, t] + (r @ e[batch.tokens[b, t + k]] if t + k < batch.tokens.shape[1] else 0.0)
                    for t in range(batch.tokens.shape[1])
                ]
                for b in range(len(batch.tokens))
            ]
            yield torch.stack([torch.stack(row) for row in rows])

    def lm_head(self, k: int) -> Any:
        return SimpleNamespace(logits=lambda states: states, token_map=self.draft.token_map)


@pytest.mark.parametrize("how", ["labels", "teacher"])
@pytest.mark.parametrize("reduced", [False, True], ids=["all", "reduced"])
def test_value_and_gradients_of_the_objective(reduced: bool, how: str) -> None:
    draft = trained_heads(reduced=reduced)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, V, SEGMENTS.shape, generator=generator)
    labels = torch.where(SEGMENTS >= 0, tokens, IGNORE_INDEX)
    labels[0, 5] = IGNORE_INDEX
    batch = Batch(tokens, labels, torch.arange(10).expand(2, 10), SEGMENTS, [])
    feats = Features(torch.randn(2, 10, D, generator=generator, dtype=torch.float64))
    teacher = LMHead(torch.randn(V, D, generator=generator, dtype=torch.float64))
    if how == "labels":
        objective, keys = Objective(draft, 0.8), {"decay": 0.8}
    else:
        objective, keys = Objective(draft, 1.0, soft_heads=0.5), {"share": 0.5, "teacher": teacher}
    counts = objective.target_counts(batch)

    def fused(grad_scale: float | None) -> Tensor:
        return objective.loss(
            feats, batch, counts, teacher=feats.hidden, teacher_lm_head=teacher, grad_scale=grad_scale
        ).loss

    wanted = formula.objective(Plain(draft), feats, batch, **keys)
    torch.testing.assert_close(fused(None), wanted, rtol=1e-10, atol=0)
    assert_gradients(fused, wanted, list(draft.parameters()))
    assert all(float(p.grad.abs().sum()) > 0 for name, p in draft.named_parameters() if "markov" in name)
