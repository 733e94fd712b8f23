"""Which trees are timed, how, and which of them is chosen and written."""

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.errors import MedusaError
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.progress import RunProgress
from medusa_train.tree_search import choose_tree as module
from medusa_train.tree_search.choose_tree import (
    TreeChoice,
    choose_tree,
    interpolate,
    merge_timings,
    smallest_of_the_fastest,
    timing_budget,
)
from medusa_train.tree_search.fit import Trace, TreeCandidate
from medusa_train.tree_search.kept_traces import load_traces, weights_key
from medusa_train.tree_search.time_steps import QUICK, THOROUGH, Effort, time_steps
from medusa_train.tree_search.traces import TracedAnswers, trace_conversations
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.tree_search.test_traces import noisy_heads


def quiet() -> RunProgress:
    return RunProgress(Console(file=io.StringIO()))


def test_latencies_are_interpolated_between_measured_sizes() -> None:
    measured = {0: 3.0, 4: 5.0, 8: 6.0}
    assert [interpolate(measured, nodes) for nodes in (0, 1, 4, 6, 8, 20)] == [
        3.0,
        3.5,
        5.0,
        5.5,
        6.0,
        6.0,
    ]
    assert interpolate({4: 5.0}, 0) == 5.0


#: One head whose first guess is right in a quarter of cases, and the next three in a twelfth each.
ODDS = ([3, 1, 1, 1, 6],)


def chosen_by(
    monkeypatch: pytest.MonkeyPatch,
    step_ms: Callable[[Tree, int], float],
    odds: Sequence[Sequence[int]] = ODDS,
    quick: bool = False,
) -> TreeChoice:
    """Choose among trees of at most eight nodes.

    Args:
        step_ms: from a tree, and whether it is timed for the first (0) or second (1) time, to
            milliseconds.
        odds: of every head, how often its first, second, ... guess is right, and at last how often
            none is.
    """
    calls: list[Sequence[Tree]] = []

    def measure(
        target_model: object, draft: object, trees: Sequence[Tree], **options: object
    ) -> dict[Tree, float]:
        calls.append(trees)
        assert len(set(trees)) == len(trees)
        return {tree: step_ms(tree, len(calls) - 1) for tree in trees}

    monkeypatch.setattr(module, "time_steps", measure)
    monkeypatch.setattr(module, "SIZES", tuple(size for size in module.SIZES if size <= 8))
    drawn = random.Random(0)
    heads = [drawn.choices([*range(len(one) - 1), -1], one, k=500) for one in odds]
    traces = [Trace([list(ranks) for ranks in zip(*heads, strict=True)], [len(odds)] * 500)] * 2
    target_model = random_target_model("llama", dtype=torch.float32)
    draft = MedusaDraft.from_target_model(target_model, len(odds))
    return choose_tree(
        target_model, draft, TracedAnswers([traces] * 4, [1, 2, 3]), quiet(), quick=quick
    )


def test_speed_decides_and_of_equally_fast_sizes_the_smallest_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = chosen_by(monkeypatch, lambda tree, again: 1 + 0.05 * tree.size)
    speed = {one.tree.size: one.tokens_per_s for one in choice.sizes}
    fastest = max(speed, key=lambda nodes: speed[nodes])
    assert choice.best.tree.size < fastest
    assert speed[choice.best.tree.size] >= 0.98 * speed[fastest]
    assert all(
        speed[nodes] < 0.98 * speed[fastest] for nodes in speed if nodes < choice.best.tree.size
    )
    slow, quick = (
        TreeCandidate(Tree.cartesian([4, 4]), 3.0, 9.0),
        TreeCandidate(Tree.chain(2), 2.0, 4.0),
    )
    assert smallest_of_the_fastest([slow, quick]) is quick


