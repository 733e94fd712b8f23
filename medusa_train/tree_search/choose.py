"""Choose the tree with the most tokens per second on this machine, and write tree.json.

Trees are fitted to traces (`fit`) and rated on answers that they were not fitted to; here their
steps are timed.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.checkpoint.run_directory import TREE, TREE_TRACES
from medusa_train.errors import MedusaError
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.progress import RunProgress
from medusa_train.tree_search.fit import (
    Trace,
    TreeCandidate,
    cross_validate,
    fit_trees,
    head_accuracy,
)
from medusa_train.tree_search.traces import (
    Prompts,
    TracedAnswers,
    save_traces,
    trace_conversations,
    weights_key,
)
from medusa_train.trees.tree import Tree

#: 0 is plain decoding without the draft, whose cost makes latency jump at 1: nothing is
# interpolated across the jump.
SIZES = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    10,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    63,
)  # TensorRT-LLM accepts at most 63 nodes
#: Sizes at which shallower trees are always timed: where a level is expensive, all of the deepest
# trees are slow.
LEVEL_SIZES = (4, 8)
#: What is timed where trees are chosen again from kept traces: latencies of other sizes are
# interpolated.
QUICK_SIZES = (0, 1, 2, 4, 8, 16, 32, 63)
#: Longest calibration answer in tokens; shorter where the token budget is too small for eight of
# them.
ANSWER_TOKENS = 256
QUICK_PROMPT = 64  # the last tokens of the prompt that are prefilled in every round
TIMED_TOKENS = 48  # that the timed steps of a round give at most
MIN_CONVERSATIONS = 3
#: Relative differences in tokens per second below this are measurement noise.
NOISE = 0.02
#: How often trees are timed side by side at most, until the one that is chosen was among them.
SIDE_BY_SIDE = 3
#: Timing trees may take this share of the seconds that the run took before, but these in any case.
TIMING_SHARE, LEAST_TIMING_SECONDS = 0.25, 20.0
#: Trees that a thorough choice times, about: those of `SIZES`, then the best with its rivals.
THOROUGH_TREES = 24


class Effort(NamedTuple):
    """How thoroughly steps are timed: rounds, and steps of each tree in each round."""

    rounds: int
    steps: int


THOROUGH, QUICK = Effort(5, 16), Effort(3, 5)


@dataclass(frozen=True)
class TreeChoice:
    """The chosen tree and everything that it was chosen from.

    Attributes:
        best: one of `sizes`, the smallest within `NOISE` of the most tokens per second; empty for
            plain decoding, if no tree is clearly faster.
        sizes: the fastest tree of each size, ascending, fitted to all traces and rated on
            conversations that they were not fitted to. Latencies are those of trees that were timed
            side by side last; of others scaled to them, or interpolated.
        accuracy: top-1 to top-10 accuracy per head, [K][10].
        about: number of conversations, answers and tokens that this is based on.
        settings: with which the steps were timed.
    """

    best: TreeCandidate
    sizes: Sequence[TreeCandidate]
    accuracy: Sequence[Sequence[float]]
    about: Mapping[str, int]
    settings: DecodingSettings

    def describe(self) -> str:
        """Say which tree was chosen and what it is expected to bring."""
        best, nodes = self.best, self.best.tree.size
        step = f"{best.step_ms:.2f} ms per step in {self.settings.dtype}"
        if not nodes:
            return f"plain decoding, {step}; no tree is clearly faster here"
        return (
            f"{nodes} node{'' if nodes == 1 else 's'}, {best.tokens_per_step:.2f} tokens per step"
            f" (simulated on {self.about['tokens']:,} greedy tokens, each with a tree that was"
            f" fitted to others), {step}; the smallest within {NOISE:.0%} of the fastest"
        )

    def save(self, directory: Path, traced: TracedAnswers, paths: ModelPaths) -> Path:
        """Write tree.json, whose path is returned (`medusa_choices` and the measurements), and the
        traces beside it.
        """
        save_traces(directory / TREE_TRACES, traced, weights_key(paths, self.settings))
        self.best.tree.save(directory / TREE, **self.record())
        return directory / TREE

    def record(self) -> dict[str, Any]:
        """Return the measurements as plain JSON values."""
        return {
            "nodes": self.best.tree.size,
            "tokens_per_step": round(self.best.tokens_per_step, 4),
            "step_ms": round(self.best.step_ms, 4),
            "head_accuracy": [[round(share, 4) for share in row] for row in self.accuracy],
            "calibration": dict(self.about),
            "sizes": [
                {
                    "nodes": one.tree.size,
                    "tokens_per_step": round(one.tokens_per_step, 4),
                    "step_ms": round(one.step_ms, 4),
                    "tokens_per_s": round(one.tokens_per_s, 1),
                }
                for one in self.sizes
            ],
            **self.settings.record(),
        }


def answer_prompts(
    backbone: Backbone,
    draft: Draft,
    conversations: Sequence[Prompts],
    token_budget: int,
    progress: RunProgress,
    max_new_tokens: int = ANSWER_TOKENS,
) -> TracedAnswers:
    """Let the backbone answer prompts greedily until there are `token_budget` tokens, and trace the
    answers.
    """
    with progress.phase("answering for the tree", token_budget, "tokens", ticking=True) as phase:
        return trace_conversations(
            backbone,
            draft,
            conversations,
            max_new_tokens=min(max_new_tokens, max(8, token_budget // 8)),
            token_budget=token_budget,
            on_answer=phase.advance,
        )


def choose_tree(
    backbone: Backbone,
    draft: Draft,
    traced: TracedAnswers,
    progress: RunProgress,
    *,
    quick: bool = False,
    seconds: float | None = None,
) -> TreeChoice:
    """Fit trees, time their steps, and choose the one with the most expected tokens per second.

    The trees of `SIZES` are timed first. Then the best of them, shallower trees of about its size
    and plain decoding are timed side by side, and one is chosen by the table of both, see
    `smallest_of_the_fastest`. Every rate is cross-validated: a conversation is decoded with trees
    that were fitted to others.

    Args:
        quick: time fewer steps of fewer trees.
        seconds: that timing may take. Where a thorough choice would take longer it is quick, and
            its rounds end when these have passed. None: without a limit.

    Raises:
        MedusaError: there are fewer than `MIN_CONVERSATIONS` conversations.
    """
    conversations = traced.conversations
    if len(conversations) < MIN_CONVERSATIONS:
        raise MedusaError(
            f"choosing a tree needs {MIN_CONVERSATIONS} or more answered chats, got"
            f" {len(conversations)}"
        )
    traces = traced.traces
    longest = max(1, backbone.max_context - TIMED_TOKENS)
    prompt = traced.prompt[-longest:]
    started = time.perf_counter()
    if seconds is not None and not quick:
        needed = _thorough_seconds(backbone, draft, prompt, progress)
        quick = needed > seconds
        if quick:
            progress.print(
                f"timing fewer steps of fewer trees: all would take about {needed:.0f} s,"
                f" {seconds:.0f} s are left for it after this run; medusa-eval --calibrate times all"
            )
    if quick:
        prompt = prompt[-QUICK_PROMPT:]
    time_trees = partial(
        time_steps,
        backbone,
        draft,
        prompt=prompt,
        progress=progress,
        effort=QUICK if quick else THOROUGH,
        deadline=None if seconds is None else started + seconds,
    )

    # 1. Time a tree of each size.
    with progress.phase("fitting trees", ticking=True):
        rated = _rated_trees(conversations, traces)
    steps = time_trees([tree for tree, _ in rated if not quick or tree.size in QUICK_SIZES])
    latency = {tree.size: ms for tree, ms in steps.items()}
    by_size = {
        tree.size: TreeCandidate(tree, rate, interpolate(latency, tree.size))
        for tree, rate in rated
    }

    # 2. Time the best of them side by side with their rivals, and choose by what is shown.
    table = dict(by_size)
    best = smallest_of_the_fastest(table.values())
    levels: Sequence[int] = () if quick else LEVEL_SIZES
    for _ in range(SIDE_BY_SIDE):
        near = sizes_to_time_again(list(by_size), best.tree.size, levels)
        with progress.phase("fitting trees", ticking=True):
            rivals = [(by_size[nodes].tree, by_size[nodes].tokens_per_step) for nodes in near]
            rivals += _shallower(conversations, traces, [by_size[nodes].tree for nodes in near])
        again = time_trees([tree for tree, _ in rivals])
        timed = [TreeCandidate(tree, rate, again[tree]) for tree, rate in rivals]
        table = merge_timings(by_size, timed)
        best = smallest_of_the_fastest(table.values())
        if best.tree.size in near:
            break
        levels = near
    return TreeChoice(
        best,
        list(table.values()),
        head_accuracy(traces),
        {"conversations": len(conversations), "answers": len(traces), "tokens": traced.tokens},
        DecodingSettings.of(backbone),
    )


def timing_budget(run_seconds: float) -> float:
    """Return the seconds that timing trees may take after a run of `run_seconds`."""
    return max(LEAST_TIMING_SECONDS, TIMING_SHARE * run_seconds)


def _thorough_seconds(
    backbone: Backbone, draft: Draft, prompt: list[int], progress: RunProgress
) -> float:
    """Estimate the seconds of a thorough choice from two plain continuations of `prompt`."""
    started = time.perf_counter()
    effort = Effort(1, THOROUGH.steps)
    time_steps(backbone, draft, [Tree.empty()], prompt, progress, effort)
    continuation = (time.perf_counter() - started) / 2
    return continuation * THOROUGH_TREES * (THOROUGH.rounds + 1)


def merge_timings(
    first: Mapping[int, TreeCandidate], again: Sequence[TreeCandidate]
) -> dict[int, TreeCandidate]:
    """Return the fastest tree of each size on the scale of the second timing.

    The machine's speed may have changed between the two: trees that were not timed again take as
    much longer as those that were, by the median.

    Args:
        first: by ascending size. again: trees that were timed again, with their rivals.
    """
    repeated = {one.tree: one for one in again}
    ratios = [
        repeated[one.tree].step_ms / one.step_ms
        for one in first.values()
        if one.tree in repeated and one.tree.size
    ]
    drift = statistics.median(ratios) if ratios else 1.0
    fastest: dict[int, TreeCandidate] = {}
    for one in again:
        other = fastest.get(one.tree.size)
        if other is None or one.tokens_per_s > other.tokens_per_s:
            fastest[one.tree.size] = one
    return {
        size: fastest.get(size, replace(one, step_ms=drift * one.step_ms))
        for size, one in first.items()
    }


# Which trees are timed?


def _rated_trees(
    conversations: Sequence[Sequence[Trace]], traces: Sequence[Trace]
) -> list[tuple[Tree, float]]:
    """Return the trees of `SIZES` by ascending size, with their tokens per step on conversations
    not fitted to.
    """
    rates, trees = cross_validate(conversations, SIZES), dict[Tree, float]()
    for size, tree in fit_trees(traces, SIZES).items():
        trees.setdefault(tree, rates[size])
    by_size = {tree.size: (tree, rate) for tree, rate in trees.items()}
    return [by_size[size] for size in sorted(by_size)]


def sizes_to_time_again(sizes: Sequence[int], best: int, levels: Sequence[int]) -> list[int]:
    """Return which of the ascending `sizes` are timed again, with shallower trees: those that may
    be the fastest.

    They are `best` with its neighbours, `levels`, and 0, which is plain decoding.
    """
    index = sizes.index(best)
    near = {*sizes[max(index - 1, 0) : index + 2], *levels, 0}
    return [size for size in sizes if size in near]


def _shallower(
    conversations: Sequence[Sequence[Trace]], traces: Sequence[Trace], trees: Sequence[Tree]
) -> list[tuple[Tree, float]]:
    """Return trees as large as `trees` but shallower, with their tokens per step on other
    conversations.

    Every level costs time beyond its nodes', so a shallower tree may be faster.
    """
    sizes = [tree.size for tree in trees]
    found: dict[Tree, float] = {}  # a tree that is the best of two depths is timed once
    for depth in range(1, max(tree.max_depth for tree in trees)):
        rates, fitted = cross_validate(conversations, sizes, depth), fit_trees(traces, sizes, depth)
        for tree in trees:
            shallow = fitted[tree.size]
            if depth < tree.max_depth and shallow.size == tree.size and shallow not in trees:
                found.setdefault(shallow, rates[tree.size])
    return list(found.items())


def interpolate(measured: Mapping[int, float], at: int) -> float:
    """Interpolate linearly between the measured points; outside of them, return the nearest one's
    value.
    """
    points = sorted(measured)
    index = bisect_left(points, at)
    if index == len(points):
        return measured[points[-1]]
    if index == 0 or points[index] == at:
        return measured[points[index]]
    low, high = points[index - 1], points[index]
    share = (at - low) / (high - low)
    return (1 - share) * measured[low] + share * measured[high]


# What does a step cost?


def time_steps(
    backbone: Backbone,
    draft: Draft,
    trees: Sequence[Tree],
    prompt: list[int],
    progress: RunProgress,
    effort: Effort,
    deadline: float | None = None,
) -> dict[Tree, float]:
    """Return the median milliseconds of a decoding step with each of `trees`.

    After `deadline`, on the clock of `time.perf_counter`, no further round begins but the first.

    Trees take turns in rounds, so that drift affects all alike, and share one cache, so that a
    large backbone needs memory for one only. A draft's early exit is off: it makes steps faster,
    but also accepts less than rank paths say.

    Raises:
        MedusaError: `prompt` and the timed tokens exceed the model's context.
    """
    trees = list(dict.fromkeys(trees))
    if len(prompt) + TIMED_TOKENS > backbone.max_context:
        raise MedusaError(
            f"a prompt of {len(prompt)} tokens and {TIMED_TOKENS} timed tokens exceed the model's"
            f" context of {backbone.max_context}"
        )
    capacity = len(prompt) + TIMED_TOKENS + max(tree.size for tree in trees) + 1
    slots = backbone.new_slots(capacity)
    decoders = {tree: Decoder(backbone, draft, tree, slots) for tree in trees}
    times: dict[Tree, list[float]] = {tree: [] for tree in trees}
    # not ticking: no thread beside the decoder
    with progress.phase("timing steps", (effort.rounds + 1) * len(trees), "continuations") as phase:
        for round_ in range(effort.rounds + 1):
            if round_ > 1 and deadline is not None and time.perf_counter() > deadline:
                break
            for tree, decoder in decoders.items():
                with draft.no_early_exit():
                    step_ms = _later_step_ms(decoder, prompt, effort.steps if round_ else 1)
                if round_:  # before them there is a warm-up
                    times[tree].append(step_ms)
                phase.advance()
    return {tree: statistics.median(milliseconds) for tree, milliseconds in times.items()}


def _later_step_ms(decoder: Decoder, prompt: list[int], count: int) -> float:
    """Return the mean milliseconds of `count` steps after the first, in which the draft also reads
    the prompt.
    """
    steps, started = 0, time.perf_counter()
    for index, _ in enumerate(islice(decoder.stream(prompt, TIMED_TOKENS, eos_ids=()), count + 2)):
        if index == 1:  # 0 is the prefill
            started = time.perf_counter()
        steps = index - 1
    return 1000 * (time.perf_counter() - started) / max(steps, 1)


# Which candidate is best?


def smallest_of_the_fastest(candidates: Iterable[TreeCandidate]) -> TreeCandidate:
    """Return the smallest candidate within `NOISE` of the most tokens per second.

    Latencies are accurate to a few percent at best, and the largest of several nearly equal results
    is the luckiest one. Among equals a small tree loses least where text is harder or the machine
    busier.
    """
    by_size: dict[int, TreeCandidate] = {}
    for one in sorted(candidates, key=lambda one: (one.tree.size, one.tokens_per_s)):
        by_size[one.tree.size] = one  # the fastest of each size
    enough = (1 - NOISE) * max(one.tokens_per_s for one in by_size.values())
    return next(one for one in by_size.values() if one.tokens_per_s >= enough)
