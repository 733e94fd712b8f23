"""Measure how long a decoding step takes with each of several trees."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from medusa_train.errors import MedusaError
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.base import Draft
from medusa_train.models.target_model import TargetModel
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree

#: Most tokens that the timed steps of a tree generate in a round.
TIMED_TOKENS = 48


class Effort(NamedTuple):
    """How thoroughly steps are timed: number of rounds, and of steps of each tree in a round."""

    rounds: int
    steps: int


THOROUGH = Effort(rounds=5, steps=16)
QUICK = Effort(rounds=5, steps=8)


def time_steps(
    target_model: TargetModel,
    draft: Draft,
    trees: Sequence[Tree],
    prompt: list[int],
    progress: RunProgress,
    effort: Effort,
    deadline: float | None = None,
) -> dict[Tree, float]:
    """Return the median milliseconds of a decoding step with each of `trees`.

    After `deadline` (on the clock of `time.perf_counter`), no new round starts, except the first
    timed one.

    Trees take turns in rounds, so that drift affects all of them equally. They share one KV cache,
    so that a large target model needs memory for only one. A draft's early exit is off: it makes
    steps faster, but also accepts fewer tokens than the simulation with traces assumes.

    Raises:
        MedusaError: `prompt` and the timed tokens exceed the model's context.
    """
    trees = list(dict.fromkeys(trees))
    # 1. a decoder for each tree, all with the same KV cache
    if len(prompt) + TIMED_TOKENS > target_model.max_context:
        raise MedusaError(
            f"a prompt of {len(prompt)} tokens and {TIMED_TOKENS} timed tokens exceed the model's"
            f" context of {target_model.max_context}"
        )
    largest = max(tree.size for tree in trees)
    kv_cache = target_model.new_kv_cache(len(prompt) + TIMED_TOKENS + largest + 1)
    decoders = {tree: Decoder(target_model, draft, tree, kv_cache) for tree in trees}
    # 2. a warm-up, then rounds in which all trees take their turn
    times: dict[Tree, list[float]] = {tree: [] for tree in trees}
    rounds = effort.rounds + 1
    # not ticking: a second thread would disturb the timing
    with progress.phase("timing steps", rounds * len(trees), "continuations") as phase:
        for index in range(rounds):
            is_warm_up = index == 0
            if index > 1 and deadline is not None and time.perf_counter() > deadline:
                break
            for tree, decoder in decoders.items():
                steps = 1 if is_warm_up else effort.steps
                with draft.no_early_exit():
                    step_ms = _later_step_ms(decoder, prompt, steps)
                if not is_warm_up:
                    times[tree].append(step_ms)
                phase.advance()
    return {tree: statistics.median(milliseconds) for tree, milliseconds in times.items()}


def _later_step_ms(decoder: Decoder, prompt: list[int], count: int) -> float:
    """Return the mean milliseconds of `count` steps after the first step, which is not timed
    because the draft also reads the prompt in it.
    """
    started = time.perf_counter()
    steps = 0  # number of timed steps
    answer = decoder.stream(prompt, TIMED_TOKENS, eos_ids=())
    for index, _ in enumerate(islice(answer, count + 2)):
        if index == 1:  # 0 is the prefill, 1 the first step
            started = time.perf_counter()
        steps = index - 1
    return 1000 * (time.perf_counter() - started) / max(steps, 1)
