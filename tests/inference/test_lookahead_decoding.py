"""Lookahead decoding: output equality, losslessness of sampling, and a plain reference of window
and pool.
"""

from collections.abc import Sequence

import pytest
import torch

from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.drafts.combined import MergedDraft
from medusa_train.models.drafts.lookahead import LookaheadDraft, LookaheadText
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.inference.chi_square import check_lossless, five_token_target_model
from tests.inference.equality import check_equals_plain
from tests.inference.steps import begun, proposal_after
from tests.inference.test_drafts import TREE, random_draft

PROMPTS = [
    [5, 9, 17, 30, 5, 9, 17, 30, 5, 9, 17],
    [7],
    [4, 8, 20, 4, 8, 21, 4, 8, 22, 7, 4, 8],
    [11, 12, 13, 14, 15],
]


def make_draft(name: str, target_model: TargetModel) -> Proposer:
    lookahead = LookaheadDraft(window=4, ngram=4, guesses=3)
    heads, _, _ = name.rpartition("+")
    return MergedDraft(random_draft(heads, target_model), lookahead) if heads else lookahead


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("lookahead", "llama"),
        ("lookahead", "mistral-window"),
        ("lookahead", "gemma3"),
        ("lookahead", "phi3-longrope"),
        ("medusa+lookahead", "llama"),
        ("hydra+++lookahead", "mistral-window"),
        ("amphista+lookahead", "llama"),
    ],
)
def test_greedy_text_equals_plain_decoding_alone_and_in_a_batch(name: str, family: str) -> None:
    target_model = random_target_model(family)
    alone, together = check_equals_plain(
        target_model, make_draft(name, target_model), PROMPTS, TREE, 32
    )
    assert sum(sum(out.accepted) for out in alone) > 10
    assert [out.accepted for out in together] == [out.accepted for out in alone]


class Reference:
    """Lookahead decoding of one row, a full pass without cache for every token.

    Columns are lists of tokens from the root on: those of level 0 up to theirs, then their own,
    level by level.
    """

    def __init__(self, target_model: TargetModel, prompt: list[int], draft: LookaheadDraft) -> None:
        self.target_model, self.text, self.draft = target_model, list(prompt), draft
        self.ngrams: list[tuple[int, ...]] = []  # by the time of their last occurrence
        self.levels = draft.new_request_state(prompt).levels
        self.passes = 0
        if draft.pool_from_prompt:
            for end in range(draft.ngram, len(prompt) + 1):
                self.insert(prompt[end - draft.ngram : end])

    def following(self, tokens: Sequence[int]) -> int:
        """The token after the text and `tokens`."""
        with torch.no_grad():
            logits = self.target_model.model(torch.tensor([[*self.text, *tokens]])).logits
        return int(logits[0, -1].argmax())

    def insert(self, ngram: Sequence[int]) -> None:
        self.ngrams = [one for one in self.ngrams if one != tuple(ngram)] + [tuple(ngram)]

    def pool(self) -> dict[int, list[tuple[int, ...]]]:
        """The last G n-grams of each first token, the most recent one first."""
        by_first: dict[int, list[tuple[int, ...]]] = {}
        for ngram in reversed(self.ngrams):
            by_first.setdefault(ngram[0], []).append(ngram[1:])
        return {first: ngrams[: self.draft.guesses] for first, ngrams in by_first.items()}

    def step(self, root: int) -> list[int]:
        """Return the accepted guesses and the next root."""
        guesses = self.pool().get(root, [])
        first, *upper = self.levels
        columns = [
            [root, *first[:i], *(level[i] for level in upper)] for i in range(self.draft.window)
        ]
        new = [self.following(column) for column in columns]
        if self.passes >= self.draft.ngram - 2:
            for i, column in enumerate(columns):
                self.insert([*column[i:], new[i]])
        self.levels = [upper[0][1:], *upper[1:], new]
        self.passes += 1

        accepted: list[int] = []
        next_root = self.following([root])
        while any(list(guess[: len(accepted) + 1]) == [*accepted, next_root] for guess in guesses):
            accepted.append(next_root)
            next_root = self.following([root, *accepted])
        for token in (root, *accepted):
            self.text.append(token)
            if self.draft.pool_from_prompt and len(self.text) >= self.draft.ngram:
                self.insert(self.text[-self.draft.ngram :])
        return [*accepted, next_root]


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.parametrize(
    ("window", "ngram", "guesses", "pool_from_prompt"),
    [(5, 4, 5, True), (4, 3, 2, False), (3, 5, 1, True), (1, 4, 3, False), (6, 3, 64, False)],
)
def test_windows_pools_and_accepted_guesses_are_those_of_a_plain_reference(
    family: str, window: int, ngram: int, guesses: int, pool_from_prompt: bool
) -> None:
    target_model = random_target_model(family)
    draft = RecordedDraft(window, ngram, guesses, pool_from_prompt)
    for prompt in PROMPTS[:2]:
        out = Decoder(target_model, draft).generate(prompt, 24, ())
        reference = Reference(target_model, prompt, draft)
        tokens, accepted = out.tokens[:1], []
        for i, (levels, pool) in enumerate(draft.moves):
            new = reference.step(tokens[-1])
            assert levels == reference.levels, i
            assert pool == reference.pool(), i
            tokens += new
            accepted.append(len(new) - 1)
        assert tokens[:24] == out.tokens
        assert accepted[:-1] == out.accepted[:-1]  # the last one is cut at the end of the answer
        draft.moves.clear()


