"""Dynamic trees of EAGLE-3 and DFlash: the nodes against an enumeration of all paths, equal output, lossless
sampling.
"""

import itertools

import pytest
import torch

from medusa_train.errors import MedusaError
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.models.drafts import dynamic_trees
from medusa_train.models.drafts.base import Proposal, Proposer, TreeSize
from medusa_train.models.drafts.combined import MergedDraft
from medusa_train.models.drafts.dflash import DFlashDraft
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.drafts.lookup import PromptLookupDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from medusa_train.trees.tree import Ranks, Tree
from tests.families import random_target_model
from tests.inference.chi_square import check_lossless, five_token_target_model
from tests.inference.equality import check_equals_plain
from tests.inference.steps import proposal_after
from tests.inference.test_drafts import PROMPTS, TREE, random_draft

SIZE = TreeSize(9, 3)


def dynamic_draft(
    target_model: TargetModel, size: TreeSize = SIZE, kind: str = "eagle3"
) -> Eagle3Draft | DFlashDraft:
    draft = random_draft(kind, target_model, spread=0.05)
    assert isinstance(draft, (Eagle3Draft, DFlashDraft))
    return draft.with_dynamic_trees(size)


def enumerated(
    draft: Eagle3Draft | DFlashDraft,
    target_model: TargetModel,
    text: list[int],
    size: TreeSize,
    k: int,
) -> dict[Ranks, float]:
    """The paths of tokens that EAGLE-2 chooses below the last token of `text`, with their
    probabilities.
    """

    def children(path: Ranks) -> dict[Ranks, float]:
        rows = Rows.from_tokens(torch.tensor([[*text, *path]]))
        states = list(
            draft.teacher_forced_states(
                target_model.run(rows.tokens, aux_layers=draft.aux_layers), rows
            )
        )[len(path)]
        head = draft.lm_head(1)
        best = head.logits(states[0, len(text) - 2]).softmax(-1).topk(k)
        tokens = head.tokens_of(best.indices).tolist()
        return {(*path, token): p for p, token in zip(best.values.tolist(), tokens, strict=True)}

    level, drafted = {(): 1.0}, dict[Ranks, float]()
    for _ in range(size.depth):
        expanded = sorted(level, key=level.__getitem__, reverse=True)[:k]
        level = {path: level[one] * p for one in expanded for path, p in children(one).items()}
        drafted |= level
    return {
        path: drafted[path]
        for path in sorted(drafted, key=drafted.__getitem__, reverse=True)[: size.size]
    }


