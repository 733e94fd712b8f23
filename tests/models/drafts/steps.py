"""Decoding steps of a draft over given states, without a target model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_train.models.drafts.base import (
    AcceptedPath,
    DraftCache,
    DraftStep,
    Proposal,
    Proposer,
    at_positions,
)
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.kv_cache import KVCache
from medusa_train.trees.transformers_adapters import PromptCache
from medusa_train.trees.tree import Tree

COLUMNS = 64


class DraftRows:
    """Rows whose prompts a draft has read, as `inference.step.Steps` keeps them.

    Args:
        hidden_states: of the prompts, [B, T, d], padded behind. tokens: long [B, T].
        lengths: of the prompts.
    """

    @torch.no_grad()
    def __init__(
        self, draft: Proposer, hidden_states: HiddenStates, tokens: Tensor, lengths: Sequence[int]
    ) -> None:
        self.draft = draft
        rows = len(lengths)
        self.kv_cache = [KVCache(1, COLUMNS, COLUMNS) for _ in range(draft.num_caches)]
        for kv_cache in self.kv_cache:
            kv_cache.make_room(rows, COLUMNS)
        draft.prefill(
            hidden_states, tokens, [PromptCache(kv_cache, 0, rows) for kv_cache in self.kv_cache]
        )
        last = [length - 1 for length in lengths]
        aux = None if hidden_states.aux is None else at_positions(hidden_states.aux, last)[:, None]
        self.accepted = AcceptedPath(
            HiddenStates(at_positions(hidden_states.final, last)[:, None], aux),
            at_positions(tokens, last)[:, None],
            path=torch.zeros(rows, 1, dtype=torch.long),
            counts=torch.ones(rows, dtype=torch.long),
            starts=torch.tensor(last),
        )

    @torch.no_grad()
    def extend(self, last_tokens: Tensor, tree: Tree) -> Any:
        """Return what the draft reads of the accepted paths."""
        return self.draft.extend(self.step(last_tokens, tree))

    def step(self, last_tokens: Tensor, tree: Tree) -> DraftStep:
        """Return what the draft gets in the next step."""
        caches = [
            DraftCache(kv_cache.storage(COLUMNS), COLUMNS, 1000) for kv_cache in self.kv_cache
        ]
        return DraftStep(
            self.accepted, last_tokens, last_tokens.tolist(), caches, [], tree, None, True
        )

    @torch.no_grad()
    def propose(self, last_tokens: Tensor, tree: Tree) -> Proposal:
        """Return what the draft proposes below `last_tokens`."""
        step = self.step(last_tokens, tree)
        return self.draft.propose(step, self.draft.extend(step))

    def accept(
        self, hidden_states: HiddenStates, tokens: Tensor, paths: Sequence[Sequence[int]]
    ) -> None:
        """Accept nodes of the verified tree; shorter paths are padded as in decoding."""
        longest = max(map(len, paths))
        padded = [[*path, *[0] * (longest - len(path))] for path in paths]
        self.accepted = AcceptedPath(
            hidden_states,
            tokens,
            path=torch.tensor(padded),
            counts=torch.tensor([len(path) for path in paths]),
            starts=self.accepted.lengths,
        )

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, see `Steps.select_rows`."""
        for kv_cache in self.kv_cache:
            for row, source in enumerate(rows):
                kv_cache.copy_row(source, row, COLUMNS)
        before = self.accepted
        index = torch.tensor(rows)
        aux = None if before.hidden_states.aux is None else before.hidden_states.aux[index]
        self.accepted = AcceptedPath(
            HiddenStates(before.hidden_states.final[index], aux),
            before.tokens[index],
            path=before.path[index],
            counts=before.counts[index],
            starts=before.starts[index],
        )
