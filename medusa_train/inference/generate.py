"""Decode one answer at a time: prefill, then steps of `inference.step`.

Plain decoding uses the empty tree.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import AcceptanceRule, Accepted, Greedy
from medusa_train.inference.answer_lock import AnswerLock
from medusa_train.inference.fixed_steps import FixedShapeSteps, new_steps
from medusa_train.inference.step import Steps, proposal_limits
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.hf_config import length_dependent_rope
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.kv_cache import KVCache
from medusa_train.trees.tree import Tree

FinishReason = Literal["eos", "length", "context"]


class Step(NamedTuple):
    """The tokens that one pass added to an answer.

    Attributes:
        tokens: token ids, cut after an end-of-text token.
        accepted: how many of them were draft tokens; these come first.
    """

    tokens: list[int]
    accepted: int


@dataclass
class Generation:
    """An answer with its step counts and times.

    Attributes:
        tokens: generated ids, the closing end-of-text token included.
        steps: verification passes; the prefill, which gives the first token, is not counted.
        accepted: per step, the number of draft tokens that were accepted and kept.
        seconds: total wall time.
        prefill_seconds: the part of `seconds` until the first token.
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

    Without a draft, or with the empty tree, each step verifies the root alone and runs no draft.
    This is plain decoding by the same loop, and the baseline of every reported speedup. A step
    synchronizes with the device once, when the accepted tokens are read; with top-p also to find
    the nucleus.

    Threads may share a decoder: it holds one answer at a time, see `stream`.

    Args:
        target_model: verifies the tokens.
        draft: proposes them; None: plain decoding.
        tree: draft tokens to verify; by default the empty tree. Drafts that copy text choose trees
            themselves.
        kv_cache: memory for keys and values; by default the decoder allocates its own and reuses it
            between answers. Decoders that answer in turns may share it.
        continues: reuse the KV cache for the prefix that a prompt has in common with the last
            prompt and answer, as in the turns of a chat. Off by default, so that measured answers
            all start with an empty cache.

    Raises:
        MedusaError: the tree is deeper than the draft has heads, or wider than its vocabulary.
    """

    def __init__(
        self,
        target_model: TargetModel,
        draft: Proposer | None = None,
        tree: Tree | None = None,
        kv_cache: KVCache | None = None,
        continues: bool = False,
    ) -> None:
        self.target_model = target_model
        self.draft = draft
        self.tree = check_tree(target_model, draft, tree)
        if length_dependent_rope(target_model.config) is not None:
            continues = False  # cached keys of a shorter text would have other rotary angles
        self._continues = continues
        self._kv_cache = kv_cache
        self._steps: Steps | None = None
        # the text whose keys and values are cached: prompt and answer, without the last token
        self._cached_text: list[int] = []
        self._lock = AnswerLock()

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int | None,
        eos_ids: Collection[int] | None = None,
        rule: AcceptanceRule = Greedy(),
        generator: torch.Generator | None = None,
    ) -> Generation:
        """Generate a whole answer; see `stream` for arguments and errors."""
        started = time.perf_counter()
        stops = stop_tokens(self.target_model, eos_ids)
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
        max_new_tokens: int | None,
        eos_ids: Collection[int] | None = None,
        rule: AcceptanceRule = Greedy(),
        generator: torch.Generator | None = None,
    ) -> Generator[Step, None, None]:
        """Generate an answer step by step. The first step is the prefill, which gives one token.

        The answer ends after the first end-of-text token (kept), after `max_new_tokens` tokens, or
        at the end of the model's context. In the last case the last token is predicted for position
        max_context but never read. The iterator may be abandoned at any step.

        The decoder holds one answer at a time. The next answer waits until this one is complete,
        closed or dropped, or abandoned, see `AnswerLock`.

        Args:
            prompt: at least one token id.
            max_new_tokens: at least 1; None: up to the end of the context.
            eos_ids: tokens that end the answer; None: the target model's; empty: no token does.
            rule: acceptance rule, greedy by default; see `accept`.
            generator: random numbers for `Sampling`.

        Raises:
            MedusaError: the prompt is empty or longer than the model's context; or another answer
                was started on this decoder before this one was complete.
        """
        stops = stop_tokens(self.target_model, eos_ids)
        limit = max_answer_length(self.target_model, prompt, max_new_tokens)
        generators = None if generator is None else [generator]

        # Enter inference mode for each pass, not around the whole generator. Python closes an
        # abandoned generator late, possibly while the interpreter exits, and leaving inference
        # mode there would call a torch that may be gone
        answer = self._lock.start()
        try:
            # 1. the prefill gives the first token
            with self._lock.hold(answer), torch.inference_mode():
                steps, num_cached = self._begin(prompt, limit, reserve=max_new_tokens is not None)
                (next_token,) = steps.prefill([prompt], rule, generators, num_cached)
            yield Step([next_token], 0)

            # 2. then steps; the draft reads the prompt in the first step
            text = list(prompt)  # prompt and answer, without the last token
            num_generated = 1
            while next_token not in stops and num_generated < limit:
                with self._lock.hold(answer), torch.inference_mode():
                    # a failed or interrupted step leaves parts of two texts in the KV cache
                    self._cached_text = []
                    path, tokens = step_single(
                        self.target_model, steps, text, next_token, rule, generators
                    )
                    text += tokens[:-1]
                    self._cached_text = text
                new = truncate_at_stop(tokens[1:], stops, limit - num_generated)
                num_generated += len(new)
                next_token = new[-1]
                yield Step(new, min(len(path) - 1, len(new)))
        finally:
            self._lock.end(answer)

    def _begin(self, prompt: list[int], limit: int, *, reserve: bool) -> tuple[Steps, int]:
        """Return steps without rows, and the number of positions of the prompt that are cached.

        The KV cache has room for the prompt, `limit` tokens and a tree. Memory of an earlier answer
        is reused if it is large enough. Without `reserve`, memory is allocated as the answer grows.
        """
        nodes = proposal_limits(self.draft, self.tree).size + 1
        capacity = len(prompt) + limit + nodes
        # 1. memory for keys and values, and the steps on it
        if self._kv_cache is None or self._kv_cache.capacity < capacity:
            self._kv_cache = self.target_model.new_kv_cache(capacity)
        if self._steps is None or self._steps.kv_cache is not self._kv_cache:
            self._steps = new_steps(self.target_model, self.draft, self.tree, self._kv_cache)
        # 2. keep the cached prefix of the prompt; drop everything else
        num_cached = self._count_cached(prompt, self._steps.committed)
        self._cached_text = []
        self._steps.reset(num_cached)
        # with CUDA graphs, buffers grow by doubling, so that few of them are captured for
        if reserve and not isinstance(self._steps, FixedShapeSteps):
            self._steps.make_room(1, capacity)
        return self._steps, num_cached

    def _count_cached(self, prompt: list[int], committed: int) -> int:
        """Return how many positions of a prompt are in the KV cache from the last answer.

        The last common token is read again: what a draft caches for a position also depends on the
        next token.
        """
        if not self._continues:
            return 0
        common = 0
        for token, held in zip(prompt, self._cached_text, strict=False):
            if token != held:
                break
            common += 1
        return max(0, min(common - 1, committed))

    @torch.inference_mode()
    def capture(self, positions: int, rule: AcceptanceRule = Greedy()) -> None:
        """Capture the steps by `rule` for texts of up to `positions` tokens, prompt included. Does
        nothing before a first answer, or if steps are not replayed.
        """
        if isinstance(self._steps, FixedShapeSteps):
            self._cached_text = []
            self._steps.reset()
            end = positions + self.tree.size + 1
            self._steps.capture(1, end, rule)


def step_single(
    target_model: TargetModel,
    steps: Steps,
    text: list[int],
    last_token: int,
    rule: AcceptanceRule,
    generators: Sequence[torch.Generator] | None,
) -> Accepted:
    """Run a step of a single row. At the length where a longrope model changes its rotary angles,
    run the whole text again instead.

    Args:
        target_model: verifies the tokens.
        steps: the steps of the row.
        text: prompt and answer, without the last token.
        last_token: accepted but not verified yet.
        rule: acceptance rule.
        generators: the row's generator, for `Sampling`.
    """
    switch = target_model.rope_switch  # longer texts use the other angles; None: not longrope
    length = len(text)
    # 1. with the last token, the text becomes long enough for longrope's other angles: recompute
    # all keys with them, as transformers' `generate` does
    if switch is not None and length == switch:
        steps.reset()
        (following,) = steps.prefill([[*text, last_token]], rule, generators)
        return Accepted([0], [last_token, following])
    # 2. no draft tokens if deeper nodes would switch the angles before the last token does
    straddles = switch is not None and length < switch <= length + steps.limits.depth
    (accepted,) = steps.step([last_token], rule, generators, skip_draft=straddles)
    return accepted


def check_tree(target_model: TargetModel, draft: Proposer | None, tree: Tree | None) -> Tree:
    """Return the tree on the target model's device; the empty tree without a draft.

    Raises:
        MedusaError: the tree is deeper than the draft has heads, or wider than its vocabulary.
    """
    if tree is None or draft is None:
        return Tree.empty().to(target_model.device)
    if tree.max_depth > draft.max_depth:
        raise MedusaError(
            f"the tree is {tree.max_depth} deep, but the draft has {draft.max_depth} heads"
        )
    vocab_size = draft.draft_vocab_size or target_model.vocab_size
    if tree.width > vocab_size:
        raise MedusaError(
            f"the tree uses guesses up to rank {tree.width - 1} of a vocabulary of {vocab_size}"
            " tokens"
        )
    return tree.to(target_model.device)


def stop_tokens(target_model: TargetModel, eos_ids: Collection[int] | None) -> frozenset[int]:
    """Return the tokens that end an answer: `eos_ids`, or the target model's if it is None."""
    if eos_ids is None:
        eos_ids = target_model.eos_ids
    return frozenset(eos_ids)


