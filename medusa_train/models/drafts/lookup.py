"""Drafts without training that look up continuations of the last tokens: their base class, prompt
lookup, and REST.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from medusa_train.data.datastore import Datastore
from medusa_train.models.drafts.base import DraftStep, Proposal, Proposer, TreeSize
from medusa_train.trees.lookahead_branch import LookaheadBranch
from medusa_train.trees.row_trees import RowTrees, TokenTree
from medusa_train.trees.tree import Tree

#: Most continuations that are compared per step; more change little and cost time.
MAX_CANDIDATES = 32


class RowText(Protocol):
    """The tokens of a row so far."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""

    def draft_tree(self, root: int, length: int, nodes: int) -> TokenTree:
        """Return a tree of at most `nodes` draft tokens below `root`, the token after the text, and
        at most `length` deep.

        Call it at most once between two calls of `extend`: a text may learn from its last draft.
        """


class LookupDraft(Proposer):
    """Drafts continuations that followed the last tokens elsewhere, without a trained model.

        text         .. the cat sat on the | root: cat
        found        the cat sat on             ran away       two continuations of "the cat"
        proposed     cat - sat - on
                        `- ran - away                          one tree; common prefixes are shared

    A row's `RowText`, kept on the host, chooses which nodes of this tree are proposed. The given
    tree is ignored. If nothing is found for any row, the step is plain decoding.

    Args:
        max_tokens: maximum length of a continuation.
        nodes: maximum number of nodes of a proposal, without the root.
    """

    def __init__(self, max_tokens: int, nodes: int) -> None:
        self.max_depth = min(max_tokens, nodes)
        self.fixed_shape = False
        self.nodes = nodes
        self._root_only = Tree.empty()

    def limits(self, tree: Tree) -> TreeSize:
        """Return the limits of this draft's own trees."""
        return TreeSize(self.nodes, self.max_depth)

    def new_request_state(self, prompt: Sequence[int]) -> RowText:
        """Return the text of a request with the tokens of its prompt."""
        raise NotImplementedError

    def extend_request_state(self, state: RowText, tokens: Sequence[int]) -> None:
        """Append accepted tokens to a text."""
        state.extend(tokens)

    def draft_trees(self, step: DraftStep) -> list[TokenTree]:
        """Return a tree of draft tokens below each row's root, which may be empty."""
        trees = []
        for text, root in zip(step.request_states, step.last_token_list, strict=True):
            trees.append(text.draft_tree(root, self.max_depth, self.nodes))
        return trees

    def lookahead_branch(self, step: DraftStep) -> LookaheadBranch | None:
        """Return the tokens that the draft runs through the target model in addition to its tree;
        None if there are none.
        """
        return None

    def propose(self, step: DraftStep, states: Any) -> Proposal:
        """Propose the continuations of each row's text."""
        trees = self.draft_trees(step)
        branch = self.lookahead_branch(step)
        if any(tree.size for tree in trees):
            return propose_trees(trees, step.last_tokens.device, branch)
        if self._root_only.depths.device != step.last_tokens.device:
            self._root_only = Tree.empty().to(step.last_tokens.device)
        return Proposal(step.last_tokens[:, None], self._root_only, branch=branch)


class PromptLookupDraft(LookupDraft):
    """Copies what followed the last tokens earlier in the prompt and the answer (prompt lookup
    decoding, Saxena 2023).

    It continues the longest n-gram that ends with the root and occurred before, of up to
    `max_ngram` tokens. A node costs time even if it is rejected, so only nodes that are probable
    enough are proposed.

    Args:
        max_ngram: longest n-gram to look up.
        max_tokens, nodes: see `LookupDraft`.
        min_probability: less probable nodes are left out; `CopyAccuracy` estimates the probability
            from the earlier steps of the answer.
    """

    def __init__(
        self,
        max_ngram: int = 3,
        max_tokens: int = 10,
        nodes: int = 10,
        min_probability: float = 0.05,
    ) -> None:
        super().__init__(max_tokens, nodes)
        self.max_ngram = max_ngram
        self.min_probability = min_probability

    def new_request_state(self, prompt: Sequence[int]) -> PromptText:
        """Return the prompt with an index of its n-grams."""
        return PromptText(prompt, self.max_ngram, self.min_probability)


