"""Path counts, fitted trees, and what they are worth on new text."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from medusa_train.tree_search import fit as module
from medusa_train.tree_search.fit import (
    AcceptedLength,
    Trace,
    count_paths,
    cross_validate,
    fit_tree,
    independent_trees,
    joint_trees,
    most_frequent,
    paths_by_product,
    tokens_per_step,
)
from medusa_train.trees.tree import Tree
from tests.tree_search.test_traces import TRACE


def test_path_counts_and_the_most_frequent() -> None:
    counts = count_paths([TRACE])
    assert counts == Counter({(0,): 3, (0, 1): 1, (0, 0): 1, (0, 0, 2): 1, (1,): 1, (1, 0): 1})
    assert most_frequent(counts, 4).paths == ((0,), (1,), (0, 0), (0, 1))
    assert count_paths([TRACE], [[3, 4]]) == Counter({(0,): 1, (1,): 1, (1, 0): 1})


def test_depth_limits_the_most_frequent_and_flat_trees_are_as_large() -> None:
    counts = count_paths([TRACE])
    assert most_frequent(counts, 4, max_depth=1).paths == ((0,), (1,))
    assert most_frequent(counts, 4, max_depth=2) == most_frequent(counts, 4)
    wide = Trace([[0, 0, 0], [0, 0, 1], [1, 0, 0], [2, 1, 0], [0, 1, 2]] * 4, [3] * 20)
    trees = [fit_tree([wide], [wide], 5, depth) for depth in (None, 2, 1)]
    assert [(tree.size, tree.max_depth) for tree in trees] == [(5, 3), (5, 2), (3, 1)]  # three first tokens only


def test_the_most_frequent_paths_are_the_best_tree_of_their_size() -> None:
    """Against every connected tree of three nodes: none has a larger mean accepted length."""
    torch.manual_seed(3)
    counts = count_paths([Trace(torch.randint(-1, 3, (30, 2)).tolist(), [2] * 30) for _ in range(4)])
    best = sum(counts[path] for path in most_frequent(counts, 3).paths)
    for chosen in itertools.combinations([(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)], 3):
        if all(path[:-1] in chosen for path in chosen if len(path) > 1):
            assert sum(counts[path] for path in chosen) <= best


def test_a_refit_is_taken_only_where_held_out_steps_agree() -> None:
    """Decoding with {(0,), (1,)} visits only even positions, where (1,) never occurs, so a recount would drop it."""
    trace = Trace([[0, -1] if i % 2 == 0 else [1, 0] for i in range(41)], [2] * 41)
    naive = most_frequent(count_paths([trace]), 2)
    assert set(naive.paths) == {(0,), (1,)}
    assert most_frequent(count_paths([trace], [trace.simulate(naive)]), 2).paths == ((0,),)
    assert fit_tree([trace], [trace], 2) == naive
    # another ending, in which the recounted paths win: after (0,) was accepted, (2, 2) always follows
    fit = Trace([[0, -1] if i % 2 == 0 else [1, -1] for i in range(20)] + [[2, 2]] * 9, [2] * 29)
    assert (2, 2) in fit_tree([fit], [Trace([[2, 2]] * 30, [2] * 30)], 3).paths


HEADS = 4


def conversation(draw: random.Random, tokens: int = 150) -> list[Trace]:
    """An answer in which all heads have the same rank until they miss: maximally dependent."""
    rows = []
    for _ in range(tokens):
        rank = min(int(draw.expovariate(0.5)), 9)
        right = next((depth for depth in range(HEADS) if draw.random() > 0.8), HEADS)
        rows.append([rank] * right + [-1] * (HEADS - right))
    targets = [min(HEADS, tokens - 1 - position) for position in range(tokens)]
    cut = [[rank if k < limit else -1 for k, rank in enumerate(row)] for row, limit in zip(rows, targets, strict=True)]
    return [Trace(cut, targets)]


@pytest.fixture(scope="module")
def conversations() -> list[list[Trace]]:
    draw = random.Random(4)
    return [conversation(draw) for _ in range(48)]


def test_independent_nodes_come_by_the_product_of_accuracies() -> None:
    # top-1 is right 3 of 4 times for head 1, 2 of 4 for head 2; second guesses 1 of 4 and 1 of 4
    tree = independent_trees([Trace([[0, 0], [0, 0], [0, 1], [1, -1]], [2, 2, 2, 2])], [4])[4]
    # (0): .75, (0, 0): .375, (1): .25, (0, 1): .1875, (1, 0): .125
    assert set(tree.paths) == {(0,), (0, 0), (1,), (0, 1)}


def test_the_joint_tree_is_worth_at_least_the_independent_one_on_new_text(
    conversations: list[list[Trace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens per step for every size from 4 to 63, on conversations that neither tree was fitted to."""
    joint = cross_validate(conversations, range(4, 64))
    monkeypatch.setattr(module, "joint_trees", independent_trees)
    independent = cross_validate(conversations, range(4, 64))
    gains = [joint[n] - independent[n] for n in range(4, 64)]
    assert min(gains) >= 0
    assert max(gains) > 0.3  # heads that err together are what the joint search is for


def test_every_size_gets_the_better_of_both_trees(conversations: list[list[Trace]]) -> None:
    traces = [trace for one in conversations for trace in one]
    trees, alone = joint_trees(traces, [3, 9]), independent_trees(traces, [3, 9])
    assert {size: tree.size for size, tree in trees.items()} == {3: 3, 9: 9}
    assert all(tokens_per_step(traces, trees[size]) >= tokens_per_step(traces, alone[size]) for size in trees)


def test_no_conversation_is_rated_with_a_tree_fitted_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    conversations = [conversation(draw, 12) for _ in range(5)]
    seen: list[set[int]] = []
    judged: list[int] = []

    def spy(traces: Sequence[Trace], sizes: Sequence[int], max_depth: int | None) -> dict[int, Tree]:
        seen.append({id(trace) for trace in traces})
        return {size: Tree.empty() for size in sizes}

    walk = Trace.simulate

    def watched(self: Trace, tree: Tree | AcceptedLength) -> list[int]:
        judged.append(id(self))
        assert id(self) not in seen[-1]
        return walk(self, tree)

    monkeypatch.setattr(Trace, "simulate", watched)
    monkeypatch.setattr(module, "joint_trees", spy)
    assert cross_validate(conversations, [4]) == {4: 1.0}
    assert len(seen) == 3
    assert sorted(judged) == sorted(id(one[0]) for one in conversations)


@pytest.mark.parametrize("levels", [[[0.2, 0.5, 0.1], [0.3, 0.3]], [[0.0, 1.0], [1.0, 0.0]]])
def test_paths_come_by_product_after_their_parents(levels: list[list[float]]) -> None:
    found = list(paths_by_product(levels))
    assert [product for product, _ in found] == sorted((product for product, _ in found), reverse=True)
    assert {path for _, path in found} == {
        path for depth in (1, 2) for path in itertools.product(*(range(len(level)) for level in levels[:depth]))
    }
    for place, (product, path) in enumerate(found):
        assert product == pytest.approx(math.prod(levels[depth][rank] for depth, rank in enumerate(path)))
        assert len(path) == 1 or path[:-1] in [earlier for _, earlier in found[:place]]
    assert list(paths_by_product([])) == []
