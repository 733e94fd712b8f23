"""Choose the tree with the most tokens per second on this machine.

Candidate trees are fitted to path counts (`tree_fit`); here their step latencies are measured and one is chosen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from medusa_train.errors import MedusaError
from medusa_train.inference.decoding_form import DecodingForm
from medusa_train.inference.dynamic_fit import DynamicFit, fit_dynamic_trees
from medusa_train.inference.generate import Decoder
from medusa_train.inference.static_steps import supports_static_steps
from medusa_train.inference.traces import head_accuracy, tokens_per_step, trace_answers
from medusa_train.inference.tree_fit import TreeCandidate, fit_tree, shallower_trees
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.trees.tree import Tree

#: 0 is plain decoding without the draft, whose cost makes latency jump at 1: nothing is interpolated across the jump.
SIZES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)  # TensorRT-LLM accepts at most 63 nodes
#: Of these sizes less deep trees are always timed: where a level costs much, the deepest trees all are slow.
LEVEL_SIZES = (4, 8)
LATENCY_ROUNDS = 5
_LATENCY_TOKENS = 48
#: Relative differences in tokens per second below this are measurement noise.
NOISE = 0.02

Candidate = TypeVar("Candidate", bound=TreeCandidate)


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

    Trees are fitted to two thirds of the answers and rated on the others. The most frequent paths make deep trees, but
    each level costs time besides its nodes (one more head, or with drafts other than Medusa one more pass). So
    shallower trees of some sizes are measured too, see `sizes_of_second_round`.

    Args:
        max_new_tokens, token_budget, on_answer: see `trace_answers`. sizes: numbers of nodes to try.
        on_measured: see `measure_step_latency`.

    Raises:
        MedusaError: fewer than three prompts have an answer of at least two tokens.
    """
    answers = trace_answers(
        backbone, draft, prompts, max_new_tokens=max_new_tokens, token_budget=token_budget, on_answer=on_answer
    )
    traces = list(answers.values())
    if len(traces) < 3:
        raise MedusaError(f"choosing a tree needs at least 3 held-out prompts with an answer, got {len(traces)}")
    held_out = traces[2::3]
    fit = [trace for i, trace in enumerate(traces) if i % 3 != 2]
    prompt = median_prompt(backbone, prompts)

    def measure(trees: Sequence[Tree]) -> list[TreeCandidate]:
        latency = measure_step_latency(backbone, draft, trees, prompt, on_measured)
        return [
            TreeCandidate(tree, tokens_per_step(held_out, tree), ms) for tree, ms in zip(trees, latency, strict=True)
        ]

    deep = {tree.size: tree for tree in (fit_tree(fit, held_out, size) for size in sizes)}
    accuracy, tokens = head_accuracy(traces), sum(len(trace.ranks) for trace in traces)
    form = DecodingForm.of(backbone)
    by_size = measure([deep[size] for size in sorted(deep)])
    calibration = Calibration(by_size, accuracy, len(traces), tokens, form)
    near = sizes_of_second_round(sorted(deep), calibration.best.tree.size)
    shallow = [tree for size in near for tree in shallower_trees(deep[size], partial(fit_tree, fit, held_out))]
    # the deep trees are measured again in the same rounds, since latencies drift
    candidates = measure([*(deep[size] for size in near), *shallow])
    best = {candidate.tree.size: candidate for candidate in calibration.candidates} | fastest_by_size(candidates)
    dynamic = None
    if draft.guesses_at_once:
        dynamic = fit_dynamic_trees(traces, by_size, candidates, partial(fit_tree, fit, held_out))
    return replace(calibration, candidates=[best[size] for size in sorted(best)], dynamic=dynamic)


def sizes_of_second_round(sizes: Sequence[int], best: int) -> list[int]:
    """Return which of the ascending `sizes` are timed again, with less deep trees: those that may be the fastest.

    They are `best` with its neighbours, `LEVEL_SIZES`, and 0, which is plain decoding.
    """
    index = sizes.index(best)
    near = {*sizes[max(index - 1, 0) : index + 2], *LEVEL_SIZES, 0}
    return [size for size in sizes if size in near]


# What does a step cost?


