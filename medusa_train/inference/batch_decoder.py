"""Decode several sequences in the same passes, each with the tokens that it would get alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from medusa_train.inference.accept import AcceptanceRule, Greedy
from medusa_train.inference.generate import (
    Decoder,
    Generation,
    check_tree,
    finish_reason,
    max_answer_length,
    step_single,
    stop_tokens,
    truncate_at_stop,
)
from medusa_train.inference.step import Steps, proposal_limits
from medusa_train.models.drafts.base import Limits, Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree

#: A batch is refilled once 1/4 of its rows are free: each refill costs a prefill.
REFILL_FRACTION = 4
#: Positions of a prefill pass of several prompts, padding included: more take no less time per
#: token.
PREFILL_TOKENS = 1024
#: Positions of padding in such a pass: more take longer than another pass.
PREFILL_PADDING = 128


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A prompt to be continued in a batch, and for `Sampling` the only source of its row's random
    numbers.
    """

    request_id: int
    prompt: list[int]
    generator: torch.Generator | None = None


class BatchDecoder:
    """Generate answers to several prompts at once.

    Rows accept paths of different lengths and finish at different times. A finished row leaves the
    batch, which goes on with fewer rows, and new ones may join. The tokens of a row do not depend
    on the other rows, except that matrix products of another shape round differently, and that
    Kangaroo's early stop, which all rows share, changes how many random numbers a sampled row
    draws. Its distribution stays the same.

    Args:
        target model: verifies the tokens. draft: proposes them. tree: the guesses to verify; by default
            the empty tree.

    Attributes:
        passes: verification passes so far over all batches; `Generation.steps` counts those of one
            row.
    """

    def __init__(
        self, target_model: TargetModel, draft: Proposer | None = None, tree: Tree | None = None
    ) -> None:
        self.target_model = target_model
        self.draft = draft
        self.tree = check_tree(target_model, draft, tree)
        self.passes = 0
        self._single = Decoder(target_model, draft, tree)
        self._idle_steps: Steps | None = None

    @torch.inference_mode()
    def generate_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        rule: AcceptanceRule = Greedy(),
        generators: Sequence[torch.Generator] | None = None,
    ) -> list[Generation]:
        """Return an answer to every prompt, in their order; arguments and errors as in
        `Decoder.stream`.

        All rows are in memory at the same time: their number times the longest prompt and answer.
        `seconds` of each answer is the time until it was complete. There is one generator per
        prompt.
        """
        if generators is not None and len(generators) != len(prompts):
            raise ValueError(f"got {len(generators)} generators for {len(prompts)} prompts")
        row_generators: Sequence[torch.Generator | None] = generators or [None] * len(prompts)
        single_is_faster = len(prompts) < 2 and not self._has_fixed_shapes
        if single_is_faster or not self.can_batch:
            return self._answer_in_turns(prompts, max_new_tokens, eos_ids, rule, row_generators)
        batch = self.begin(max_new_tokens, eos_ids, rule)
        requests: list[PendingRequest] = []
        for i, prompt in enumerate(prompts):
            requests.append(PendingRequest(i, prompt, row_generators[i]))
        batch.add_requests(requests)
        answers: dict[int, Generation] = {}
        while len(answers) < len(prompts):
            answers.update(batch.step())
        return [answers[i] for i in range(len(prompts))]

    def begin(
        self,
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        rule: AcceptanceRule = Greedy(),
    ) -> RunningBatch:
        """Return an empty batch, to which requests can be added at any time; arguments as in
        `generate_batch`.
        """
        stops = stop_tokens(self.target_model, eos_ids)
        return RunningBatch(self, max_new_tokens, stops, rule)

    @torch.inference_mode()
    def capture(self, rows: int, positions: int, rule: AcceptanceRule = Greedy()) -> None:
        """After a first batch, capture the steps by `rule` of all with `rows` rows of `positions`
        tokens, prompts included.
        """
        steps = self._idle_steps
        if steps is None:
            return
        positions = min(positions + self.limits.size + 1, steps.kv_cache.capacity)
        steps.reset()
        steps.make_room(rows, positions)
        steps.capture(rows, positions, keep_logits=not isinstance(rule, Greedy))

    @property
    def can_batch(self) -> bool:
        """Whether rows may share a pass: not with longrope, where the longest row would set the
        angles of all.
        """
        return self.target_model.rope_switch is None

    @property
    def limits(self) -> Limits:
        """The limits of a step's guesses."""
        return proposal_limits(self.draft, self.tree)

    @property
    def _has_fixed_shapes(self) -> bool:
        """Whether there are steps that CUDA graphs replay, which a single row uses too."""
        return self._idle_steps is not None and self._idle_steps.has_fixed_shapes

    def acquire_steps(self) -> Steps:
        """Return steps without rows, until `release_steps`."""
        steps = self._idle_steps
        self._idle_steps = None
        if steps is None:
            # the last token of an answer may lie one position past the context, see
            # `max_answer_length`
            kv_cache = self.target_model.new_kv_cache(
                self.target_model.max_context + self.limits.size + 2
            )
            return Steps(self.target_model, self.draft, self.tree, kv_cache)
        steps.reset()
        return steps

    def release_steps(self, steps: Steps) -> None:
        """Keep the steps of a batch that is empty for the next one."""
        self._idle_steps = steps

    def _answer_in_turns(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        eos_ids: Collection[int] | None,
        rule: AcceptanceRule,
        generators: Sequence[torch.Generator | None],
    ) -> list[Generation]:
        """Answer one prompt after the other; arguments as in `generate_batch`."""
        for prompt in prompts:
            max_answer_length(
                self.target_model, prompt, max_new_tokens
            )  # fail before the first answer
        answers: list[Generation] = []
        for prompt, generator in zip(prompts, generators, strict=True):
            out = self._single.generate(prompt, max_new_tokens, eos_ids, rule, generator)
            self.passes += out.steps
            answers.append(out)
        return answers