def test_where_no_tree_pays_decoding_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen_by(monkeypatch, lambda tree, again: 1 + tree.size)
    assert (choice.best.tree, choice.best.tokens_per_step) == (Tree.empty(), 1.0)
    assert choice.describe().startswith(
        "plain decoding, 1.00 ms per step in float32; no tree is clearly faster here"
    )
    lucky = chosen_by(monkeypatch, lambda tree, again: 1 + 0.9 * (again > 0) * (tree.size > 0))
    # fast when timed first, slower than plain decoding side by side
    assert lucky.best.tree.size == 0
    assert all(one.step_ms == pytest.approx(1.9) for one in lucky.sizes if one.tree.size)


def test_where_levels_cost_much_a_flat_tree_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if every deep tree is slower than plain decoding, so that the first round chooses none."""
    odds = [[50, 8, 8, 8, 26], [60, 40]]
    choice = chosen_by(
        monkeypatch, lambda tree, again: 1 + 0.6 * tree.max_depth + 0.01 * tree.size, odds
    )
    assert all(one.tokens_per_s < 1000 for one in choice.sizes if one.tree.size in (1, 2, 3, 6, 8))
    assert (choice.best.tree.size, choice.best.tree.max_depth) == (4, 1)
    assert choice.best.step_ms == pytest.approx(1.64)  # not that of the deep tree of 4 nodes, 2.24


def test_the_table_that_is_shown_is_the_one_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the two timings say: the smallest tree within two per cent of the fastest."""
    for seed in range(20):
        drawn = random.Random(seed)

        def step_ms(tree: Tree, again: int, drawn: random.Random = drawn) -> float:
            return (1 + 0.05 * tree.size) * drawn.uniform(0.8, 1.2) * (1 + 0.3 * (again > 0))

        choice = chosen_by(monkeypatch, step_ms)
        shown = choice.record()["sizes"]
        enough = 0.98 * max(one["tokens_per_s"] for one in shown)
        expected = next(one for one in shown if one["tokens_per_s"] >= enough)
        assert choice.best.tree.size == expected["nodes"]
        assert round(choice.best.step_ms, 4) == expected["step_ms"]


def test_trees_that_were_not_timed_again_take_as_much_longer_as_the_others() -> None:
    trees = [Tree.empty(), Tree.chain(1), Tree.chain(2), Tree.chain(3)]
    first = {tree.size: TreeCandidate(tree, 1.0 + tree.size, 1.0 + tree.size) for tree in trees}
    flat = TreeCandidate(Tree.cartesian([2]), 2.9, 2.0)  # of 2 nodes, too, and faster
    again = [
        TreeCandidate(trees[0], 1.0, 1.1),
        TreeCandidate(trees[1], 2.0, 3.0),
        TreeCandidate(trees[2], 3.0, 4.5),
        flat,
    ]
    table = merge_timings(first, again)
    assert [one.step_ms for one in table.values()] == [1.1, 3.0, 2.0, 1.5 * 4.0]
    assert table[2] == flat


