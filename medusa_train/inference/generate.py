"""Decode with a draft: prefill, then steps of propose, verify, accept and commit.

Plain decoding is the empty tree.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import Accepted, Rule, accept
from medusa_train.inference.static.cache import StaticCache
from medusa_train.inference.static.steps import StaticSteps, new_static_steps, supports_static_steps
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import CompiledPass, round_up_to_block
from medusa_train.models.drafts.base import Limits, Proposal, Proposer, at_positions
from medusa_train.models.features import FINAL_STATES, Features
from medusa_train.trees.kv_cache import BatchCache, RowPaths, TreeCache
from medusa_train.trees.masks import additive_mask, mask_of_slots, mask_with_prefix
from medusa_train.trees.row_trees import RowTrees, TreeAndBranch
from medusa_train.trees.tree import Tree

FinishReason = Literal["eos", "length", "context"]


class Step(NamedTuple):
    """The tokens that one pass added to an answer.

    Attributes:
        tokens: token ids, cut after an end-of-text token. accepted: how many of them, from the
            first on, were drafted.
    """

    tokens: list[int]
    accepted: int


@dataclass
class Generation:
    """An answer with its step counts and times.

    Attributes:
        tokens: generated ids, the closing end-of-text token included.
        steps: verification passes; the prefill, which gives the first token, is not counted.
        accepted: per step, the number of drafted tokens that were accepted and kept.
        seconds: wall time in total; prefill_seconds: the part of it until the first token.
        finish: "eos", "length" (max_new_tokens) or "context" (the model's positions are used up).
    """

    tokens: list[int]
    steps: int = 0
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    finish: FinishReason = "length"


class Decoder:
    """Generate answers one prompt at a time; `BatchDecoder` takes several at once.

    Without a draft, or with the empty tree, each step verifies the root alone and no head is
    computed. This is plain decoding by the same loop, and the baseline of every reported speedup. A
    step synchronises with the device once, when the accepted tokens are read; with top-p also to
    find the nucleus.

    Args:
        backbone: verifies the tokens. draft: proposes them.
        tree: the draft tokens to verify; by default the empty tree. Drafts that copy text choose
            trees themselves.
        cache: memory for keys and values; by default the decoder allocates its own and reuses it
            between answers.

    Raises:
        MedusaError: the tree is deeper than the draft has heads, or wider than its vocabulary.
    """

    def __init__(
        self,
        backbone: Backbone,
        draft: Proposer | None = None,
        tree: Tree | None = None,
        cache: TreeCache | StaticCache | None = None,
    ) -> None:
        self.backbone = backbone
        self.draft = draft
        self.tree = check_tree(backbone, draft, tree)
        self._cache = cache
        self._static: bool | None = None
        self._steps: StaticSteps | None = None
        # started so far; tells an abandoned stream that its cache is in use again
        self._answers = 0

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        rule: Rule = None,
        generator: torch.Generator | None = None,
    ) -> Generation:
        """Generate a whole answer; see `stream` for arguments and errors."""
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

    def stream(
        self,
        prompt: list[int],
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        rule: Rule = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Step]:
        """Generate an answer step by step. The first step is the prefill, which gives one token.

        The answer ends after the first end-of-text token (kept), after `max_new_tokens` tokens, or
        at the end of the model's context: the last token is then predicted at position max_context
        but never read. The iterator may be abandoned at any step.

        Args:
            prompt: at least one token id. max_new_tokens: at least 1.
            eos_ids: tokens that end the answer; by default the backbone's, empty for none.
            rule: acceptance rule, greedy by default; see `accept`. generator: for `Sampling`.

        Raises:
            MedusaError: the prompt is empty or longer than the model's context; or another answer
                was started on this decoder before this one was complete.
        """
        stops = frozenset(self.backbone.eos_ids if eos_ids is None else eos_ids)
        limit = max_answer_length(self.backbone, prompt, max_new_tokens)
        generators = None if generator is None else [generator]
        capacity = len(prompt) + limit + proposal_limits(self.draft, self.tree).size + 1
        # torch's decorator would need torch to close an abandoned stream, at the interpreter's end
        # too
        with torch.inference_mode():
            session = self._new_session(capacity, rule)
            self._answers += 1
            answer = self._answers
            (root,) = session.prefill([prompt], generators)
        yield Step([root], 0)

        count = 1
        while root not in stops and count < limit:
            if answer != self._answers:
                raise MedusaError(
                    "another answer was started on this decoder; it holds one at a time"
                )
            with torch.inference_mode():
                if count == 1:
                    session.start_draft()
                ((path, tokens),) = session.step([root], generators)
            tokens = truncate_at_stop(tokens[1:], stops, limit - count)
            count += len(tokens)
            root = tokens[-1]
            yield Step(tokens, min(len(path) - 1, len(tokens)))

    @torch.inference_mode()
    def capture(self, positions: int) -> None:
        """After a first answer, capture the steps of all with up to `positions` tokens, the
        prompt's included.
        """
        if self._steps is not None:
            self._steps.reset()
            self._steps.capture(1, positions + self.tree.size + 1)

    def _new_session(self, capacity: int, rule: Rule) -> DecodingSession:
        """Return a session on the previous answer's memory if it is large enough, else on new
        memory.
        """
        draft = effective_draft(self.draft, self.tree)
        if self._cache is None or self._cache.capacity < capacity:
            if self._static is None:  # asked once, since it warns
                self._static = supports_static_steps(self.backbone, draft)
            static = self._static
            self._cache = (
                StaticCache.for_backbone(self.backbone, capacity)
                if static
                else self.backbone.new_cache(capacity)
            )
        if not isinstance(self._cache, StaticCache):
            self._cache.reset()
            return DecodingSession(self.backbone, self.draft, self.tree, self._cache, rule)
        if self._steps is None or self._steps.cache is not self._cache:
            self._steps = new_static_steps(self.backbone, draft, self.tree, self._cache)
        self._steps.reset()
        return DecodingSession(
            self.backbone, self.draft, self.tree, self._steps.prompt_cache(1), rule, self._steps
        )


class DecodingSession:
    """Keys, values and draft state of B rows, and the step that `Decoder` (B = 1) and
    `RunningBatch` share.

    The two differ in the class of the cache and in how the mask is built; with static steps not at
    all.

    Args:
        tree: from `check_tree`. cache: empty; a `BatchCache` where there may be several rows.
        steps: runs the steps on fixed memory; `cache` is its `prompt_cache` then.
    """

    def __init__(
        self,
        backbone: Backbone,
        draft: Proposer | None,
        tree: Tree,
        cache: TreeCache,
        rule: Rule = None,
        steps: StaticSteps | None = None,
    ) -> None:
        self.cache = cache
        self._backbone = backbone
        self._limits = proposal_limits(draft, tree)
        self._draft = effective_draft(draft, tree)
        self._tree = tree
        self._root_only = Tree.empty().to(backbone.device) if tree.size else tree
        self._needs = FINAL_STATES if self._draft is None else self._draft.needs
        self._rule = rule
        self._steps = steps
        self._prompts: tuple[Features, Tensor, list[int]] | None = None
        self._draft_state: Any = None
        # that the cache holds, where longrope allows a single row
        self._text: list[int] | None = None

    def prefill(
        self, prompts: Sequence[list[int]], generators: Sequence[torch.Generator] | None = None
    ) -> list[int]:
        """Run the prompts in one causal pass, padded behind, and return the first token of each
        answer.
        """
        self._text = None if self._backbone.rope_switch is None else list(prompts[0])
        lengths = [len(prompt) for prompt in prompts]
        padded = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
        tokens = torch.tensor(padded, device=self._backbone.device)
        feats = self._backbone.run(tokens, cache=self.cache, need=self._needs)
        self.cache.commit_rows(lengths)
        self._prompts = feats, tokens, lengths
        # accepting a tree without draft tokens gives the token after its root, here the prompt's
        # last token
        last = torch.tensor([prompt[-1:] for prompt in prompts], device=self._backbone.device)
        logits = self._backbone.logits(
            at_positions(feats.hidden, [length - 1 for length in lengths])
        )
        return [
            tokens[-1]
            for _, tokens in accept(self._rule, last, logits[:, None], Tree.empty(), generators)
        ]

    def start_draft(self) -> None:
        """Give the draft the prompts.

        Apart from `prefill`, so that the first token does not wait for it.
        """
        assert self._prompts is not None
        if self._steps is not None:
            self._steps.append_rows(*self._prompts)
        elif self._draft is not None:
            self._draft_state = self._draft.start(*self._prompts, self.cache)
        self._prompts = None

    def step(
        self, roots: Sequence[int], generators: Sequence[torch.Generator] | None = None
    ) -> list[Accepted]:
        """Propose a tree below each row's root, verify it in one pass, accept a path, and commit
        it.
        """
        if self._steps is not None:
            return self._steps.step(roots, self._rule, generators)
        if self._text is not None and len(self._text) == self._backbone.rope_switch:
            # the root is the first with longrope's other angles: all keys get them, as in
            # transformers' `generate`
            self.cache.reset()
            following = self.prefill([[*self._text, *roots]], generators)
            self.start_draft()
            return [Accepted([0], [*roots, *following])]
        proposal = self._propose(roots)
        feats, logits = self._verify(proposal)
        # the draft gets the logits of its branch tokens
        if proposal.branch is not None and self._draft is not None:
            nodes = proposal.tokens.shape[1]
            self._draft_state = self._draft.observe(self._draft_state, proposal, logits[:, nodes:])
            feats, logits = feats.first(nodes), logits[:, :nodes]
        accepted = accept(self._rule, proposal.tokens, logits, proposal.tree, generators)
        paths = RowPaths([path for path, _ in accepted], self._backbone.device)
        self.cache.keep_rows(paths)
        if self._draft is not None:
            self._draft_state = self._draft.advance(self._draft_state, feats, proposal, paths)
        if self._text is not None:
            self._text += accepted[0].tokens[:-1]
        return accepted

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order; see `BatchCache.select_rows`."""
        if self._steps is not None:
            self._steps.select_rows(rows)
            return
        assert isinstance(self.cache, BatchCache)
        self.cache.select_rows(rows)
        if self._draft is not None:
            self._draft_state = self._draft.select_rows(self._draft_state, rows)

    def append_rows(self, other: DecodingSession, capacity: int) -> None:
        """Append the rows of `other`, which has made no step; see `BatchCache.append_rows`."""
        if self._steps is not None:
            return  # they joined when `other`, on the same steps, gave the draft its prompts
        assert isinstance(self.cache, BatchCache)
        assert isinstance(other.cache, BatchCache)
        self.cache.append_rows(other.cache, capacity)
        if self._draft is not None:
            self._draft_state = self._draft.append_rows(
                self._draft_state, other._draft_state, self.cache
            )

    def _propose(self, roots: Sequence[int]) -> Proposal:
        root_tokens = torch.tensor(roots, device=self._backbone.device)
        switch, length = self._backbone.rope_switch, self.cache.length
        # deeper nodes would make a longrope model switch its angles before the root does
        straddles = switch is not None and length < switch <= length + self._limits.depth
        if self._draft is None or straddles:
            return Proposal(root_tokens[:, None], self._root_only)
        return self._draft.propose(self._draft_state, root_tokens, self._tree)

    def _verify(self, proposal: Proposal) -> tuple[Features, Tensor]:
        """One pass over all nodes of all rows: features and logits [B, n + 1, V], those of branch
        tokens at the end.
        """
        backbone, cache = self._backbone, self.cache
        tokens, tree = proposal.rows()
        positions = torch.atleast_2d(tree.depths) + cache.row_lengths(backbone.device)
        if cache.length + tree.max_depth >= backbone.max_context:
            # nodes past the context are never accepted, but the model's position table must cover
            # their ids
            positions = positions.clamp(max=backbone.max_context - 1)
        if (compiled := self._compiled(len(tokens), tree)) is not None:
            # repeats the layers that a self-draft ran, which costs less than the others uncompiled
            feats, logits = compiled(tokens, positions, *self._compiled_inputs(tree))
            return feats, proposal.outputs(logits)
        feats = backbone.run(
            tokens,
            positions=positions,
            mask=self._mask(tree),
            cache=cache,
            need=self._needs,
            early=proposal.early,
        )
        return feats, backbone.logits(proposal.outputs(feats.hidden))

    def _compiled(self, rows: int, tree: Tree | RowTrees | TreeAndBranch) -> CompiledPass | None:
        """The program for a pass over the nodes of `tree`; None if there is none, or it lacks what
        the draft reads.
        """
        compiled = self._backbone.compiled_for(self._needs)
        if compiled is None or self._block_end(tree) >= self.cache.capacity:
            return None
        if isinstance(self.cache, BatchCache) and rows == 1:
            # its memory has more rows: a program for a single row would be compiled again, for
            # minutes
            return None
        return compiled if compiled.covers(rows, tree.size + 1) else None

    def _compiled_inputs(
        self, tree: Tree | RowTrees | TreeAndBranch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask, columns of the new keys, and the cache's memory for a compiled pass; see
        `CompiledPass`.
        """
        cache, end = self.cache, self._block_end(tree)
        storage = cache.reserve(tree.size + 1)
        mask = mask_of_slots(cache, additive_mask(tree.ancestors, self._backbone.dtype), end)
        return mask, cache.pending_columns(self._backbone.device), storage

    def _block_end(self, tree: Tree | RowTrees | TreeAndBranch) -> int:
        return round_up_to_block(self.cache.length + tree.size + 1)

    def _mask(self, tree: Tree | RowTrees | TreeAndBranch) -> Tensor | None:
        """What each node attends to, additive [1 or B, 1, n + 1, S]; a single row's root alone
        needs no mask.
        """
        if not tree.size and not isinstance(self.cache, BatchCache):
            return None
        return mask_with_prefix(self.cache, additive_mask(tree.ancestors, self._backbone.dtype))


def check_tree(backbone: Backbone, draft: Proposer | None, tree: Tree | None) -> Tree:
    """Return the tree on the backbone's device, empty without a draft; MedusaError: too deep or
    wide for the heads.
    """
    tree = tree if tree is not None and draft is not None else Tree.empty()
    if draft is not None and tree.max_depth > draft.num_heads:
        raise MedusaError(
            f"the tree is {tree.max_depth} deep, but the draft has {draft.num_heads} heads"
        )
    vocab_size = (None if draft is None else draft.draft_vocab_size) or backbone.vocab_size
    if tree.width > vocab_size:
        raise MedusaError(
            f"the tree uses guesses up to rank {tree.width - 1} of a vocabulary of {vocab_size}"
            " tokens"
        )
    return tree.to(backbone.device)


def proposal_limits(draft: Proposer | None, tree: Tree) -> Limits:
    """Return the limits of what `draft` proposes for `tree`; of size 0 without a draft."""
    return Limits(0, 0) if draft is None else draft.limits(tree)


def effective_draft(draft: Proposer | None, tree: Tree) -> Proposer | None:
    """Return the draft; None where it has nothing to propose: plain decoding computes no head."""
    return draft if proposal_limits(draft, tree).size else None


def max_answer_length(backbone: Backbone, prompt: list[int], max_new_tokens: int) -> int:
    """Return how many tokens fit: the last one is never read, so it may lie one position past the
    context.

    Raises:
        MedusaError: the prompt is empty, longer than the model's context or has an unknown token,
            or `max_new_tokens` is below 1.
    """
    if not prompt:
        raise MedusaError("the prompt is empty; decoding needs at least one token")
    if max(prompt) >= backbone.vocab_size:
        raise MedusaError(
            f"the prompt has the token {max(prompt)}, but the model only {backbone.vocab_size}"
            " tokens"
        )
    if max_new_tokens < 1:
        raise MedusaError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    limit = backbone.max_context - len(prompt) + 1
    if limit < 1:
        raise MedusaError(
            f"the prompt has {len(prompt)} tokens, but the model's context is"
            f" {backbone.max_context}"
        )
    return min(max_new_tokens, limit)


def truncate_at_stop(tokens: list[int], stops: Collection[int], limit: int) -> list[int]:
    """Cut accepted tokens after the first end-of-text token and at `limit`."""
    for i, token in enumerate(tokens[:limit]):
        if token in stops:
            return tokens[: i + 1]
    return tokens[:limit]


def finish_reason(tokens: list[int], stops: Collection[int], max_new_tokens: int) -> FinishReason:
    """Return why a complete answer ended."""
    if tokens[-1] in stops:
        return "eos"
    return "length" if len(tokens) >= max_new_tokens else "context"
