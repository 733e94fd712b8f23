"""Simulate what a tree accepts along traced answers, fit the best tree of each size, and estimate
its tokens per step on new text.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from medusa_train.trees.tree import Ranks, Tree

#: Number of a head's best tokens that can become nodes, ranks 0 to 9. Lower-ranked tokens are never
#: worth a node (published trees end at rank 9 too).
MAX_RANK = 10
#: Number of parts in cross-validation.
_FOLDS = 3


# What does a tree accept?


@dataclass(frozen=True)
class Trace:
    """The ranks of an answer's tokens among the heads' predictions; the answer is greedy, by the
    target model.

    Attributes:
        ranks: [tokens][K]. If token p of the answer is the root, head k = 1 .. K predicts token
            p + k. `ranks[p][k - 1]` is the rank of the answer's token p + k among that head's
            predictions, 0 for the best one; -1 if it is not among the best `MAX_RANK`, or if the
            answer ends before it. Heads count from 1 as in `losses.objective`, indices from 0.
        confidence: probability of head 1's best token, [tokens - 1], for drafts that stop early;
            empty for other drafts. It is not saved next to tree.json.
    """

    ranks: list[list[int]]
    confidence: Sequence[float] = field(default=(), compare=False)

    def path(self, start: int) -> Ranks:
        """Return the ranks of the tokens after `start`, up to the first miss: the path that an
        unlimited tree would accept.
        """
        return self._paths[start]

    @cached_property
    def _paths(self) -> list[Ranks]:
        """The `path` of every position, cached because a tree search reads it hundreds of times."""
        paths: list[Ranks] = []
        for ranks in self.ranks:
            hits = itertools.takewhile(lambda rank: rank >= 0, ranks)
            paths.append(tuple(hits))
        return paths

    def simulate(self, tree: Tree | AcceptedLength) -> list[int]:
        """Simulate decoding with `tree`: return the positions at which its steps start."""
        accepted = tree
        if isinstance(accepted, Tree):
            accepted = AcceptedLength(accepted)
        paths = self._paths
        end = len(self.ranks) - 1
        starts: list[int] = []
        position = 0
        while position < end:
            starts.append(position)
            position += accepted[paths[position]] + 1
        return starts


class AcceptedLength(dict[Ranks, int]):
    """How many tokens of a path of ranks a tree accepts; computed once per path."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._nodes = set(tree.paths)

    def __missing__(self, path: Ranks) -> int:
        accepted = 0
        while accepted < len(path) and path[: accepted + 1] in self._nodes:
            accepted += 1
        self[path] = accepted
        return accepted


def tokens_per_step(traces: Sequence[Trace], tree: Tree) -> float:
    """Return the mean acceptance length of `tree` on `traces`. The first token of an answer comes
    from the prefill and is not counted.
    """
    accepted = AcceptedLength(tree)
    steps = sum(len(trace.simulate(accepted)) for trace in traces)
    tokens = sum(len(trace.ranks) - 1 for trace in traces)
    if not steps:
        return 1.0
    return tokens / steps


def node_acceptance(traces: Sequence[Trace], tree: Tree) -> list[float] | None:
    """Simulate decoding the traced answers with `tree`; return the share of steps that accept each
    node, in the order of `tree.paths`.

    None if there are no steps.
    """
    steps = 0
    accepted: Counter[Ranks] = Counter()
    lengths = AcceptedLength(tree)
    for trace in traces:
        starts = trace.simulate(lengths)
        steps += len(starts)
        for start in starts:
            path = trace.path(start)
            accepted.update(path[:depth] for depth in range(1, len(path) + 1))
    if not steps:
        return None
    return [accepted[path] / steps for path in tree.paths]


def head_accuracy(traces: Sequence[Trace]) -> list[list[float]]:
    """Return the top-1 .. top-10 accuracy of every head over all positions that have a target,
    [K][10].
    """
    if not traces:
        return []
    table: list[list[float]] = []
    for k in range(len(traces[0].ranks[0])):
        # head k + 1: how often the target has each rank. The last k + 1 positions of an answer have
        # no target
        count = 0
        hits: Counter[int] = Counter()
        for trace in traces:
            ranks_of_targets = trace.ranks[: -k - 1]
            count += len(ranks_of_targets)
            hits.update(ranks[k] for ranks in ranks_of_targets)
        # ranks below 1, 2, ..., 10
        top_hits = itertools.accumulate(hits[rank] for rank in range(MAX_RANK))
        table.append([top / max(count, 1) for top in top_hits])
    return table


