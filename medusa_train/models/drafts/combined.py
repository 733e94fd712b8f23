"""Combine the draft tokens of a trained draft with copied text in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.models.drafts.base import DraftStep, Proposal, Proposer, TreeSize
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.drafts.lookup import LookupDraft, propose_trees
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.row_trees import TokenTree
from medusa_train.trees.transformers_adapters import PromptCache
from medusa_train.trees.tree import Tree


class MergedDraft(Proposer):
    """Adds continuations from n-gram lookup to the tree of a trained draft, called the heads here.

        heads       root - a - b          lookup     root - a - d          both    root - a - b
                        `- c                                                           |    `- d
                                                                                       `- c

    Equal children are one node, which is verified once. The nodes of the heads come first and keep
    their order, so the heads work as without lookup. Merging reads the heads' draft tokens on the
    host, which is one more synchronization per step. If nothing is added, the heads' tree is
    verified.

    Args:
        heads: a trained draft.
        lookup: a draft without training.

    Raises:
        MedusaError: the heads run layers of the target model themselves (Kangaroo), and these
            layers would not see the added nodes.
    """

    def __init__(self, heads: Proposer, lookup: LookupDraft) -> None:
        if isinstance(heads, KangarooDraft):
            raise MedusaError(
                "Kangaroo's guesses pass the target model's first layers, so no others can be added"
            )
        self.heads = heads
        self.lookup = lookup
        self.aux_layers = heads.aux_layers
        self.max_depth = heads.max_depth
        self.fixed_shape = False

    @property
    def draft_vocab_size(self) -> int | None:
        """Size of the heads' reduced vocabulary, or None."""
        return self.heads.draft_vocab_size

    def limits(self, tree: Tree) -> TreeSize:
        """Return the limits of merged proposals."""
        heads = self.heads.limits(tree)
        added = self.lookup.limits(tree)
        return TreeSize(heads.size + added.size, max(heads.depth, added.depth))

    @property
    def num_caches(self) -> int:
        """Number of the heads' caches; lookup has none."""
        return self.heads.num_caches

    def prefill(
        self, hidden_states: HiddenStates, tokens: Tensor, caches: Sequence[PromptCache]
    ) -> None:
        """Let the heads read the prompts."""
        self.heads.prefill(hidden_states, tokens, caches)

    def new_request_state(self, prompt: Sequence[int]) -> Any:
        """Index a prompt for the lookup."""
        return self.lookup.new_request_state(prompt)

    def extend_request_state(self, state: Any, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the lookup's text."""
        self.lookup.extend_request_state(state, tokens)

    def extend(self, step: DraftStep) -> Any:
        """Let the heads read the accepted path."""
        return self.heads.extend(step)

    def propose(self, step: DraftStep, states: Any) -> Proposal:
        """Fill the tree with the heads' draft tokens, and add continuations from lookup."""
        if not self.heads.limits(step.tree).size:
            return self.lookup.propose(step, None)
        # 1. the heads' tree of each row, on the host
        proposal = self.heads.propose(step, states)
        trees = []
        for row, tokens in enumerate(proposal.tokens.tolist()):
            parents = proposal.tree.row(row).parent_list
            trees.append(TokenTree(tokens[: len(parents)], list(parents)))
        # 2. add the continuations from lookup
        for tree, added in zip(trees, self.lookup.draft_trees(step), strict=True):
            tree.merge(added)
        branch = self.lookup.lookahead_branch(step)
        # 3. if nothing was new, use the heads' proposal, which is on the device already
        if any(tree.size != proposal.tree.size for tree in trees):
            return propose_trees(trees, step.last_tokens.device, branch)
        if branch is None:
            return proposal
        return replace(proposal, branch=branch)

    def no_early_exit(self) -> AbstractContextManager[None]:
        """Within this context, the heads fill the whole tree."""
        return self.heads.no_early_exit()

    def observe(self, request_states: Sequence[Any], proposal: Proposal, logits: Tensor) -> None:
        """Pass the logits of the branch tokens on to the lookup, which proposed the branch."""
        self.lookup.observe(request_states, proposal, logits)