class PromptText:
    """A text with the positions of its n-grams, and a record of how often copies were right.

    Args:
        tokens: tokens of the prompt.
        max_ngram: length of the longest n-gram. A token adds up to this many dictionary entries.
        min_probability: lowest probability of a draft token.
    """

    def __init__(self, tokens: Iterable[int], max_ngram: int, min_probability: float) -> None:
        self._max_ngram = max_ngram
        self._min_probability = min_probability
        self._tokens: list[int] = []
        # for each n-gram, the positions after its occurrences, increasing
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._accuracy = CopyAccuracy()
        # the last draft: length of the n-gram that was found, position of the root, and the tree of
        # all continuations
        self._last: tuple[int, int, TokenTree] | None = None
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in range(1, min(self._max_ngram, end) + 1):
                ngram = tuple(self._tokens[end - n :])
                self._ends.setdefault(ngram, []).append(end)

    def draft_tree(self, root: int, length: int, nodes: int) -> TokenTree:
        """Return the tree of the most probable continuations of the longest n-gram that ends with
        `root`.
        """
        # 1. learn from the last draft: what followed its root is known now
        if self._last is not None:
            ngram, position, tree = self._last
            self._accuracy.record(ngram, tree, [*self._tokens[position + 1 :], root])
        # 2. look up
        ngram, continuations = self._longest_match(root, length)
        tree = tree_of_continuations(root, continuations)
        self._last = ngram, len(self._tokens), tree
        # 3. keep the most probable nodes
        probabilities = self._accuracy.probabilities(ngram, tree)
        likely = []
        for node in range(1, len(tree.tokens)):
            if probabilities[node] >= self._min_probability:
                likely.append(node)
        likely.sort(key=lambda node: -probabilities[node])  # a parent comes before its children
        return tree.subset(likely[:nodes])

    def _longest_match(self, root: int, length: int) -> tuple[int, list[Sequence[int]]]:
        """Return the length of the longest n-gram that ends with `root` and occurred before, and up
        to `MAX_CANDIDATES` of its continuations, the most recent first.

        If there is none, return 0 and an empty list.
        """
        first = max(len(self._tokens) - self._max_ngram + 1, 0)
        recent = (*self._tokens[first:], root)  # the longest n-gram
        for start in range(len(recent)):
            ends = self._ends.get(recent[start:], [])
            if ends:
                most_recent = ends[-MAX_CANDIDATES:]
                continuations = [self._after(end, root, length) for end in reversed(most_recent)]
                return len(recent) - start, continuations
        return 0, []

    def _after(self, position: int, root: int, length: int) -> Sequence[int]:
        """Return up to `length` tokens from `position` on, of the text followed by the root."""
        tokens = self._tokens[position : position + length]
        if len(tokens) < length:
            tokens.append(root)
        return tokens


