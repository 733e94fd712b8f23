"""Temperatures on synthetic heads, the cost of a head, the number of heads, and simulation against decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.combined import DynamicDraft
from medusa_train.tree_search import fit_dynamic
from medusa_train.tree_search.fit import TreeCandidate, independent_trees
from medusa_train.tree_search.fit_dynamic import (
    MIN_POSITIONS,
    fit_dynamic_trees,
    fit_temperatures,
    head_ms,
    simulate,
)
from medusa_train.tree_search.traces import Trace, tokens_per_step, trace_answer
from medusa_train.trees.dynamic import DynamicTrees, StepSize, calibrate, scaled_log_probs
from medusa_train.trees.tree import Tree
from tests.families import random_backbone
from tests.inference.test_drafts import PROMPTS, random_draft


def synthetic(
    temperatures: list[float], tokens: int, seed: int, unreached: float = 1.0, spread: float = 3.0
) -> list[Trace]:
    """Heads whose true distribution is their softmax at a temperature, and where an earlier head missed at another."""
    generator = np.random.default_rng(seed)
    count, guesses = len(temperatures), 10
    logits = np.sort(generator.normal(size=(tokens, count, guesses + 1)) * spread, axis=-1)[..., ::-1]
    order = np.concatenate([logits[..., :guesses], logits[..., guesses:]], axis=-1)  # the last class: all others
    log_probs = order - np.log(np.exp(order).sum(-1, keepdims=True))
    ranks, reached = np.zeros((tokens, count), dtype=int), np.ones(tokens, dtype=bool)
    for head, temperature in enumerate(temperatures):
        at = np.where(reached, temperature, unreached)[:, None]
        true = np.exp(scaled_log_probs(log_probs[:, head, :guesses], at))
        drawn = (true.cumsum(-1) > generator.random((tokens, 1))).argmax(-1)
        ranks[:, head] = np.where(drawn == guesses, -1, drawn)
        reached &= ranks[:, head] >= 0
    return [Trace(ranks.tolist(), [count] * tokens, log_probs[..., :guesses].astype(np.float32))]


def calibration_error(probabilities: NDArray[Any], right: NDArray[Any]) -> float:
    """Mean distance of confidence and accuracy over ten bins (Guo et al., Expected Calibration Error)."""
    bins = np.minimum((probabilities * 10).astype(int), 9)
    return sum(abs((probabilities - right)[bins == one].sum()) for one in range(10)) / len(right)


@pytest.mark.parametrize("true", [[2.0, 0.6], [1.0, 3.0]])
def test_temperatures_are_found_and_make_confidences_right(true: list[float]) -> None:
    (trace,) = synthetic(true, 6000, seed=1)
    fitted = fit_temperatures([trace])
    assert fitted == pytest.approx(true, rel=0.1)
    (fresh,) = synthetic(true, 6000, seed=2)
    assert fresh.log_probs is not None
    right = np.array(fresh.ranks)[:, 0] == 0
    before, after = (calibrate(fresh.log_probs, [one])[:, 0, 0] for one in (1.0, fitted[0]))
    assert calibration_error(after, right) < 0.02
    if true[0] != 1:
        assert calibration_error(before, right) > 0.05


def test_a_head_is_calibrated_where_the_ones_before_it_were_right() -> None:
    (trace,) = synthetic([4.0, 0.5], 8000, seed=3, unreached=5.0)
    assert fit_temperatures([trace])[1] == pytest.approx(0.5, rel=0.15)
    few = Trace(
        trace.ranks[: MIN_POSITIONS - 1], trace.targets[: MIN_POSITIONS - 1], trace.log_probs[: MIN_POSITIONS - 1]
    )  # type: ignore[index]
    assert fit_temperatures([few]) == [1.0, 1.0]


def test_a_head_costs_what_depth_adds_among_trees_of_equal_size() -> None:
    def timed(paths: Tree, ms: float) -> TreeCandidate:
        return TreeCandidate(paths, 1.5, ms)

    flat, deep = Tree.cartesian([3]), Tree.chain(3)
    assert head_ms([timed(flat, 10.0), timed(deep, 14.0), timed(Tree.chain(5), 30.0)]) == pytest.approx(2.0)
    assert head_ms([timed(flat, 14.0), timed(deep, 10.0)]) == 0
    assert head_ms([timed(flat, 14.0)]) == 0


@pytest.fixture
def free_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let choosing the nodes take no time."""
    monkeypatch.setattr(fit_dynamic, "choosing_ms", lambda traces, trees: 0.0)


def candidates(traces: list[Trace], step_ms: Any) -> list[TreeCandidate]:
    trees = independent_trees(traces, [0, 2, 4, 8, 16, 32])
    return [TreeCandidate(tree, tokens_per_step(traces, tree), step_ms(tree)) for tree in trees.values()]


