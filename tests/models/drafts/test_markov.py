"""Medusa heads with a Markov bias: untrained they are plain heads, and guesses depend on their
parent's token.
"""

import pytest
import torch
from torch import Tensor, nn

from medusa_train.models import lm_head as lm_head_module
from medusa_train.models import prepack
from medusa_train.models.drafts import markov as markov_module
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_states import HiddenStates, Rows
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.models.drafts.steps import DraftRows
from tests.models.test_prepack import needs_onednn

D, V, KEPT = 16, 61, torch.tensor([40, 3, 9, 21, 60, 5, 33, 0, 17, 52, 11, 7, 28, 45, 2, 14])
TREE = Tree.from_paths(
    [(0,), (1,), (4,), (0, 0), (0, 3), (1, 0), (4, 2), (0, 3, 1), (4, 2, 0), (4, 2, 5)]
)


def random_heads(
    *, reduced: bool = False, lm_head: LMHead | None = None, dtype: torch.dtype = torch.float64
) -> MedusaDraft:
    token_map = KEPT if reduced else None
    draft = MedusaDraft(D, V, 3, shared=lm_head, token_map=token_map, markov_rank=4, dtype=dtype)
    torch.manual_seed(1)
    for parameter in draft.parameters():
        nn.init.normal_(parameter, std=0.5)
    return draft


def propose(draft: MedusaDraft, hidden: Tensor, last_tokens: Tensor, tree: Tree) -> Tensor:
    """Proposed tokens [B, n + 1] after the states [B, d]."""
    tokens = torch.zeros(len(hidden), 1, dtype=torch.long)
    rows = DraftRows(draft, HiddenStates(hidden[:, None]), tokens, [1] * len(hidden))
    return rows.propose(last_tokens, tree).tokens


def expected_tokens(
    draft: MedusaDraft, hidden: Tensor, root: int, tree: Tree, candidates: int
) -> list[int]:
    """Node by node: the parent's token adds `R E[token]` to the logits of the head's best
    `candidates`.
    """
    state, tokens = dict(draft.named_parameters()), [root]
    e, r = state["markov.embedding.weight"], state["markov.output.weight"]
    for node, path in enumerate(tree.paths, start=1):
        logits = draft._lm_head(len(path)).logits(draft.head_state(hidden, len(path)))
        kept = logits.topk(candidates).indices
        row = int(
            kept[
                (logits[kept] + r[kept] @ e[tokens[tree.parent_list[node]]]).argsort(
                    descending=True
                )[path[-1]]
            ]
        )
        tokens.append(row if draft.token_map is None else int(draft.token_map[row]))
    return tokens


@pytest.mark.parametrize("reduced", [False, True], ids=["all", "reduced"])
@pytest.mark.parametrize("candidates", [8, 64])
def test_each_level_is_ranked_by_its_parents_tokens(
    candidates: int, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lm_head_module, markov_module):
        monkeypatch.setattr(module, "CANDIDATES", candidates)
    draft = random_heads(reduced=reduced)
    hidden = torch.randn(3, D, dtype=torch.float64)
    last_tokens = torch.tensor([42, 7, 60])
    best = min(candidates, len(KEPT) if reduced else V)
    wanted = [
        expected_tokens(draft, hidden[row], int(last_tokens[row]), TREE, best) for row in range(3)
    ]
    assert draft.stacked() is not None
    assert propose(draft, hidden, last_tokens, TREE).tolist() == wanted
    with monkeypatch.context() as apart:
        apart.setattr(draft, "stacked", lambda: None)
        assert propose(draft, hidden, last_tokens, TREE).tolist() == wanted
    others = propose(draft, hidden, torch.tensor([41, 8, 59]), TREE)
    assert others[:, 1:].tolist() != [row[1:] for row in wanted]  # guesses depend on the root
    # the ranks that traces and validation find are those of proposals
    states = torch.cat([draft.head_state(hidden, 1), draft.markov.embedding(last_tokens)], dim=1)  # type: ignore[union-attr]
    guesses = draft.lm_head(1).guesses(states, draft.lm_head(1).logits(states), 5)
    if reduced:
        guesses = KEPT[guesses]
    assert guesses[:, [0, 1, 4]].tolist() == [row[1:4] for row in wanted]


def test_a_tree_may_be_wider_than_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lm_head_module, markov_module):
        monkeypatch.setattr(module, "CANDIDATES", 4)
    draft, hidden = random_heads(), torch.randn(1, D, dtype=torch.float64)
    tree = Tree.from_paths([(0,), (9,), (0, 0)])
    wanted = expected_tokens(draft, hidden[0], 5, tree, 10)
    assert propose(draft, hidden, torch.tensor([5]), tree).tolist() == [wanted]


@needs_onednn
def test_prepacked_heads_propose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepack, "_is_faster", lambda weights: True)
    draft = random_heads(lm_head=LMHead(torch.randn(V, D)), reduced=True, dtype=torch.float32)
    hidden, last_tokens = torch.randn(2, D), torch.tensor([7, 9])
    with torch.inference_mode():
        plain = propose(draft, hidden, last_tokens, TREE)
        assert prepack.prepack_linears(draft)
        assert torch.equal(propose(draft, hidden, last_tokens, TREE), plain)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_untrained_it_changes_nothing_to_the_bit(family: str) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    plain = MedusaDraft.from_target_model(target_model, 3)
    draft = MedusaDraft.from_target_model(target_model, 3, markov_rank=4)
    torch.manual_seed(1)
    for (name, parameter), (other, theirs) in zip(
        draft.named_parameters(), plain.named_parameters(), strict=False
    ):
        assert name == other
        with torch.no_grad():  # trained heads with an untrained bias
            parameter.copy_(theirs.add_(0.05 * torch.randn_like(theirs)))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    hidden_states, rows = target_model.run(tokens), Rows.from_tokens(tokens)
    states = zip(
        draft.head_states(hidden_states, rows), plain.head_states(hidden_states, rows), strict=True
    )
    for k, (mine, theirs) in enumerate(states, start=1):
        assert torch.equal(draft.lm_head(k).logits(mine), plain.lm_head(k).logits(theirs))
    last_tokens = torch.tensor([42])
    proposals = [
        propose(one, hidden_states.final[:, -1], last_tokens, TREE) for one in (draft, plain)
    ]
    assert torch.equal(*proposals)


def test_past_the_end_of_a_document_no_token_of_another_is_read() -> None:
    draft = random_heads()
    assert draft.markov is not None
    rows = Rows(
        torch.tensor([[11, 12, 13, 21, 22]]),
        torch.tensor([[0, 1, 2, 0, 1]]),
        torch.tensor([[0, 0, 0, 1, 1]]),
    )
    read = [
        state[0, :, D:]
        for state in draft.head_states(
            HiddenStates(torch.zeros(1, 5, D, dtype=torch.float64)), rows
        )
    ]
    for k, ahead in ((1, [12, 13, 0, 22, 0]), (2, [13, 0, 0, 0, 0])):  # the token t + k
        assert torch.equal(read[k - 1], draft.markov.embedding(torch.tensor(ahead)))
