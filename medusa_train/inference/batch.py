"""Decoding of several sequences at once, each as if it were alone. Knows no text, no training, no report."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.inference.accept import Accepted, Rule, accept
from medusa_train.inference.generate import (
    Decoder,
    Generation,
    check_tree,
    finish_reason,
    max_answer_length,
    truncate_at_stop,
)
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal, hidden_at_positions
from medusa_train.models.features import PLAIN, Features
from medusa_train.trees.kv_cache import BatchCache, mask_behind
from medusa_train.trees.tree import Tree


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A prompt that is to be continued in a batch.

    Attributes:
        request_id: by which its answer is told from the others. prompt: token ids.
        generator: for `Sampling`; what the row draws comes from it alone.
    """

    request_id: int
    prompt: list[int]
    generator: torch.Generator | None = None


@dataclass
class _Row:
    """One sequence under way; `started` is a reading of the clock."""

    request_id: int
    out: Generation
    room: int
    generator: torch.Generator | None
    started: float


class BatchDecoder:
    """The rounds of `Decoder` for many rows in one pass: they accept unlike lengths and end at different times.

    A row that is done leaves the batch; those that remain go on in a smaller one, or others join them. What a row says
    does not depend on the others, up to the rounding of products of another shape.

    Args:
        backbone: who decides. draft: who guesses. tree: which guesses are verified; the empty tree by default.

    Attributes:
        passes: how many verification passes there were so far, in all batches; `Generation.steps` counts a row's.
    """

    def __init__(self, backbone: Backbone, draft: Draft | None = None, tree: Tree | None = None) -> None:
        self.backbone = backbone
        self.draft = draft
        self.tree = check_tree(backbone, draft, tree)
        self.need = draft.needs if draft is not None and self.tree.size else PLAIN
        self.passes = 0
        self._one = Decoder(backbone, draft, tree)
        self._blocks: dict[int, tuple[Tree, Tensor]] = {}  # by identity, since comparing trees takes their paths

    @torch.inference_mode()
    def generate_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        rule: Rule = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> list[Generation]:
        """Continue every prompt; each answer ends as `Decoder.stream` says, at its own time.

        All prompts are held at once: keys and values for the longest prompt and answer times their number.

        Args:
            prompts: token ids, of any lengths. max_new_tokens: of each answer.
            eos_ids: tokens that end an answer; the backbone's own by default, empty for none.
            rule: greedy by default; see `accept`.
            generators: one per prompt, for `Sampling`; what a row draws comes from its own alone.

        Returns:
            In the order of `prompts`. `seconds` of each is the time until it was done, beside the others.

        Raises:
            MedusaError: a prompt is empty or longer than the model's context.
        """
        if generators is not None and len(generators) != len(prompts):
            raise ValueError(f"{len(generators)} generators for {len(prompts)} prompts")
        each: list[torch.Generator | None] = [*generators] if generators is not None else [None] * len(prompts)
        if len(prompts) < 2 or not self.can_batch:
            return self._one_by_one(prompts, max_new_tokens, eos_ids, rule, each)
        batch = self.begin(max_new_tokens, eos_ids, rule)
        batch.add_requests([PendingRequest(i, prompt, each[i]) for i, prompt in enumerate(prompts)])
        answers: dict[int, Generation] = {}
        while len(answers) < len(prompts):
            answers.update(batch.step())
        return [answers[i] for i in range(len(prompts))]

    def begin(self, max_new_tokens: int, eos_ids: Collection[int] | None = None, rule: Rule = None) -> Batch:
        """A batch without rows, which may join at any time; arguments are those of `generate_batch`.

        Raises:
            ValueError: this backbone can't decode in batches, see `batches`.
        """
        if not self.can_batch:
            raise ValueError("the longest row of a pass would set the angles of all; decode them one by one")
        return Batch(self, max_new_tokens, frozenset(self.backbone.eos_ids if eos_ids is None else eos_ids), rule)

    @property
    def can_batch(self) -> bool:
        """Whether rows share passes: not where the longest one would set the angles of all (longrope)."""
        return self.backbone.rope_switch is None

    @property
    def uses_draft(self) -> bool:
        """Whether there is anything to verify but the backbone's own tokens."""
        return self.draft is not None and self.tree.size > 0

    def _one_by_one(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        eos_ids: Collection[int] | None,
        rule: Rule,
        generators: Sequence[torch.Generator | None],
    ) -> list[Generation]:
        for prompt in prompts:
            max_answer_length(self.backbone, prompt, max_new_tokens)  # mistakes are told before work is done
        made = [
            self._one.generate(prompt, max_new_tokens, eos_ids, rule, generator)
            for prompt, generator in zip(prompts, generators, strict=True)
        ]
        self.passes += sum(out.steps for out in made)
        return made

    def mask(self, tree: Tree, cache: BatchCache) -> Tensor:
        """What each node sees: its own row's committed positions, its ancestors and itself, [B, 1, n + 1, S]."""
        return mask_behind(cache, self._block(tree))

    def _block(self, tree: Tree) -> Tensor:
        """What the nodes of `tree` see of each other, additive [n + 1, n + 1]."""
        if id(tree) not in self._blocks:
            block = torch.zeros(tree.ancestors.shape, dtype=self.backbone.dtype, device=self.backbone.device)
            self._blocks[id(tree)] = tree, block.masked_fill_(~tree.ancestors, float("-inf"))
        return self._blocks[id(tree)][1]


