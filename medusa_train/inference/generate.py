"""One decoding loop for every draft; plain decoding is the empty tree. Knows no text, no training, no report."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import Accepted, accept_greedy
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal
from medusa_train.models.features import Features
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.tree import Tree


@dataclass
class Generation:
    """An answer and what it cost.

    Attributes:
        tokens: generated ids, the closing eos included.
        steps: verification passes; the prefill, which gives the first token, is not a step.
        accepted: per step, how many drafted tokens were accepted and kept.
        seconds: wall time in all; prefill_seconds: of that, until the first token.
        finish: "eos", "length" (max_new_tokens) or "context" (the model's positions are used up).
    """

    tokens: list[int]
    steps: int = 0
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    finish: Literal["eos", "length", "context"] = "length"

    @property
    def acceleration_rate(self) -> float:
        """Tokens per decoding step, 1.0 for plain decoding (Medusa, section 3, "acceleration rate")."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 1.0


class _TreeMask:
    """The additive mask of a tree pass over a growing prefix, updated in place: [1, 1, n + 1, capacity]."""

    def __init__(self, tree: Tree, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block = torch.zeros(tree.ancestors.shape, dtype=dtype)
        self._block.masked_fill_(~tree.ancestors, float("-inf"))
        self._block = self._block.to(device)
        self._mask = torch.zeros(1, 1, tree.size + 1, capacity, dtype=dtype, device=device)
        self._clean = 0  # columns up to here are all zero

    def at(self, prefix: int) -> Tensor:
        """The mask [1, 1, n + 1, prefix + n + 1] for nodes behind `prefix` cached positions."""
        end = prefix + len(self._block)
        self._mask[..., self._clean : prefix] = 0
        self._mask[0, 0, :, prefix:end] = self._block
        self._clean = prefix
        return self._mask[..., :end]


class Decoder:
    """Greedy decoding of one sequence: prefill, then rounds of propose, verify, accept.

    Without a draft, or with the empty tree, each round verifies the root alone and no head is computed: plain
    decoding with the same loop, which is what speedups are measured against.

    Args:
        backbone: who decides. draft: who guesses. tree: which guesses are verified; the empty tree by default.
        cache: memory to use for keys and values; by default the decoder makes its own, and keeps it between answers.
    """

    def __init__(
        self,
        backbone: Backbone,
        draft: Draft | None = None,
        tree: Tree | None = None,
        cache: TreeCache | None = None,
    ) -> None:
        self.backbone = backbone
        self.draft = draft
        self.tree = tree if tree is not None and draft is not None else Tree.empty()
        if draft is not None and self.tree.max_depth > draft.num_heads:
            raise MedusaError(f"the tree is {self.tree.max_depth} deep, the draft has {draft.num_heads} heads")
        if self.tree.width > backbone.vocab_size:
            raise MedusaError(f"the tree reads rank {self.tree.width - 1} of {backbone.vocab_size} tokens")
        self._depths = self.tree.depths.to(backbone.device)[None]
        self._cache = cache

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
    ) -> Generation:
        """Continue `prompt`.

        Generation ends after the first eos (kept), after `max_new_tokens` tokens, or where the model's context
        ends: the last token then stands at position max_context, predicted but never read.

        Args:
            prompt: at least one token id. max_new_tokens: at least 1.
            eos_ids: tokens that end the answer; the backbone's own by default, empty for none.

        Raises:
            MedusaError: the prompt is empty or longer than the model's context.
        """
        started = time.perf_counter()
        stops = frozenset(self.backbone.eos_ids if eos_ids is None else eos_ids)
        room = self._room(prompt, max_new_tokens)
        cache = self._fresh_cache(len(prompt) + room + self.tree.size + 1)
        mask = (
            _TreeMask(self.tree, cache.capacity, self.backbone.dtype, self.backbone.device) if self.tree.size else None
        )

        tokens = torch.tensor([prompt], device=self.backbone.device)
        feats = self.backbone.run(tokens, cache=cache)
        cache.commit(len(prompt))
        root = int(self.backbone.logits(feats.hidden[:, -1]).argmax(-1))
        out = Generation([root], prefill_seconds=time.perf_counter() - started)
        state = self.draft.start(feats) if self.draft is not None and self.tree.size else None

        while not (out.tokens[-1] in stops or len(out.tokens) >= room):
            proposal = self._propose(state, out.tokens[-1], cache.length)
            feats, accepted = self._verify(proposal, cache, mask)
            cache.keep(accepted.path)
            if self.draft is not None and self.tree.size:
                state = self.draft.advance(state, feats, accepted.path)
            kept = _until_stop(accepted.tokens[1:], stops, room - len(out.tokens))
            out.tokens += kept
            out.steps += 1
            out.accepted.append(min(len(accepted.path) - 1, len(kept)))
        out.finish = self._finish(out.tokens, stops, max_new_tokens)
        out.seconds = time.perf_counter() - started
        return out

    def _propose(self, state: object, root: int, prefix: int) -> Proposal:
        token = torch.tensor([root], device=self.backbone.device)
        if self.draft is None or not self.tree.size or self._straddles_rope_switch(prefix):
            return Proposal(token, Tree.empty())
        return self.draft.propose(state, token, self.tree)

    def _straddles_rope_switch(self, prefix: int) -> bool:
        """Whether a tree behind `prefix` positions would make a longrope model switch before the root gets there."""
        switch = self.backbone.rope_switch
        return switch is not None and prefix < switch <= prefix + self.tree.max_depth

    def _verify(self, proposal: Proposal, cache: TreeCache, mask: _TreeMask | None) -> tuple[Features, Accepted]:
        """One pass over all nodes; a node's position id is prefix length + depth."""
        positions = self._depths[:, : len(proposal.tokens)] + cache.length
        if cache.length + self.tree.max_depth >= self.backbone.max_context:
            # nodes past the context are never kept; no position table must be asked for them either
            positions = positions.clamp(max=self.backbone.max_context - 1)
        feats = self.backbone.run(
            proposal.tokens[None],
            positions=positions,
            mask=mask.at(cache.length) if mask is not None and proposal.tree.size else None,
            cache=cache,
        )
        logits = self.backbone.logits(feats.hidden[0])
        return feats, accept_greedy(proposal.tokens, logits, proposal.tree)

    def _room(self, prompt: list[int], max_new_tokens: int) -> int:
        """How many tokens may be generated: the last one is not read, so it may lie one past the context."""
        if not prompt:
            raise MedusaError("the prompt is empty: decoding needs at least one token to start from")
        if max_new_tokens < 1:
            raise MedusaError(f"max_new_tokens is {max_new_tokens}; it has to be 1 or more")
        limit = self.backbone.max_context - len(prompt) + 1
        if limit < 1:
            raise MedusaError(
                f"the prompt has {len(prompt)} tokens, the model reads {self.backbone.max_context} at most"
            )
        return min(max_new_tokens, limit)

    def _fresh_cache(self, capacity: int) -> TreeCache:
        """The cache of the last question where it is large enough, else a new one."""
        if self._cache is None or self._cache.capacity < capacity:
            self._cache = self.backbone.new_cache(capacity)
        self._cache.reset()
        return self._cache

    def _finish(
        self, tokens: list[int], stops: Collection[int], max_new_tokens: int
    ) -> Literal["eos", "length", "context"]:
        if tokens[-1] in stops:
            return "eos"
        return "length" if len(tokens) >= max_new_tokens else "context"


def _until_stop(tokens: list[int], stops: Collection[int], room: int) -> list[int]:
    """Cut freshly accepted tokens after the first eos and at the room left, so that nothing leaks past either."""
    for i, token in enumerate(tokens[:room]):
        if token in stops:
            return tokens[: i + 1]
    return tokens[:room]
