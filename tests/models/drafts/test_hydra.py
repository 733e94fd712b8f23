"""Hydra: heads that follow the path, compared with plain loops in training and node by node in
decoding.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu, softmax

from medusa_train.data.batch import Batch
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.hydra import HydraDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, Rows
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_target_model
from tests.models.drafts.steps import DraftRows

TREE = Tree.from_paths([(0,), (1,), (3,), (0, 0), (0, 2), (3, 1), (0, 2, 0), (0, 2, 1), (3, 1, 4)])


def trained(
    target_model: TargetModel,
    *,
    num_layers: int = 2,
    prefix_layer: bool = True,
    normalize_embeddings: bool = True,
    dropout: float = 0.0,
) -> HydraDraft:
    """Random weights in every part."""
    draft = HydraDraft(
        target_model,
        3,
        num_layers,
        prefix_layer=prefix_layer,
        normalize_embeddings=normalize_embeddings,
        dropout=dropout,
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return draft


def plain_head(
    draft: HydraDraft, target_model: TargetModel, k: int, state: Tensor, path: list[int]
) -> Tensor:
    """Head k's logits [V] by the formula, from h_t [d] and the tokens at t + 1 .. t + k."""
    weights = dict(draft.named_parameters())
    d = target_model.hidden_size
    vectors = target_model.embedding()(torch.tensor(path))
    x = torch.cat(
        [state, *(rms_norm(vectors, (d,), eps=1e-12) if draft.normalize_embeddings else vectors)]
    )
    first, bias = (
        weights[f"blocks.{k - 1}.0.linear.weight"],
        weights[f"blocks.{k - 1}.0.linear.bias"],
    )
    x = linear(x, first[:d], bias[:d]) + silu(linear(x, first[d:], bias[d:]))
    for j in range(1, draft.num_layers):
        block = f"blocks.{k - 1}.{j}.linear"
        x = x + silu(linear(x, weights[f"{block}.weight"], weights[f"{block}.bias"]))
    return target_model.lm_head().transform(linear(x, weights[f"lm_heads.{k - 1}.weight"]))


def prefixed(draft: HydraDraft, states: Tensor) -> Tensor:
    """The states that the heads read in one document, [T, d] -> [T, d]."""
    if draft.prefix is None:
        return states
    rows = Rows.from_tokens(torch.zeros(1, len(states), dtype=torch.long))
    return draft.prefix(states[None], rows.positions, rows.segments)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_heads_without_a_prefix_layer_give_the_target_models_logits(family: str) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    draft = HydraDraft(target_model, 3, 4, prefix_layer=False)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    hidden_states = target_model.run(tokens)
    for k, hidden in enumerate(draft.head_states(hidden_states, Rows.from_tokens(tokens)), start=1):
        assert torch.equal(
            draft.lm_head(k).logits(hidden), target_model.logits(hidden_states.final)
        )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_untrained_prefix_layer_begins_near_the_target_models_states(family: str) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    draft = HydraDraft(target_model, 1)
    states = target_model.run(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).final[0]
    ours = prefixed(draft, states)
    assert abs(float((ours.norm() / states.norm()).log().detach())) < 0.2
    assert torch.cosine_similarity(ours, states).min() > 0.5


@pytest.mark.parametrize("normalize_embeddings", [False, True])
@pytest.mark.parametrize("prefix_layer", [False, True])
def test_loss_and_gradients_of_packed_documents_against_plain_loops(
    prefix_layer: bool, normalize_embeddings: bool
) -> None:
    """Teacher at t + k, unweighted losses; nothing leaks from the other document or wraps around."""
    target_model = random_target_model("qwen3")
    draft = trained(
        target_model, prefix_layer=prefix_layer, normalize_embeddings=normalize_embeddings
    )
    documents = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5]]
    tokens = torch.tensor([[*documents[0], *documents[1], 0]])
    segments = torch.tensor([[0] * 7 + [1] * 4 + [-1]])
    positions = torch.tensor([[*range(7), *range(5)]])
    batch = Batch(
        tokens, tokens.masked_fill((segments < 0) | (tokens == 4), -100), positions, segments, []
    )
    hidden_states = target_model.run(tokens, positions=positions, segments=segments)
    objective = Objective(draft, 1.0, soft_targets=1.0)
    ours = objective.loss_and_gradients(
        hidden_states,
        batch,
        objective.target_counts(batch),
        teacher=(hidden_states.final, target_model.lm_head()),
    ).loss
    gradients = torch.autograd.grad(ours, list(draft.parameters()))

    terms: list[list[Tensor]] = [[], [], []]
    for document in documents:
        states = target_model.run(torch.tensor([document])).final[0]
        read, teacher = prefixed(draft, states), softmax(target_model.logits(states), -1)
        for k in (1, 2, 3):
            for t in range(len(document) - k - 1):
                if document[t + k + 1] == 4:
                    continue
                logits = plain_head(draft, target_model, k, read[t], document[t + 1 : t + k + 1])
                terms[k - 1].append(-(teacher[t + k] * logits.log_softmax(-1)).sum())
    plain = torch.stack([torch.stack(term).mean() for term in terms]).sum()
    assert torch.allclose(ours, plain, atol=1e-6)
    for theirs, mine in zip(
        torch.autograd.grad(plain, list(draft.parameters())), gradients, strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("prefix_layer", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2"])
def test_proposals_are_each_nodes_own_best_tokens(family: str, prefix_layer: bool) -> None:
    """Two steps of three rows, compared with the formula at every node."""
    target_model = random_target_model(family)
    draft = trained(target_model, prefix_layer=prefix_layer)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    padded = torch.tensor([prompt + [0] * (5 - len(prompt)) for prompt in prompts])
    texts = [target_model.run(torch.tensor([prompt])).final[0] for prompt in prompts]
    last_tokens = torch.tensor([42, 43, 44])
    with torch.no_grad():
        rows = DraftRows(draft, target_model.run(padded), padded, [5, 2, 3])
        for paths in ([[0, 1, 5, 8], [0], [0, 3]], [[0]] * 3):
            proposal = rows.propose(last_tokens, TREE)
            for row, text in enumerate(texts):
                last = prefixed(draft, text)[-1]
                nodes = proposal.tokens[row].tolist()
                for node, path in enumerate(TREE.paths, start=1):
                    above = [nodes[i] for i in TREE.path_nodes(TREE.parent_list[node])]
                    order = plain_head(draft, target_model, len(path), last, above).argsort(
                        descending=True
                    )
                    assert nodes[node] == int(order[path[-1]])
            # of a verification pass
            states = torch.randn(3, TREE.size + 1, 32, dtype=torch.float64)
            texts = [torch.cat([text, states[row, paths[row]]]) for row, text in enumerate(texts)]
            rows.accept(HiddenStates(states), proposal.tokens, paths)
        rows.select([0, 2])
        states = rows.extend(last_tokens[:2], TREE)
        for row, text in enumerate([texts[0], texts[2]]):
            assert torch.allclose(states[row], prefixed(draft, text)[-1], atol=1e-6)


def test_dropout_acts_on_what_every_block_adds() -> None:
    target_model = random_target_model("llama")
    d = target_model.hidden_size
    draft = trained(target_model, num_layers=3, prefix_layer=False, dropout=1.0).train()
    for k, blocks in enumerate(draft.blocks, start=1):
        x = torch.randn(5, (k + 1) * d, dtype=torch.float64)
        first = blocks[0].linear
        torch.testing.assert_close(blocks(x), linear(x, first.weight[:d], first.bias[:d]))
