import io
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from rich.console import Console

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.evaluation import tree_choice
from medusa_train.evaluation.calibrate import describe
from medusa_train.evaluation.tree_choice import CalibrationResult, NamedCandidate, interpolate, search
from medusa_train.inference.traces import Trace
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree
from tests.families import random_backbone


def test_latencies_are_interpolated_between_measured_sizes() -> None:
    measured = {0: 3.0, 4: 5.0, 8: 6.0}
    assert [interpolate(measured, nodes) for nodes in (0, 1, 4, 6, 8, 20)] == [3.0, 3.5, 5.0, 5.5, 6.0, 6.0]
    assert interpolate({4: 5.0}, 0) == 5.0


def small_result() -> CalibrationResult:
    sizes = range(3)
    trees = {name: {n: Tree.from_paths([(i,) for i in range(n)]) for n in sizes} for name in ("joint", "independent")}
    trees["chain"] = {n: Tree.chain(min(n, 1)) for n in sizes}
    curves = {name: {n: 1 + n / 2 for n in sizes} for name in trees}
    side = [NamedCandidate(trees[name][1], 1.5, 4.0, name) for name in trees]
    about = {"conversations": 4, "answers": 5, "tokens": 600}
    return CalibrationResult(trees, curves, {0: 2.0, 2: 4.0}, 2, 3.9, side, [[0.5, 0.75]], [0.5, 0.25], about)


def test_content_of_tree_json_and_calibration_json() -> None:
    record = small_result().tree_record()
    assert record["step_ms"] == record["sizes"][2]["step_ms"] == 3.9  # the chosen tree's own, not the size's
    assert set(record) == {"nodes", "tokens_per_step", "step_ms", "head_accuracy", "calibration", "sizes"}
    assert record["sizes"][1] == {"nodes": 1, "tokens_per_step": 1.5, "step_ms": 3.0, "tokens_per_s": 500.0}
    everything = small_result().as_json()
    assert [size["nodes"] for size in everything["searches"]["chain"]] == [0, 1]
    assert everything["medusa_choices"] == [[0], [1]]
    assert everything["candidates"][0]["tokens_per_s"] == 375.0


#: One head whose first guess is right in a quarter of cases, and the next three in a twelfth each.
ODDS = ([3, 1, 1, 1, 6],)


def searched(
    monkeypatch: pytest.MonkeyPatch, step_ms: Callable[[Tree, int], float], odds: Sequence[Sequence[int]] = ODDS
) -> CalibrationResult:
    """Search trees of at most eight nodes.

    Args:
        step_ms: from a tree, and whether it is timed for the first (0) or second (1) time, to milliseconds.
        odds: of every head, how often its first, second, ... guess is right, and at last how often none is.
    """
    times: list[int] = []

    def measure(backbone: Backbone, draft: Draft, trees: Sequence[Tree], *args: object) -> list[float]:
        times.append(len(times))
        return [step_ms(tree, times[-1]) for tree in trees]

    monkeypatch.setattr(tree_choice, "measure_step_latency", measure)
    monkeypatch.setattr(tree_choice, "LARGEST", 8)
    monkeypatch.setattr(tree_choice, "SIZES", tuple(size for size in tree_choice.SIZES if size <= 8))
    drawn = random.Random(0)
    heads = [drawn.choices([*range(len(one) - 1), -1], one, k=500) for one in odds]
    traces = [Trace([list(ranks) for ranks in zip(*heads, strict=True)], [len(odds)] * 500)] * 2
    backbone = random_backbone("llama", dtype=torch.float32)
    model = LoadedModel(backbone, MedusaDraft.from_backbone(backbone, len(odds)), None)
    return search(model, [traces] * 4, [[1, 2, 3]], RunProgress(Console(file=io.StringIO())))


def test_the_cost_of_the_draft_itself_is_not_spread_over_small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = searched(monkeypatch, lambda tree, again: 1 + 0.3 * (tree.size > 0) + 0.01 * tree.size)
    assert chosen.step_ms(1) == pytest.approx(1.31)  # between 0 and 4 nodes a straight line would say 1.085
    assert chosen.nodes == 4
    assert chosen.tree_record()["step_ms"] == pytest.approx(1.34)


def test_of_equally_fast_sizes_the_smallest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = searched(monkeypatch, lambda tree, again: 1 + 0.05 * tree.size)
    speed = {size["nodes"]: size["tokens_per_s"] for size in chosen.sizes()}
    fastest = max(speed, key=lambda nodes: speed[nodes])
    assert chosen.nodes < fastest
    assert speed[chosen.nodes] >= 0.98 * speed[fastest]
    assert all(speed[nodes] < 0.98 * speed[fastest] for nodes in range(chosen.nodes))


def test_where_no_tree_pays_decoding_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = searched(monkeypatch, lambda tree, again: 1 + tree.size)
    assert (chosen.nodes, chosen.best) == (0, Tree.empty())
    assert chosen.tree_record()["tokens_per_step"] == 1.0
    assert "chosen: plain decoding, 1.00 ms per step" in describe(chosen)
    lucky = searched(monkeypatch, lambda tree, again: 1 + 0.9 * again * (tree.size > 0))
    assert lucky.step_ms(4) == 1  # fast when timed first, slower than plain decoding side by side
    assert lucky.nodes == 0


def test_where_levels_cost_much_a_flat_tree_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if every deep tree is slower than plain decoding, so that the first round chooses none."""
    odds = [[50, 8, 8, 8, 26], [60, 40]]
    chosen = searched(monkeypatch, lambda tree, again: 1 + 0.6 * tree.max_depth + 0.01 * tree.size, odds)
    assert all(size["tokens_per_s"] < 1000 for size in chosen.sizes() if size["nodes"] in (1, 2, 3, 6, 8))
    assert (chosen.nodes, chosen.best.max_depth) == (4, 1)
    assert chosen.chosen_ms == pytest.approx(1.64)  # not that of the deep tree of 4 nodes, 2.24


def test_drift_between_the_two_rounds_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_ms(tree: Tree, again: int) -> float:
        return (1 + 0.2 * again * (tree.size > 0)) * (1 + 0.01 * tree.size)

    chosen = searched(monkeypatch, step_ms)  # the second time trees take longer, and plain decoding does not
    assert chosen.nodes == chosen.best.size > 0
    assert chosen.chosen_ms == pytest.approx(1 + 0.01 * chosen.nodes)
