"""Choose the tree with the most tokens per second on this machine, and write tree.json.

Trees are fitted to traces (`fit`) and rated on answers that they were not fitted to; `time_steps`
says what their steps cost.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.checkpoint.run_directory import TREE, TREE_TRACES
from medusa_train.errors import MedusaError
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.models.drafts.base import Draft
from medusa_train.models.target_model import TargetModel
from medusa_train.progress import RunProgress
from medusa_train.tree_search.fit import (
    Trace,
    TreeCandidate,
    cross_validate,
    fit_trees,
    head_accuracy,
)
from medusa_train.tree_search.kept_traces import save_traces, weights_key
from medusa_train.tree_search.time_steps import (
    QUICK,
    THOROUGH,
    TIMED_TOKENS,
    Effort,
    time_steps,
)
from medusa_train.tree_search.traces import Prompts, TracedAnswers, trace_conversations
from medusa_train.trees.tree import Tree

#: 0 is plain decoding without the draft, whose cost makes latency jump at 1: nothing is
#: interpolated across the jump. TensorRT-LLM accepts at most 63 nodes.
SIZES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)
#: Sizes at which shallower trees are always timed: where a level is expensive, all of the deepest
#: trees are slow.
LEVEL_SIZES = (4, 8)
#: What is timed where trees are chosen again from kept traces: latencies of other sizes are
#: interpolated.
QUICK_SIZES = (0, 1, 2, 4, 8, 16, 32, 63)
#: Longest calibration answer in tokens; shorter where the token budget is too small for eight of
#: them.
ANSWER_TOKENS = 256
#: The last tokens of the prompt that are prefilled in every round of a quick choice.
QUICK_PROMPT = 64
MIN_CONVERSATIONS = 3
#: Relative differences in tokens per second below this are measurement noise.
NOISE = 0.02
#: How often trees are timed side by side at most, until the one that is chosen was among them.
SIDE_BY_SIDE = 3
#: Timing trees may take this share of the seconds that the run took before.
TIMING_SHARE = 0.1
#: But these seconds in any case.
LEAST_TIMING_SECONDS = 10.0
#: Trees that are timed thoroughly, about: the best with its rivals. Those of `SIZES` before, a few
#: steps of each, take as long as some more.
THOROUGH_TREES = 15


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
        best = self.best
        nodes = best.tree.size
        step = f"{best.step_ms:.2f} ms per step in {self.settings.dtype}"
        if not nodes:
            return f"plain decoding, {step}; no tree is clearly faster here"
        plural = "" if nodes == 1 else "s"
        return (
            f"{nodes} node{plural}, {best.tokens_per_step:.2f} tokens per step"
            f" (simulated on {self.about['tokens']:,} greedy tokens, each with a tree that was"
            f" fitted to others), {step}; the smallest within {NOISE:.0%} of the fastest"
        )

    def save(self, directory: Path, traced: TracedAnswers, paths: ModelPaths) -> Path:
        """Write tree.json (`medusa_choices` and the measurements), and the traces beside it; return
        the path of tree.json.
        """
        key = weights_key(paths, self.settings)
        save_traces(directory / TREE_TRACES, traced, key)
        self.best.tree.save(directory / TREE, **self.record())
        return directory / TREE

    def record(self) -> dict[str, Any]:
        """Return the measurements as plain JSON values."""
        accuracy: list[list[float]] = []
        for shares in self.accuracy:
            accuracy.append([round(share, 4) for share in shares])
        sizes: list[dict[str, Any]] = []
        for candidate in self.sizes:
            entry = {
                "nodes": candidate.tree.size,
                "tokens_per_step": round(candidate.tokens_per_step, 4),
                "step_ms": round(candidate.step_ms, 4),
                "tokens_per_s": round(candidate.tokens_per_s, 1),
                "medusa_choices": [list(path) for path in candidate.tree.paths],
            }
            sizes.append(entry)
        return {
            "nodes": self.best.tree.size,
            "tokens_per_step": round(self.best.tokens_per_step, 4),
            "step_ms": round(self.best.step_ms, 4),
            "head_accuracy": accuracy,
            "calibration": dict(self.about),
            "sizes": sizes,
            **self.settings.record(),
        }


def answer_prompts(
    target_model: TargetModel,
    draft: Draft,
    conversations: Sequence[Prompts],
    token_budget: int,
    progress: RunProgress,
    max_new_tokens: int = ANSWER_TOKENS,
) -> TracedAnswers:
    """Let the target model answer prompts greedily until there are `token_budget` tokens, and trace the
    answers.
    """
    eighth = max(8, token_budget // 8)
    with progress.phase("answering for the tree", token_budget, "tokens", ticking=True) as phase:
        return trace_conversations(
            target_model,
            draft,
            conversations,
            max_new_tokens=min(max_new_tokens, eighth),
            token_budget=token_budget,
            on_answer=phase.advance,
        )


def choose_tree(
    target_model: TargetModel,
    draft: Draft,
    traced: TracedAnswers,
    progress: RunProgress,
    *,
    quick: bool = False,
    seconds: float | None = None,
) -> TreeChoice:
    """Fit trees, time their steps, and choose the one with the most expected tokens per second.

    Every rate is cross-validated: a conversation is decoded with trees that were fitted to others.

    Args:
        quick: time fewer steps of fewer trees.
        seconds: that timing may take. All sizes are then timed briefly, and only the best of them
            with its rivals thoroughly. Where that would take longer the choice is quick, and its
            rounds end when these have passed. None: without a limit.

    Raises:
        MedusaError: there are fewer than `MIN_CONVERSATIONS` conversations.
    """
    conversations = traced.conversations
    if len(conversations) < MIN_CONVERSATIONS:
        raise MedusaError(
            f"choosing a tree needs {MIN_CONVERSATIONS} or more answered chats, got"
            f" {len(conversations)}"
        )
    # 1. how much is timed
    timer = _plan_timing(target_model, draft, traced.prompt, progress, quick=quick, seconds=seconds)
    # 2. a tree of each size: what it accepts, and how long its step takes
    with progress.phase("fitting trees", ticking=True):
        rated = _rated_trees(conversations, traced.traces)
    by_size = _time_each_size(rated, timer)
    # 3. the best of them again, side by side with its rivals
    table = _time_rivals(by_size, traced, timer)
    # 4. the choice, by the table that is shown
    return TreeChoice(
        best=smallest_of_the_fastest(table.values()),
        sizes=list(table.values()),
        accuracy=head_accuracy(traced.traces),
        about={
            "conversations": len(conversations),
            "answers": len(traced.traces),
            "tokens": traced.tokens,
        },
        settings=DecodingSettings.of(target_model),
    )


@dataclass(frozen=True)
class _Timer:
    """Times steps with trees, all in the same way.

    Attributes:
        prompt: the prompt that is continued.
        quick: whether fewer steps of fewer trees are timed.
        deadline: on the clock of `time.perf_counter`, when no further round begins; None: never.
    """

    target_model: TargetModel
    draft: Draft
    progress: RunProgress
    prompt: list[int]
    quick: bool
    deadline: float | None

    def step_ms(self, trees: Sequence[Tree], *, briefly: bool = False) -> dict[Tree, float]:
        """Return the milliseconds of a step with each of `trees`, which take turns.

        Args:
            briefly: time few steps although the choice is thorough, if its time is limited.
        """
        effort = THOROUGH
        if self.quick or (briefly and self.deadline is not None):
            effort = QUICK
        return time_steps(
            self.target_model,
            self.draft,
            trees,
            prompt=self.prompt,
            progress=self.progress,
            effort=effort,
            deadline=self.deadline,
        )


def _plan_timing(
    target_model: TargetModel,
    draft: Draft,
    prompt: list[int],
    progress: RunProgress,
    *,
    quick: bool,
    seconds: float | None,
) -> _Timer:
    """Decide whether the choice is quick, and return what times its trees; see `choose_tree`."""
    started = time.perf_counter()
    # 1. the end of the prompt: it and what is timed fit the context
    longest = max(1, target_model.max_context - TIMED_TOKENS)
    prompt = prompt[-longest:]
    # 2. quick where it is asked for, or where the seconds are too few
    deadline: float | None = None
    if seconds is not None:
        deadline = started + seconds
        quick = quick or _must_be_quick(target_model, draft, prompt, progress, seconds)
    # 3. which also continues a shorter prompt
    if quick:
        prompt = prompt[-QUICK_PROMPT:]
    return _Timer(target_model, draft, progress, prompt, quick, deadline)


def _time_each_size(rated: Sequence[tuple[Tree, float]], timer: _Timer) -> dict[int, TreeCandidate]:
    """Return a candidate of each size, ascending; a quick timer times some, and the latencies of
    the others are interpolated.

    Args:
        rated: a tree of each size, with its tokens per step.
    """
    trees = [tree for tree, _ in rated]
    if timer.quick:
        trees = [tree for tree in trees if tree.size in QUICK_SIZES]
    latency = {tree.size: ms for tree, ms in timer.step_ms(trees, briefly=True).items()}
    by_size: dict[int, TreeCandidate] = {}
    for tree, rate in rated:
        by_size[tree.size] = TreeCandidate(tree, rate, interpolate(latency, tree.size))
    return by_size


def _time_rivals(
    by_size: Mapping[int, TreeCandidate], traced: TracedAnswers, timer: _Timer
) -> dict[int, TreeCandidate]:
    """Time the best of the candidates side by side with its rivals, and return the table of all, by
    size.

    Where another tree is the best then, it is timed with its own rivals, `SIDE_BY_SIDE` times at
    most. A round times the sizes of the round before again. Its table takes the first timings of
    the other sizes, and replaces the table of the round before.
    """
    table = dict(by_size)
    best = smallest_of_the_fastest(table.values())
    extra_sizes: Sequence[int] = LEVEL_SIZES
    if timer.quick:
        extra_sizes = ()
    for _ in range(SIDE_BY_SIDE):
        # 1. the best and its rivals
        sizes = sizes_to_time_again(list(by_size), best.tree.size, extra_sizes)
        rivals = _rivals(sizes, by_size, traced, timer.progress)
        # 2. all of them in turns
        step_ms = timer.step_ms([tree for tree, _ in rivals])
        timed = [TreeCandidate(tree, rate, step_ms[tree]) for tree, rate in rivals]
        # 3. done once the best was among them
        table = merge_timings(by_size, timed)
        best = smallest_of_the_fastest(table.values())
        if best.tree.size in sizes:
            break
        extra_sizes = sizes
    return table


def _rivals(
    sizes: Sequence[int],
    by_size: Mapping[int, TreeCandidate],
    traced: TracedAnswers,
    progress: RunProgress,
) -> list[tuple[Tree, float]]:
    """Return the candidates of `sizes` and shallower trees of these sizes, with their tokens per
    step.
    """
    candidates = [by_size[size] for size in sizes]
    rivals = [(candidate.tree, candidate.tokens_per_step) for candidate in candidates]
    with progress.phase("fitting trees", ticking=True):
        trees = [candidate.tree for candidate in candidates]
        rivals += _shallower(traced.conversations, traced.traces, trees)
    return rivals


def timing_budget(run_seconds: float) -> float:
    """Return the seconds that timing trees may take after a run of `run_seconds`."""
    return max(LEAST_TIMING_SECONDS, TIMING_SHARE * run_seconds)


def _must_be_quick(
    target_model: TargetModel,
    draft: Draft,
    prompt: list[int],
    progress: RunProgress,
    seconds: float,
) -> bool:
    """Return whether a thorough choice would take longer than `seconds`, and say so.

    Its time is estimated from two plain continuations of `prompt`.
    """
    started = time.perf_counter()
    effort = Effort(1, THOROUGH.steps)
    time_steps(target_model, draft, [Tree.empty()], prompt, progress, effort)
    continuation = (time.perf_counter() - started) / 2
    needed = continuation * THOROUGH_TREES * (THOROUGH.rounds + 1)
    if needed <= seconds:
        return False
    progress.print(
        f"timing fewer steps of fewer trees: all would take about {needed:.0f} s,"
        f" {seconds:.0f} s are left for it after this run; medusa-eval --calibrate times all"
    )
    return True


def merge_timings(
    first: Mapping[int, TreeCandidate], again: Sequence[TreeCandidate]
) -> dict[int, TreeCandidate]:
    """Return the fastest tree of each size on the scale of the second timing.

    The machine's speed may have changed between the two: trees that were not timed again take as
    much longer as those that were, by the median.

    Args:
        first: by ascending size. again: trees that were timed again, with their rivals.
    """
    # 1. how much slower the machine is now
    repeated = {candidate.tree: candidate for candidate in again}
    ratios: list[float] = []
    for candidate in first.values():
        if candidate.tree in repeated and candidate.tree.size:
            ratios.append(repeated[candidate.tree].step_ms / candidate.step_ms)
    drift = 1.0
    if ratios:
        drift = statistics.median(ratios)
    # 2. the fastest of each size that was timed again
    fastest: dict[int, TreeCandidate] = {}
    for candidate in again:
        size = candidate.tree.size
        if size not in fastest or candidate.tokens_per_s > fastest[size].tokens_per_s:
            fastest[size] = candidate
    # 3. the others on the same scale
    table: dict[int, TreeCandidate] = {}
    for size, candidate in first.items():
        if size in fastest:
            table[size] = fastest[size]
        else:
            table[size] = replace(candidate, step_ms=drift * candidate.step_ms)
    return table


# Which trees are timed?


def _rated_trees(
    conversations: Sequence[Sequence[Trace]], traces: Sequence[Trace]
) -> list[tuple[Tree, float]]:
    """Return the trees of `SIZES` by ascending size, with their tokens per step on conversations
    not fitted to.
    """
    rates = cross_validate(conversations, SIZES)
    fitted = fit_trees(traces, SIZES)
    # trees of several of `SIZES` are equal where no other guess was ever right
    rate_of: dict[Tree, float] = {}
    for size, tree in fitted.items():
        rate_of.setdefault(tree, rates[size])
    by_size = {tree.size: (tree, rate) for tree, rate in rate_of.items()}
    return [by_size[size] for size in sorted(by_size)]


def sizes_to_time_again(sizes: Sequence[int], best: int, levels: Sequence[int]) -> list[int]:
    """Return which of the ascending `sizes` are timed again, since they may be the fastest.

    They are `best` with its neighbours, `levels`, and 0, which is plain decoding.
    """
    index = sizes.index(best)
    neighbours = sizes[max(index - 1, 0) : index + 2]
    near = {*neighbours, *levels, 0}
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
    deepest = max(tree.max_depth for tree in trees)
    for depth in range(1, deepest):
        rates = cross_validate(conversations, sizes, depth)
        fitted = fit_trees(traces, sizes, depth)
        for tree in trees:
            shallow = fitted[tree.size]
            is_other = shallow not in trees and shallow.size == tree.size
            if is_other and depth < tree.max_depth:
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
    low = points[index - 1]
    high = points[index]
    share = (at - low) / (high - low)
    return (1 - share) * measured[low] + share * measured[high]


# Which candidate is best?


def smallest_of_the_fastest(candidates: Iterable[TreeCandidate]) -> TreeCandidate:
    """Return the smallest candidate within `NOISE` of the most tokens per second.

    Latencies are accurate to a few percent at best, and the largest of several nearly equal results
    is the luckiest one. Among equals a small tree loses least where text is harder or the machine
    busier.
    """

    def size_and_speed(candidate: TreeCandidate) -> tuple[int, float]:
        return candidate.tree.size, candidate.tokens_per_s

    by_size: dict[int, TreeCandidate] = {}
    for candidate in sorted(candidates, key=size_and_speed):
        by_size[candidate.tree.size] = candidate  # the fastest of each size
    most = max(candidate.tokens_per_s for candidate in by_size.values())
    enough = (1 - NOISE) * most
    return next(candidate for candidate in by_size.values() if candidate.tokens_per_s >= enough)
