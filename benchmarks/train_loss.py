"""Loss and backward over hidden states for `train.py`: stacked logits, and the package's chunks. Knows no backbone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_case import Case, Memory, Result, timed

from medusa_train.data.batch import Batch
from medusa_train.data.targets import IGNORE
from medusa_train.losses.objective import Objective
from medusa_train.losses.schedules import head_weight
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Features, TokenRows
from medusa_train.models.lm_head import LMHead

DECAY, LAMBDA0 = 0.8, 0.2  # c and lambda0 of the paper


def naive_loss(logits: Iterable[Tensor], labels: Tensor, weights: Sequence[float], first: int = 0) -> Tensor:
    """Mean cross-entropies of the predictors of t + 1, t + 2, ... over stacked float logits, weighted and added.

    The formula as the public Medusa trainer has it: [K + 1, B, T, V] logits, a shifted slice of them for each term.

    Args:
        logits: [B, T, V] each, the first of them predicts t + 1 + first. labels: [B, T]. weights: one for each.
    """
    stacked = torch.stack(list(logits)).float()
    terms = []
    for number, weight in enumerate(weights):
        ahead = number + first + 1
        part = stacked[number, :, :-ahead].contiguous().view(-1, stacked.shape[-1])
        terms.append(weight * cross_entropy(part, labels[:, ahead:].contiguous().view(-1)))
    return torch.stack(terms).sum()


def all_logits(feats: Features, batch: TokenRows, draft: MedusaDraft, own: LMHead | None) -> Iterator[Tensor]:
    """[B, T, V] of the backbone, where its unembedding is given, and of every head."""
    if own is not None:
        yield own.logits(feats.hidden)
    for k, state in enumerate(draft.head_states(feats, batch), start=1):
        yield draft.lm_head(k).logits(state)


def measure_loss(case: Case) -> Result:
    """Loss and backward of K heads and lm_head, all trained, over given hidden states."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        draft = MedusaDraft(case.width, case.vocab, case.heads, 1)
        lm_head = torch.nn.Linear(case.width, case.vocab, bias=False)
        hidden = torch.randn(1, case.tokens, case.width, requires_grad=True)
        tokens = torch.randint(case.vocab, (1, case.tokens))
        # prompts and answers in turn, 64 tokens of both
        prompt = torch.arange(case.tokens) % 64 < round(64 * case.masked)
        batch = Batch(tokens, tokens.masked_fill(prompt, IGNORE), tokens, torch.zeros_like(tokens), [])
    objective = Objective(draft, DECAY, lm="ce", heads_coefficient=LAMBDA0)
    parameters = [*draft.parameters(), *lm_head.parameters()]

    def loss(states: Tensor, rows: Batch) -> Tensor:
        feats, own = Features(states), LMHead(lm_head.weight)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=case.dtype == "bfloat16"):
            if case.method == "ours":
                return objective.loss(feats, rows, objective.counts(rows), student_unembedding=own).loss
            return naive_loss(all_logits(feats, rows, draft, own), rows.labels, _weights(case.heads))

    def forget() -> None:
        for tensor in (*parameters, hidden):
            tensor.grad = None

    few = 32  # of the rows, to wake threads and kernels up
    small = Batch(*(t[:, -few:] for t in (batch.tokens, batch.labels, batch.positions, batch.segments)), records=[])
    loss(hidden[:, -few:], small).backward()
    forget()
    gradients = sum(p.numel() * p.element_size() for p in parameters)
    memory, peaks = Memory(), []
    for _ in range(2):  # the second time beside the gradients of the first, as with gradient accumulation
        loss(hidden, batch).backward()
        peaks.append(memory.peak() - gradients)

    def step() -> float:
        forget()
        value = loss(hidden, batch)
        value.backward()
        return float(value.detach())

    seconds, values = timed(step, case)
    return Result(True, seconds, values[-1], case.tokens, peaks[0], peaks[1])


def _weights(heads: int) -> list[float]:
    return [1.0, *(LAMBDA0 * head_weight(k, DECAY) for k in range(1, heads + 1))]
