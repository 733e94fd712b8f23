"""The best tree for these heads on this machine: rank-path counts and measured latency; knows no data set."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from medusa_train.errors import MedusaError
from medusa_train.inference.generate import Decoder
from medusa_train.inference.traces import AcceptedLength, Trace, head_accuracy, tokens_per_step, trace_answers
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.trees.tree import Ranks, Tree

SIZES = (0, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)  # TensorRT-LLM takes 63 at most
_REFITS = 3
_LATENCY_TOKENS = 48
_LATENCY_ROUNDS = 5


NOISE = 0.02  # share of tokens per second by which measured latencies make equal trees differ


@dataclass(frozen=True)
class TreeChoice:
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
        choices: by rising size. accuracy: top-1 .. top-10 per head on greedy continuations, [K][10].
        answers, tokens: how much text this rests on.
    """

    choices: list[TreeChoice]
    accuracy: list[list[float]]
    answers: int
    tokens: int

    @property
    def best(self) -> TreeChoice:
        """The smallest candidate within `NOISE` of the most expected tokens per second.

        Latencies are measured to a few percent at best, and the largest of several nearly equal figures is the
        luckiest one; among equals a small tree loses least where text is harder or the machine busier than here.
        """
        enough = (1 - NOISE) * max(choice.tokens_per_s for choice in self.choices)
        return next(choice for choice in self.choices if choice.tokens_per_s >= enough)

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
                for c in self.choices
            ],
        )


def count_paths(traces: Sequence[Trace], starts: Iterable[Sequence[int]] | None = None) -> Counter[Ranks]:
    """How often each rank path is a prefix of what came next, over all positions or those in `starts`."""
    whole: Counter[Ranks] = Counter()
    places = starts if starts is not None else [range(len(trace.ranks) - 1) for trace in traces]
    for trace, chosen in zip(traces, places, strict=True):
        whole.update(trace.path(place) for place in chosen)
    counts: Counter[Ranks] = Counter()
    for path, times in whole.items():
        for depth in range(1, len(path) + 1):
            counts[path[:depth]] += times
    return counts


def most_frequent(counts: Counter[Ranks], size: int, depth: int | None = None) -> Tree:
    """The `size` most frequent paths, of `depth` tokens at most, ties to the shallower.

    A path is counted whenever a longer one below it is, so the result is prefix-closed, and it maximises the mean
    accepted length over the counted positions without assuming that heads err independently.
    """
    within = counts if depth is None else [path for path in counts if len(path) <= depth]
    ranked = sorted(within, key=lambda path: (-counts[path], len(path), path))
    return Tree.from_paths(ranked[:size])


def fit_tree(fit: Sequence[Trace], held_out: Sequence[Trace], size: int, depth: int | None = None) -> Tree:
    """The best tree of `size` nodes, and of `depth` at most, found from `fit`, chosen on `held_out`.

    Steps start only where the step before ended, so after a first count over all positions the paths are counted
    again where decoding with the last tree would start. Rare paths overfit, so held-out steps decide.
    """
    tree = most_frequent(count_paths(fit), size, depth)
    found = [tree]
    for _ in range(_REFITS - 1):
        reach = AcceptedLength(tree)
        tree = most_frequent(count_paths(fit, [trace.walk(reach) for trace in fit]), size, depth)
        if tree.size == size and tree not in found:
            found.append(tree)
    return max(found, key=lambda candidate: tokens_per_step(held_out, candidate))


