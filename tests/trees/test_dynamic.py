"""The choice of a step's tree against all trees there are, its latencies, and its entry in tree.json."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from medusa_train.errors import CheckpointError
from medusa_train.trees.dynamic import DynamicTrees, StepSize, calibrate, paths_by_product
from medusa_train.trees.tree import Ranks, Tree


def trees_with(step_ms: Sequence[float], tokens: Sequence[float], heads: int = 2) -> DynamicTrees:
    """Dynamic trees of 0, 1, 2, ... nodes with these latencies."""
    sizes = (StepSize(nodes, ms, rate) for nodes, (ms, rate) in enumerate(zip(step_ms, tokens, strict=True)))
    return DynamicTrees((1.0,) * heads, tuple(sizes))


def all_trees(heads: int, width: int, most: int) -> Iterator[tuple[Ranks, ...]]:
    """Every prefix-closed set of at most `most` paths."""
    paths = [path for depth in range(1, heads + 1) for path in itertools.product(range(width), repeat=depth)]
    for count in range(most + 1):
        for chosen in itertools.combinations(paths, count):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                yield chosen


def expected_tokens(tree: Sequence[Ranks], row: Sequence[Sequence[float]]) -> float:
    return sum(math.prod(row[depth][rank] for depth, rank in enumerate(path)) for path in tree)


def random_row(generator: np.random.Generator, width: int, scale: float = 1.0) -> list[list[float]]:
    """Sorted probabilities of two heads, with a share that belongs to no guess."""
    levels = generator.dirichlet([0.5] * (width + 1), size=2)[:, :width] * scale
    return np.sort(levels, axis=1)[:, ::-1].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_is_the_best_of_all_trees(seed: int) -> None:
    """Expected tokens minus cost, where latencies rise unevenly."""
    generator = np.random.default_rng(seed)
    row = random_row(generator, 3)
    step_ms = 10 + np.cumsum(generator.choice([0.0, 0.02, 0.5, 3.0], size=7))
    trees = trees_with(step_ms, 1 + np.arange(7) / 8)
    rate = max((1 + n / 8) / step_ms[n] for n in range(7))
    assert trees.rate() == pytest.approx(rate)

    def value(tree: Sequence[Ranks]) -> float:
        return expected_tokens(tree, row) - rate * step_ms[len(tree)]

    best = max(value(tree) for tree in all_trees(2, 3, 6))
    (chosen,) = trees.choose([row])
    assert value(chosen) == pytest.approx(best, abs=1e-12)
    assert Tree.from_paths(chosen).size == len(chosen)  # connected


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_batch_share_the_best_number_of_nodes(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = [random_row(generator, 2), random_row(generator, 2, scale=0.2)]
    step_ms = 10 + np.cumsum(generator.uniform(0, 1, size=12))
    trees = trees_with(step_ms, [1 + n / 10 for n in range(12)])

    def cost(nodes: int) -> float:
        return trees.rate(2) * trees.step_ms(2 * nodes + 1)

    best = [[max(expected_tokens(t, row) for t in all_trees(2, 2, n) if len(t) == n) for row in rows] for n in range(7)]
    values = [sum(pair) - cost(n) for n, pair in enumerate(best)]
    chosen = trees.choose(rows)
    size = len(chosen[0])
    assert [len(tree) for tree in chosen] == [size, size]
    assert sum(expected_tokens(tree, row) for tree, row in zip(chosen, rows, strict=True)) == pytest.approx(
        sum(best[size])
    )
    assert values[size] == pytest.approx(max(values))


def test_confident_heads_get_deep_trees_and_doubtful_ones_none() -> None:
    trees = trees_with([10, 10.5, 11, 11.5, 12], [1, 1.3, 1.4, 1.5, 1.5])
    assert trees.choose([[[0.95, 0.01], [0.9, 0.05]]]) == [[(0,), (0, 0)]]
    assert trees.choose([[[0.4, 0.3], [0.1, 0.1]]]) == [[(0,), (1,)]]
    assert trees.choose([[[0.04, 0.03], [0.9, 0.05]]]) == [[]]
    never = trees_with([10, 30, 40, 50, 60], [1, 1.3, 1.4, 1.5, 1.5])
    assert never.choose([[[0.95, 0.01], [0.9, 0.05]]]) == [[]]
    assert DynamicTrees((), (StepSize(0, 10.0, 1.0),)).max_nodes == 0


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


def test_latencies_between_and_after_the_measured_sizes() -> None:
    trees = DynamicTrees(
        (1.0,), (StepSize(0, 4.0, 1.0), StepSize(4, 6.0, 1.2), StepSize(8, 7.0, 1.4), StepSize(16, 9.0, 1.5))
    )
    assert [trees.step_ms(nodes) for nodes in (0, 2, 4, 12, 16)] == [4.0, 5.0, 6.0, 8.0, 9.0]
    assert trees.step_ms(32) == 9.0 + 16 * (9.0 - 7.0) / 8
    assert trees.rate() == pytest.approx(1 / 4.0)
    assert trees.rate(3) == pytest.approx(3 / trees.step_ms(2))  # the roots of three rows in one pass


def test_calibrated_probabilities() -> None:
    log_probs = np.log(np.array([[[0.6, 0.2], [0.5, 0.4]]]))
    assert calibrate(log_probs, [1.0, 1.0]) == pytest.approx(np.exp(log_probs))
    flat, sharp = calibrate(log_probs, [2.0])[0, 0], calibrate(log_probs, [0.5])[0, 0]
    assert flat == pytest.approx(np.sqrt([0.6, 0.2]) / np.sqrt([0.6, 0.2, 0.2]).sum())
    assert sharp == pytest.approx(np.square([0.6, 0.2]) / np.square([0.6, 0.2, 0.2]).sum())
    unknown = calibrate(np.full((1, 3), -np.inf, np.float32), [1.7])
    assert (unknown == 0).all()
    certain = calibrate(np.array([[0.0, -50.0]]), [3.0])[0]
    assert 0.9 < certain[0] < 1


def test_tree_json_keeps_the_rule_and_earlier_files_have_none(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    trees = DynamicTrees((1.25, 0.5), (StepSize(0, 4.0, 1.0), StepSize(4, 6.0, 1.2)), Tree.chain(2))
    Tree.chain(2).save(path, nodes=2, dynamic=trees.record())
    assert DynamicTrees.load(path) == trees
    assert Tree.load(path) == Tree.chain(2)
    Tree.chain(2).save(path, nodes=2)
    assert DynamicTrees.load(path) is None
    path.write_text("[[0], [1]]", encoding="utf-8")
    assert DynamicTrees.load(path) is None


def size(nodes: int, step_ms: float = 1.0) -> dict[str, float]:
    return {"nodes": nodes, "step_ms": step_ms, "tokens_per_step": 1.0}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"sizes": []}, "increase from 0 nodes"),
        ({"sizes": [size(1), size(4)]}, "increase from 0 nodes"),
        ({"sizes": [size(0), size(4), size(4)]}, "increase from 0 nodes"),
        ({"sizes": [size(0), size(4, 0.0)]}, "must be positive"),
        ({"temperatures": [1.0, 0.0]}, "must be positive"),
        ({"sizes": [{"nodes": 0, "step_ms": 1}]}, "tokens_per_step"),
        ({"sizes": None}, "NoneType"),
        ({"equal_latency": [[0, 0]]}, "has no parent"),
    ],
)
def test_a_broken_rule_in_tree_json_is_named(tmp_path: Path, broken: dict[str, object], reason: str) -> None:
    path = tmp_path / "tree.json"
    record = DynamicTrees((1.25, 0.5), (StepSize(0, 4.0, 1.0), StepSize(4, 6.0, 1.2)), Tree.chain(2)).record()
    path.write_text(json.dumps({"medusa_choices": [], "dynamic": {**record, **broken}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"tree\.json: not a tree file .*{reason}"):
        DynamicTrees.load(path)