@pytest.mark.usefixtures("free_choice")
def test_calibrated_trees_beat_the_best_fixed_tree_where_confidences_vary() -> None:
    traces = synthetic([1.5, 1.5, 1.5], 4000, seed=4, spread=2.0)
    by_size = candidates(traces, lambda tree: 20 + 0.4 * tree.size + 0.5 * tree.max_depth)
    flat = TreeCandidate(Tree.cartesian([8]), 1.5, 20 + 3.2 + 0.5)
    fit = fit_dynamic_trees(traces, by_size, [flat, next(one for one in by_size if one.tree.size == 8)], Tree.chain)
    assert fit is not None
    fixed = max(one.tokens_per_step / one.step_ms for one in by_size)
    assert fit.expected.rate > 1.02 * fixed
    assert 0 < fit.expected.nodes < 32
    assert [round(size.step_ms, 6) for size in fit.trees.sizes] == [
        round(20 + 0.4 * one.tree.size + 0.5 * fit.trees.heads, 6) for one in by_size
    ]
    assert fit.trees.equal_latency is not None
    equal = fit.trees.equal_latency.size  # of a chain
    assert 20 + 0.4 * equal <= fit.expected.step_ms <= 20 + 0.4 * (equal + 1) + 1.5
    assert DynamicTrees.from_record(fit.record()["dynamic"]).heads == fit.trees.heads


@pytest.mark.usefixtures("free_choice")
def test_a_step_without_nodes_pays_for_the_heads() -> None:
    traces = synthetic([1.0, 1.0], 1000, seed=6)

    def step_ms(tree: Tree) -> float:
        return 10 + 4 * (tree.size > 0) + 0.1 * tree.size + 0.5 * tree.max_depth

    flat = TreeCandidate(Tree.cartesian([8]), 1.5, step_ms(Tree.cartesian([8])))
    by_size = candidates(traces, step_ms)
    fit = fit_dynamic_trees(traces, by_size, [flat, next(one for one in by_size if one.tree.size == 8)])
    assert fit is not None
    assert fit.trees.heads > 0
    draft_ms = 4 + 0.5 * fit.trees.heads
    assert [size.step_ms - draft_ms for size in fit.trees.sizes[:3]] == pytest.approx([10.0, 10.2, 10.4])


def test_latencies_include_choosing_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_dynamic, "choosing_ms", lambda traces, trees: 3.0)
    traces = synthetic([1.0, 1.0], 1000, seed=6)
    fit = fit_dynamic_trees(traces, candidates(traces, lambda tree: 20 + 0.1 * tree.size))
    assert fit is not None
    assert fit.trees.heads > 0
    assert [size.step_ms for size in fit.trees.sizes][1:] == pytest.approx([23.2, 23.4, 23.8, 24.6, 26.2])
    monkeypatch.undo()
    assert 0 < fit_dynamic.choosing_ms(traces, fit.trees) < 100


def test_where_nodes_cost_too_much_no_head_is_used() -> None:
    traces = synthetic([1.0, 1.0], 500, seed=5)
    fit = fit_dynamic_trees(traces, candidates(traces, lambda tree: 20 + 60 * tree.size))
    assert fit is not None
    assert (fit.trees.heads, fit.trees.max_nodes, fit.expected.tokens_per_step) == (0, 0, 1.0)
    assert fit_dynamic_trees(traces, candidates(traces, lambda tree: 20.0)[:1]) is None
    assert fit_dynamic_trees([Trace([[0], [0]], [1, 0])], candidates(traces, lambda tree: 20.0)) is None


@pytest.mark.parametrize("kind", ["medusa", "amphista"])
def test_simulated_steps_are_those_of_decoding(kind: str) -> None:
    backbone = random_backbone("llama")
    draft = random_draft(kind, backbone, spread=0.1)
    trees = DynamicTrees(
        (1.3, 0.8), (StepSize(0, 10.0, 1.0), StepSize(4, 10.4, 1.3), StepSize(8, 10.9, 1.4), StepSize(20, 13.0, 1.5))
    )
    accepted: list[int] = []
    simulated = 0.0
    for prompt in PROMPTS:
        out = Decoder(backbone, DynamicDraft(draft, trees)).generate(prompt, 30, ())
        trace = trace_answer(backbone, draft, prompt, Decoder(backbone).generate(prompt, 40, ()).tokens)
        # the same answer, with guesses past its end
        end = sum(out.accepted[:-1]) + len(out.accepted)
        cut = Trace(trace.ranks[:end], trace.targets[:end], trace.log_probs[:end])  # type: ignore[index]
        simulated += (end - 1) / simulate([cut], trees).tokens_per_step
        accepted += out.accepted[:-1]
    assert round(simulated) == len(accepted)
    assert sum(accepted) > 5