def step_latency(backbone: Backbone, draft: Draft, trees: Sequence[Tree], prompt: list[int]) -> list[float]:
    """Median milliseconds of a decoding step with each of `trees`, measured in turns so that drift hits all alike.

    All share one cache, so that a large backbone needs room for one only. Trees are filled whole: a draft that stops
    early takes less, and accepts less than the ranks of its guesses say.

    Raises:
        MedusaError: `prompt` leaves no room for `_LATENCY_TOKENS` tokens in the context.
    """
    if len(prompt) + _LATENCY_TOKENS > backbone.max_context:
        raise MedusaError(f"a prompt of {len(prompt)} tokens leaves no room to time steps in")
    cache = backbone.new_cache(len(prompt) + _LATENCY_TOKENS + max(tree.size for tree in trees) + 1)
    decoders = [Decoder(backbone, draft, tree, cache) for tree in trees]
    times: list[list[float]] = [[] for _ in trees]
    for round_ in range(_LATENCY_ROUNDS + 1):
        for decoder, seen in zip(decoders, times, strict=True):
            with draft.whole_trees():
                out = decoder.generate(prompt, _LATENCY_TOKENS, eos_ids=())
            if round_:  # the first round warms up
                seen.append(1000 * (out.seconds - out.prefill_seconds) / max(out.steps, 1))
    return [statistics.median(seen) for seen in times]


def typical_prompt(backbone: Backbone, prompts: Sequence[list[int]]) -> list[int]:
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
    prompt = typical_prompt(backbone, prompts)

    def timed(trees: Sequence[Tree]) -> list[TreeChoice]:
        latency = step_latency(backbone, draft, trees, prompt)
        return [TreeChoice(tree, tokens_per_step(held_out, tree), ms) for tree, ms in zip(trees, latency, strict=True)]

    deep = {tree.size: tree for tree in (fit_tree(fit, held_out, size) for size in sizes)}
    about = (len(traces), sum(len(trace.ranks) for trace in traces))
    accuracy = head_accuracy(traces)
    found = Calibration(timed([deep[size] for size in sorted(deep)]), accuracy, *about)
    near = neighbours(sorted(deep), found.best.tree.size)
    flat = [tree for size in near for tree in shallower(deep[size], partial(fit_tree, fit, held_out))]
    if not flat:
        return found
    again = timed([*(deep[size] for size in near), *flat])  # in the same turns, to compare like with like
    best = {choice.tree.size: choice for choice in found.choices}
    best |= {size: max((c for c in again if c.tree.size == size), key=lambda c: c.tokens_per_s) for size in near}
    return Calibration([best[size] for size in sorted(best)], accuracy, *about)


def neighbours(sizes: Sequence[int], best: int) -> list[int]:
    """`best` with the size before and the one behind it; `sizes` ascend."""
    place = sizes.index(best)
    return list(sizes[max(place - 1, 0) : place + 2])


def shallower(tree: Tree, fit: Callable[[int, int], Tree]) -> list[Tree]:
    """Trees of the same size and of every smaller depth that holds so many nodes; `fit` makes them of both."""
    found = [fit(tree.size, depth) for depth in range(1, tree.max_depth)]
    return [flat for flat in found if flat.size == tree.size]


#: The answers of one conversation.
Talk = Sequence[Trace]
#: Trees by their number of nodes, fitted to traces.
Search = Callable[[Sequence[Trace], Sequence[int]], dict[int, Tree]]

FOLDS = 4


def joint_trees(traces: Sequence[Trace], sizes: Sequence[int], depth: int | None = None) -> dict[int, Tree]:
    """The best trees, of `depth` at most, that are known here: from counts of rank paths (`calibrate.fit_tree`).

    The independent tree of the same size competes, so that few data do no harm: its products of accuracies rest on
    more of them than the counts of rare paths do.
    """
    others = independent_trees(traces, sizes, depth)
    found = {}
    for size in sizes:
        tree = fit_tree(traces, traces, size, depth)
        found[size] = max(tree, others[size], key=lambda candidate: tokens_per_step(traces, candidate))
    return found


def independent_trees(traces: Sequence[Trace], sizes: Sequence[int], depth: int | None = None) -> dict[int, Tree]:
    """The paper's sparse trees: nodes by the product of their heads' accuracies (Medusa, section 2.3.3; SPEC 1).

    a_k(i) is how often head k's i-th guess is right. Node after node, the one with the largest product of all that
    are connected is added, as if heads erred independently of each other.
    """
    best = list(itertools.islice(_by_product(head_accuracy(traces)[:depth]), max(sizes, default=0)))
    return {size: Tree.from_paths(best[:size]) for size in sizes}