class Batch:
    """Rows under way: `join` adds some, `step` takes all of them on. See `BatchDecoder.begin`.

    Attributes:
        active: the rows that are not done, in the order of the cache's.
    """

    def __init__(self, decoder: BatchDecoder, max_new_tokens: int, stops: Collection[int], rule: Rule) -> None:
        self._decoder = decoder
        self._backbone = decoder.backbone
        self._max_new_tokens = max_new_tokens
        self._stops = stops
        self._rule = rule
        self.active: list[_Row] = []
        self._done: list[tuple[int, Generation]] = []
        self._cache = BatchCache(0, 0)  # until somebody joins
        self._state: Any = None

    @torch.inference_mode()
    def add_requests(self, requests: Sequence[PendingRequest]) -> None:
        """Read the prompts of `requests` (at least one) in one pass, and let them go on with the others.

        A draft's states can't be joined: with one, rows may only join a batch whose rows are all done.

        Raises:
            MedusaError: a prompt is empty or longer than the model's context; nobody has joined then.
            ValueError: a draft is in the middle of other rows.
        """
        if self.active and self._decoder.uses_draft:
            raise ValueError("a draft's rows begin together; none can join those under way")
        now = time.perf_counter()
        rows = [
            _Row(one.request_id, Generation([]), self._room(one.prompt), one.generator, started=now) for one in requests
        ]
        prompts = [one.prompt for one in requests]
        ends = (len(prompt) + row.room for prompt, row in zip(prompts, rows, strict=True))
        capacity = max(ends) + self._decoder.tree.size + 1
        if not self.active:
            self._cache = self._prefill(rows, prompts, capacity)
        else:
            self._cache.join(self._prefill(rows, prompts, max(map(len, prompts))), capacity)
        self.active += rows
        self._retire()

    def _room(self, prompt: list[int]) -> int:
        return max_answer_length(self._backbone, prompt, self._max_new_tokens)

    def _prefill(self, rows: list[_Row], prompts: Sequence[list[int]], capacity: int) -> BatchCache:
        """One causal pass over the prompts, padded behind, where no token of a prompt looks."""
        lengths = [len(prompt) for prompt in prompts]
        cache = BatchCache(self._backbone.num_layers, capacity)
        padded = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
        prompt_tokens = torch.tensor(padded, device=self._backbone.device)
        feats = self._backbone.run(prompt_tokens, cache=cache, need=self._decoder.need)
        cache.commit_rows(lengths)
        # each prompt's last token is a root with nothing below it
        last = torch.tensor([prompt[-1:] for prompt in prompts], device=self._backbone.device)
        logits = self._backbone.logits(hidden_at_positions(feats, [length - 1 for length in lengths]))
        accepted = accept(self._rule, last, logits[:, None], Tree.empty(), _generators(rows))
        if self._decoder.uses_draft:
            assert self._decoder.draft is not None
            self._state = self._decoder.draft.start(feats, prompt_tokens, lengths, cache)
        now = time.perf_counter()
        for row, (_, tokens) in zip(rows, accepted, strict=True):
            row.out.tokens = tokens[-1:]
            row.out.prefill_seconds = now - row.started
        return cache

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Generation]]:
        """Propose, verify and accept for every row; the answers that are done, with their tickets.

        `seconds` of an answer is the time since its row joined, beside the others.
        """
        if self.active:
            self._advance()
        done, self._done = self._done, []
        return done

    def _advance(self) -> None:
        proposal = self._propose()
        feats, accepted = self._verify(proposal)
        self._decoder.passes += 1
        paths = [path for path, _ in accepted]
        self._cache.keep_rows(paths)
        if self._decoder.uses_draft:
            assert self._decoder.draft is not None
            self._state = self._decoder.draft.advance(self._state, feats, proposal, paths)
        for row, (path, tokens) in zip(self.active, accepted, strict=True):
            kept = truncate_at_stop(tokens[1:], self._stops, row.room - len(row.out.tokens))
            row.out.tokens += kept
            row.out.steps += 1
            row.out.accepted.append(min(len(path) - 1, len(kept)))
        self._retire()

    def _propose(self) -> Proposal:
        roots = torch.tensor([row.out.tokens[-1] for row in self.active], device=self._backbone.device)
        if not self._decoder.uses_draft:
            return Proposal(roots[:, None], self._decoder.tree)
        assert self._decoder.draft is not None
        return self._decoder.draft.propose(self._state, roots, self._decoder.tree)

    def _verify(self, proposal: Proposal) -> tuple[Features, list[Accepted]]:
        """One pass over all nodes of all rows; a node's position id is its own row's length + depth."""
        lengths = torch.tensor(self._cache.lengths, device=self._backbone.device)
        positions = proposal.tree.depths + lengths[:, None]
        # nodes past the context are never kept; no position table must be asked for them either
        positions = positions.clamp(max=self._backbone.max_context - 1)
        feats = self._backbone.run(
            proposal.tokens,
            positions=positions,
            mask=self._decoder.mask(proposal.tree, self._cache),
            cache=self._cache,
            need=self._decoder.need,
            early=proposal.early,
        )
        logits = self._backbone.logits(feats.hidden)
        return feats, accept(self._rule, proposal.tokens, logits, proposal.tree, _generators(self.active))

    def _retire(self) -> None:
        """Let the rows that are done go; the last of the others take their places."""
        done = [row.out.tokens[-1] in self._stops or len(row.out.tokens) >= row.room for row in self.active]
        if not any(done):
            return
        for row, over in zip(self.active, done, strict=True):
            if over:
                row.out.seconds = time.perf_counter() - row.started
                row.out.finish = finish_reason(row.out.tokens, self._stops, self._max_new_tokens)
                self._done.append((row.request_id, row.out))
        staying = [i for i, over in enumerate(done) if not over]
        size = len(staying)
        movers = [i for i in staying if i >= size]
        places = [i if not done[i] else movers.pop() for i in range(size)]
        self.active = [self.active[i] for i in places]
        if self.active:
            self._cache.take(places)
            if self._decoder.uses_draft:
                assert self._decoder.draft is not None
                self._state = self._decoder.draft.select_rows(self._state, places)


def _generators(rows: Sequence[_Row]) -> list[torch.Generator] | None:
    found = [row.generator for row in rows if row.generator is not None]
    return found or None
