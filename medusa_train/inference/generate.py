"""One decoding loop for every draft; plain decoding is the empty tree. Knows no text, no training, no report."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import Accepted, Rule, accept
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import block_end
from medusa_train.models.drafts.base import Draft, Proposal
from medusa_train.models.features import PLAIN, Features
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.masks import TreeMasks
from medusa_train.trees.tree import Tree

FinishReason = Literal["eos", "length", "context"]


class Step(NamedTuple):
    """What one pass added to an answer.

    Attributes:
        tokens: ids in order, nothing behind an eos. accepted: how many of them, from the first on, were drafted.
    """

    tokens: list[int]
    accepted: int


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
    finish: FinishReason = "length"

    @property
    def acceleration_rate(self) -> float:
        """Tokens per decoding step, 1.0 for plain decoding (Medusa, section 3, "acceleration rate")."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 1.0


class Decoder:
    """Decoding of one sequence: prefill, then rounds of propose, verify, accept.

    Without a draft, or with the empty tree, each round verifies the root alone and no head is computed: plain
    decoding with the same loop, which is what speedups are measured against.

    A round transfers once from the device to the host, when the accepted tokens are asked for. The decoder answers
    one prompt at a time; `BatchDecoder` answers several at once.

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
        self.tree = check_tree(backbone, draft, tree)
        self._need = draft.needs if draft is not None and self.tree.size else PLAIN
        self._nothing = Tree.empty().to(backbone.device)
        self._cache = cache
        self._answers = 0  # how many were begun

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        rule: Rule = None,
        generator: torch.Generator | None = None,
    ) -> Generation:
        """Continue `prompt`; arguments and errors are those of `stream`."""
        started = time.perf_counter()
        stops = frozenset(self.backbone.eos_ids if eos_ids is None else eos_ids)
        out = Generation([])
        for step in self.stream(prompt, max_new_tokens, stops, rule, generator):
            if out.tokens:
                out.steps += 1
                out.accepted.append(step.accepted)
            else:
                out.prefill_seconds = time.perf_counter() - started
            out.tokens += step.tokens
        out.finish = finish_reason(out.tokens, stops, max_new_tokens)
        out.seconds = time.perf_counter() - started
        return out

    @torch.inference_mode()
    def stream(
        self,
        prompt: list[int],
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        rule: Rule = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Step]:
        """Continue `prompt`, step by step: the first one is the prefill, which gives one token.

        Generation ends after the first eos (kept), after `max_new_tokens` tokens, or where the model's context
        ends: the last token then stands at position max_context, predicted but never read. It may be left off at
        any step.

        Args:
            prompt: at least one token id. max_new_tokens: at least 1.
            eos_ids: tokens that end the answer; the backbone's own by default, empty for none.
            rule: greedy by default; see `accept`. generator: for `Sampling`.

        Raises:
            MedusaError: the prompt is empty or longer than the model's context; or another answer was begun before
                this one was done.
        """
        stops = frozenset(self.backbone.eos_ids if eos_ids is None else eos_ids)
        room = max_answer_length(self.backbone, prompt, max_new_tokens)
        generators = None if generator is None else [generator]
        cache = self._fresh_cache(len(prompt) + room + self.tree.size + 1)
        masks = TreeMasks(cache.capacity, self.backbone.dtype, self.backbone.device)
        answer = self._answers = self._answers + 1

        tokens = torch.tensor([prompt], device=self.backbone.device)
        feats = self.backbone.run(tokens, cache=cache, need=self._need)
        cache.commit(len(prompt))
        # the prompt's last token is a root with nothing below it
        logits = self.backbone.logits(feats.hidden[:, -1:])
        root = accept(rule, tokens[:, -1:], logits, Tree.empty(), generators)[0].tokens[-1]
        yield Step([root], 0)
        state = None
        if self.draft is not None and self.tree.size:
            state = self.draft.start(feats, tokens, [len(prompt)], cache)

        count = 1
        while not (root in stops or count >= room):
            if answer != self._answers:
                raise MedusaError("this decoder has begun another answer; it keeps one at a time")
            proposal = self._propose(state, root, cache.length)
            feats, accepted = self._verify(proposal, cache, masks, rule, generators)
            cache.keep(accepted.path)
            if self.draft is not None and self.tree.size:
                state = self.draft.advance(state, feats, proposal, [accepted.path])
            kept = truncate_at_stop(accepted.tokens[1:], stops, room - count)
            count += len(kept)
            root = kept[-1]
            yield Step(kept, min(len(accepted.path) - 1, len(kept)))

    def _propose(self, state: object, root: int, prefix: int) -> Proposal:
        roots = torch.tensor([root], device=self.backbone.device)
        if self.draft is None or not self.tree.size or self._straddles_rope_switch(prefix):
            return Proposal(roots[:, None], self._nothing)
        return self.draft.propose(state, roots, self.tree)

    def _straddles_rope_switch(self, prefix: int) -> bool:
        """Whether a tree behind `prefix` positions would make a longrope model switch before the root gets there."""
        switch = self.backbone.rope_switch
        return switch is not None and prefix < switch <= prefix + self.tree.max_depth

    def _verify(
        self,
        proposal: Proposal,
        cache: TreeCache,
        masks: TreeMasks,
        rule: Rule,
        generators: list[torch.Generator] | None,
    ) -> tuple[Features, Accepted]:
        """One pass over all nodes; a node's position id is prefix length + depth."""
        positions = proposal.tree.depths[None] + cache.length
        if cache.length + self.tree.max_depth >= self.backbone.max_context:
            # nodes past the context are never kept; no position table must be asked for them either
            positions = positions.clamp(max=self.backbone.max_context - 1)
        compiled = self.backbone.compiled
        count = proposal.tree.size + 1
        upto = block_end(cache.length + count)
        if compiled is not None and self._need == PLAIN and upto < cache.capacity:
            mask = masks.at(proposal.tree, cache.length, upto)
            hidden, logits = compiled(proposal.tokens, positions, mask, cache.expect(count), cache.length)
            feats = Features(hidden)
        else:
            feats = self.backbone.run(
                proposal.tokens,
                positions=positions,
                mask=masks.at(proposal.tree, cache.length) if proposal.tree.size else None,
                cache=cache,
                need=self._need,
                early=proposal.early,
            )
            logits = self.backbone.logits(feats.hidden)
        return feats, accept(rule, proposal.tokens, logits, proposal.tree, generators)[0]

    def _fresh_cache(self, capacity: int) -> TreeCache:
        """The cache of the last question where it is large enough, else a new one."""
        if self._cache is None or self._cache.capacity < capacity:
            self._cache = self.backbone.new_cache(capacity)
        self._cache.reset()
        return self._cache


