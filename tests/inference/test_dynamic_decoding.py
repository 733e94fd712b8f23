"""Dynamic trees: output equality, losslessness of sampling, what they choose, and which drafts they refuse."""

from __future__ import annotations

import pytest
import torch

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import Typical
from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Proposal, Proposer
from medusa_train.models.drafts.dynamic import DynamicDraft
from medusa_train.models.drafts.lookup import PromptLookupDraft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.drafts.merged import MergedDraft
from medusa_train.trees.dynamic import DynamicTrees, StepSize
from medusa_train.trees.tree import Tree
from tests.families import random_backbone
from tests.inference.chi_square import check_lossless, five_token_backbone
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


def record_sizes(draft: Proposer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all proposals from now on."""
    sizes: list[int] = []
    propose = draft.propose

    def spy(*given: object) -> Proposal:
        proposal = propose(*given)  # type: ignore[arg-type]
        sizes.append(proposal.tree.size)
        return proposal

    monkeypatch.setattr(draft, "propose", spy)
    return sizes


@pytest.mark.parametrize("family", ["llama", "mistral-window", "phi3-longrope"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_equals_plain_decoding_alone_and_in_a_batch(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = random_backbone(family)
    plain = [Decoder(backbone).generate(prompt, 30).tokens for prompt in PROMPTS]
    draft = make_draft(name, backbone)
    sizes = record_sizes(draft, monkeypatch)
    alone = [Decoder(backbone, draft, TREE).generate(prompt, 30) for prompt in PROMPTS]
    assert [out.tokens for out in alone] == plain
    assert sum(sum(out.accepted) for out in alone) > 5
    assert len(set(sizes)) > 3
    together = BatchDecoder(backbone, draft, TREE).generate_batch(PROMPTS, 30)
    assert [out.tokens for out in together] == plain
    eos = [plain[1][4], plain[2][9]]  # rows end at different times
    short = [Decoder(backbone).generate(prompt, 24, eos).tokens for prompt in PROMPTS]
    together = BatchDecoder(backbone, draft, TREE).generate_batch(PROMPTS, 24, eos)
    assert [out.tokens for out in together] == short


@pytest.mark.parametrize("name", NAMES)
def test_sampled_text_follows_the_backbones_distribution(name: str) -> None:
    backbone = five_token_backbone()
    decoder = BatchDecoder(backbone, make_draft(name, backbone, LARGE), Tree.cartesian([2, 2]))
    assert check_lossless(decoder, rows=2500, batches=4, other_below=1e-8) > 300


def test_typical_acceptance_takes_dynamic_trees() -> None:
    backbone = random_backbone("llama")
    draft = make_draft("medusa", backbone)
    out = Decoder(backbone, draft).generate(PROMPTS[0], 30, (), Typical(1.0))
    assert len(out.tokens) == 30
    assert sum(out.accepted) > 0


def test_trees_do_not_depend_on_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's tree is the same under every seed; a sample changes only those after it."""
    backbone = random_backbone("llama")
    draft = make_draft("medusa", backbone)
    sizes = record_sizes(draft, monkeypatch)
    greedy = Decoder(backbone).generate(PROMPTS[0], 2, ()).tokens
    seeds = [seed for seed in range(60) if first_sample(backbone, seed) == greedy[0]]
    assert len(seeds) > 1
    for seed in seeds:
        Decoder(backbone, draft).generate(PROMPTS[0], 2, (), Sampling(1.0), torch.Generator().manual_seed(seed))
    assert len(set(sizes)) == 1


def first_sample(backbone: Backbone, seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    return Decoder(backbone).generate(PROMPTS[0], 1, (), Sampling(1.0), generator).tokens[0]


def test_plain_decoding_where_heads_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = random_backbone("llama")
    never = make_draft("medusa", backbone, DynamicTrees((), (StepSize(0, 10.0, 1.0),)))
    sizes = record_sizes(never, monkeypatch)
    out = Decoder(backbone, never, TREE).generate(PROMPTS[0], 12)
    assert out.tokens == Decoder(backbone).generate(PROMPTS[0], 12).tokens
    assert sizes == []  # no head is computed
    dear = make_draft("medusa", backbone, DynamicTrees((1.0,), (StepSize(0, 10.0, 1.0), StepSize(4, 99.0, 1.1))))
    sizes = record_sizes(dear, monkeypatch)
    assert Decoder(backbone, dear, TREE).generate(PROMPTS[0], 12).tokens == out.tokens
    assert set(sizes) == {0}


def test_heads_over_a_reduced_vocabulary() -> None:
    backbone = random_backbone("llama")
    tokens = torch.arange(3, 61, 2)
    draft = MedusaDraft.from_backbone(backbone, 3, vocab_size=len(tokens), token_map=tokens)
    dynamic = DynamicDraft(draft.eval(), TREES)
    assert dynamic.draft_vocab_size == len(tokens)
    feats = backbone.run(torch.tensor([PROMPTS[0]]))
    dynamic.start(feats, torch.tensor([PROMPTS[0]]), [len(PROMPTS[0])], backbone.new_cache(20))
    for prompt in PROMPTS:
        out = Decoder(backbone, dynamic).generate(prompt, 24)
        assert out.tokens == Decoder(backbone).generate(prompt, 24).tokens


@pytest.mark.parametrize("kind", ["hydra", "kangaroo"])
def test_heads_that_read_guesses_are_refused(kind: str) -> None:
    with pytest.raises(MedusaError, match="use tree: fixed"):
        DynamicDraft(random_draft(kind, random_backbone("llama")), TREES)


def test_trees_of_more_heads_than_there_are_are_refused() -> None:
    draft = random_draft("medusa", random_backbone("llama"))
    with pytest.raises(MedusaError, match="4 deep, but there are 3 heads"):
        DynamicDraft(draft, DynamicTrees((1.0,) * 4, SIZES))