def test_timing_is_bounded_by_the_seconds_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model is timed quickly, whatever the number of answered tokens."""
    timed: list[tuple[Effort, float | None]] = []
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    def measure(
        target_model: object,
        draft: object,
        trees: Sequence[Tree],
        prompt: list[int],
        progress: RunProgress,
        effort: Effort,
        deadline: float | None = None,
    ) -> dict[Tree, float]:
        timed.append((effort, deadline))
        clock[0] += len(trees) * (effort.rounds + 1)
        return {tree: 1.0 + tree.size for tree in trees}

    monkeypatch.setattr(module, "time_steps", measure)
    monkeypatch.setattr(module, "SIZES", (0, 1, 2))
    target_model = random_target_model("llama")
    traced = TracedAnswers([[Trace([[0, 0, 0]] * 9, [3] * 9)]] * 3, [1, 2, 3])
    for seconds, rivals in ((50.0, QUICK), (1000.0, THOROUGH)):
        clock[0] = 0.0
        timed.clear()
        progress = quiet()
        choose_tree(target_model, noisy_heads(target_model), traced, progress, seconds=seconds)
        # after the estimate all sizes are timed briefly, then the rivals of the best
        assert [one for one, _ in timed[1:]] == [QUICK, rivals]
        assert {deadline for _, deadline in timed[1:]} == {seconds}
        shown = progress.console.file.getvalue()  # type: ignore[attr-defined]
        assert ("timing fewer steps of fewer trees: all would take about 90 s" in shown) == (
            rivals == QUICK
        )
    timed.clear()
    choose_tree(target_model, noisy_heads(target_model), traced, quiet())
    assert {one for one, _ in timed} == {THOROUGH}  # without a limit
    assert timing_budget(10) == 10
    assert timing_budget(400) == 40


def test_a_tree_is_chosen_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SIZES", (0, 2, 5))
    target_model = random_target_model("llama", dtype=torch.float32)
    draft = noisy_heads(target_model)
    conversations = [
        [[i, i + 1, 2 * i + 1] for i in range(2, 14)][i : i + 2] for i in range(0, 12, 2)
    ]
    traced = trace_conversations(
        target_model, draft, conversations, max_new_tokens=20, token_budget=150
    )
    choice = choose_tree(target_model, draft, traced, quiet())
    paths = ModelPaths(tmp_path, str(tmp_path), None, None, None)
    assert choice.save(tmp_path, traced, paths) == tmp_path / "tree.json"
    assert load_traces(tmp_path / "tree_traces.npz", weights_key(paths, choice.settings)) == traced
    assert Tree.load(tmp_path / "tree.json") == choice.best.tree
    record = json.loads((tmp_path / "tree.json").read_text())
    assert record["calibration"] == {"conversations": 4, "answers": 8, "tokens": 160}
    assert [size["nodes"] for size in record["sizes"]] == [0, 2, 5]
    assert [len(size["medusa_choices"]) for size in record["sizes"]] == [0, 2, 5]
    assert record["sizes"][0]["tokens_per_step"] == 1.0
    assert all(size["step_ms"] > 0 for size in record["sizes"])
    chosen = next(size for size in record["sizes"] if size["nodes"] == record["nodes"])
    assert {name: record[name] for name in ("tokens_per_step", "step_ms")}.items() <= chosen.items()
    assert record["form"]["dtype"] == "float32"
    assert [len(row) for row in record["head_accuracy"]] == [10] * 3
    with pytest.raises(MedusaError, match="3 or more answered chats, got 2"):
        choose_tree(target_model, draft, TracedAnswers(traced.conversations[:2], [1]), quiet())


def test_quickly_fewer_trees_are_timed_after_a_shorter_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[int] = []

    def step_ms(tree: Tree, again: int) -> float:
        timed.append(tree.size)
        return 1 + 0.1 * tree.max_depth + 0.01 * tree.size

    chosen = chosen_by(monkeypatch, step_ms)
    thorough = len(timed)
    timed.clear()
    quick = chosen_by(monkeypatch, step_ms, quick=True)
    assert len(timed) < thorough
    assert quick.best == chosen.best
    assert timed[:4] == [0, 1, 2, 4]  # not 3
    assert [one.tree.size for one in quick.sizes] == [one.tree.size for one in chosen.sizes]


def test_a_prompt_that_fills_the_context_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    target_model, long = random_target_model("llama"), list(range(2, 60)) * 2
    draft, trace = noisy_heads(target_model), Trace([[0, 0, 0]] * 9, [3] * 9)
    monkeypatch.setattr(module, "SIZES", (0, 1))
    assert (
        choose_tree(target_model, draft, TracedAnswers([[trace]] * 3, long), quiet(), quick=True)
        .sizes[0]
        .step_ms
        > 0
    )
    with pytest.raises(MedusaError, match="exceed the model's context"):
        time_steps(target_model, draft, [Tree.empty()], long, quiet(), QUICK)