def max_answer_length(
    target_model: TargetModel, prompt: list[int], max_new_tokens: int | None
) -> int:
    """Return how many tokens fit, at most `max_new_tokens`. The last token is never read, so it may
    be one position past the context.

    Raises:
        MedusaError: the prompt is empty, longer than the model's context or has an unknown token,
            or `max_new_tokens` is below 1.
    """
    if not prompt:
        raise MedusaError("the prompt is empty; decoding needs at least one token")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < target_model.vocab_size:
            raise MedusaError(
                f"the prompt has the token {token}, but the model only {target_model.vocab_size}"
                " tokens"
            )
    if max_new_tokens is not None and max_new_tokens < 1:
        raise MedusaError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    limit = target_model.max_context - len(prompt) + 1
    if limit < 1:
        raise MedusaError(
            f"the prompt has {len(prompt)} tokens, but the model's context is"
            f" {target_model.max_context}"
        )
    return limit if max_new_tokens is None else min(max_new_tokens, limit)


def truncate_at_stop(tokens: list[int], stops: Collection[int], limit: int) -> list[int]:
    """Cut accepted tokens after the first end-of-text token and after `limit` tokens."""
    for i, token in enumerate(tokens[:limit]):
        if token in stops:
            return tokens[: i + 1]
    return tokens[:limit]


def finish_reason(
    tokens: list[int], stops: Collection[int], max_new_tokens: int | None
) -> FinishReason:
    """Return why a complete answer ended."""
    if tokens[-1] in stops:
        return "eos"
    if max_new_tokens is not None and len(tokens) >= max_new_tokens:
        return "length"
    return "context"