def _by_product(top: Sequence[Sequence[float]]) -> Iterator[Ranks]:
    """Paths by falling product of accuracies; `top` [K][R] are top-1 .. top-R accuracies, so shares are differences.

    A path's product is at most its parent's, so parents come first.
    """
    shares = [[row[0], *(b - a for a, b in itertools.pairwise(row))] for row in top]
    waiting: list[tuple[float, Ranks]] = []
    if shares:
        waiting = [(-share, (rank,)) for rank, share in enumerate(shares[0])]
    heapq.heapify(waiting)
    while waiting:
        product, path = heapq.heappop(waiting)
        yield path
        if len(path) < len(shares):
            for rank, share in enumerate(shares[len(path)]):
                heapq.heappush(waiting, (product * share, (*path, rank)))


def dense_trees(traces: Sequence[Trace], sizes: Sequence[int]) -> dict[int, Tree]:
    """For each size the best Cartesian tree of at most so many nodes (Medusa, section 2.1.2)."""
    limit = max(sizes, default=0)
    rated = [(tokens_per_step(traces, tree), tree) for tree in _cartesian(traces, limit)]
    found = {}
    for size in sizes:
        fitting = [(rate, tree) for rate, tree in rated if tree.size <= size]
        found[size] = max(fitting, key=lambda pair: (pair[0], -pair[1].size))[1]
    return found


def _cartesian(traces: Sequence[Trace], limit: int) -> Iterator[Tree]:
    """All Cartesian trees of at most `limit` nodes whose deeper levels branch no wider than the ones above."""
    heads = len(traces[0].ranks[0]) if traces else 0
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        choices = waiting.pop()
        tree = Tree.cartesian(choices)
        yield tree
        if len(choices) == heads:
            continue
        leaves = 1
        for count in choices:
            leaves *= count
        for count in range(1, min(choices[-1] if choices else limit, 10) + 1):
            if tree.size + leaves * count <= limit:
                waiting.append((*choices, count))


def chain_trees(traces: Sequence[Trace], sizes: Sequence[int]) -> dict[int, Tree]:
    """The chain of first guesses, as long as size and heads allow: what a loader without trees gets."""
    heads = len(traces[0].ranks[0]) if traces else 0
    return {size: Tree.chain(min(size, heads)) for size in sizes}


SEARCHES: dict[str, Search] = {
    "joint": joint_trees,
    "independent": independent_trees,
    "dense": dense_trees,
    "chain": chain_trees,
}


@dataclass(frozen=True)
class Simulated:
    """Tokens per step of one search's trees, by their size, on talks that none of them was fitted to."""

    search: str
    by_size: dict[int, float]


def compare_searches(
    talks: Sequence[Talk],
    sizes: Iterable[int] = range(4, 64),
    searches: Mapping[str, Search] = SEARCHES,
    folds: int = FOLDS,
) -> list[Simulated]:
    """What each search's trees are worth on new text, by cross-fitting.

    The talks are dealt into `folds` parts; each part is decoded on paper with the trees that were fitted to all the
    others, whole conversations at a time, and tokens and steps are summed over the parts.

    Raises:
        ValueError: fewer talks than two.
    """
    if len(talks) < 2:
        raise ValueError("it takes two conversations: one to fit a tree to, one to judge it by")
    wanted = sorted(set(sizes))
    parts = [list(talks[start :: min(folds, len(talks))]) for start in range(min(folds, len(talks)))]
    tokens = 0
    steps = {name: dict.fromkeys(wanted, 0) for name in searches}
    for place, part in enumerate(parts):
        judge = [trace for talk in part for trace in talk]
        fit = [trace for other, talks_ in enumerate(parts) if other != place for talk in talks_ for trace in talk]
        tokens += sum(len(trace.ranks) - 1 for trace in judge)
        for name, find in searches.items():
            for size, tree in find(fit, wanted).items():
                reach = AcceptedLength(tree)
                steps[name][size] += sum(len(trace.walk(reach)) for trace in judge)
    return [Simulated(name, {size: tokens / max(count, 1) for size, count in steps[name].items()}) for name in searches]