@dataclass
class _Row:
    """A sequence in a batch.

    Attributes:
        out: the answer so far.
        limit: the most tokens that it may have.
        started: reading of the clock when its request was added.
    """

    request_id: int
    prompt: list[int]
    out: Generation
    limit: int
    generator: torch.Generator | None
    started: float

    @property
    def room(self) -> int:
        """How many tokens the answer may still get."""
        return self.limit - len(self.out.tokens)


class RunningBatch:
    """Rows that share passes: `add_requests` adds some, `step` extends all. Created by
    `BatchDecoder.begin`.

    Attributes:
        active: the rows that are not finished, in the order of the cache's rows.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        max_new_tokens: int,
        stops: Collection[int],
        rule: AcceptanceRule,
    ) -> None:
        self.active: list[_Row] = []
        self._decoder = decoder
        self._max_new_tokens = max_new_tokens
        self._stops = stops
        self._rule = rule
        self._finished: list[tuple[int, Generation]] = []
        self._steps: Steps | None = None

    @torch.inference_mode()
    def add_requests(self, requests: Sequence[PendingRequest]) -> None:
        """Prefill the prompts of `requests` (at least one) and add them to the batch.

        Prompts of similar length share a pass, see `group_prompts`.

        Raises:
            MedusaError: a prompt is empty or longer than the model's context; no request is added
                then.
            ValueError: rows can't share passes, see `BatchDecoder.can_batch`.
        """
        if len(self.active) + len(requests) > 1 and not self._decoder.can_batch:
            raise ValueError(
                "longrope models can't decode in batches: the longest row would set the angles"
                " of all"
            )
        # 1. check all prompts
        now = time.perf_counter()
        target_model = self._decoder.target_model
        rows: list[_Row] = []
        for request in requests:
            prompt = request.prompt
            limit = max_answer_length(target_model, prompt, self._max_new_tokens)
            out = Generation([])
            row = _Row(request.request_id, prompt, out, limit, request.generator, started=now)
            rows.append(row)
        # 2. make room for the longest answer
        longest = max(len(row.prompt) + row.limit for row in rows)
        if self._steps is None:
            self._steps = self._decoder.acquire_steps()
        capacity = longest + self._decoder.limits.size + 1
        self._steps.make_room(len(self.active) + len(rows), capacity)
        # 3. prefill prompts of similar length together
        for group in group_prompts([len(row.prompt) for row in rows]):
            joining = [rows[i] for i in group]
            prompts = [row.prompt for row in joining]
            first_tokens = self._steps.prefill(prompts, self._rule, _generators(joining))
            now = time.perf_counter()
            for row, token in zip(joining, first_tokens, strict=True):
                row.out.tokens = [token]
                row.out.prefill_seconds = now - row.started
            self._steps.start_draft()
            self.active += joining
        self._retire()

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Generation]]:
        """Extend every row by one step; return the finished answers with their request ids.

        `seconds` of an answer is the time since its request was added.
        """
        if self.active:
            self._extend_rows()
            self._retire()
        finished = self._finished
        self._finished = []
        return finished

    def _extend_rows(self) -> None:
        """Run one step, and add its tokens to the rows."""
        steps = self._steps
        assert steps is not None
        # 1. the step
        roots = [row.out.tokens[-1] for row in self.active]
        generators = _generators(self.active)
        if self._decoder.can_batch:
            accepted = steps.step(roots, self._rule, generators)
        else:
            (row,) = self.active
            text = [*row.prompt, *row.out.tokens[:-1]]
            target_model = self._decoder.target_model
            only = step_single(target_model, steps, text, roots[0], self._rule, generators)
            accepted = [only]
        self._decoder.passes += 1
        # 2. its tokens, up to the end of each answer
        for row, (path, tokens) in zip(self.active, accepted, strict=True):
            new = truncate_at_stop(tokens[1:], self._stops, row.room)
            row.out.tokens += new
            row.out.steps += 1
            row.out.accepted.append(min(len(path) - 1, len(new)))

    def _retire(self) -> None:
        """Remove finished rows.

        Rows from the end of the batch fill the gaps, so that few keys and values move.
        """
        # 1. finish the answers that are complete
        done: list[bool] = []
        for row in self.active:
            is_done = row.out.tokens[-1] in self._stops or row.room <= 0
            done.append(is_done)
            if is_done:
                row.out.seconds = time.perf_counter() - row.started
                row.out.finish = finish_reason(row.out.tokens, self._stops, self._max_new_tokens)
                self._finished.append((row.request_id, row.out))
        if not any(done):
            return
        # 2. keep the others: those past the new end move into the gaps before it
        remaining = [i for i, is_done in enumerate(done) if not is_done]
        size = len(remaining)
        movable = [i for i in remaining if i >= size]
        order: list[int] = []
        for i in range(size):
            if done[i]:
                order.append(movable.pop())
            else:
                order.append(i)
        self.active = [self.active[i] for i in order]
        assert self._steps is not None
        if self.active:
            self._steps.select_rows(order)
        else:
            self._decoder.release_steps(self._steps)
            self._steps = None


def group_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Group prompts of similar length for prefill; returns indices, groups of longer prompts first.

    A group has at most `PREFILL_TOKENS` positions, `PREFILL_PADDING` of them padding, or it is a
    single prompt.
    """
    groups: list[list[int]] = []
    longest = 0  # of the current group, whose first prompt is the longest
    padding = 0  # of the current group with the next prompt
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padding += longest - lengths[i]
        fits = (
            len(groups) > 0
            and padding <= PREFILL_PADDING
            and longest * (len(groups[-1]) + 1) <= PREFILL_TOKENS
        )
        if not fits:
            groups.append([])
            longest = lengths[i]
            padding = 0
        groups[-1].append(i)
    return [sorted(group) for group in groups]


def _generators(rows: Sequence[_Row]) -> list[torch.Generator] | None:
    """Return the rows' generators; None where they have none."""
    generators = [row.generator for row in rows if row.generator is not None]
    return generators or None
