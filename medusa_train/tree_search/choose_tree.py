"""Choose the tree with the most tokens per second on this machine, and write tree.json.

Trees are fitted to traces (`fit`) and rated on answers that they were not fitted to. `time_steps`
measures how long their steps take, all trees in turns. The smallest tree within `NOISE` of the most
tokens per second is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

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
from medusa_train.tree_search.time_steps import (
    QUICK,
    THOROUGH,
    TIMED_TOKENS,
    Effort,
    time_steps,
)
from medusa_train.tree_search.traces import Prompts, TracedAnswers, trace_conversations
from medusa_train.trees.tree import Tree

#: Sizes of the trees that are timed; 0 is plain decoding. TensorRT-LLM accepts at most 63 nodes.
SIZES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)
#: For these sizes, trees of smaller depth are timed too: if a level is expensive, all deep trees
#: are slow.
LEVEL_SIZES = (4, 8, 16)
#: `SIZES` and `LEVEL_SIZES` if there is too little time to time all trees.
FEW_SIZES = (0, 1, 2, 4, 8, 16, 32, 63)
FEW_LEVEL_SIZES = (4,)
#: Longest calibration answer in tokens. Answers are shorter if the token budget is too small for
#: eight of them.
ANSWER_TOKENS = 256
#: If the time is limited, only this many last tokens of the prompt are prefilled in every round.
QUICK_PROMPT = 64
MIN_CONVERSATIONS = 3
#: Relative differences in tokens per second below this are measurement noise.
NOISE = 0.02
#: Timing trees may take this share of the run's seconds so far.
TIMING_SHARE = 0.1
#: Timing trees may always take this many seconds.
LEAST_TIMING_SECONDS = 10.0


@dataclass(frozen=True)
class TreeChoice:
    """The chosen tree and everything that it was chosen from.

    Attributes:
        best: one of `sizes`: the smallest tree within `NOISE` of the most tokens per second. It is
            the empty tree (plain decoding) if no tree is clearly faster.
        sizes: the fastest tree of each size, ascending. The trees are fitted to all traces; their
            rates are cross-validated.
        accuracy: top-1 to top-10 accuracy per head, [K][10].
        about: number of conversations, answers and tokens that the choice is based on.
        settings: decoding settings with which the steps were timed.
    """

    best: TreeCandidate
    sizes: Sequence[TreeCandidate]
    accuracy: Sequence[Sequence[float]]
    about: Mapping[str, int]
    settings: DecodingSettings

    def describe(self) -> str:
        """Describe the chosen tree and its expected acceptance and latency."""
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

    def save(self, directory: Path, traced: TracedAnswers) -> Path:
        """Write tree.json (`medusa_choices` and the measurements), and the traces next to it;
        return the path of tree.json.
        """
        traced.save(directory / TREE_TRACES)
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
    """Let the target model answer prompts greedily until there are `token_budget` tokens, and trace
    the answers.
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
    seconds: float | None = None,
) -> TreeChoice:
    """Fit trees, time their steps, and choose the one with the most expected tokens per second.

    Every rate is cross-validated: decoding of a conversation is simulated with trees that were
    fitted to other conversations.

    Args:
        target_model: verifies the nodes.
        draft: the draft to choose a tree for.
        traced: the traced answers.
        progress: reports the phases.
        seconds: time limit for timing. With a limit, fewer steps are timed, and fewer trees if all
            of them would take longer; no round starts after it. None: no limit.

    Raises:
        MedusaError: there are fewer than `MIN_CONVERSATIONS` conversations.
    """
    conversations = traced.conversations
    if len(conversations) < MIN_CONVERSATIONS:
        raise MedusaError(
            f"choosing a tree needs {MIN_CONVERSATIONS} or more answered chats, got"
            f" {len(conversations)}"
        )
    # 1. candidate trees, with the tokens per step of each
    with progress.phase("fitting trees", ticking=True):
        rated = rated_trees(conversations, SIZES, LEVEL_SIZES)
    # 2. how long their steps take after the prompt, which is cut so that the timed tokens fit the
    # context
    longest = max(1, target_model.max_context - TIMED_TOKENS)
    prompt = traced.prompt[-longest:]
    effort = THOROUGH
    deadline: float | None = None
    if seconds is not None:
        prompt, effort = prompt[-QUICK_PROMPT:], QUICK
        deadline = time.perf_counter() + seconds
        if not _all_fit(target_model, draft, prompt, progress, len(rated), seconds):
            rated = rated_trees(conversations, FEW_SIZES, FEW_LEVEL_SIZES)
    step_ms = time_steps(target_model, draft, list(rated), prompt, progress, effort, deadline)
    # 3. the choice, from the same table that is reported
    candidates = [TreeCandidate(tree, rate, step_ms[tree]) for tree, rate in rated.items()]
    sizes = fastest_of_each_size(candidates)
    return TreeChoice(
        best=smallest_of_the_fastest(sizes),
        sizes=sizes,
        accuracy=head_accuracy(traced.traces),
        about={
            "conversations": len(conversations),
            "answers": len(traced.traces),
            "tokens": traced.tokens,
        },
        settings=DecodingSettings.of(target_model),
    )