def check_tree(backbone: Backbone, draft: Draft | None, tree: Tree | None) -> Tree:
    """The tree to decode with, on the backbone's device: empty without a draft.

    Raises:
        MedusaError: it is deeper than the draft, or wider than the vocabulary of either.
    """
    tree = tree if tree is not None and draft is not None else Tree.empty()
    if draft is not None and tree.max_depth > draft.num_heads:
        raise MedusaError(f"the tree is {tree.max_depth} deep, the draft has {draft.num_heads} heads")
    known = backbone.vocab_size if draft is None or draft.draft_vocab_size is None else draft.draft_vocab_size
    if tree.width > known:
        raise MedusaError(f"the tree reads rank {tree.width - 1} of {known} tokens")
    return tree.to(backbone.device)


def max_answer_length(backbone: Backbone, prompt: list[int], max_new_tokens: int) -> int:
    """How many tokens may be generated: the last one is not read, so it may lie one past the context.

    Raises:
        MedusaError: the prompt is empty or longer than the model's context, or `max_new_tokens` is below 1.
    """
    if not prompt:
        raise MedusaError("the prompt is empty: decoding needs at least one token to start from")
    if max_new_tokens < 1:
        raise MedusaError(f"max_new_tokens is {max_new_tokens}; it has to be 1 or more")
    limit = backbone.max_context - len(prompt) + 1
    if limit < 1:
        raise MedusaError(f"the prompt has {len(prompt)} tokens, the model reads {backbone.max_context} at most")
    return min(max_new_tokens, limit)


def truncate_at_stop(tokens: list[int], stops: Collection[int], room: int) -> list[int]:
    """Cut freshly accepted tokens after the first eos and at the room left, so that nothing leaks past either."""
    for i, token in enumerate(tokens[:room]):
        if token in stops:
            return tokens[: i + 1]
    return tokens[:room]


def finish_reason(tokens: list[int], stops: Collection[int], max_new_tokens: int) -> FinishReason:
    """Why an answer that is done ends where it does."""
    if tokens[-1] in stops:
        return "eos"
    return "length" if len(tokens) >= max_new_tokens else "context"
