"""Drafts made of others: heads with dynamic trees, and heads in one tree with copied text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.models.drafts.base import Draft, Limits, Proposal, Proposer
from medusa_train.models.drafts.lookup import LookupDraft, LookupState, propose_trees
from medusa_train.models.features import Features
from medusa_train.trees.dynamic import DynamicTrees
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.row_trees import RowTrees, TokenTree
from medusa_train.trees.tree import Tree

MAX_RANK = 10  # lower-ranked draft tokens are never worth a node (published trees end at rank 9)


class DynamicDraft(Proposer):
    """Proposes the best draft tokens of trained heads in the tree that `DynamicTrees` chooses for each row and step.

    The `tree` argument of `propose` is ignored. A tree depends on the text and the heads alone, never on what is drawn
    in the same step. The heads' probabilities are read on the host, one more synchronization per step. If no guess is
    worth its time, the step verifies the root alone.

    Args:
        draft: the heads, which must all draft at once.
        trees: fitted to these heads.

    Raises:
        MedusaError: the heads read the draft tokens before them, or are fewer than the trees use.
    """

    def __init__(self, draft: Draft, trees: DynamicTrees) -> None:
        if not draft.guesses_at_once:
            raise MedusaError(
                "tree: dynamic chooses among the guesses of all heads, but these heads read the guesses before them; "
                "use tree: fixed"
            )
        if trees.heads > draft.num_heads:
            raise MedusaError(f"the dynamic trees are {trees.heads} deep, but there are {draft.num_heads} heads")
        self.draft = draft
        self.trees = trees
        self.needs = draft.needs
        self.num_heads = draft.num_heads
        self.can_append_rows = draft.can_append_rows
        self._root_only = Tree.empty()

    @property
    def draft_vocab_size(self) -> int | None:
        """The heads' vocabulary."""
        return self.draft.draft_vocab_size

    def limits(self, tree: Tree) -> Limits:
        """Return the limits of the dynamic trees."""
        return Limits(self.trees.max_nodes, self.trees.heads)

    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> Any:
        """Start the heads."""
        if self._root_only.depths.device != tokens.device:
            self._root_only = Tree.empty().to(tokens.device)
        return self.draft.start(feats, tokens, lengths, cache)

    def propose(self, state: Any, roots: Tensor, tree: Tree) -> Proposal:
        """Compute all heads, and propose the trees that are chosen by their confidences."""
        logits = self.draft.all_head_logits(state, roots, self.trees.heads)
        guesses = logits.topk(min(MAX_RANK, logits.shape[-1])).indices
        log_probs = log_probs_at(logits, guesses)
        paths = self.trees.choose(self.trees.calibrated(log_probs.transpose(0, 1).cpu().numpy()).tolist())
        if not paths[0]:
            return Proposal(roots[:, None], self._root_only)
        width = guesses.shape[2]
        index = [[(len(path) - 1) * width + path[-1] for path in row] for row in paths]
        chosen = guesses.transpose(0, 1).flatten(1).gather(1, torch.tensor(index, device=roots.device))
        chosen = self.draft.lm_head(1).tokens_of(chosen)
        return Proposal(torch.cat([roots[:, None], chosen], dim=1), RowTrees(_parents(paths), roots.device))

    def advance(self, state: Any, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]) -> Any:
        """Advance the heads."""
        return self.draft.advance(state, feats, proposal, paths)

    def append_rows(self, state: Any, other: Any, cache: TreeCache) -> Any:
        """Return the state of both."""
        return self.draft.append_rows(state, other, cache)


def log_probs_at(logits: Tensor, columns: Tensor) -> Tensor:
    """Return the log-probabilities of some columns, float32 [..., R] of logits [..., V] and columns [..., R]."""
    # in parts, since a copy of all logits in float32 may be large
    total = torch.cat([part.float().logsumexp(-1, keepdim=True) for part in logits.split(64)])
    return logits.gather(-1, columns).float() - total


def _parents(trees: Sequence[Sequence[tuple[int, ...]]]) -> list[list[int]]:
    """Return the parent of every node of trees given by their paths; -1 for the root, which comes first."""
    parents = []
    for paths in trees:
        index = {path: node for node, path in enumerate(paths, start=1)}
        parents.append([-1, *(index.get(path[:-1], 0) for path in paths)])
    return parents


class MergedState(NamedTuple):
    """The states of both drafts."""

    heads: Any
    lookup: LookupState


class MergedDraft(Proposer):
    """Adds looked-up continuations to the tree of the heads' draft tokens; equal children are verified once.

    The nodes of the heads come first and keep their order, so the heads advance as without the others. Merging reads
    the heads' guesses on the host, one more synchronization per step. If nothing is added, the heads' tree is verified.

    Args:
        heads: a trained draft, with fixed trees or dynamic ones. lookup: a draft without training.

    Raises:
        MedusaError: the heads run layers of the backbone themselves (Kangaroo), which would lack the added nodes.
    """

    def __init__(self, heads: Proposer, lookup: LookupDraft) -> None:
        if heads.runs_backbone:
            raise MedusaError(
                "Kangaroo runs its guesses through the backbone's first layers itself, so no other guesses can be added"
            )
        self.heads = heads
        self.lookup = lookup
        self.needs = heads.needs
        self.num_heads = heads.num_heads
        self.can_append_rows = heads.can_append_rows and lookup.can_append_rows

    @property
    def draft_vocab_size(self) -> int | None:
        """The heads' vocabulary."""
        return self.heads.draft_vocab_size

    def limits(self, tree: Tree) -> Limits:
        """Return the limits of both together."""
        heads, added = self.heads.limits(tree), self.lookup.limits(tree)
        return Limits(heads.size + added.size, max(heads.depth, added.depth))

    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> MergedState:
        """Start both drafts."""
        return MergedState(
            self.heads.start(feats, tokens, lengths, cache), self.lookup.start(feats, tokens, lengths, cache)
        )

    def propose(self, state: MergedState, roots: Tensor, tree: Tree) -> Proposal:
        """Fill `tree` with the heads' draft tokens and add the others."""
        if not self.heads.limits(tree).size:
            return self.lookup.propose(state.lookup, roots, tree)
        proposal = self.heads.propose(state.heads, roots, tree)
        rows = proposal.tokens.tolist()
        guesses = self.lookup.draft_trees(state.lookup, [row[0] for row in rows])
        parents = [proposal.tree.row(i).parent_list for i in range(len(rows))]
        trees = [TokenTree(row[: len(one)], list(one)) for row, one in zip(rows, parents, strict=True)]
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
        """Pass the logits of the branch tokens on to the draft without training, which requested them."""
        return state._replace(lookup=self.lookup.observe(state.lookup, proposal, logits))

    def advance(
        self, state: MergedState, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]
    ) -> MergedState:
        """Advance both drafts, each by the whole accepted path."""
        return MergedState(
            self.heads.advance(state.heads, feats, proposal, paths),
            self.lookup.advance(state.lookup, feats, proposal, paths),
        )

    def select_rows(self, state: MergedState, rows: Sequence[int]) -> MergedState:
        """Return the states of `rows`."""
        return MergedState(self.heads.select_rows(state.heads, rows), self.lookup.select_rows(state.lookup, rows))

    def append_rows(self, state: MergedState, other: MergedState, cache: TreeCache) -> MergedState:
        """Return the states of both batches."""
        return MergedState(
            self.heads.append_rows(state.heads, other.heads, cache),
            self.lookup.append_rows(state.lookup, other.lookup, cache),
        )
