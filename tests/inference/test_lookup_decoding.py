"""Drafts without training, alone and merged with heads: output equality, losslessness of sampling,
and their trees.
"""

import pytest
import torch

from medusa_train.data.datastore import Datastore
from medusa_train.errors import MedusaError
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.drafts.combined import MergedDraft
from medusa_train.models.drafts.lookup import PromptLookupDraft, RestDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.inference.chi_square import check_lossless, five_token_target_model
from tests.inference.equality import check_equals_plain
from tests.inference.steps import proposal_after
from tests.inference.test_drafts import TREE, random_draft

LOOP = [5, 9, 17, 30, 5, 9, 17, 30, 5, 9, 17]  # the same n-grams several times
BRANCHES = [4, 8, 20, 4, 8, 21, 4, 8, 22, 7, 4, 8]  # an n-gram with different continuations
PROMPTS = [LOOP, [7], BRANCHES, [11, 12, 13, 14, 15, 16, 17]]
HEADS = ["medusa", "hydra", "hydra++", "amphista"]
DRAFTS = ["prompt_lookup", *(f"{kind}+prompt_lookup" for kind in HEADS)]


def make_draft(
    name: str, target_model: TargetModel, lookup: PromptLookupDraft | None = None
) -> Proposer:
    lookup = lookup or PromptLookupDraft(max_ngram=2, max_tokens=6, nodes=9)
    heads, _, _ = name.rpartition("+")
    return MergedDraft(random_draft(heads, target_model), lookup) if heads else lookup


@pytest.mark.parametrize("family", ["llama", "mistral-window", "phi3-longrope"])
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_text_equals_plain_decoding_alone_and_in_a_batch(name: str, family: str) -> None:
    target_model = random_target_model(family)
    alone, together = check_equals_plain(
        target_model, make_draft(name, target_model), PROMPTS, TREE, 40
    )
    assert max(max(out.accepted, default=0) for out in alone) >= (
        1 if family == "phi3-longrope" else 2
    )
    assert [out.accepted for out in together] == [out.accepted for out in alone]


def test_samples_with_a_datastore_follow_the_target_models_distribution() -> None:
    target_model = five_token_target_model()
    draft = RestDraft(
        Datastore([[1, 2, 3, 4, 0, 1, 3, 2], [2, 2, 4, 1]], 6), max_ngram=2, max_tokens=2, nodes=3
    )
    assert (
        check_lossless(BatchDecoder(target_model, draft), rows=2500, batches=4, other_below=1e-8)
        > 500
    )


def test_loops_are_copied_as_far_as_the_limit_allows() -> None:
    """Once the text loops, a step takes max_tokens of the copy and one of the target model."""
    target_model = random_target_model("llama")
    target_model.logits = lambda hidden: looping_logits(hidden)  # type: ignore[method-assign]
    out = Decoder(target_model, PromptLookupDraft(max_ngram=2, max_tokens=6, nodes=6)).generate(
        [3], 60, ()
    )
    assert out.tokens == [0] * 60
    assert out.accepted[-3:-1] == [6, 6]


def looping_logits(hidden: torch.Tensor) -> torch.Tensor:
    logits = hidden.new_zeros(*hidden.shape[:-1], 61)
    logits[..., 0] = 1
    return logits


@pytest.mark.parametrize("name", ["prompt_lookup", "medusa+prompt_lookup"])
def test_sampled_text_follows_the_target_models_distribution(name: str) -> None:
    """Rows of this batch have different trees: what they copy depends on what they sampled, and on
    what was right.
    """
    target_model = five_token_target_model()
    lookup = PromptLookupDraft(max_ngram=1, max_tokens=2, nodes=3, min_probability=0.3)
    decoder = BatchDecoder(
        target_model, make_draft(name, target_model, lookup), Tree.cartesian([2, 1])
    )
    assert check_lossless(decoder, rows=2500, batches=4, other_below=1e-8) > 500


def test_merged_drafts_verify_equal_guesses_once() -> None:
    target_model = random_target_model("llama")
    lookup = PromptLookupDraft(max_ngram=2, max_tokens=6, nodes=9, min_probability=0)
    draft = make_draft("medusa+prompt_lookup", target_model, lookup)
    proposal = proposal_after(target_model, draft, TREE, [LOOP, LOOP[:9]], [30, 2])
    for row in range(2):
        tree, tokens = proposal.tree.row(row), proposal.tokens[row].tolist()
        for children in tree.children:
            assert len({tokens[node] for node in children}) == len(children)
    first = proposal.tree.row(0)
    assert first.parent_list[: TREE.size + 1] == TREE.parent_list
    assert first.size == TREE.size + 6  # the copy 5 9 17 30 5 9, of which the heads guessed nothing
    assert proposal.tree.row(1).size == TREE.size  # 2 is new to the text


def test_heads_trees_stay_as_they_are_where_nothing_is_copied() -> None:
    target_model = random_target_model("llama")
    decoder = Decoder(target_model, make_draft("medusa+prompt_lookup", target_model), TREE)
    alone = Decoder(target_model, random_draft("medusa", target_model), TREE)
    draft = decoder.draft
    assert draft is not None
    tree = proposal_after(target_model, draft, decoder.tree, [[3, 4]], [9]).tree
    assert isinstance(tree, Tree)
    assert tree.paths == TREE.paths
    assert alone.generate(PROMPTS[3], 5).tokens == decoder.generate(PROMPTS[3], 5).tokens


def test_kangaroo_takes_no_other_guesses() -> None:
    target_model = random_target_model("llama")
    with pytest.raises(MedusaError, match="first layers"):
        make_draft("kangaroo+prompt_lookup", target_model)
