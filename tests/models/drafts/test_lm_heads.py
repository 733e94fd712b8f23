"""Heads over a reduced vocabulary: rows of the target model's lm_head, the loss, and guesses of its
tokens.
"""

from typing import Any

import pytest
import torch
from torch import nn

from medusa_train.data.batch import Batch
from medusa_train.errors import MedusaError
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.base import Draft, Proposal, Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from medusa_train.tree_search.traces import trace_answer
from medusa_train.trees.tree import Tree
from tests.families import random_target_model, without_weights
from tests.inference.test_drafts import PROMPTS, TREE
from tests.losses.formula import objective as plain_objective
from tests.losses.plain import accumulated

KEPT = torch.tensor([40, 3, 9, 21, 60, 5, 33, 0, 17, 52, 11, 7, 28, 45, 2, 14])  # in no order
SETTINGS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 3},
    "medusa-shared": {"num_heads": 3, "share_lm_head": True},
    "hydra": {"num_heads": 3, "num_layers": 2, "prefix_layer": False},
    "hydra++": {"num_heads": 3, "num_layers": 1},
    "amphista": {"num_heads": 3},
}
OWN = [kind for kind in SETTINGS if kind != "medusa-shared"]  # with output matrices of their own


def make_draft(
    kind: str, target_model: TargetModel, tokens: torch.Tensor | None = KEPT, *, spread: float = 0.0
) -> Draft:
    """Heads over `tokens`, or over all, with noise in every weight."""
    settings = {
        **SETTINGS[kind],
        "vocab_size": None if tokens is None else len(tokens),
        "token_map": tokens,
    }
    draft = DRAFTS[kind.partition("-")[0].strip("+")].from_target_model(target_model, **settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return draft.eval()


def with_bias(family: str) -> TargetModel:
    target_model = random_target_model(family)
    bias = torch.randn(61, dtype=torch.float64)
    target_model.output_embeddings.bias = nn.Parameter(bias, requires_grad=False)
    return target_model


def widened(kind: str, draft: Draft, target_model: TargetModel) -> Draft:
    """The same heads over all tokens; a bias excludes those that `draft` lacks."""
    state = draft.state_dict()
    tokens = state.pop("token_map")
    for name in [name for name in state if name.startswith("lm_heads.")]:
        rows = state[name]
        state[name] = rows.new_full((61, *rows.shape[1:]), -1e9 if name.endswith("bias") else 0.0)
        state[name][tokens] = rows
    whole = make_draft(kind, target_model, None)
    whole.load_state_dict(state)
    return whole


def record_proposals(draft: Proposer, monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """All proposals from now on."""
    proposals: list[Proposal] = []
    propose = draft.propose

    def spy(*given: Any) -> Proposal:
        proposals.append(propose(*given))
        return proposals[-1]

    monkeypatch.setattr(draft, "propose", spy)
    return proposals


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", ["medusa", "medusa-shared", "hydra", "amphista"])
def test_untrained_heads_give_the_target_models_logits(kind: str, family: str, bias: bool) -> None:
    target_model = with_bias(family) if bias else random_target_model(family)
    draft = make_draft(kind, target_model)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    hidden_states = target_model.run(tokens)
    expected = target_model.logits(hidden_states.final)[..., KEPT]
    for k, hidden in enumerate(draft.head_states(hidden_states, Rows.from_tokens(tokens)), start=1):
        torch.testing.assert_close(
            draft.lm_head(k).logits(hidden), expected, rtol=1e-10, atol=1e-10
        )
    for tokens_of_heads in (KEPT, None):
        other = make_draft(kind, target_model, tokens_of_heads)
        count = type(other).count_parameters(without_weights(target_model), **other.settings)
        assert sum(parameter.numel() for parameter in other.parameters()) == count
        assert other.settings["vocab_size"] == (None if tokens_of_heads is None else 16)


@pytest.mark.parametrize("kind", ["medusa", "medusa-shared", "hydra", "amphista"])
def test_a_vocabulary_size_without_its_token_map_is_rejected(kind: str) -> None:
    target_model = random_target_model("llama")
    for options in ({"vocab_size": 16}, {"token_map": KEPT}, {"vocab_size": 8, "token_map": KEPT}):
        with pytest.raises(ValueError, match="token_map"):
            DRAFTS[kind.partition("-")[0]].from_target_model(target_model, num_heads=2, **options)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("kind", OWN)
def test_value_and_gradients_of_the_loss(kind: str, share: float) -> None:
    """Targets outside the vocabulary have no loss; the teacher is restricted to it."""
    target_model = random_target_model("qwen3")
    draft = make_draft(kind, target_model, spread=0.1)
    tokens = torch.tensor(
        [[3, 1, 40, 9, 5, 9, 2, 7, 5, 33, 5, 0], [60, 21, 4, 17, 52, 1, 7, 8, 9, 2, 14, 3]]
    )
    segments = torch.tensor([[0] * 7 + [1] * 4 + [-1], [0] * 12])
    positions = torch.tensor([[*range(7), *range(5)], [*range(12)]])
    batch = Batch(
        tokens, tokens.masked_fill((segments < 0) | (tokens == 9), -100), positions, segments, []
    )
    hidden_states = target_model.run(tokens, positions=positions, segments=segments)
    teacher, parameters = target_model.lm_head(), list(draft.parameters())
    objective = Objective(draft, 0.8, soft_targets=share)
    counts = objective.target_counts(batch)
    wanted = plain_objective(draft, hidden_states, batch, teacher=teacher, decay=0.8, share=share)
    ours = objective.loss_and_gradients(
        hidden_states, batch, counts, teacher=(hidden_states.final, teacher)
    )
    torch.testing.assert_close(ours.loss, wanted, rtol=1e-9, atol=0)
    assert bool((ours.head_in_vocab < ours.head_counts).all())
    theirs = torch.autograd.grad(wanted, parameters, materialize_grads=True)
    at_once = accumulated(
        lambda: objective.loss_and_gradients(
            hidden_states, batch, counts, teacher=(hidden_states.final, teacher), grad_scale=1.0
        ),
        parameters,
    )
    for mine, other in zip(at_once, theirs, strict=True):
        # norms of stock layers are float32
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("tree", [Tree.chain(3), TREE], ids=["chain", "sparse"])
@pytest.mark.parametrize("kind", OWN)
def test_decoding_is_that_of_heads_which_never_guess_other_tokens(
    kind: str, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy text equals plain decoding; steps and traces are those of heads over all tokens."""
    target_model = with_bias("llama")
    draft = make_draft(kind, target_model, spread=0.03)
    whole = widened(kind, draft, target_model)
    plain = [Decoder(target_model).generate(prompt, 24).tokens for prompt in PROMPTS]
    expected = [Decoder(target_model, whole, tree).generate(prompt, 24) for prompt in PROMPTS]
    proposals = record_proposals(draft, monkeypatch)
    alone = [Decoder(target_model, draft, tree).generate(prompt, 24) for prompt in PROMPTS]
    assert [out.tokens for out in alone] == [out.tokens for out in expected] == plain
    assert [out.accepted for out in alone] == [out.accepted for out in expected]
    assert sum(sum(out.accepted) for out in alone) > 0
    assert [
        out.tokens for out in BatchDecoder(target_model, draft, tree).generate_batch(PROMPTS, 24)
    ] == plain
    guessed = {
        token for proposal in proposals for token in proposal.tokens[:, 1:].flatten().tolist()
    }
    assert guessed <= set(KEPT.tolist())
    assert len(guessed) > 8
    traces = [trace_answer(target_model, heads, PROMPTS[0], plain[0]) for heads in (draft, whole)]
    assert traces[0] == traces[1]
    assert any(rank > 0 for ranks in traces[0].ranks for rank in ranks)


@pytest.mark.parametrize("kind", ["medusa", "medusa-shared", "hydra", "amphista"])
def test_a_tree_wider_than_the_vocabulary_is_rejected(kind: str) -> None:
    target_model = random_target_model("llama")
    with pytest.raises(MedusaError, match="rank 16 of a vocabulary of 16 tokens"):
        Decoder(target_model, make_draft(kind, target_model), Tree.from_paths([(16,)]))


@pytest.mark.parametrize("kind", ["medusa", "medusa-shared", "hydra", "amphista"])
def test_the_token_map_is_loaded_with_the_weights(kind: str) -> None:
    target_model = random_target_model("llama")
    other = make_draft(kind, target_model, torch.arange(16))
    other.load_state_dict(make_draft(kind, target_model).state_dict())
    head = other.lm_head(2)
    assert head.tokens_of(head.indices_of(KEPT)).tolist() == KEPT.tolist()
    assert head.tokens_of(torch.tensor([[0, 4]])).tolist() == [[40, 60]]
    assert other.half().token_map.dtype == torch.int64  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["medusa-shared", "dflash"])
def test_shared_rows_are_those_of_the_vocabulary_that_is_loaded(kind: str) -> None:
    """A run that goes on with other data has chosen other tokens before it loads its weights."""
    settings = SETTINGS.get(kind, {"max_draft_tokens": 3, "num_layers": 1})
    target_model = random_target_model("llama")
    draft_class = DRAFTS[kind.partition("-")[0]]
    trained, draft = (
        draft_class.from_target_model(target_model, **settings, vocab_size=16, token_map=tokens)
        for tokens in (KEPT, torch.arange(16))
    )
    draft.load_state_dict(trained.state_dict())
    assert torch.equal(draft.lm_head(1).tokens_of(torch.arange(16)), KEPT)
    assert torch.equal(draft.lm_head(1).weight, target_model.lm_head().weight[KEPT])
