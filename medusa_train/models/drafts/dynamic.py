"""Trained heads with dynamic trees: another tree in every step, chosen by the heads' confidences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.models.drafts.base import Draft, Limits, Proposal, Proposer
from medusa_train.models.features import Features
from medusa_train.trees.dynamic import DynamicTrees
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.tree import Tree

MAX_RANK = 10  # lower-ranked guesses are never worth a node (published trees end at rank 9)


class DynamicDraft(Proposer):
    """Proposes the best guesses of trained heads in the tree that `DynamicTrees` chooses for each row and step.

    The `tree` argument of `propose` is ignored. A tree depends on the text and the heads alone, never on what is drawn
    in the same step. The heads' probabilities are read on the host, one more synchronization per step. If no guess is
    worth its time, the step verifies the root alone.

    Args:
        draft: the heads, which must all guess at once.
        trees: fitted to these heads.

    Raises:
        MedusaError: the heads read the guesses before them, or are fewer than the trees use.
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

    def select_rows(self, state: Any, rows: Sequence[int]) -> Any:
        """Return the state of `rows`."""
        return self.draft.select_rows(state, rows)

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
