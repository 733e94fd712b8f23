"""Fitted trees, and what they are worth on new text."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from medusa_train.tree_search import fit as module
from medusa_train.tree_search.fit import (
    AcceptedLength,
    Trace,
    cross_validate,
    fit_trees,
    paths_by_product,
)
from medusa_train.trees.tree import Tree

HEADS = 4


def conversation(draw: random.Random, tokens: int = 150) -> list[Trace]:
    """An answer in which all heads have the same rank until they miss: maximally dependent."""
    rows = []
    for _ in range(tokens):
        rank = min(int(draw.expovariate(0.5)), 9)
        right = next((depth for depth in range(HEADS) if draw.random() > 0.8), HEADS)
        rows.append([rank] * right + [-1] * (HEADS - right))
    cut = [
        [rank if position + k + 1 < tokens else -1 for k, rank in enumerate(row)]
        for position, row in enumerate(rows)
    ]
    return [Trace(cut)]


def test_nodes_come_by_the_product_of_accuracies() -> None:
    # top-1 is right 3 of 5 times for head 1, 2 of 4 for head 2; second guesses 1 of 5 and 1 of 4
    traces = [Trace([[0, 0], [0, 0], [0, 1], [1, -1], [-1, -1], [-1, -1]])]
    trees = fit_trees(traces, [4, 99])
    # (0): .6, (0, 0): .3, (1): .2, (0, 1): .15, (1, 0): .1, (1, 1): .05; other guesses
    # were never right
    assert set(trees[4].paths) == {(0,), (0, 0), (1,), (0, 1)}
    assert set(trees[99].paths) == {(0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1)}
    assert fit_trees(traces, [4], max_depth=1)[4].paths == ((0,), (1,))


def test_no_conversation_is_rated_with_a_tree_fitted_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    conversations = [conversation(draw, 12) for _ in range(5)]
    seen: list[set[int]] = []
    judged: list[int] = []

    def spy(
        traces: Sequence[Trace], sizes: Sequence[int], max_depth: int | None
    ) -> dict[int, Tree]:
        seen.append({id(trace) for trace in traces})
        return {size: Tree.empty() for size in sizes}

    walk = Trace.simulate

    def watched(self: Trace, tree: Tree | AcceptedLength) -> list[int]:
        judged.append(id(self))
        assert id(self) not in seen[-1]
        return walk(self, tree)

    monkeypatch.setattr(Trace, "simulate", watched)
    monkeypatch.setattr(module, "fit_trees", spy)
    assert cross_validate(conversations, [4]) == {4: 1.0}
    assert len(seen) == 3
    assert sorted(judged) == sorted(id(one[0]) for one in conversations)


@pytest.mark.parametrize("levels", [[[0.2, 0.5, 0.1], [0.3, 0.3]], [[0.0, 1.0], [1.0, 0.0]]])
def test_paths_come_by_product_after_their_parents(levels: list[list[float]]) -> None:
    found = list(paths_by_product(levels))
    assert [product for product, _ in found] == sorted(
        (product for product, _ in found), reverse=True
    )
    assert {path for _, path in found} == {
        path
        for depth in (1, 2)
        for path in itertools.product(*(range(len(level)) for level in levels[:depth]))
    }
    for place, (product, path) in enumerate(found):
        assert product == pytest.approx(
            math.prod(levels[depth][rank] for depth, rank in enumerate(path))
        )
        assert len(path) == 1 or path[:-1] in [earlier for _, earlier in found[:place]]
    assert list(paths_by_product([])) == []
