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


class Effort(NamedTuple):
    """How thoroughly steps are timed: rounds, and steps of each tree in each round."""

    rounds: int
    steps: int


THOROUGH, QUICK = Effort(5, 16), Effort(3, 5)


@dataclass(frozen=True)
class TreeChoice:
    """The chosen tree and everything that it was chosen from.

    Attributes:
        best: the chosen tree, of which the steps' latency is on the scale of `sizes`; empty for
            plain decoding, if no tree is clearly faster.
        sizes: trees by ascending size, fitted to all traces and rated on conversations that they
            were not fitted to; latencies are measured, or interpolated.
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
            f" fitted to others), {step}"
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
) -> TreeChoice:
    """Fit trees, time their steps, and choose the one with the most expected tokens per second.

    The trees of `SIZES` are timed first. Then the best of them, shallower trees of about its size
    and plain decoding are timed side by side, and one of them is chosen, see
    `smallest_of_the_fastest`. Every rate is cross-validated: a conversation is decoded with trees
    that were fitted to others.

    With `quick` fewer steps of fewer trees are timed.

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
    longest = min(
        QUICK_PROMPT if quick else len(traced.prompt), backbone.max_context - TIMED_TOKENS
    )
    prompt, effort = traced.prompt[-max(longest, 1) :], QUICK if quick else THOROUGH
    time_trees = partial(
        time_steps, backbone, draft, prompt=prompt, progress=progress, effort=effort
    )
    with progress.phase("fitting trees", ticking=True):
        rated = _rated_trees(conversations, traces)
    steps = time_trees([tree for tree, _ in rated if not quick or tree.size in QUICK_SIZES])
    latency = {tree.size: ms for tree, ms in steps.items()}
    by_size = {
        tree.size: TreeCandidate(tree, rate, interpolate(latency, tree.size))
        for tree, rate in rated
    }
    near = sizes_to_time_again(
        list(by_size),
        smallest_of_the_fastest(by_size.values()).tree.size,
        () if quick else LEVEL_SIZES,
    )
    with progress.phase("fitting trees", ticking=True):
        rivals = [(by_size[nodes].tree, by_size[nodes].tokens_per_step) for nodes in near]
        rivals += _shallower(conversations, traces, [by_size[nodes].tree for nodes in near])
    again = time_trees([tree for tree, _ in rivals])
    chosen = smallest_of_the_fastest(
        [TreeCandidate(tree, rate, again[tree]) for tree, rate in rivals]
    )
    # both rounds timed the deep tree of that size, so drift between them cancels out
    nodes = chosen.tree.size
    best = replace(
        chosen, step_ms=by_size[nodes].step_ms * chosen.step_ms / again[by_size[nodes].tree]
    )
    return TreeChoice(
        best,
        [best if size == nodes else one for size, one in by_size.items()],
        head_accuracy(traces),
        {"conversations": len(conversations), "answers": len(traces), "tokens": traced.tokens},
        DecodingSettings.of(backbone),
    )


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
) -> dict[Tree, float]:
    """Return the median milliseconds of a decoding step with each of `trees`.

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
