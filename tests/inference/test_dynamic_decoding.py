"""Dynamic trees: output equality, losslessness of sampling, what they choose, and which drafts they refuse."""

from __future__ import annotations

import pytest
import torch

from medusa_train.errors import MedusaError
from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Proposal, Proposer
from medusa_train.models.drafts.combined import DynamicDraft, MergedDraft
from medusa_train.models.drafts.lookup import PromptLookupDraft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Rows
from medusa_train.trees.dynamic import DynamicTrees, StepSize
from medusa_train.trees.tree import Tree
from tests.families import random_backbone
from tests.inference.chi_square import check_lossless, five_token_backbone
from tests.inference.equality import check_equals_plain
from tests.inference.test_drafts import PROMPTS, TREE, random_draft

#: A node is worth its time from a probability of 0.02 on, in a batch of four rows from 0.07 on.
SIZES = (StepSize(0, 10.0, 1.0), StepSize(4, 10.4, 1.5), StepSize(16, 12.0, 2.4))
TREES = DynamicTrees((1.0, 0.7, 0.7), SIZES)
#: All trees have 10 nodes, in batches of any size.
LARGE = DynamicTrees((1.0, 0.7), (StepSize(0, 10.0, 1.0), StepSize(9, 10.0, 1.5), StepSize(10, 10.0, 1.5)))
NAMES = ["medusa", "amphista", "medusa+prompt_lookup"]


def make_draft(name: str, backbone: Backbone, trees: DynamicTrees = TREES) -> Proposer:
    heads, plus, _ = name.partition("+")
    draft = DynamicDraft(random_draft(heads, backbone, spread=0.1), trees)
    return MergedDraft(draft, PromptLookupDraft(max_ngram=2, max_tokens=4, nodes=4)) if plus else draft


def record_proposals(draft: Proposer, monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """All proposals from now on."""
    proposals: list[Proposal] = []
    propose = draft.propose

    def spy(*given: object) -> Proposal:
        proposals.append(propose(*given))  # type: ignore[arg-type]
        return proposals[-1]

    monkeypatch.setattr(draft, "propose", spy)
    return proposals


def sizes_of(proposals: list[Proposal]) -> set[int]:
    return {proposal.tree.size for proposal in proposals}


@pytest.mark.parametrize("family", ["llama", "mistral-window", "phi3-longrope"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_equals_plain_decoding_alone_and_in_a_batch(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = random_backbone(family)
    draft = make_draft(name, backbone)
    proposals = record_proposals(draft, monkeypatch)
    alone, _ = check_equals_plain(backbone, draft, PROMPTS, TREE, 30)
    assert sum(sum(out.accepted) for out in alone) > 5
    assert len(sizes_of(proposals)) > 3


@pytest.mark.parametrize("name", NAMES)
def test_sampled_text_follows_the_backbones_distribution(name: str) -> None:
    backbone = five_token_backbone()
    decoder = BatchDecoder(backbone, make_draft(name, backbone, LARGE), Tree.cartesian([2, 2]))
    assert check_lossless(decoder, rows=2500, batches=4, other_below=1e-8) > 300


def test_trees_do_not_depend_on_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's guesses are the same under every seed, though the samples of that step differ."""
    backbone = random_backbone("llama")
    draft = make_draft("medusa", backbone)
    proposals = record_proposals(draft, monkeypatch)
    greedy = Decoder(backbone).generate(PROMPTS[0], 2, ()).tokens
    seeds = [seed for seed in range(60) if first_sample(backbone, seed) == greedy[0]]
    samples = [
        Decoder(backbone, draft).generate(PROMPTS[0], 2, (), Sampling(1.0), torch.Generator().manual_seed(seed)).tokens
        for seed in seeds
    ]
    assert len({tuple(tokens) for tokens in samples}) > 1
    guesses = {(*one.tokens[0].tolist(), *one.tree.row(0).parent_list) for one in proposals}
    assert len(guesses) == 1


def first_sample(backbone: Backbone, seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    return Decoder(backbone).generate(PROMPTS[0], 1, (), Sampling(1.0), generator).tokens[0]


def test_plain_decoding_where_heads_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = random_backbone("llama")
    never = make_draft("medusa", backbone, DynamicTrees((), (StepSize(0, 10.0, 1.0),)))
    proposals = record_proposals(never, monkeypatch)
    out = Decoder(backbone, never, TREE).generate(PROMPTS[0], 12)
    assert out.tokens == Decoder(backbone).generate(PROMPTS[0], 12).tokens
    assert proposals == []  # no head is computed
    dear = make_draft("medusa", backbone, DynamicTrees((1.0,), (StepSize(0, 10.0, 1.0), StepSize(4, 99.0, 1.1))))
    proposals = record_proposals(dear, monkeypatch)
    assert Decoder(backbone, dear, TREE).generate(PROMPTS[0], 12).tokens == out.tokens
    assert sizes_of(proposals) == {0}


def reduced_heads(backbone: Backbone, tokens: torch.Tensor | None) -> MedusaDraft:
    """Noisy heads over `tokens`."""
    draft = MedusaDraft.from_backbone(backbone, 3, vocab_size=None if tokens is None else len(tokens), token_map=tokens)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return draft.eval()


@pytest.mark.parametrize("tokens", [None, torch.arange(60, 3, -2)], ids=["all", "reduced"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_row_has_its_own_heads_guesses_on_the_chosen_paths(family: str, tokens: torch.Tensor | None) -> None:
    """gemma2 caps its logits, which changes confidences and not ranks."""
    backbone = random_backbone(family)
    draft = reduced_heads(backbone, tokens)
    texts = torch.tensor([[3, 14, 15, 9], [7, 20, 30, 40], [11, 12, 13, 14]])
    feats = backbone.run(texts)
    dynamic = DynamicDraft(draft, TREES)
    state = dynamic.start(feats, texts, [4, 4, 4], backbone.new_cache(20))
    proposal = dynamic.propose(state, torch.tensor([5, 6, 8]), TREE)
    heads = zip(range(1, 4), draft.teacher_forced_states(feats, Rows.from_tokens(texts)), strict=True)
    logits = torch.stack([draft.lm_head(k).logits(states[:, -1]) for k, states in heads], dim=1)  # [B, heads, V]
    best = logits.log_softmax(-1).topk(10)
    paths = TREES.choose(TREES.calibrated(best.values.detach().numpy()).tolist())
    assert len(paths[0]) > 3
    assert len({tuple(row) for row in paths}) > 1
    for row, root in enumerate([5, 6, 8]):
        ids = [int(best.indices[row, len(path) - 1, path[-1]]) for path in paths[row]]
        assert proposal.tokens[row].tolist() == [root, *(i if tokens is None else int(tokens[i]) for i in ids)]
        tree = proposal.tree.row(row)
        assert tree.depth_list[1:] == [len(path) for path in paths[row]]
        assert tree.parent_list[1:] == [paths[row].index(path[:-1]) + 1 if path[1:] else 0 for path in paths[row]]


@pytest.mark.parametrize("kind", ["hydra", "kangaroo", "medusa-markov"])
def test_heads_that_read_guesses_are_refused(kind: str) -> None:
    with pytest.raises(MedusaError, match="use tree: fixed"):
        DynamicDraft(random_draft(kind, random_backbone("llama")), TREES)


def test_trees_of_more_heads_than_there_are_are_refused() -> None:
    draft = random_draft("medusa", random_backbone("llama"))
    with pytest.raises(MedusaError, match="4 deep, but there are 3 heads"):
        DynamicDraft(draft, DynamicTrees((1.0,) * 4, SIZES))