class RecordedDraft(LookaheadDraft):
    """Records the levels and the pool of a single row after every step."""

    def __init__(self, *settings: int) -> None:
        super().__init__(*settings)  # type: ignore[arg-type]
        self.moves: list[tuple[list[list[int]], dict[int, list[tuple[int, ...]]]]] = []

    def extend_request_state(self, state: LookaheadText, tokens: Sequence[int]) -> None:
        super().extend_request_state(state, tokens)
        pool = {first: list(reversed(ngrams)) for first, ngrams in state.pool.items()}
        self.moves.append((state.levels, pool))


def test_branch_tokens_are_neither_accepted_nor_kept() -> None:
    """A step's proposal, and the cache after it, with as many positions as tokens were accepted."""
    target_model = random_target_model("llama")
    draft = LookaheadDraft(window=3, ngram=3, guesses=2)
    prompts = [PROMPTS[0], PROMPTS[0][:9]]
    proposal = proposal_after(target_model, draft, Tree.empty(), prompts, [30, 2])
    assert proposal.branch is not None
    assert proposal.tree.size == 2  # after 30: 5 9
    assert proposal.branch.tokens.shape == (2, 5)
    tokens, tree_and_branch = proposal.pass_inputs()
    assert tokens.shape == (2, 8)
    assert tree_and_branch.size == 7
    assert draft.limits(Tree.empty()) == (2 * 2 + 5, 3)
    # the step counts as many positions as tokens were accepted
    steps = begun(target_model, draft, Tree.empty(), [PROMPTS[0]])
    root = 30
    committed = len(PROMPTS[0])
    for _ in range(24):
        with torch.inference_mode():
            (accepted,) = steps.step([root])
        assert steps.committed == committed
        committed += len(accepted.path)
        root = accepted.tokens[-1]
    assert committed > len(PROMPTS[0]) + 24  # some guesses were accepted


class WarmDraft(LookaheadDraft):
    """Takes n-grams of the window from the first step on, since an answer of the test has two
    steps.
    """

    def new_request_state(self, prompt: Sequence[int]) -> LookaheadText:
        text = super().new_request_state(prompt)
        text._random_levels = 0
        return text


@pytest.mark.parametrize("name", ["lookahead", "medusa+lookahead"])
def test_sampled_text_follows_the_target_models_distribution(name: str) -> None:
    target_model = five_token_target_model()
    draft: Proposer = WarmDraft(window=3, ngram=3, guesses=2)
    if name != "lookahead":
        draft = MergedDraft(random_draft("medusa", target_model), draft)  # type: ignore[arg-type]
    decoder = BatchDecoder(
        target_model, draft, Tree.cartesian([2, 1]) if name != "lookahead" else None
    )
    prompt = [1, 2, 3, 4, 1, 0, 2, 1]
    assert check_lossless(decoder, rows=2500, batches=4, other_below=1e-8, prompt=prompt) > 500
