"""Decode several sequences in the same passes, each with the tokens that it would get alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from medusa_train.inference.accept import AcceptanceRule, Greedy
from medusa_train.inference.fixed_steps import FixedShapeSteps, new_steps
from medusa_train.inference.generate import (
    Generation,
    check_tree,
    finish_reason,
    max_answer_length,
    step_single,
    stop_tokens,
    truncate_at_stop,
)
from medusa_train.inference.step import Steps, proposal_limits
from medusa_train.models.drafts.base import Proposer, TreeSize
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree

#: A batch is refilled once 1/4 of its rows are free: each refill costs a prefill.
REFILL_FRACTION = 4
#: Most positions in a prefill pass of several prompts, padding included. A larger pass takes no
#: less time per token.
PREFILL_TOKENS = 1024
#: Most padded positions in such a pass. More padding costs more than a second pass.
PREFILL_PADDING = 128


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A prompt to be continued in a batch.

    Attributes:
        request_id: identifies the answer in the results of `RunningBatch.step`.
        prompt: token ids.
        generator: for `Sampling`, the only source of random numbers of the row.
    """

    request_id: int
    prompt: list[int]
    generator: torch.Generator | None = None


class BatchDecoder:
    """Generate answers to several prompts at once.

    Rows accept paths of different lengths and finish at different times. A finished row leaves the
    batch, which continues with fewer rows, and new rows may join. The tokens of a row do not depend
    on the other rows, with two exceptions. Matrix products of another shape round differently.
    Kangaroo's early stop, which all rows share, changes how many random numbers a sampled row
    draws; its distribution stays the same.

    Args:
        target_model: verifies the tokens.
        draft: proposes the tokens; None for plain decoding.
        tree: draft tokens to verify; by default the empty tree.

    Attributes:
        passes: number of verification passes so far over all batches; `Generation.steps` counts the
            passes of one row.
    """

    def __init__(
        self, target_model: TargetModel, draft: Proposer | None = None, tree: Tree | None = None
    ) -> None:
        self.target_model = target_model
        self.draft = draft
        self.tree = check_tree(target_model, draft, tree)
        self.passes = 0
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
        """Return an answer to every prompt, in the order of the prompts.

        Arguments and errors are those of `Decoder.stream`, but with one generator per prompt. All
        rows are in memory at the same time: the number of rows times the longest prompt and answer.
        `seconds` of each answer is the time until it was complete.
        """
        if generators is not None and len(generators) != len(prompts):
            raise ValueError(f"got {len(generators)} generators for {len(prompts)} prompts")
        requests: list[PendingRequest] = []
        for i, prompt in enumerate(prompts):
            generator = None if generators is None else generators[i]
            requests.append(PendingRequest(i, prompt, generator))
            max_answer_length(self.target_model, prompt, max_new_tokens)  # fails before any answer
        # rows that cannot share passes are answered one after the other
        groups = [[request] for request in requests]
        if self.can_batch and requests:
            groups = [requests]
        batch = self.begin(max_new_tokens, eos_ids, rule)
        answers: dict[int, Generation] = {}
        for group in groups:
            batch.add_requests(group)
            while batch.active:
                answers.update(batch.step())
        answers.update(batch.step())  # answers that ended with their prefill
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
        """Capture the steps of batches of up to `rows` rows of `positions` tokens (prompts
        included) by `rule`. Does nothing before a first batch.
        """
        steps = self._idle_steps
        if steps is None:
            return
        positions = min(positions + self.limits.size + 1, steps.kv_cache.capacity)
        steps.reset()
        steps.make_room(rows, positions)
        if isinstance(steps, FixedShapeSteps):
            steps.capture(rows, positions, rule)

    @property
    def can_batch(self) -> bool:
        """Whether rows may share a pass. With longrope they may not: the longest row would set the
        rotary angles of all rows.
        """
        return self.target_model.rope_switch is None

    @property
    def limits(self) -> TreeSize:
        """The limits of what the draft proposes in a step."""
        return proposal_limits(self.draft, self.tree)

    def acquire_steps(self) -> Steps:
        """Return steps without rows, for use until `release_steps`."""
        steps = self._idle_steps
        self._idle_steps = None
        if steps is not None:
            return steps
        # the last token of an answer may be one position past the context, see `max_answer_length`
        capacity = self.target_model.max_context + self.limits.size + 2
        kv_cache = self.target_model.new_kv_cache(capacity)
        return new_steps(self.target_model, self.draft, self.tree, kv_cache)

    def release_steps(self, steps: Steps) -> None:
        """Keep the steps of an empty batch for the next batch."""
        steps.reset()
        self._idle_steps = steps


