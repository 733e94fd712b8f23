"""The best tree for these heads on this machine: rank-path counts and measured latency; knows no data set."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from medusa_train.errors import MedusaError
from medusa_train.inference.generate import Decoder
from medusa_train.inference.traces import head_accuracy, tokens_per_step, trace_answers
from medusa_train.inference.tree_fit import fit_tree, shallower_trees
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.trees.tree import Tree

SIZES = (0, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)  # TensorRT-LLM takes 63 at most

_LATENCY_TOKENS = 48

LATENCY_ROUNDS = 5

NOISE = 0.02  # share of tokens per second by which measured latencies make equal trees differ


@dataclass(frozen=True)
class TreeCandidate:
    """One candidate: a tree of n nodes, what it brings and what it costs.

    Attributes:
        tokens_per_step: simulated on answers that the tree was not fitted to. step_ms: measured latency.
    """

    tree: Tree
    tokens_per_step: float
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        """What decoding would reach, prefill left out."""
        return 1000 * self.tokens_per_step / self.step_ms


@dataclass(frozen=True)
class Calibration:
    """Every candidate, the chosen one, and how well the heads guess.

    Attributes:
        candidates: by rising size. accuracy: top-1 .. top-10 per head on greedy continuations, [K][10].
        answers, tokens: how much text this rests on.
    """

    candidates: list[TreeCandidate]
    accuracy: list[list[float]]
    answers: int
    tokens: int

    @property
    def best(self) -> TreeCandidate:
        """The smallest candidate within `NOISE` of the most expected tokens per second.

        Latencies are measured to a few percent at best, and the largest of several nearly equal figures is the
        luckiest one; among equals a small tree loses least where text is harder or the machine busier than here.
        """
        enough = (1 - NOISE) * max(choice.tokens_per_s for choice in self.candidates)
        return next(choice for choice in self.candidates if choice.tokens_per_s >= enough)

    def save(self, path: Path) -> None:
        """Write tree.json: `medusa_choices`, and how they came about."""
        best = self.best
        best.tree.save(
            path,
            nodes=best.tree.size,
            tokens_per_step=round(best.tokens_per_step, 4),
            step_ms=round(best.step_ms, 4),
            head_accuracy=[[round(share, 4) for share in row] for row in self.accuracy],
            calibration={"answers": self.answers, "tokens": self.tokens},
            sizes=[
                {
                    "nodes": c.tree.size,
                    "tokens_per_step": round(c.tokens_per_step, 4),
                    "step_ms": round(c.step_ms, 4),
                    "tokens_per_s": round(c.tokens_per_s, 1),
                }
                for c in self.candidates
            ],
        )


def measure_step_latency(
    backbone: Backbone,
    draft: Draft,
    trees: Sequence[Tree],
    prompt: list[int],
    on_measured: Callable[[], None] | None = None,
) -> list[float]:
    """Median milliseconds of a decoding step with each of `trees`, measured in turns so that drift hits all alike.

    All share one cache, so that a large backbone needs room for one only. Trees are filled whole: a draft that stops
    early takes less, and accepts less than the ranks of its guesses say.

    Args:
        on_measured: called after each of the (LATENCY_ROUNDS + 1) * len(trees) continuations.

    Raises:
        MedusaError: `prompt` leaves no room for `_LATENCY_TOKENS` tokens in the context.
    """
    if len(prompt) + _LATENCY_TOKENS > backbone.max_context:
        raise MedusaError(f"a prompt of {len(prompt)} tokens leaves no room to time steps in")
    cache = backbone.new_cache(len(prompt) + _LATENCY_TOKENS + max(tree.size for tree in trees) + 1)
    decoders = [Decoder(backbone, draft, tree, cache) for tree in trees]
    times: list[list[float]] = [[] for _ in trees]
    for round_ in range(LATENCY_ROUNDS + 1):
        for decoder, seen in zip(decoders, times, strict=True):
            with draft.no_early_exit():
                out = decoder.generate(prompt, _LATENCY_TOKENS, eos_ids=())
            if round_:  # the first round warms up
                seen.append(1000 * (out.seconds - out.prefill_seconds) / max(out.steps, 1))
            if on_measured is not None:
                on_measured()
    return [statistics.median(seen) for seen in times]


def median_prompt(backbone: Backbone, prompts: Sequence[list[int]]) -> list[int]:
    """The prompt of median length among those that leave room to time steps in; else the end of the shortest."""
    room = backbone.max_context - _LATENCY_TOKENS
    fitting = sorted((prompt for prompt in prompts if len(prompt) <= room), key=len)
    return fitting[len(fitting) // 2] if fitting else min(prompts, key=len)[-max(room, 1) :]


def calibrate(
    backbone: Backbone,
    draft: Draft,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 256,
    token_budget: int = 6000,
    sizes: Sequence[int] = SIZES,
    on_answer: Callable[[int], None] | None = None,
    on_measured: Callable[[], None] | None = None,
) -> Calibration:
    """Find the tree with the most expected tokens per second for `draft` on this machine.

    Two of three answers are fitted to, the third judges (DESIGN: joint rank paths, SPEC 1: sparse tree search). The
    most frequent paths make deep trees, and each level costs time beyond its nodes' (a head more, or with other drafts
    than Medusa a pass); so shallower trees are timed too, of the best size and of its neighbours.

    Raises:
        MedusaError: fewer than three prompts with an answer of two tokens or more.
    """
    traces = trace_answers(
        backbone, draft, prompts, max_new_tokens=max_new_tokens, token_budget=token_budget, on_answer=on_answer
    )
    if len(traces) < 3:
        raise MedusaError(f"only {len(traces)} answers to choose a tree from; it takes three or more held-out prompts")
    held_out = traces[2::3]
    fit = [trace for i, trace in enumerate(traces) if i % 3 != 2]
    prompt = median_prompt(backbone, prompts)

    def timed(trees: Sequence[Tree]) -> list[TreeCandidate]:
        latency = measure_step_latency(backbone, draft, trees, prompt, on_measured)
        return [
            TreeCandidate(tree, tokens_per_step(held_out, tree), ms) for tree, ms in zip(trees, latency, strict=True)
        ]

    deep = {tree.size: tree for tree in (fit_tree(fit, held_out, size) for size in sizes)}
    about = (len(traces), sum(len(trace.ranks) for trace in traces))
    accuracy = head_accuracy(traces)
    found = Calibration(timed([deep[size] for size in sorted(deep)]), accuracy, *about)
    near = neighbours(sorted(deep), found.best.tree.size)
    flat = [tree for size in near for tree in shallower_trees(deep[size], partial(fit_tree, fit, held_out))]
    if not flat:
        return found
    again = timed([*(deep[size] for size in near), *flat])  # in the same turns, to compare like with like
    best = {choice.tree.size: choice for choice in found.candidates}
    best |= {size: max((c for c in again if c.tree.size == size), key=lambda c: c.tokens_per_s) for size in near}
    return Calibration([best[size] for size in sorted(best)], accuracy, *about)


def neighbours(sizes: Sequence[int], best: int) -> list[int]:
    """`best` with the size before and the one behind it; `sizes` ascend."""
    place = sizes.index(best)
    return list(sizes[max(place - 1, 0) : place + 2])
