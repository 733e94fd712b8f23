"""Fit draft trees to traces: path counts, candidate trees of each size, and cross-validated tokens per step."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from medusa_train.inference.traces import AcceptedLength, Trace, head_accuracy, tokens_per_step
from medusa_train.trees.tree import Ranks, Tree

#: The answers of one conversation.
Talk = Sequence[Trace]


#: Trees by their number of nodes, fitted to traces.
TreeSearch = Callable[[Sequence[Trace], Sequence[int]], dict[int, Tree]]


_REFITS = 3


FOLDS = 4


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
        tree = most_frequent(count_paths(fit, [trace.simulate(reach) for trace in fit]), size, depth)
        if tree.size == size and tree not in found:
            found.append(tree)
    return max(found, key=lambda candidate: tokens_per_step(held_out, candidate))


def shallower_trees(tree: Tree, fit: Callable[[int, int], Tree]) -> list[Tree]:
    """Trees of the same size and of every smaller depth that holds so many nodes; `fit` makes them of both."""
    found = [fit(tree.size, depth) for depth in range(1, tree.max_depth)]
    return [flat for flat in found if flat.size == tree.size]


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


SEARCHES: dict[str, TreeSearch] = {
    "joint": joint_trees,
    "independent": independent_trees,
    "dense": dense_trees,
    "chain": chain_trees,
}


@dataclass(frozen=True)
class SearchResult:
    """Tokens per step of one search's trees, by their size, on talks that none of them was fitted to."""

    search: str
    by_size: dict[int, float]


def compare_searches(
    talks: Sequence[Talk],
    sizes: Iterable[int] = range(4, 64),
    searches: Mapping[str, TreeSearch] = SEARCHES,
    folds: int = FOLDS,
) -> list[SearchResult]:
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
                steps[name][size] += sum(len(trace.simulate(reach)) for trace in judge)
    return [
        SearchResult(name, {size: tokens / max(count, 1) for size, count in steps[name].items()}) for name in searches
    ]