@dataclass
class _Row:
    """A sequence in a batch.

    Attributes:
        request: the request that the row answers.
        limit: maximum number of tokens of the answer.
        started: `time.perf_counter()` when the request was added.
        generation: the answer so far.
    """

    request: PendingRequest
    limit: int
    started: float
    generation: Generation = field(default_factory=lambda: Generation([]))

    @property
    def tokens_left(self) -> int:
        """How many tokens the answer may still get."""
        return self.limit - len(self.generation.tokens)


class RunningBatch:
    """Rows that share passes: `add_requests` adds rows, `step` extends all rows. Created by
    `BatchDecoder.begin`.

    Attributes:
        active: the rows that are not finished, in the order of the KV cache's rows.
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
            MedusaError: a prompt is empty or longer than the model's context. Then no request is
                added.
            ValueError: rows can't share passes, see `BatchDecoder.can_batch`.
        """
        if len(self.active) + len(requests) > 1 and not self._decoder.can_batch:
            raise ValueError(
                "longrope models can't decode in batches: the longest row would set the angles"
                " of all"
            )
        # 1. check all prompts
        started = time.perf_counter()
        rows: list[_Row] = []
        for request in requests:
            limit = max_answer_length(
                self._decoder.target_model, request.prompt, self._max_new_tokens
            )
            rows.append(_Row(request, limit, started))
        # 2. make room for the longest answer
        longest = max(len(row.request.prompt) + row.limit for row in rows)
        if self._steps is None:
            self._steps = self._decoder.acquire_steps()
        capacity = longest + self._decoder.limits.size + 1
        self._steps.make_room(len(self.active) + len(rows), capacity)
        # 3. prefill prompts of similar length together
        for group in group_prompts([len(request.prompt) for request in requests]):
            joining = [rows[i] for i in group]
            prompts = [row.request.prompt for row in joining]
            first_tokens = self._steps.prefill(prompts, self._rule, _generators(joining))
            now = time.perf_counter()
            for row, token in zip(joining, first_tokens, strict=True):
                row.generation.tokens = [token]
                row.generation.prefill_seconds = now - row.started
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
        last_tokens = [row.generation.tokens[-1] for row in self.active]
        generators = _generators(self.active)
        if self._decoder.can_batch:
            accepted = steps.step(last_tokens, self._rule, generators)
        else:
            (row,) = self.active
            text = [*row.request.prompt, *row.generation.tokens[:-1]]
            target_model = self._decoder.target_model
            accepted = [
                step_single(target_model, steps, text, last_tokens[0], self._rule, generators)
            ]
        self._decoder.passes += 1
        # 2. append its tokens, up to the end of each answer
        for row, (path, tokens) in zip(self.active, accepted, strict=True):
            new = truncate_at_stop(tokens[1:], self._stops, row.tokens_left)
            row.generation.tokens += new
            row.generation.steps += 1
            row.generation.accepted.append(min(len(path) - 1, len(new)))

    def _retire(self) -> None:
        """Remove finished rows.

        Rows from the end of the batch fill the gaps, so that few keys and values move.
        """
        # 1. finish the answers that are complete
        kept_rows: list[int] = []
        for i, row in enumerate(self.active):
            if row.generation.tokens[-1] not in self._stops and row.tokens_left > 0:
                kept_rows.append(i)
                continue
            row.generation.seconds = time.perf_counter() - row.started
            row.generation.finish = finish_reason(
                row.generation.tokens, self._stops, self._max_new_tokens
            )
            self._finished.append((row.request.request_id, row.generation))
        if len(kept_rows) == len(self.active):
            return
        # 2. keep the other rows: rows past the new end move into the gaps before it
        size = len(kept_rows)
        stays = set(kept_rows)
        movable = [i for i in kept_rows if i >= size]
        order = [i if i in stays else movable.pop() for i in range(size)]
        self.active = [self.active[i] for i in order]
        assert self._steps is not None
        if self.active:
            self._steps.select_rows(order)
        else:
            self._decoder.release_steps(self._steps)
            self._steps = None


def group_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Group prompts of similar length for prefill; return indices, groups of longer prompts first.

    A group has at most `PREFILL_TOKENS` positions, of which at most `PREFILL_PADDING` are padding,
    or it is a single prompt.
    """
    groups: list[list[int]] = []
    longest = 0  # length of the current group's first prompt, which is its longest
    padding = 0  # padded positions of the current group with the next prompt
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
    """Return the generators of the rows; None if no row has one."""
    generators = [row.request.generator for row in rows if row.request.generator is not None]
    return generators or None