def measure_step_latency(
    backbone: Backbone,
    draft: Draft,
    trees: Sequence[Tree],
    prompt: list[int],
    on_measured: Callable[[], None] | None = None,
) -> list[float]:
    """Measure the median milliseconds of a decoding step with each of `trees`.

    Trees take turns in rounds, so that drift affects all alike, and share one cache, so that a large backbone needs
    memory for one only. A draft's early exit is off: it makes steps faster, but also accepts less than rank paths say.

    Args:
        on_measured: called after each of the (LATENCY_ROUNDS + 1) * len(trees) continuations.

    Raises:
        MedusaError: `prompt` and the measured tokens exceed the model's context.
    """
    if len(prompt) + _LATENCY_TOKENS > backbone.max_context:
        raise MedusaError(
            f"a prompt of {len(prompt)} tokens and {_LATENCY_TOKENS} measured tokens exceed the model's context of "
            f"{backbone.max_context}"
        )
    capacity = len(prompt) + _LATENCY_TOKENS + max(tree.size for tree in trees) + 1
    static = supports_static_steps(backbone, draft)
    cache = backbone.new_static_cache(capacity) if static else backbone.new_cache(capacity)
    decoders = [Decoder(backbone, draft, tree, cache) for tree in trees]
    times: list[list[float]] = [[] for _ in trees]
    for round_ in range(LATENCY_ROUNDS + 1):
        for decoder, milliseconds in zip(decoders, times, strict=True):
            with draft.no_early_exit():
                step_ms = _later_step_ms(decoder, prompt)
            if round_:  # the first round is the warm-up
                milliseconds.append(step_ms)
            if on_measured is not None:
                on_measured()
    return [statistics.median(milliseconds) for milliseconds in times]


def _later_step_ms(decoder: Decoder, prompt: list[int]) -> float:
    """Return the mean milliseconds of the steps after the first, in which the draft also reads the prompt."""
    steps, started = 0, time.perf_counter()
    for index, _ in enumerate(decoder.stream(prompt, _LATENCY_TOKENS, eos_ids=())):
        if index == 1:  # 0 is the prefill
            started = time.perf_counter()
        steps = index - 1
    return 1000 * (time.perf_counter() - started) / max(steps, 1)


def median_prompt(backbone: Backbone, prompts: Sequence[list[int]]) -> list[int]:
    """Return the prompt of median length that `measure_step_latency` accepts; if none fits, the shortest one's end."""
    limit = backbone.max_context - _LATENCY_TOKENS
    fitting = sorted((prompt for prompt in prompts if len(prompt) <= limit), key=len)
    return fitting[len(fitting) // 2] if fitting else min(prompts, key=len)[-max(limit, 1) :]


# Which candidate is best?


def fastest_by_size(candidates: Iterable[Candidate]) -> dict[int, Candidate]:
    """Return the candidate with the most tokens per second of each size, by ascending size."""
    best: dict[int, Candidate] = {}
    for one in sorted(candidates, key=lambda one: (one.tree.size, one.tokens_per_s)):
        best[one.tree.size] = one
    return best


def smallest_of_the_fastest(candidates: Iterable[Candidate]) -> Candidate:
    """Return the smallest candidate within `NOISE` of the most tokens per second.

    Latencies are accurate to a few percent at best, and the largest of several nearly equal results is the luckiest
    one. Among equals a small tree loses least where text is harder or the machine busier.
    """
    by_size = fastest_by_size(candidates)
    enough = (1 - NOISE) * max(one.tokens_per_s for one in by_size.values())
    return next(one for one in by_size.values() if one.tokens_per_s >= enough)


@dataclass(frozen=True)
class Calibration:
    """The measured candidates and the data that they rest on.

    Attributes:
        candidates: the best one of each size, by ascending size.
        accuracy: top-1 .. top-10 of every head on greedy continuations, [K][10].
        answers, tokens: amount of text.
        form: in which the steps were timed.
        dynamic: the dynamic trees; None if they could not be fitted.
    """

    candidates: list[TreeCandidate]
    accuracy: list[list[float]]
    answers: int
    tokens: int
    form: DecodingForm | None = None
    dynamic: DynamicFit | None = None

    @property
    def best(self) -> TreeCandidate:
        """The candidate to decode with, see `smallest_of_the_fastest`."""
        return smallest_of_the_fastest(self.candidates)

    def describe(self) -> str:
        """Say what the best tree is expected to bring, and on which text that rests."""
        best, nodes = self.best, self.best.tree.size
        chosen = (
            f"with the chosen tree of {nodes} node{'' if nodes == 1 else 's'} ({best.step_ms:.1f} ms per step here)"
            if nodes
            else "no tree is clearly faster here, so tree.json is empty and decoding stays plain"
        )
        return (
            f"{best.tokens_per_step:.2f} tokens per step: {self.tokens:,} greedy tokens of the model itself, {chosen}"
        )

    def save(self, path: Path) -> None:
        """Write tree.json: `medusa_choices` of the best tree, with the measurements as further keys."""
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
                    "nodes": candidate.tree.size,
                    "tokens_per_step": round(candidate.tokens_per_step, 4),
                    "step_ms": round(candidate.step_ms, 4),
                    "tokens_per_s": round(candidate.tokens_per_s, 1),
                }
                for candidate in self.candidates
            ],
            **({} if self.form is None else self.form.record()),
            **({} if self.dynamic is None else self.dynamic.record()),
        )
