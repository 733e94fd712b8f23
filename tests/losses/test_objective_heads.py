"""The heads' objective against plain loops: value, gradients, accumulation, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_train.data.batch import IGNORE_INDEX, Batch
from medusa_train.losses import chunks
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Features
from medusa_train.models.lm_head import LMHead
from tests.losses.formula import objective as plain
from tests.losses.plain import accumulated, peak_bytes
from tests.losses.toy import DECAY, KEPT, B, D, Heads, K, ReducedHeads, Rows, Stem, T, V, one_document, part

TEACHER = LMHead(torch.randn(V, D, generator=torch.Generator().manual_seed(8), dtype=torch.float64))


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("make", [Heads, Stem, ReducedHeads])
def test_value_and_gradients_are_the_formulas(make: Any, share: float, batch: Rows, feats: Features) -> None:
    """Independent heads, heads that share a layer, and heads over a reduced vocabulary."""
    heads = make()
    ours, teacher = Objective(heads, DECAY, soft_heads=share), {"teacher_lm_head": TEACHER}
    counts = ours.target_counts(batch)
    wanted = plain(heads, feats, batch, teacher=TEACHER, decay=DECAY, share=share)
    out = ours.loss(feats, batch, counts, teacher=feats.hidden, **teacher)
    torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=0)
    parameters = list(heads.parameters())
    gradients = torch.autograd.grad(wanted, parameters)
    at_once = accumulated(
        lambda: ours.loss(feats, batch, counts, teacher=feats.hidden, grad_scale=1.0, **teacher), parameters
    )
    for mine, direct, other in zip(torch.autograd.grad(out.loss, parameters), at_once, gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
        torch.testing.assert_close(direct, other, rtol=0, atol=1e-10)


def test_counts_and_hits_of_a_reduced_vocabulary(batch: Rows, feats: Features) -> None:
    heads = ReducedHeads()
    objective = Objective(heads, DECAY)
    counts = objective.target_counts(batch)
    out = objective.loss(feats, batch, counts)
    numbers = torch.zeros(3, K, dtype=torch.long)  # per head: valid targets, those in KEPT, hits
    for k, states in enumerate(heads.head_states(feats, batch), start=1):
        best = KEPT[heads.lm_head(k).logits(states).argmax(-1)]
        for b in range(B):
            for t in range(T - k - 1):
                label = int(batch.labels[b, t + k + 1])
                if label != IGNORE_INDEX and batch.segments[b, t] == batch.segments[b, t + k + 1]:
                    numbers[:, k - 1] += torch.tensor([1, label in KEPT, label == best[b, t]])
    assert torch.equal(torch.stack([out.head_counts, out.head_in_vocab, out.head_correct]), numbers)
    assert torch.equal(counts, out.head_in_vocab)
    assert bool((out.head_in_vocab > 0).all() & (out.head_in_vocab < out.head_counts).all())  # or this shows nothing


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_micro_batches_add_up(share: float, batch: Rows, feats: Features) -> None:
    heads = ReducedHeads()
    ours, teacher = Objective(heads, DECAY, soft_heads=share), {"teacher_lm_head": TEACHER}
    counts, parameters = ours.target_counts(batch), list(heads.parameters())
    slices = [slice(0, 1), slice(1, B)]

    def run(rows: slice) -> Tensor:
        states = part(feats, rows)
        return ours.loss(states, batch.part(rows), counts, teacher=states.hidden, grad_scale=1.0, **teacher).loss

    whole = accumulated(lambda: run(slice(0, B)), parameters)
    halves = accumulated(lambda: [run(rows) for rows in slices], parameters)
    for mine, other in zip(halves, whole, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(run(rows) for rows in slices), run(slice(0, B)), rtol=1e-12, atol=0)


def test_nothing_supervised_gives_zero_not_nan(feats: Features) -> None:
    heads = ReducedHeads()
    ours, teacher = Objective(heads, DECAY, soft_heads=1.0), {"teacher_lm_head": TEACHER}
    for label in (IGNORE_INDEX, 1):  # 1: not in KEPT
        rows = one_document(torch.full((B, T), label))
        out = ours.loss(feats, rows, ours.target_counts(rows), teacher=feats.hidden, **teacher)
        assert out.loss.item() == 0.0
        assert out.head_counts.tolist() == [0 if label < 0 else B * (T - k - 1) for k in range(1, K + 1)]
        assert out.head_in_vocab.tolist() == out.head_correct.tolist() == [0, 0, 0]
        assert all(torch.count_nonzero(grad) == 0 for grad in torch.autograd.grad(out.loss, list(heads.parameters())))


def medusa(
    heads: int, tokens: int, vocab: int, width: int, shared: bool = False
) -> tuple[MedusaDraft, Features, Batch]:
    torch.manual_seed(0)
    lm_head = LMHead(torch.randn(vocab, width)) if shared else None
    draft = MedusaDraft(width, vocab, heads, 1, shared=lm_head)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    labels = torch.randint(vocab, (1, tokens))
    batch = Batch(labels, labels, torch.arange(tokens)[None], torch.zeros_like(labels), [])
    return draft, Features(torch.randn(1, tokens, width)), batch


@pytest.mark.parametrize("grad_scale", [1.0, None])
def test_autocast_gives_every_weight_its_gradient(grad_scale: float | None) -> None:
    draft, feats, batch = medusa(3, 64, 50, 16)
    ours = Objective(draft, DECAY)
    counts, parameters = ours.target_counts(batch), list(draft.parameters())

    def run() -> None:
        loss = ours.loss(feats, batch, counts, grad_scale=grad_scale).loss
        if grad_scale is None:
            loss.backward()

    wanted = accumulated(run, parameters)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = accumulated(run, parameters)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0.05 * float(other.abs().max()))


def test_memory_is_flat_in_the_number_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocab, width = 1024, 500, 16
    monkeypatch.setattr(chunks, "_MIN_ROWS", 64)
    monkeypatch.setitem(chunks._CHUNK_BYTES, "cpu", 64 * vocab * 4)
    monkeypatch.setitem(chunks._BLOCK_BYTES, "cpu", 32 * vocab * 4)

    def peak(heads: int) -> int:
        draft, feats, batch = medusa(heads, tokens, vocab, width)
        ours = Objective(draft, 0.8, soft_heads=1.0)
        counts, teacher = ours.target_counts(batch), LMHead(torch.randn(vocab, width))

        def run() -> None:
            ours.loss(feats, batch, counts, teacher=feats.hidden, teacher_lm_head=teacher, grad_scale=1.0)

        run()
        return peak_bytes(run)

    few, many = peak(1), peak(5)
    assert many < 1.1 * few
    assert many < 0.15 * 5 * tokens * vocab * 4