def timing_budget(run_seconds: float) -> float:
    """Return the seconds that timing trees may take after a run of `run_seconds`."""
    return max(LEAST_TIMING_SECONDS, TIMING_SHARE * run_seconds)


def rated_trees(
    conversations: Sequence[Sequence[Trace]], sizes: Sequence[int], level_sizes: Sequence[int]
) -> dict[Tree, float]:
    """Return trees of these `sizes`, and trees of `level_sizes` with smaller depths, with the
    cross-validated tokens per step of each.
    """
    traces = list(chain.from_iterable(conversations))
    rated: dict[Tree, float] = {}

    def add(some_sizes: Sequence[int], max_depth: int | None = None) -> None:
        rates = cross_validate(conversations, some_sizes, max_depth)
        # trees of several sizes are equal if no further token was ever right; keep the first rate
        for size, tree in fit_trees(traces, some_sizes, max_depth).items():
            rated.setdefault(tree, rates[size])

    add(sizes)
    deepest = max(tree.max_depth for tree in rated)
    for max_depth in range(1, deepest):
        add([size for size in level_sizes if size in sizes], max_depth)
    return rated


def _all_fit(
    target_model: TargetModel,
    draft: Draft,
    prompt: list[int],
    progress: RunProgress,
    num_trees: int,
    seconds: float,
) -> bool:
    """Return whether all trees can be timed within `seconds`; if not, print a message.

    The time is estimated from two plain continuations of `prompt`.
    """
    started = time.perf_counter()
    effort = Effort(1, QUICK.steps)
    time_steps(target_model, draft, [Tree.empty()], prompt, progress, effort)
    continuation = (time.perf_counter() - started) / 2
    needed_seconds = continuation * num_trees * (QUICK.rounds + 1)
    if needed_seconds <= seconds:
        return True
    progress.print(
        f"timing fewer trees: all would take about {needed_seconds:.0f} s, {seconds:.0f} s are left"
        " for it after this run; medusa-eval --calibrate times all"
    )
    return False


def fastest_of_each_size(candidates: Iterable[TreeCandidate]) -> list[TreeCandidate]:
    """Return for each size the candidate with the most tokens per second, by ascending size."""

    def size_and_speed(candidate: TreeCandidate) -> tuple[int, float]:
        return candidate.tree.size, candidate.tokens_per_s

    fastest_by_size = {
        candidate.tree.size: candidate for candidate in sorted(candidates, key=size_and_speed)
    }
    return list(fastest_by_size.values())


def smallest_of_the_fastest(candidates: Sequence[TreeCandidate]) -> TreeCandidate:
    """Return the smallest candidate within `NOISE` of the most tokens per second.

    Latencies are accurate to a few percent at best, so the best of several nearly equal results is
    partly luck. Among nearly equal trees, a small one loses least if text is harder to predict or
    the machine is busier.
    """
    enough = (1 - NOISE) * max(candidate.tokens_per_s for candidate in candidates)
    fast = [candidate for candidate in candidates if candidate.tokens_per_s >= enough]
    return min(fast, key=lambda candidate: candidate.tree.size)
