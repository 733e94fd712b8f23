"""Heads in one tree with copied text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.models.drafts.base import Limits, Proposal, Proposer
from medusa_train.models.drafts.lookup import LookupDraft, LookupState, propose_trees
from medusa_train.models.features import Features
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.row_trees import TokenTree
from medusa_train.trees.tree import Tree


class MergedState(NamedTuple):
    """The states of both drafts."""

    heads: Any
    lookup: LookupState


class MergedDraft(Proposer):
    """Adds looked-up continuations to the tree of the heads' draft tokens; equal children are
    verified once.

    The nodes of the heads come first and keep their order, so the heads advance as without the
    others. Merging reads the heads' guesses on the host, one more synchronization per step. If
    nothing is added, the heads' tree is verified.

    Args:
        heads: a trained draft. lookup: a draft without training.

    Raises:
        MedusaError: the heads run layers of the backbone themselves (Kangaroo), which would lack
            the added nodes.
    """

    def __init__(self, heads: Proposer, lookup: LookupDraft) -> None:
        if heads.runs_backbone:
            raise MedusaError(
                "Kangaroo's guesses pass the backbone's first layers, so no others can be added"
            )
        self.heads = heads
        self.lookup = lookup
        self.needs = heads.needs
        self.num_heads = heads.num_heads

    @property
    def draft_vocab_size(self) -> int | None:
        """The heads' vocabulary."""
        return self.heads.draft_vocab_size

    def limits(self, tree: Tree) -> Limits:
        """Return the limits of both together."""
        heads, added = self.heads.limits(tree), self.lookup.limits(tree)
        return Limits(heads.size + added.size, max(heads.depth, added.depth))

    def start(
        self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache
    ) -> MergedState:
        """Start both drafts."""
        return MergedState(
            self.heads.start(feats, tokens, lengths, cache),
            self.lookup.start(feats, tokens, lengths, cache),
        )

    def propose(self, state: MergedState, roots: Tensor, tree: Tree) -> Proposal:
        """Fill `tree` with the heads' draft tokens and add the others."""
        if not self.heads.limits(tree).size:
            return self.lookup.propose(state.lookup, roots, tree)
        proposal = self.heads.propose(state.heads, roots, tree)
        rows = proposal.tokens.tolist()
        guesses = self.lookup.draft_trees(state.lookup, [row[0] for row in rows])
        parents = [proposal.tree.row(i).parent_list for i in range(len(rows))]
        trees = [
            TokenTree(row[: len(one)], list(one)) for row, one in zip(rows, parents, strict=True)
        ]
        for one, added in zip(trees, guesses, strict=True):
            one.merge(added)
        branch = self.lookup.lookahead_branch(state.lookup)
        if all(one.size == proposal.tree.size for one in trees):
            return proposal if branch is None else replace(proposal, branch=branch)
        return propose_trees(trees, roots.device, branch)

    def no_early_exit(self) -> AbstractContextManager[None]:
        """Within this context the heads fill the whole tree."""
        return self.heads.no_early_exit()

    def observe(self, state: MergedState, proposal: Proposal, logits: Tensor) -> MergedState:
        """Pass the logits of the branch tokens on to the draft without training, which requested
        them.
        """
        return state._replace(lookup=self.lookup.observe(state.lookup, proposal, logits))

    def advance(
        self,
        state: MergedState,
        feats: Features,
        proposal: Proposal,
        paths: Sequence[Sequence[int]],
    ) -> MergedState:
        """Advance both drafts, each by the whole accepted path."""
        return MergedState(
            self.heads.advance(state.heads, feats, proposal, paths),
            self.lookup.advance(state.lookup, feats, proposal, paths),
        )

    def select_rows(self, state: MergedState, rows: Sequence[int]) -> MergedState:
        """Return the states of `rows`."""
        return MergedState(
            self.heads.select_rows(state.heads, rows), self.lookup.select_rows(state.lookup, rows)
        )

    def append_rows(self, state: MergedState, other: MergedState, cache: TreeCache) -> MergedState:
        """Return the states of both batches."""
        return MergedState(
            self.heads.append_rows(state.heads, other.heads, cache),
            self.lookup.append_rows(state.lookup, other.lookup, cache),
        )
