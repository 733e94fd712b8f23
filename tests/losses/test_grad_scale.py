"""Gradients computed with the loss: where they go, what is trained, and how much memory they need."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from medusa_train.data.batch import Batch
from medusa_train.losses import chunked_logits
from medusa_train.losses.linear_loss import linear_loss
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_states import HiddenStates
from tests.losses.plain import Random, accumulated, peak_bytes

N, D, V = 23, 6, 17


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight and targets."""
    random = Random(3, dtype)
    hidden, weight = random.leaf(N, D), random.leaf(V, D)
    return hidden, weight, torch.randint(0, V, (N,), generator=random.generator)


def test_two_heads_that_share_a_weight_add_up() -> None:
    hidden, weight, targets = case()

    def both(grad_scale: float | None) -> Tensor:
        heads = (LMHead(weight), LMHead(weight, softcap=2.0))
        return torch.stack(
            [linear_loss(hidden, head, targets, grad_scale=grad_scale).loss_sum for head in heads]
        ).sum()

    wanted = torch.autograd.grad(both(None), [hidden, weight])
    for mine, other in zip(accumulated(lambda: both(1.0), [hidden, weight]), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_a_gradient_is_added_to_the_same_tensor() -> None:
    hidden, weight, targets = case()
    linear_loss(hidden.detach(), LMHead(weight), targets, grad_scale=1.0)
    first = weight.grad
    assert first is not None
    linear_loss(hidden.detach(), LMHead(weight), targets, grad_scale=1.0)
    assert weight.grad is first
    once = torch.autograd.grad(linear_loss(hidden, LMHead(weight), targets).loss_sum, weight)[0]
    torch.testing.assert_close(first, 2 * once)


def test_rows_of_a_trained_weight_pass_their_gradient_on() -> None:
    """A matrix that is not a leaf has no `.grad` to add to."""
    hidden, weight, targets = case()
    rows = torch.arange(V).flip(0)

    def loss(grad_scale: float | None) -> Tensor:
        return linear_loss(
            hidden, LMHead(weight[rows], token_map=rows), targets, grad_scale=grad_scale
        ).loss_sum

    wanted = torch.autograd.grad(loss(None), weight)[0]
    torch.testing.assert_close(
        accumulated(lambda: loss(1.0), [weight])[0], wanted, rtol=0, atol=1e-12
    )


def test_a_large_loss_scale_does_not_round_float32_gradients() -> None:
    hidden, weight, targets = case(torch.float32)

    def run(scale: float) -> Callable[[], object]:
        return lambda: linear_loss(hidden, LMHead(weight), targets, grad_scale=scale)

    plain, scaled = (accumulated(run(scale), [hidden, weight]) for scale in (1.0, 65536.0))
    assert all(torch.equal(65536.0 * a, b) for a, b in zip(plain, scaled, strict=True))


def test_hooks_see_a_gradient_in_its_own_backward_pass() -> None:
    """As DeepSpeed needs: each head's gradient comes and can be taken away before the next head's
    is computed.
    """
    vocab, width, rows = 512, 64, 128
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(0))
    random = Random(1, torch.float32)
    hidden = random.leaf(rows, width)

    def backward_peak(count: int) -> int:
        weights = [nn.Parameter(random.leaf(vocab, width).detach()) for _ in range(count)]
        seen: list[int] = []

        def take(weight: Tensor) -> None:
            seen.append(id(weight))
            weight.grad = None

        for weight in weights:
            weight.register_post_accumulate_grad_hook(take)
        sums = [linear_loss(hidden, LMHead(weight), targets).loss_sum for weight in weights]
        peak = peak_bytes(torch.stack(sums).sum().backward)
        assert seen == [id(weight) for weight in reversed(weights)]
        return peak

    assert backward_peak(5) < 1.1 * backward_peak(1)


def objective_peaks(
    heads: int, dtype: torch.dtype, tokens: int, vocab: int, width: int
) -> list[int]:
    """Peak bytes beyond parameters and `.grad` of loss and gradients, in a first and a second
    micro-batch.
    """
    torch.manual_seed(0)
    draft = MedusaDraft(width, vocab, heads, 1)
    weight = nn.Parameter(torch.randn(vocab, width))
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    ids = torch.randint(vocab, (1, tokens))
    batch = Batch(ids, ids, torch.arange(tokens)[None], torch.zeros_like(ids), [])
    objective, teacher = (
        Objective(draft, 0.8, lm="ce", soft_targets=0.5),
        LMHead(torch.randn(vocab, width)),
    )
    trained = [*draft.parameters(), weight, hidden]

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            counts = objective.target_counts(batch)
            taught = (hidden.detach(), teacher)
            objective.loss_and_gradients(
                HiddenStates(hidden),
                batch,
                counts,
                lm_head=LMHead(weight),
                teacher=taught,
                grad_scale=1.0,
            )

    step()  # loads kernels
    for tensor in trained:
        tensor.grad = None
    return [peak_bytes(step) - sum(tensor.nbytes for tensor in trained), peak_bytes(step)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_flat_in_the_number_of_heads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while gradients are accumulated, and a small part of [K + 1, T, V] float32 logits."""
    tokens, vocab, width = 1024, 500, 16
    monkeypatch.setattr(chunked_logits, "_LEAST_CHUNK", 64)
    monkeypatch.setitem(chunked_logits._CHUNK_BYTES, "cpu", 64 * vocab * 4)
    monkeypatch.setitem(chunked_logits._BLOCK_BYTES, "cpu", 32 * vocab * 4)
    few, many = (objective_peaks(heads, dtype, tokens, vocab, width) for heads in (1, 5))
    for small, large in zip(few, many, strict=True):
        assert large < 1.1 * small
    assert max(many) < 0.1 * 6 * tokens * vocab * 4
