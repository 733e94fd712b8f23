"""Lookahead decoding: drafts n-grams from a window of Jacobi iterations, without training
(Lookahead Decoding, Fu et al.).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from medusa_train.models.drafts.base import DraftStep, Proposal, TreeSize
from medusa_train.models.drafts.lookup import LookupDraft, tree_of_continuations
from medusa_train.trees.lookahead_branch import BranchLayout, LookaheadBranch
from medusa_train.trees.row_trees import TokenTree
from medusa_train.trees.tree import Tree


class LookaheadDraft(LookupDraft):
    """Proposes n-grams that the target model generates ahead of the text, in the same passes that
    verify them (Lookahead Decoding, arXiv 2402.02057).

        pass = root + verification branch: n-grams of the pool that start with the root
                    + lookahead branch: a window of guessed tokens, which adds n-grams to the pool

    The window has W columns and N - 1 levels of draft tokens (W = 3, N = 4):

        level 0      root  a   b            the token of level l in column i is l + i positions
        level 1        c   d   e            after the root
        level 2        f   g   h
        predicted      i   j   k            after f, g and h

    A token attends to level 0 up to its column, and to its own column up to its level (Lookahead
    Decoding, Figure "Attention mask"). Each column with its predicted token is an n-gram for the
    pool: (root, c, f, i), (a, d, g, j), (b, e, h, k). Then the window moves by one position (Jacobi
    iteration): level 0 is removed, and the predicted tokens become the new highest level.

    The window starts with random tokens of the prompt (Lookahead Decoding, Algorithm 2), the same
    tokens in every run. As in the authors' code, the predicted tokens are always the most probable
    ones, even if the text is sampled, and the window moves by one position per step for any number
    of accepted tokens.

    Args:
        window: W.
        ngram: N, at least 3.
        guesses: G: largest number of n-grams that the pool keeps for each first token, and that a
            step verifies.
        pool_from_prompt: also fill the pool with the n-grams of the prompt and the answer.
    """

    def __init__(
        self, window: int = 5, ngram: int = 4, guesses: int = 5, pool_from_prompt: bool = True
    ) -> None:
        super().__init__(max_tokens=ngram - 1, nodes=guesses * (ngram - 1))
        self.window = window
        self.ngram = ngram
        self.guesses = guesses
        self.pool_from_prompt = pool_from_prompt
        self._layout = window_layout(window, ngram, torch.device("cpu"))

    def new_request_state(self, prompt: Sequence[int]) -> LookaheadText:
        """Return a new pool and window for a prompt."""
        return LookaheadText(prompt, self.window, self.ngram, self.guesses, self.pool_from_prompt)

    def limits(self, tree: Tree) -> TreeSize:
        """Return the limits of this draft's own trees together with the window."""
        size = self.nodes + self._layout.size
        depth = max(self.max_depth, self._layout.max_depth)
        return TreeSize(size, depth)

    def lookahead_branch(self, step: DraftStep) -> LookaheadBranch:
        """Return the tokens of all windows, level by level."""
        device = step.last_tokens.device
        if self._layout.depths.device != device:
            self._layout = window_layout(self.window, self.ngram, device)
        windows = [list(chain.from_iterable(text.levels)) for text in step.request_states]
        tokens = torch.tensor(windows, device=device)  # [B, m]
        return LookaheadBranch(tokens, self._layout)

    def observe(self, request_states: Sequence[Any], proposal: Proposal, logits: Tensor) -> None:
        """Add the n-grams of the windows' columns to the pools, and move the windows.

        The predicted tokens are copied from the device in one transfer.
        """
        last_tokens = proposal.tokens[:, :1]  # [B, 1]
        predicted = logits.float().argmax(-1)  # [B, W]; in bfloat16 this is slow on a CPU
        copied = torch.cat([last_tokens, predicted], dim=1).tolist()
        for text, (root, *following) in zip(request_states, copied, strict=True):
            text.move_window(root, following)


class LookaheadText:
    """The n-gram pool and the window of one row.

    Args:
        tokens: tokens of the prompt.
        window, ngram, guesses, pool_from_prompt: see `LookaheadDraft`.

    Attributes:
        levels: the N - 1 levels of the window. Level 0 has W - 1 tokens, because the root is not
            included; the other levels have W tokens.
        pool: for each first token, up to G continuations of N - 1 tokens, the most recently seen
            last.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        window: int,
        ngram: int,
        guesses: int,
        pool_from_prompt: bool = True,
    ) -> None:
        draw = random.Random(0)
        self.levels = [draw.choices(tokens, k=window - 1)]  # the root is missing
        for _ in range(ngram - 2):
            self.levels.append(draw.choices(tokens, k=window))
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        self._guesses = guesses
        self._random_levels = ngram - 2  # levels above 0 that still have random tokens
        self._recent: deque[int] | None = deque(maxlen=ngram) if pool_from_prompt else None
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, and add the n-grams that end with them to the pool."""
        if self._recent is None:
            return
        for token in tokens:
            self._recent.append(token)
            if len(self._recent) == self._recent.maxlen:
                self._add(tuple(self._recent))

    def draft_tree(self, root: int, length: int, nodes: int) -> TokenTree:
        """Return the tree of the pool's continuations of `root`, the most recent first. `length` is
        not used: it is the length of the continuations.
        """
        continuations = self.pool.get(root, {})
        return tree_of_continuations(root, reversed(continuations)).most_frequent(nodes)

    def move_window(self, root: int, following: list[int]) -> None:
        """Add the columns' n-grams to the pool, and move the window by one position.

        Args:
            root: root of the pass.
            following: predicted token after each column.
        """
        lowest, *upper = self.levels
        # 1. each column and its predicted token are an n-gram
        if self._random_levels:
            self._random_levels -= 1  # n-grams of random tokens would replace better ones
        else:
            for ngram in zip([root, *lowest], *upper, following, strict=True):
                self._add(ngram)
        # 2. level 1 becomes level 0, without its first token, whose place the new last token takes
        self.levels = [upper[0][1:], *upper[1:], following]

    def _add(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram as the most recent one of its first token; remove the oldest if there are
        more than G.
        """
        first = ngram[0]
        continuation = ngram[1:]
        entries = self.pool.setdefault(first, {})
        entries.pop(continuation, None)  # so that it is inserted at the end
        entries[continuation] = None
        if len(entries) > self._guesses:
            oldest = next(iter(entries))
            del entries[oldest]


def window_layout(window: int, ngram: int, device: torch.device) -> BranchLayout:
    """Return positions and mask of a window of W columns and N - 1 levels, level by level.

    W = 3, N = 4:           depth  0  1  2  3  4
        level 0                    r--a--b               r is the root, not a branch token
        level 1                     \\  \\  \\
                                    c  d  e              as a tree: b's parent is a, e's is b,
                                                         h's is e
        level 2                      \\  \\  \\
                                     f  g  h             the outputs
    """
    # level 0 without the root: the parent of a token is the token before it
    parents = list(range(-1, window - 2))
    # other levels: the parent of a token is the token of its column in the previous level
    first = -1  # index of column 0 in the previous level; the root has -1
    for _ in range(ngram - 2):
        parents += range(first, first + window)
        first = len(parents) - window
    return BranchLayout(parents, window, device)