class CopyAccuracy:
    """Estimates the probability that a copied token is right, from the earlier steps of the same
    answer.

    For each length of the n-gram and each depth of the token, it counts how often one of the
    continuations had the right token, given that the tokens before it were right. Depths from
    `DEEPEST` on are counted together. The prior for n-grams of length n is n right copies out of
    n + 2, at every depth.
    """

    DEEPEST = 4

    def __init__(self) -> None:
        self._right: Counter[tuple[int, int]] = Counter()
        self._total: Counter[tuple[int, int]] = Counter()

    def record(self, ngram: int, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Record which of the copies in `tree`, after an n-gram of length `ngram`, were right.

        Args:
            ngram: length of the n-gram.
            tree: the copies.
            tokens: the tokens after the tree's root, as far as they are known.
        """
        inner = set(tree.parents)  # nodes with children
        node = 0
        for depth, token in enumerate(tokens, start=1):
            if node not in inner:
                return  # the continuations end here, so there was no copy of this token
            child = tree.find(node, token)
            key = ngram, min(depth, self.DEEPEST)
            self._total[key] += 1
            if child is None:
                return
            self._right[key] += 1
            node = child

    def probabilities(self, ngram: int, tree: TokenTree) -> list[float]:
        """Return the probability of every node of `tree`, first 1 for the root.

        The probability that one of several siblings is right is divided among them in proportion to
        their numbers of continuations.
        """
        # 1. number of continuations through the children of each node
        below = [0] * len(tree.tokens)
        for parent, count in zip(tree.parents[1:], tree.counts[1:], strict=True):
            below[parent] += count
        # 2. probabilities from the root down; parents come before their children
        depths = [0]
        probabilities = [1.0]
        for parent, count in zip(tree.parents[1:], tree.counts[1:], strict=True):
            depth = depths[parent] + 1
            a_child_is_right = probabilities[parent] * self._estimate(ngram, depth)
            depths.append(depth)
            probabilities.append(a_child_is_right * count / below[parent])
        return probabilities

    def _estimate(self, ngram: int, depth: int) -> float:
        """Estimate the probability that one of the siblings at this depth is right, given that
        their parent is.
        """
        key = ngram, min(depth, self.DEEPEST)
        return (self._right[key] + ngram) / (self._total[key] + ngram + 2)


class RestDraft(LookupDraft):
    """Copies from a datastore, such as the model's own answers (REST: Retrieval-Based Speculative
    Decoding).

    It looks up the longest n-gram of the datastore that ends with the root, of up to `max_ngram`
    tokens, and proposes its most frequent continuations.

    Args:
        datastore: must be sorted by at least `max_ngram` tokens. Its samples are representative if
            it is sorted by `max_tokens` more.
        max_ngram: longest n-gram to look up.
        max_tokens, nodes: see `LookupDraft`.
    """

    def __init__(
        self, datastore: Datastore, max_ngram: int = 16, max_tokens: int = 10, nodes: int = 16
    ) -> None:
        super().__init__(max_tokens, nodes)
        self.max_ngram = max_ngram
        self.datastore = datastore

    def new_request_state(self, prompt: Sequence[int]) -> RowText:
        """Return the last tokens of the prompt, with which continuations are looked up."""
        return _DatastoreText(self.datastore, prompt, self.max_ngram)


class _DatastoreText:
    """The last tokens of a text."""

    def __init__(self, datastore: Datastore, tokens: Sequence[int], max_ngram: int) -> None:
        self._datastore = datastore
        self._recent = deque(tokens, maxlen=max_ngram - 1)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        self._recent.extend(tokens)

    def draft_tree(self, root: int, length: int, nodes: int) -> TokenTree:
        """Return the tree of the most frequent continuations of the longest n-gram of the datastore
        that ends with `root`.
        """
        recent = [*self._recent, root]
        continuations = self._datastore.continuations(recent, length, MAX_CANDIDATES)
        return tree_of_continuations(root, continuations).most_frequent(nodes)


def tree_of_continuations(root: int, continuations: Iterable[Sequence[int]]) -> TokenTree:
    """Return the tree of all continuations below `root`."""
    tree = TokenTree([root])
    for continuation in continuations:
        tree.add(continuation)
    return tree


def propose_trees(
    trees: Sequence[TokenTree], device: torch.device, branch: LookaheadBranch | None = None
) -> Proposal:
    """Return the proposal of one tree per row; rows with fewer nodes are right-padded."""
    row_trees = RowTrees([tree.parents for tree in trees], device)
    padded = [tree.tokens + [0] * (row_trees.size - tree.size) for tree in trees]
    tokens = torch.tensor(padded, device=device)  # [B, n + 1]
    return Proposal(tokens, row_trees, branch=branch)
