"""Medusa heads over a reduced vocabulary: rows of the backbone's lm_head, and proposals of its token ids."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medusa_train.errors import MedusaError
from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.models import prepack
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Features, Rows
from medusa_train.models.lm_head import LMHead
from medusa_train.tree_search.traces import trace_answer
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.tree import Tree
from tests.families import random_backbone
from tests.models.test_prepack import needs_onednn

KEPT = torch.tensor([40, 3, 9, 21, 60, 5, 33, 0, 17, 52, 11, 7, 28, 45, 2, 14])  # in no order
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], [20, 30, 40], [11, 12, 13, 14, 15, 16, 17]]
TREE = Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (1, 0, 2)])


def heads(backbone: Backbone, *, share: bool = False, spread: float = 0.0, layers: int = 1) -> MedusaDraft:
    draft = MedusaDraft.from_backbone(backbone, 3, layers, share_lm_head=share, vocab_size=len(KEPT), token_map=KEPT)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return draft.eval()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_untrained_heads_give_the_backbones_logits(family: str, bias: bool, share: bool) -> None:
    backbone = random_backbone(family)
    if bias:
        backbone.output_embeddings.bias = nn.Parameter(torch.randn(61, dtype=torch.float64), requires_grad=False)
    draft = heads(backbone, share=share)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    feats = backbone.run(tokens)
    expected = backbone.logits(feats.hidden)[..., KEPT]
    for k, hidden in enumerate(draft.head_states(feats, Rows.from_tokens(tokens)), start=1):
        torch.testing.assert_close(draft.lm_head(k).logits(hidden), expected, rtol=1e-12, atol=1e-12)
    count = MedusaDraft.count_parameters(backbone.model, **draft.settings)
    assert sum(parameter.numel() for parameter in draft.parameters()) == count
    assert draft.draft_vocab_size == draft.settings["vocab_size"] == len(KEPT)


def test_a_vocabulary_size_without_its_token_map_is_rejected() -> None:
    for options in ({"vocab_size": 16}, {"token_map": KEPT}, {"vocab_size": 8, "token_map": KEPT}):
        with pytest.raises(ValueError, match="token_map"):
            MedusaDraft.from_backbone(random_backbone("llama"), 2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("layers", [0, 2])
def test_proposals_are_tokens_in_each_heads_order(layers: int, share: bool) -> None:
    backbone = random_backbone("qwen2")
    draft = heads(backbone, share=share, spread=0.3, layers=layers)
    feats = backbone.run(torch.tensor([[3, 1, 4], [9, 2, 0]]))
    state = draft.start(feats, torch.tensor([[3, 1, 4], [9, 2, 0]]), [3, 2], backbone.new_cache(1))
    assert state.stacked is not None
    roots, tree = torch.tensor([42, 43]), Tree.from_paths([(0,), (15,), (0, 4), (0, 4, 1)])
    for proposal in (draft.propose(state, roots, tree), draft.propose(state._replace(stacked=None), roots, tree)):
        for row, last in enumerate((feats.hidden[0, 2], feats.hidden[1, 1])):
            best = [KEPT[draft.head_logits(last, k).argsort(descending=True)].tolist() for k in (1, 2, 3)]
            assert proposal.tokens[row].tolist() == [42 + row, best[0][0], best[0][15], best[1][4], best[2][1]]


@needs_onednn
@pytest.mark.parametrize("share", [False, True])
def test_prepacked_heads_propose_the_same(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    monkeypatch.setattr(prepack, "_is_faster", lambda weights: True)
    torch.manual_seed(1)
    lm_head = LMHead(torch.randn(61, 16)) if share else None
    draft = MedusaDraft(16, 61, 4, shared=lm_head, token_map=KEPT)
    for parameter in draft.parameters():
        nn.init.normal_(parameter, std=0.3)
    feats, tokens = Features(torch.randn(2, 5, 16)), torch.zeros(2, 5, dtype=torch.long)
    with torch.inference_mode():
        state = draft.start(feats, tokens, [5, 3], TreeCache(1, 8))
        plain = draft.propose(state, torch.tensor([7, 9]), Tree.cartesian([3, 2, 2])).tokens
        assert draft.prepack_weights()
        assert torch.equal(draft.propose(state, torch.tensor([7, 9]), Tree.cartesian([3, 2, 2])).tokens, plain)


@pytest.mark.parametrize(("tree", "share"), [(Tree.chain(3), False), (TREE, True)], ids=["chain", "sparse, shared"])
def test_greedy_decoding_is_lossless_alone_and_in_a_batch(tree: Tree, share: bool) -> None:
    """Tokens inside and outside the reduced vocabulary both occur."""
    backbone = random_backbone("llama")
    draft = heads(backbone, share=share, spread=0.03)
    plain = [Decoder(backbone).generate(prompt, 24).tokens for prompt in PROMPTS]
    single = [Decoder(backbone, draft, tree).generate(prompt, 24) for prompt in PROMPTS]
    assert [out.tokens for out in single] == plain
    tokens, reduced = {token for answer in plain for token in answer}, set(KEPT.tolist())
    assert tokens & reduced
    assert tokens - reduced
    assert sum(out.steps for out in single) < sum(len(answer) - 1 for answer in plain)  # some tokens are accepted
    batch = BatchDecoder(backbone, draft, tree).generate_batch(PROMPTS, 24)
    assert [out.tokens for out in batch] == plain


def test_a_token_outside_the_vocabulary_has_no_rank() -> None:
    backbone = random_backbone("llama")
    draft = heads(backbone, spread=0.03)
    answer = Decoder(backbone).generate(PROMPTS[0], 24).tokens
    trace = trace_answer(backbone, draft, PROMPTS[0], answer)
    feats = backbone.run(torch.tensor([PROMPTS[0] + answer]))
    reduced = KEPT.tolist()
    for position in range(len(answer) - 2):
        target = answer[position + 2]  # of head 2
        order = draft.head_logits(feats.hidden[0, len(PROMPTS[0]) - 1 + position], 2).argsort(descending=True).tolist()
        rank = order.index(reduced.index(target)) if target in reduced else -1
        assert trace.ranks[position][1] == (rank if rank < 10 else -1)
    assert {token in reduced for token in answer[2:]} == {True, False}


def test_a_tree_wider_than_the_vocabulary_is_rejected() -> None:
    backbone = random_backbone("llama")
    with pytest.raises(MedusaError, match="rank 16 of a vocabulary of 16 tokens"):
        Decoder(backbone, heads(backbone), Tree.from_paths([(16,)]))


@pytest.mark.parametrize("share", [False, True])
def test_the_token_map_is_saved_with_the_weights(share: bool) -> None:
    backbone = random_backbone("llama")
    draft = heads(backbone, share=share, spread=0.1)
    other = MedusaDraft.from_backbone(backbone, 3, share_lm_head=share, vocab_size=16, token_map=torch.arange(16))
    other.load_state_dict(draft.state_dict())
    states = torch.randn(3, backbone.hidden_size, dtype=torch.float64)
    assert torch.equal(other.head_logits(states, 2), draft.head_logits(states, 2))
    assert other.lm_head(1).rows_of(torch.tensor([40])).tolist() == [0]
    assert other.half().token_map.dtype == torch.int64
