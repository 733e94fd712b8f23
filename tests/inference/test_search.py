"""Searches for a tree, and the joint one against the paper's on text that neither was fitted to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from medusa_train.inference.ranks import Reach, Trace, tokens_per_step
from medusa_train.inference.search import (
    SEARCHES,
    chain_trees,
    compare_searches,
    dense_trees,
    independent_trees,
    joint_trees,
)
from medusa_train.trees.tree import Tree

HEADS = 4


def talk(draw: random.Random, tokens: int = 150) -> list[Trace]:
    """An answer in which all heads stand at the same rank until they miss, as far from independent as can be."""
    rows = []
    for _ in range(tokens):
        rank = min(int(draw.expovariate(0.5)), 9)
        right = next((depth for depth in range(HEADS) if draw.random() > 0.8), HEADS)
        rows.append([rank] * right + [-1] * (HEADS - right))
    known = [min(HEADS, tokens - 1 - place) for place in range(tokens)]
    cut = [[rank if k < limit else -1 for k, rank in enumerate(row)] for row, limit in zip(rows, known, strict=True)]
    return [Trace(cut, known)]


@pytest.fixture(scope="module")
def talks() -> list[list[Trace]]:
    draw = random.Random(4)
    return [talk(draw) for _ in range(48)]


def test_independent_nodes_come_by_the_product_of_accuracies() -> None:
    # top-1 is right 3 of 4 times for head 1, 2 of 4 for head 2; second guesses 1 of 4 and 1 of 4
    rows = [[0, 0], [0, 0], [0, 1], [1, -1]]
    tree = independent_trees([Trace(rows, [2, 2, 2, 2])], [4])[4]
    # (0): .75, (0, 0): .375, (1): .25, (0, 1): .1875, (1, 0): .125
    assert set(tree.paths) == {(0,), (0, 0), (1,), (0, 1)}


def test_the_independent_tree_is_the_best_by_its_own_measure(talks: list[list[Trace]]) -> None:
    """No single exchange of a leaf for another connected node has a larger sum of products."""
    traces = [trace for one in talks for trace in one]
    small, large = independent_trees(traces, [12, 13]).values()
    assert set(small.paths) < set(large.paths)
    shares = _accuracies(traces)

    def product(path: tuple[int, ...]) -> float:
        value = 1.0
        for head, rank in enumerate(path):
            value *= shares[head][rank]
        return value

    leaves = [path for path in small.paths if not any(other[:-1] == path for other in small.paths)]
    outside = [(*path, rank) for path in ((), *small.paths) if len(path) < HEADS for rank in range(10)]
    worst = min(product(path) for path in leaves)
    assert all(product(path) <= worst + 1e-12 for path in outside if path not in small.paths)


def _accuracies(traces: list[Trace]) -> list[list[float]]:
    table = []
    for head in range(HEADS):
        column = [row[head] for t in traces for row, known in zip(t.ranks, t.known, strict=True) if known > head]
        table.append([sum(rank == wanted for rank in column) / len(column) for wanted in range(10)])
    return table


def test_dense_trees_are_cartesian_and_fit(talks: list[list[Trace]]) -> None:
    traces = [trace for one in talks for trace in one]
    found = dense_trees(traces, [0, 4, 20])
    assert found[0] == Tree.empty()
    for size, tree in found.items():
        assert tree.size <= size
        levels = [sum(len(path) == depth for path in tree.paths) for depth in range(1, tree.max_depth + 1)]
        choices = [count // below for count, below in zip(levels, [1, *levels], strict=False)]
        assert Tree.cartesian(choices) == tree
    rivals = [Tree.cartesian(choices) for choices in ([4], [2, 1], [1, 1, 1, 1])]
    assert tokens_per_step(traces, found[4]) == max(tokens_per_step(traces, tree) for tree in rivals)


def test_the_chain_ends_with_the_heads() -> None:
    trace = Trace([[0, 0], [0, -1], [-1, -1]], [2, 1, 0])
    assert [tree.size for tree in chain_trees([trace], [0, 1, 5]).values()] == [0, 1, 2]


def test_every_search_answers_for_every_size(talks: list[list[Trace]]) -> None:
    traces = [trace for one in talks[:6] for trace in one]
    for find in SEARCHES.values():
        found = find(traces, [0, 3, 7])
        assert list(found) == [0, 3, 7]
        assert all(tree.size <= size for size, tree in found.items())
    assert [tree.size for tree in joint_trees(traces, [0, 3, 7]).values()] == [0, 3, 7]


def test_the_joint_tree_is_worth_at_least_the_independent_one_on_new_text(talks: list[list[Trace]]) -> None:
    """Expected tokens per step for every n in 4..63, on conversations that neither tree was fitted to."""
    joint, independent = compare_searches(
        talks, range(4, 64), {name: SEARCHES[name] for name in ("joint", "independent")}
    )
    worse = {
        n: (joint.by_size[n], independent.by_size[n]) for n in range(4, 64) if joint.by_size[n] < independent.by_size[n]
    }
    assert worse == {}
    gains = [joint.by_size[n] - independent.by_size[n] for n in range(4, 64)]
    assert max(gains) > 0.3  # heads that err together are what the joint search is for


def test_no_talk_is_judged_by_a_tree_that_saw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    talks = [talk(draw, 12) for _ in range(5)]
    seen: list[set[int]] = []
    judged: list[int] = []

    def spy(traces: Sequence[Trace], sizes: Sequence[int]) -> dict[int, Tree]:
        seen.append({id(trace) for trace in traces})
        return {size: Tree.empty() for size in sizes}

    walk = Trace.walk

    def watched(self: Trace, tree: Tree | Reach) -> list[int]:
        judged.append(id(self))
        assert id(self) not in seen[-1]
        return walk(self, tree)

    monkeypatch.setattr(Trace, "walk", watched)
    (found,) = compare_searches(talks, [4], {"joint": spy}, folds=3)
    assert sorted(judged) == sorted(id(one[0]) for one in talks)
    assert found.by_size[4] == 1.0


def test_one_conversation_is_not_enough() -> None:
    with pytest.raises(ValueError, match="two conversations"):
        compare_searches([talk(random.Random(1))], [4])
