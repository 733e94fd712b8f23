"""Medusa heads: an untrained head equals the target model, and heads share no weights."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_target_model
from tests.models.drafts.steps import DraftRows


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_heads_give_the_target_models_logits_to_the_bit(family: str, layers: int) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    draft = MedusaDraft.from_target_model(target_model, num_heads=3, num_layers=layers)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    hidden_states = target_model.run(tokens)
    theirs = target_model.model(tokens, use_cache=False).logits
    assert torch.equal(target_model.logits(hidden_states.final), theirs)
    for k, hidden in enumerate(draft.head_states(hidden_states, Rows.from_tokens(tokens)), start=1):
        assert torch.equal(draft.lm_head(k).logits(hidden), theirs)


def test_the_formula_with_trained_weights() -> None:
    target_model = random_target_model("llama")
    draft = MedusaDraft.from_target_model(target_model, num_heads=2, num_layers=2)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0, 0.3)
    h = torch.randn(4, target_model.hidden_size, dtype=torch.float64)
    state = dict(draft.named_parameters())
    x = h
    for j in range(2):
        x = x + silu(
            linear(x, state[f"blocks.1.{j}.linear.weight"], state[f"blocks.1.{j}.linear.bias"])
        )
    assert torch.allclose(
        draft.lm_head(2).logits(draft.head_state(h, 2)),
        linear(x, state["lm_heads.1.weight"]),
        atol=1e-12,
    )


def test_no_two_heads_or_blocks_share_a_tensor() -> None:
    draft = MedusaDraft.from_target_model(random_target_model("llama"), num_heads=4, num_layers=3)
    storages = [parameter.data_ptr() for parameter in draft.parameters()]
    assert len(storages) == 4 * (3 * 2 + 1) == len(set(storages))


def _random_heads(
    layers: int, *, bias: bool = False, share: bool = False
) -> tuple[TargetModel, MedusaDraft]:
    target_model = random_target_model("qwen2")
    if bias:
        bias_values = torch.randn(target_model.vocab_size, dtype=torch.float64)
        target_model.output_embeddings.bias = nn.Parameter(bias_values, requires_grad=False)
    draft = MedusaDraft.from_target_model(
        target_model, num_heads=4, num_layers=layers, share_lm_head=share
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0, 0.3)
    return target_model, draft


def _check_proposals(target_model: TargetModel, draft: MedusaDraft) -> None:
    """Three prompts of different lengths in a batch, compared with each head's ranking of all
    tokens.
    """
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    padded = torch.tensor([prompt + [0] * (5 - len(prompt)) for prompt in prompts])
    hidden_states = target_model.run(padded)
    tree = Tree.from_paths([(0,), (2,), (0, 4), (2, 0), (0, 4, 1)])
    made = DraftRows(draft, hidden_states, padded, [5, 2, 3]).propose(
        torch.tensor([42, 43, 44]), tree
    )
    for row, prompt in enumerate(prompts):
        hidden = hidden_states.final[row, len(prompt) - 1]
        best = [
            draft.lm_head(k).logits(draft.head_state(hidden, k)).argsort(descending=True)
            for k in (1, 2, 3)
        ]
        expected = [42 + row, best[0][0], best[0][2], best[1][4], best[1][0], best[2][1]]
        assert made.tokens[row].tolist() == [int(token) for token in expected]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_proposals_are_the_best_tokens_of_each_head(layers: int, bias: bool, share: bool) -> None:
    target_model, draft = _random_heads(layers, bias=bias, share=share)
    assert draft.stacked() is not None
    _check_proposals(target_model, draft)


def test_heads_stay_stacked_and_are_never_stale() -> None:
    target_model, draft = _random_heads(2)
    names = {id(parameter) for parameter in draft.parameters()}
    optimizer = torch.optim.AdamW(draft.parameters(), lr=0.1)
    for k in range(1, 5):
        states = draft.head_state(torch.randn(3, 32, dtype=torch.float64), k)
        draft.lm_head(k).logits(states).logsumexp(-1).mean().backward()
    optimizer.step()
    assert draft.stacked() is not None
    _check_proposals(target_model, draft)
    draft.load_state_dict({name: tensor + 0.1 for name, tensor in draft.state_dict().items()})
    _check_proposals(target_model, draft.float().double())
    assert draft.stacked() is not None
    assert {id(parameter) for parameter in draft.parameters()} == names
    numel = sum(parameter.numel() for parameter in draft.parameters())
    held = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in draft.parameters()
    }
    assert sum(held.values()) == 8 * numel  # no copies are kept


def test_heads_that_are_not_stacked_propose_the_same() -> None:
    """As with ZeRO, whose buffers hold the parameters."""
    target_model, draft = _random_heads(1)
    moved = draft.lm_heads[2]
    assert isinstance(moved, nn.Linear)
    moved.weight.data = moved.weight.data.clone()
    assert draft.stacked() is None
    _check_proposals(target_model, draft)
