"""What a tree accepts, and which tree is best, by counting: nothing of the package is imported.

An answer of n tokens has ranks [n][K]: where head k ranks the token k positions after the one at p,
counted from 0, with the token at p as the root of the tree; -1 for none of its best ten, and past
the end of the answer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from torch import Tensor

MAX_RANK = 10

Path = tuple[int, ...]
Ranks = list[list[int]]


def rank(logits: Tensor, index: int) -> int:
    """Return how many tokens have a larger logit; -1 from the tenth on, or without an index."""
    if index < 0:
        return -1
    better = int((logits > logits[index]).sum())
    return better if better < MAX_RANK else -1


def path_at(ranks: Ranks, position: int) -> Path:
    """Return the ranks of the following tokens up to the first that no head has among its best."""
    return tuple(itertools.takewhile(lambda r: r >= 0, ranks[position]))


def accepted_length(path: Path, tree: Collection[Path]) -> int:
    """Return how far a tree follows a path."""
    nodes = set(tree)
    return max((d for d in range(len(path) + 1) if d == 0 or path[:d] in nodes), default=0)


def steps_of(ranks: Ranks, tree: Collection[Path]) -> list[int]:
    """Return how many draft tokens each step of decoding accepts; the prefill gives token 0."""
    position, accepted = 0, []
    while position < len(ranks) - 1:
        count = accepted_length(path_at(ranks, position), tree)
        accepted.append(count)
        position += count + 1
    return accepted


def tokens_per_step(answers: Sequence[Ranks], tree: Collection[Path]) -> float:
    steps = sum(len(steps_of(ranks, tree)) for ranks in answers)
    return sum(len(ranks) - 1 for ranks in answers) / steps if steps else 1.0


def accuracy(answers: Sequence[Ranks]) -> list[list[float]]:
    """Return the top-1 .. top-10 accuracy of each head, over positions that have a token to guess."""
    table = []
    for k in range(1, len(answers[0][0]) + 1):
        guessed = [
            ranks[p][k - 1] for ranks in answers for p in range(len(ranks)) if p + k < len(ranks)
        ]
        hits = Counter(guessed)
        top = itertools.accumulate(hits[r] for r in range(MAX_RANK))
        table.append([count / max(len(guessed), 1) for count in top])
    return table


def fit(answers: Sequence[Ranks], size: int, depth: int | None = None) -> list[Path]:
    """Return the `size` paths with the largest products of accuracies; fewer if others are 0."""
    single = []
    for top in accuracy(answers)[:depth]:
        single.append([top[0], *(later - earlier for earlier, later in itertools.pairwise(top))])
    found: list[tuple[float, Path]] = []
    products: dict[Path, float] = {(): 1.0}
    for level in single:
        grown = {
            (*path, r): product * p
            for path, product in products.items()
            for r, p in enumerate(level)
        }
        products = {path: product for path, product in grown.items() if product > 0}
        found += [(-product, path) for path, product in products.items()]
    return [path for _, path in sorted(found)[:size]]


def cross_validated(
    conversations: Sequence[Sequence[Ranks]], size: int, folds: int, depth: int | None = None
) -> float:
    """Return tokens per step of trees on conversations that they were not fitted to."""
    folds = min(folds, len(conversations))
    steps = tokens = 0
    for fold in range(folds):
        held_out = [ranks for chat in conversations[fold::folds] for ranks in chat]
        others = [
            ranks
            for start in range(folds)
            if start != fold
            for chat in conversations[start::folds]
            for ranks in chat
        ]
        tree = fit(others, size, depth)
        steps += sum(len(steps_of(ranks, tree)) for ranks in held_out)
        tokens += sum(len(ranks) - 1 for ranks in held_out)
    return tokens / max(steps, 1)


def two_halves(conversations: Sequence[Sequence[Ranks]], size: int) -> float:
    """Return the mean tokens per step of a tree fitted to every other conversation, on the others."""
    halves = [[ranks for chat in conversations[i::2] for ranks in chat] for i in range(2)]
    first, second = (fit(half, size) for half in halves)
    return (tokens_per_step(halves[1], first) + tokens_per_step(halves[0], second)) / 2