@pytest.mark.parametrize("size", [TreeSize(9, 3), TreeSize(2, 2), TreeSize(40, 3), TreeSize(5, 1)])
@pytest.mark.parametrize(
    ("family", "reduced"), [("llama", False), ("gemma2", False), ("qwen3", True)]
)
def test_nodes_are_those_of_an_enumeration_of_all_paths(
    family: str, reduced: bool, size: TreeSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gemma2 caps its logits, which changes probabilities and not ranks."""
    monkeypatch.setattr(dynamic_trees, "EXPANDED", 3)
    target_model = random_target_model(family)
    draft = dynamic_draft(target_model, size)
    if reduced:
        tokens = torch.arange(60, 3, -2)
        head = draft.lm_head(1).restrict_to(tokens)
        draft = Eagle3Draft.from_target_model(
            target_model, 3, vocab_size=len(tokens), token_map=tokens
        )
        draft.lm_heads[0].weight.data.copy_(head.weight)
        draft = draft.with_dynamic_trees(size)
    prompts = [[3, 14, 15, 9], [7, 20, 30, 40], [11, 12, 13, 14]]
    last_tokens = [5, 6, 8]
    proposal = proposal_after(target_model, draft, TREE, prompts, last_tokens)
    shapes = set()
    for row, root in enumerate(last_tokens):
        tree, tokens = proposal.tree.row(row), proposal.tokens[row].tolist()
        paths = [
            tuple(tokens[node] for node in tree.path_nodes(i)[1:]) for i in range(1, tree.size + 1)
        ]
        expected = enumerated(draft, target_model, [*prompts[row], root], size, min(3, size.size))
        assert tokens[0] == root
        assert set(paths) == set(expected)
        assert len(paths) == min(size.size, 3 + 9 * (size.depth - 1))
        shapes.add(tuple(tree.parent_list))
    assert len(shapes) > 1 or len(paths) in (2, 3, 21)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("dflash", "llama"),
        ("dflash-markov", "llama"),
        ("dflash-bidirectional", "llama"),
        ("dflash", "granite"),  # which divides its logits by 8
    ],
)
def test_trees_of_dflash_are_the_most_probable_paths(kind: str, family: str) -> None:
    """Of all paths, and with a Markov bias given each node's parent: with at most ten nodes none is
    missed.
    """
    target_model = random_target_model(family)
    size = TreeSize(9, 3)
    draft = dynamic_draft(target_model, size, kind)
    proposal = proposal_after(target_model, draft, TREE, [[3, 14, 15, 9]], [5])
    tree, tokens = proposal.tree.row(0), proposal.tokens[0].tolist()
    paths = {tuple(tokens[node] for node in tree.path_nodes(i)[1:]) for i in range(1, 10)}
    expected = enumerated(draft, target_model, [3, 14, 15, 9, 5], size, target_model.vocab_size)
    assert paths == set(expected)


def test_equal_products_go_to_the_parent() -> None:
    """A draft that is certain of every token: a chain, of which no node is missing."""
    target_model = random_target_model("llama")
    draft = dynamic_draft(target_model, TreeSize(3, 3))
    draft.lm_heads[0].weight.data.mul_(1e6)
    proposal = proposal_after(target_model, draft, TREE, [[3, 14, 15]], [5])
    assert proposal.tree.row(0).parent_list == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(
            ("eagle3", family)
            for family in ("llama", "mistral-window", "qwen3", "gemma3", "phi3-longrope")
        ),
        ("dflash", "qwen3"),
        ("dflash-markov", "mistral-window"),
        ("dflash-bidirectional", "llama"),
    ],
)
@pytest.mark.parametrize("merged", [False, True])
def test_greedy_text_equals_plain_decoding_alone_and_in_a_batch(
    merged: bool, kind: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_model = random_target_model(family)
    heads = dynamic_draft(target_model, kind=kind)
    proposals, propose = [], heads.propose

    def spy(*given: object) -> Proposal:
        proposals.append(propose(*given))  # type: ignore[arg-type]
        return proposals[-1]

    monkeypatch.setattr(heads, "propose", spy)
    draft: Proposer = (
        MergedDraft(heads, PromptLookupDraft(max_ngram=2, max_tokens=4, nodes=4))
        if merged
        else heads
    )
    alone, _ = check_equals_plain(target_model, draft, PROMPTS, TREE, 30)
    assert sum(sum(out.accepted) for out in alone) > 5
    assert {one.tree.size for one in proposals} == {9}
    rows = itertools.chain.from_iterable(
        map(one.tree.row, range(len(one.tokens))) for one in proposals
    )
    assert len({tuple(row.parent_list) for row in rows}) > 3


@pytest.mark.parametrize("kind", ["eagle3", "dflash-markov"])
def test_sampled_text_follows_the_target_models_distribution(kind: str) -> None:
    target_model = five_token_target_model()
    draft = dynamic_draft(target_model, TreeSize(6, 2), kind)
    decoder = BatchDecoder(target_model, draft, Tree.cartesian([2, 2]))
    assert check_lossless(decoder, rows=2500, batches=4, other_below=1e-8) > 300


def test_trees_deeper_than_the_draft_are_refused() -> None:
    with pytest.raises(
        MedusaError, match="the dynamic trees are 4 deep, but the draft has 3 heads"
    ):
        dynamic_draft(random_target_model("llama"), TreeSize(9, 4))
