"""Calibration: measured step latencies and the choice of a tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.errors import MedusaError
from medusa_train.inference import tree_search as calibrate_module
from medusa_train.inference.generate import Decoder, Step
from medusa_train.inference.traces import Trace
from medusa_train.inference.tree_fit import TreeCandidate
from medusa_train.inference.tree_search import (
    Calibration,
    calibrate,
    measure_step_latency,
    median_prompt,
)
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.trees.dynamic import DynamicTrees
from medusa_train.trees.tree import Tree
from tests.families import random_backbone
from tests.inference.test_traces import noisy_heads


@pytest.mark.parametrize(("level_ms", "deepest"), [(0.0, True), (5.0, False)])
def test_a_level_that_costs_much_makes_trees_flat(
    monkeypatch: pytest.MonkeyPatch, level_ms: float, deepest: bool
) -> None:
    backbone = random_backbone("llama", dtype=torch.float32)
    monkeypatch.setattr(
        calibrate_module,
        "measure_step_latency",
        lambda backbone, draft, trees, prompt, on_measured: [
            1 + 0.01 * tree.size + level_ms * tree.max_depth for tree in trees
        ],
    )
    answer = Trace([[0, 0, 0], [1, 0, -1], [0, 1, -1]] * 10, [3] * 30)
    monkeypatch.setattr(calibrate_module, "trace_answers", lambda *given, **options: dict.fromkeys(range(6), answer))
    result = calibrate(backbone, MedusaDraft.from_backbone(backbone, 3), [[1, 2, 3]], sizes=(2, 3, 5))
    assert [choice.tree.size for choice in result.candidates] == sorted(
        {choice.tree.size for choice in result.candidates}
    )
    assert (result.best.tree.max_depth > 1) == deepest


def test_calibration_end_to_end(tmp_path: Path) -> None:
    backbone = random_backbone("llama", dtype=torch.float32)
    prompts = [[i, i + 1, 2 * i + 1] for i in range(2, 14)]
    lengths: list[int] = []
    result = calibrate(
        backbone,
        noisy_heads(backbone),
        prompts,
        max_new_tokens=20,
        token_budget=150,
        sizes=(0, 2, 5),
        on_answer=lengths.append,
    )
    assert (result.answers, sum(lengths)) == (8, 160)
    assert [choice.tree.size for choice in result.candidates] == [0, 2, 5]
    assert result.candidates[0].tokens_per_step == 1.0
    assert all(choice.step_ms > 0 for choice in result.candidates)
    result.save(tmp_path / "tree.json")
    assert Tree.load(tmp_path / "tree.json") == result.best.tree
    record = json.loads((tmp_path / "tree.json").read_text())
    assert record["form"]["dtype"] == "float32"
    dynamic = DynamicTrees.load(tmp_path / "tree.json")
    assert dynamic is not None
    assert [size.nodes for size in dynamic.sizes] == [0, 2, 5]
    assert len(record["head_accuracy"]) == 3
    assert len(record["head_accuracy"][0]) == 10
    with pytest.raises(MedusaError, match="got 2"):
        calibrate(backbone, noisy_heads(backbone), prompts[:2])


def test_the_first_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft reads the prompt in it, once in an answer of any length."""
    clock = [0.0]
    monkeypatch.setattr(calibrate_module.time, "perf_counter", lambda: clock[0])

    class Steps(Decoder):
        def stream(self, *args: Any, **options: Any) -> Iterator[Step]:
            for seconds in (100.0, 50.0, *[0.002] * 20):  # prefill, first step, later steps
                clock[0] += seconds
                yield Step([1], 0)

    monkeypatch.setattr(calibrate_module, "Decoder", Steps)
    backbone = random_backbone("llama")
    measured = measure_step_latency(backbone, noisy_heads(backbone), [Tree.empty(), Tree.chain(1)], [1, 2, 3])
    assert measured == pytest.approx([2.0, 2.0])


def test_speed_decides_not_acceptance() -> None:
    slow = TreeCandidate(Tree.cartesian([4, 4]), 3.0, 9.0)
    quick = TreeCandidate(Tree.chain(2), 2.0, 4.0)
    assert Calibration([quick, slow], [], 3, 100).best is quick


def test_of_equally_fast_trees_the_smallest_is_taken() -> None:
    small = TreeCandidate(Tree.chain(2), 2.0, 4.0)
    lucky = TreeCandidate(Tree.cartesian([4, 4]), 4.04, 8.0)
    better = TreeCandidate(Tree.cartesian([4, 4]), 4.2, 8.0)
    assert Calibration([small, lucky], [], 3, 100).best is small
    assert Calibration([small, better], [], 3, 100).best is better


def test_what_the_best_tree_is_expected_to_bring_is_said() -> None:
    plain, tree = TreeCandidate(Tree.empty(), 1.0, 4.0), TreeCandidate(Tree.chain(1), 1.5, 5.0)
    text = Calibration([plain, tree], [], 3, 1200).describe()
    assert text.startswith("1.50 tokens per step: 1,200 greedy tokens")
    assert text.endswith("with the chosen tree of 1 node (5.0 ms per step here)")
    assert "decoding stays plain" in Calibration([plain, replace(tree, step_ms=6.0)], [], 3, 1200).describe()


def test_a_prompt_that_fills_the_context_is_not_timed_on() -> None:
    backbone = random_backbone("llama")
    long, short = list(range(2, 60)) * 2, [3, 4, 5]
    assert median_prompt(backbone, [long, short]) == short
    assert len(median_prompt(backbone, [long])) == backbone.max_context - 48
    with pytest.raises(MedusaError, match="exceed the model's context"):
        measure_step_latency(backbone, noisy_heads(backbone), [Tree.empty()], long)
