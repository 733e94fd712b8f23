"""The objective over a reduced vocabulary against the formula in plain loops: value, gradients, counts, hits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, one_hot

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses.objective import Objective
from medusa_train.models.features import Features
from medusa_train.models.lm_head import LMHead
from tests.losses.plain import assert_gradients
from tests.losses.toy import DECAY, B, D, K, Rows, T, V, one_document

KEPT = torch.tensor([12, 3, 5, 0, 9, 16])


class Heads(nn.Module):
    """K linear heads over KEPT, with a bias, a soft cap and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.trained_heads = K
        self.independent_heads = True
        generator = torch.Generator().manual_seed(1)

        def leaf(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.inner = nn.ParameterList(leaf(D, D) for _ in range(K))
        self.outer = nn.ParameterList(leaf(len(KEPT), D) for _ in range(K))
        self.bias = nn.ParameterList(leaf(len(KEPT)) for _ in range(K))

    def head_states(self, feats: Features, batch: Rows) -> Iterator[Tensor]:
        for inner in self.inner:
            yield feats.hidden @ inner

    def lm_head(self, k: int) -> LMHead:
        return LMHead(self.outer[k - 1], self.bias[k - 1], 4.0, 0.5, token_map=KEPT)


def plain(heads: Heads, feats: Features, batch: Rows, teacher: LMHead, share: float) -> tuple[Tensor, Tensor]:
    """The formula in `Objective`'s docstring, target by target; and per head: valid targets, known ones, hits."""
    terms, numbers, kept = [], torch.zeros(3, K, dtype=torch.long), KEPT.tolist()
    own = teacher.logits(feats.hidden).softmax(-1)
    for k, hidden in enumerate(heads.head_states(feats, batch), start=1):
        logits = 4.0 * torch.tanh(0.5 * (hidden @ heads.outer[k - 1].t() + heads.bias[k - 1]) / 4.0)
        losses = []
        for b in range(B):
            for t in range(T - k - 1):
                label = int(batch.labels[b, t + k + 1])
                if label == IGNORE_INDEX or batch.segments[b, t] != batch.segments[b, t + k + 1]:
                    continue
                known = label in kept
                hit = known and int(logits[b, t].argmax()) == kept.index(label)
                numbers[:, k - 1] += torch.tensor([1, known, hit])
                if known:
                    restricted = own[b, t + k, KEPT] / own[b, t + k, KEPT].sum()
                    hard = one_hot(torch.tensor(kept.index(label)), len(kept)).double()
                    target = share * restricted + (1 - share) * hard
                    losses.append(-(target * log_softmax(logits[b, t], dim=0)).sum())
        terms.append(DECAY**k * torch.stack(losses).mean())
    return torch.stack(terms).sum(), numbers


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_value_and_gradients_are_the_formula_s(batch: Rows, feats: Features, share: float) -> None:
    heads = Heads()
    teacher = LMHead(torch.randn(V, D, generator=torch.Generator().manual_seed(8), dtype=torch.float64))
    objective = Objective(heads, DECAY, soft_heads=share)
    counts = objective.target_counts(batch)
    compute = partial(objective.loss, feats, batch, counts, teacher=feats.hidden, teacher_lm_head=teacher)
    out = compute()
    wanted, numbers = plain(heads, feats, batch, teacher, share)
    torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=0)
    assert_gradients(lambda scale: compute(grad_scale=scale).loss, wanted, list(heads.parameters()))
    assert torch.equal(torch.stack([out.head_counts, out.head_in_vocab, out.head_correct]), numbers)
    assert torch.equal(counts, out.head_in_vocab)
    assert bool((out.head_in_vocab < out.head_counts).all())  # or this shows nothing
    assert bool((out.head_in_vocab > 0).all())


def test_a_batch_that_knows_none_of_its_targets_has_no_loss(feats: Features) -> None:
    heads = Heads()
    rows = one_document(torch.full((B, T), 1))
    objective = Objective(heads, DECAY)
    out = objective.loss(feats, rows, objective.target_counts(rows))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert all(torch.count_nonzero(p.grad) == 0 for p in heads.parameters())
    assert out.head_counts.tolist() == [B * (T - 2), B * (T - 3), B * (T - 4)]
    assert out.head_in_vocab.tolist() == out.head_correct.tolist() == [0, 0, 0]
