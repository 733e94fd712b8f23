"""The objective of heads with a Markov bias against plain loops, with the offsets of its tokens."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_train.data.batch import IGNORE_INDEX, Batch
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_states import HiddenStates
from tests.losses import formula
from tests.losses.plain import assert_gradients

D, R, V = 6, 3, 17
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

    def head_states(self, hidden_states: HiddenStates, batch: Batch) -> Iterator[Tensor]:
        """Logits, since `lm_head` leaves them as they are."""
        e, r = self.state["markov.embedding.weight"], self.state["markov.output.weight"]
        for k in range(1, self.draft.num_heads + 1):
            logits = self.draft._lm_head(k).logits(self.draft.head_state(hidden_states.final, k))
            rows = [
                [
                    logits[b, t]
                    + (r @ e[batch.tokens[b, t + k]] if t + k < batch.tokens.shape[1] else 0.0)
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
    hidden_states = HiddenStates(torch.randn(2, 10, D, generator=generator, dtype=torch.float64))
    teacher = LMHead(torch.randn(V, D, generator=generator, dtype=torch.float64))
    if how == "labels":
        objective, keys = Objective(draft, 0.8), {"decay": 0.8}
    else:
        objective, keys = (
            Objective(draft, 1.0, soft_targets=0.5),
            {"share": 0.5, "teacher": teacher},
        )
    counts = objective.target_counts(batch)

    def fused(grad_scale: float | None) -> Tensor:
        return objective.loss_and_gradients(
            hidden_states,
            batch,
            counts,
            teacher=(hidden_states.final, teacher),
            grad_scale=grad_scale,
        ).loss

    wanted = formula.objective(Plain(draft), hidden_states, batch, **keys)
    torch.testing.assert_close(fused(None), wanted, rtol=1e-10, atol=0)
    assert_gradients(fused, wanted, list(draft.parameters()))
    assert all(
        float(p.grad.abs().sum()) > 0 for name, p in draft.named_parameters() if "markov" in name
    )