@dataclass(frozen=True)
class TreeCandidate:
    """A fixed tree with its acceptance and its cost.

    Attributes:
        tree: the tree.
        tokens_per_step: mean acceptance length, cross-validated by simulation.
        step_ms: measured latency in milliseconds.
    """

    tree: Tree
    tokens_per_step: float
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Expected decoding speed without the prefill."""
        return 1000 * self.tokens_per_step / self.step_ms


# Which tree of a given size is best?


def fit_trees(
    traces: Sequence[Trace], sizes: Sequence[int], max_depth: int | None = None
) -> dict[int, Tree]:
    """Return sparse trees by size (Medusa, Searching for the Optimized Tree Construction), at most
    `max_depth` deep.

    Let a_k(i) be the accuracy of head k's i-th best token. Nodes are added greedily by the product
    of the accuracies on their path, which assumes that heads err independently. A tree has fewer
    than `size` nodes if no further token was ever right.
    """
    # 1. a_k(i): the difference of neighboring top-1 .. top-10 accuracies
    accuracy: list[list[float]] = []
    for top in head_accuracy(traces)[:max_depth]:
        single = [later - earlier for earlier, later in itertools.pairwise(top)]
        accuracy.append([top[0], *single])
    # 2. the paths with the largest products
    paths: list[Ranks] = []
    largest = max(sizes, default=0)
    for product, path in paths_by_product(accuracy):
        if product <= 0 or len(paths) == largest:
            break
        paths.append(path)
    return {size: Tree.from_paths(paths[:size]) for size in sizes}


def paths_by_product(probabilities: Sequence[Sequence[float]]) -> Iterator[tuple[float, Ranks]]:
    """Yield paths and the product of the probabilities along each, the largest product first.
    Parents precede children.

    A path's product is never larger than its parent's, so the first n paths form a tree, and no
    tree of n nodes has a larger sum.

    Args:
        probabilities: for every head, the probability of its token of each rank, at most 1; it need
            not decrease with the rank.
    """
    # 1. probability and rank of each head's tokens, the most probable first
    levels: list[list[tuple[float, int]]] = []
    for by_rank in probabilities:
        guesses = [(probability, rank) for rank, probability in enumerate(by_rank)]
        levels.append(sorted(guesses, key=lambda guess: -guess[0]))
    # 2. a heap with the best path below each parent that is not yielded yet. Entries: minus the
    # product (the largest product first), the path, its place in `level`, the parent's product
    queue: list[tuple[float, Ranks, int, float]] = []

    def push(parent: Ranks, product: float, place: int) -> None:
        level = levels[len(parent)]
        if place < len(level):
            probability, rank = level[place]
            heapq.heappush(queue, (-product * probability, (*parent, rank), place, product))

    if levels:
        push((), 1.0, 0)
    while queue:
        negative, path, place, above = heapq.heappop(queue)
        yield -negative, path
        push(path[:-1], above, place + 1)  # its next sibling
        if len(path) < len(levels):
            push(path, -negative, 0)  # its first child


def cross_validate(
    conversations: Sequence[Sequence[Trace]], sizes: Sequence[int], max_depth: int | None = None
) -> dict[int, float]:
    """Estimate the tokens per step of `fit_trees` by size on new text, by cross-validation.

    Whole conversations are split into `_FOLDS` parts. Decoding of each part is simulated with trees
    fitted to all others, and tokens and steps are summed over the parts.

    Args:
        conversations: traces of each conversation's answers; two or more conversations.
        sizes: sizes of the trees.
        max_depth: largest depth of the trees; None: no limit.
    """
    # 1. every third conversation is one part
    folds = min(_FOLDS, len(conversations))
    parts: list[list[Trace]] = []
    for start in range(folds):
        parts.append(list(itertools.chain.from_iterable(conversations[start::folds])))
    # 2. decode each part with trees fitted to the others
    steps = dict.fromkeys(sizes, 0)
    for index, held_out in enumerate(parts):
        other_parts = parts[:index] + parts[index + 1 :]
        fitted_to = list(itertools.chain.from_iterable(other_parts))
        for size, tree in fit_trees(fitted_to, sizes, max_depth).items():
            accepted = AcceptedLength(tree)
            steps[size] += sum(len(trace.simulate(accepted)) for trace in held_out)
    # 3. tokens and steps over all parts; the first token of an answer comes from the prefill
    tokens = 0
    for part in parts:
        tokens += sum(len(trace.ranks) - 1 for trace in part)
    return {size: tokens / max(count, 1) for size, count in steps.items()}
