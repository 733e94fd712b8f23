"""Which trees are timed, how, and which of them is chosen and written."""

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console

from medusa_train.errors import MedusaError
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.progress import RunProgress
from medusa_train.tree_search import choose_tree as module
from medusa_train.tree_search.choose_tree import (
    TreeChoice,
    choose_tree,
    smallest_of_the_fastest,
    timing_budget,
)
from medusa_train.tree_search.fit import Trace, TreeCandidate
from medusa_train.tree_search.time_steps import QUICK, THOROUGH, Effort, time_steps
from medusa_train.tree_search.traces import TracedAnswers, trace_conversations
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.tree_search.test_traces import noisy_heads


def quiet() -> RunProgress:
    return RunProgress(Console(file=io.StringIO()))


#: One head whose first guess is right in a quarter of cases, and the next three in a twelfth each.
ODDS = ([3, 1, 1, 1, 6],)


def chosen_by(
    monkeypatch: pytest.MonkeyPatch,
    step_ms: Callable[[Tree], float],
    odds: Sequence[Sequence[int]] = ODDS,
) -> TreeChoice:
    """Choose among trees of at most eight nodes.

    Args:
        step_ms: from a tree to milliseconds.
        odds: of every head, how often its first, second, ... guess is right, and at last how often
            none is.
    """

    def measure(
        target_model: object, draft: object, trees: Sequence[Tree], *others: object
    ) -> dict[Tree, float]:
        assert len(set(trees)) == len(trees)
        return {tree: step_ms(tree) for tree in trees}

    monkeypatch.setattr(module, "time_steps", measure)
    monkeypatch.setattr(module, "SIZES", tuple(size for size in module.SIZES if size <= 8))
    drawn = random.Random(0)
    heads = [drawn.choices([*range(len(one) - 1), -1], one, k=500) for one in odds]
    traces = [Trace([list(ranks) for ranks in zip(*heads, strict=True)])] * 2
    target_model = random_target_model("llama", dtype=torch.float32)
    draft = MedusaDraft.from_target_model(target_model, len(odds))
    return choose_tree(target_model, draft, TracedAnswers([traces] * 4, [1, 2, 3]), quiet())


def test_speed_decides_and_of_equally_fast_sizes_the_smallest_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = chosen_by(monkeypatch, lambda tree: 1 + 0.05 * tree.size)
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
    choice = chosen_by(monkeypatch, lambda tree: 1 + tree.size)
    assert (choice.best.tree, choice.best.tokens_per_step) == (Tree.empty(), 1.0)
    assert choice.describe().startswith(
        "plain decoding, 1.00 ms per step in float32; no tree is clearly faster here"
    )


def test_where_levels_cost_much_a_flat_tree_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if every deep tree is slower than plain decoding."""
    odds = [[50, 8, 8, 8, 26], [60, 40]]
    choice = chosen_by(monkeypatch, lambda tree: 1 + 0.6 * tree.max_depth + 0.01 * tree.size, odds)
    assert all(one.tokens_per_s < 1000 for one in choice.sizes if one.tree.size in (1, 2, 3, 6, 8))
    assert (choice.best.tree.size, choice.best.tree.max_depth) == (4, 1)
    assert choice.best.step_ms == pytest.approx(1.64)  # not that of the deep tree of 4 nodes, 2.24


def test_the_table_that_is_shown_is_the_one_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the timings say: the smallest tree within two per cent of the fastest."""
    for seed in range(20):
        drawn = random.Random(seed)

        def step_ms(tree: Tree, drawn: random.Random = drawn) -> float:
            return (1 + 0.05 * tree.size) * drawn.uniform(0.8, 1.2)

        choice = chosen_by(monkeypatch, step_ms)
        shown = choice.record()["sizes"]
        enough = 0.98 * max(one["tokens_per_s"] for one in shown)
        expected = next(one for one in shown if one["tokens_per_s"] >= enough)
        assert choice.best.tree.size == expected["nodes"]
        assert round(choice.best.step_ms, 4) == expected["step_ms"]


class Timed(NamedTuple):
    """What `time_steps` was called with."""

    trees: Sequence[Tree]
    prompt: list[int]
    progress: RunProgress
    effort: Effort
    deadline: float | None = None


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Timed]:
    """Timings of trees of 0, 1 and 2 nodes, or of 0 and 2, in which each continuation takes a second."""
    calls: list[Timed] = []
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    def measure(target_model: object, draft: object, *given: Any) -> dict[Tree, float]:
        call = Timed(*given)
        calls.append(call)
        clock[0] += len(call.trees) * (call.effort.rounds + 1)
        return {tree: 1.0 + tree.size for tree in call.trees}

    monkeypatch.setattr(module, "time_steps", measure)
    monkeypatch.setattr(module, "SIZES", (0, 1, 2))
    monkeypatch.setattr(module, "FEW_SIZES", (0, 2))
    return calls


def choose_within(seconds: float | None) -> str:
    """Choose a tree, and return what is printed."""
    target_model, progress = random_target_model("llama"), quiet()
    traced = TracedAnswers([[Trace([[0, 0, 0]] * 9)]] * 3, list(range(100)))
    choose_tree(target_model, noisy_heads(target_model), traced, progress, seconds=seconds)
    return progress.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_without_a_limit_all_trees_are_timed_thoroughly(timed: list[Timed]) -> None:
    choose_within(None)
    (call,) = timed
    assert [tree.size for tree in call.trees] == [0, 1, 2]
    assert (call.effort, call.deadline, len(call.prompt)) == (THOROUGH, None, 80)


def test_within_enough_seconds_all_trees_are_timed_briefly(timed: list[Timed]) -> None:
    assert "timing fewer trees" not in choose_within(1000.0)
    call = timed[-1]  # after the estimate
    assert [tree.size for tree in call.trees] == [0, 1, 2]
    assert (call.effort, call.deadline, len(call.prompt)) == (QUICK, 1000.0, 64)


def test_within_few_seconds_fewer_trees_are_timed(timed: list[Timed]) -> None:
    assert "timing fewer trees: all would take about 18 s, 10 s are left" in choose_within(10.0)
    assert [tree.size for tree in timed[-1].trees] == [0, 2]
    assert timed[-1].deadline == 10.0


def test_timing_may_take_a_share_of_the_run() -> None:
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
    assert choice.save(tmp_path, traced) == tmp_path / "tree.json"
    with np.load(tmp_path / "tree_traces.npz") as arrays:
        assert arrays["ranks"].tolist() == [rank for trace in traced.traces for rank in trace.ranks]
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


def test_a_prompt_that_fills_the_context_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    target_model, long = random_target_model("llama"), list(range(2, 60)) * 2
    draft, trace = noisy_heads(target_model), Trace([[0, 0, 0]] * 9)
    monkeypatch.setattr(module, "SIZES", (0, 1))
    assert (
        choose_tree(target_model, draft, TracedAnswers([[trace]] * 3, long), quiet())
        .sizes[0]
        .step_ms
        > 0
    )
    with pytest.raises(MedusaError, match="exceed the model's context"):
        time_steps(target_model, draft, [Tree.empty()], long, quiet(), QUICK)
