"""Ranks, rank paths, simulated decoding and the choice of a tree."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from medusa_train.errors import MedusaError
from medusa_train.inference import calibrate as calibrate_module
from medusa_train.inference.calibrate import (
    Calibration,
    TreeChoice,
    calibrate,
    count_paths,
    fit_tree,
    most_frequent,
    shallower,
    step_latency,
    typical_prompt,
)
from medusa_train.inference.generate import Decoder
from medusa_train.inference.ranks import Trace, head_accuracy, rank_of, tokens_per_step, trace_answer
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.trees.tree import Tree
from tests.families import random_backbone

# an answer of six tokens, three heads: rank of what head k said would come k tokens after the root
TRACE = Trace(
    [[0, 1, -1], [0, 0, 2], [-1, 0, 0], [1, 0, -1], [0, -1, -1], [-1, -1, -1]],
    [3, 3, 3, 2, 1, 0],
)


def test_paths_end_at_the_first_miss() -> None:
    assert [TRACE.path(i) for i in range(6)] == [(0, 1), (0, 0, 2), (), (1, 0), (0,), ()]


def test_decoding_on_paper() -> None:
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0)])
    # from 0 only (0,) is in the tree: one accepted and the new root is 2; from 2 nothing; from 3 both nodes
    assert TRACE.walk(tree) == [0, 2, 3]
    assert tokens_per_step([TRACE], tree) == 5 / 3
    assert TRACE.walk(Tree.empty()) == [0, 1, 2, 3, 4]
    assert tokens_per_step([TRACE], Tree.empty()) == 1.0


def test_accuracy_counts_only_positions_with_a_target() -> None:
    accuracy = head_accuracy([TRACE])
    assert accuracy[0][:2] == [3 / 5, 4 / 5]
    assert accuracy[1][:2] == [3 / 4, 4 / 4]
    assert accuracy[2][:3] == [1 / 3, 1 / 3, 2 / 3]


def test_path_counts_and_the_most_frequent() -> None:
    counts = count_paths([TRACE])
    assert counts == Counter({(0,): 3, (0, 1): 1, (0, 0): 1, (0, 0, 2): 1, (1,): 1, (1, 0): 1})
    assert most_frequent(counts, 4).paths == ((0,), (1,), (0, 0), (0, 1))
    assert count_paths([TRACE], [[3, 4]]) == Counter({(0,): 1, (1,): 1, (1, 0): 1})


def test_depth_limits_the_most_frequent_and_flat_trees_are_as_large() -> None:
    counts = count_paths([TRACE])
    assert most_frequent(counts, 4, depth=1).paths == ((0,), (1,))
    assert most_frequent(counts, 4, depth=2) == most_frequent(counts, 4)
    wide = Trace([[0, 0, 0], [0, 0, 1], [1, 0, 0], [2, 1, 0], [0, 1, 2]] * 4, [3] * 20)
    deep = fit_tree([wide], [wide], 5)
    assert deep.max_depth == 3
    flat = shallower(deep, lambda size, depth: fit_tree([wide], [wide], size, depth))
    assert [(tree.size, tree.max_depth) for tree in flat] == [(5, 2)]  # there are three first tokens only


@pytest.mark.parametrize(("level_ms", "deepest"), [(0.0, True), (5.0, False)])
def test_a_level_that_costs_much_makes_trees_flat(
    monkeypatch: pytest.MonkeyPatch, level_ms: float, deepest: bool
) -> None:
    backbone = random_backbone("llama", dtype=torch.float32)
    monkeypatch.setattr(
        calibrate_module,
        "step_latency",
        lambda backbone, draft, trees, prompt: [1 + 0.01 * tree.size + level_ms * tree.max_depth for tree in trees],
    )
    answer = Trace([[0, 0, 0], [1, 0, -1], [0, 1, -1]] * 10, [3] * 30)
    monkeypatch.setattr(calibrate_module, "trace_answers", lambda *given, **options: [answer] * 6)
    result = calibrate(backbone, MedusaDraft.from_backbone(backbone, 3), [[1, 2, 3]], sizes=(2, 3, 5))
    assert [choice.tree.size for choice in result.choices] == sorted({choice.tree.size for choice in result.choices})
    assert (result.best.tree.max_depth > 1) == deepest


def test_the_most_frequent_paths_are_the_best_tree_of_their_size() -> None:
    """Against every connected tree of three nodes: none has a larger mean accepted length."""
    torch.manual_seed(3)
    traces = [Trace(torch.randint(-1, 3, (30, 2)).tolist(), [2] * 30) for _ in range(4)]
    counts = count_paths(traces)
    best = sum(counts[path] for path in most_frequent(counts, 3).paths)
    nodes = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    for chosen in itertools.combinations(nodes, 3):
        if all(path[:-1] in chosen for path in chosen if len(path) > 1):
            assert sum(counts[path] for path in chosen) <= best


def _noisy(backbone: Backbone) -> MedusaDraft:
    draft = MedusaDraft.from_backbone(backbone, num_heads=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for block in draft.blocks.parameters():
            block.normal_(0, 0.05)
    return draft


def test_ranks_against_a_plain_computation() -> None:
    backbone = random_backbone("llama")
    draft = _noisy(backbone)
    prompt = [3, 1, 4, 1]
    answer = Decoder(backbone).generate(prompt, 12).tokens
    trace = trace_answer(backbone, draft, prompt, answer)
    text = prompt + answer
    for place, known in enumerate(trace.known):
        hidden = backbone.run(torch.tensor([text[: len(prompt) + place]])).hidden[0, -1]
        for k in (1, 2, 3):
            if place + k >= len(answer):
                assert (trace.ranks[place][k - 1], known < k) == (-1, True)
                continue
            order = draft.head_logits(hidden, k).argsort(descending=True).tolist()
            rank = order.index(answer[place + k])
            assert trace.ranks[place][k - 1] == (rank if rank < 10 else -1)


@pytest.mark.parametrize("tree", [Tree.cartesian([3, 2]), Tree.chain(3), Tree.from_paths([(0,), (4,), (0, 3)])])
def test_decoding_on_paper_is_what_the_loop_does(tree: Tree) -> None:
    backbone = random_backbone("qwen3")
    draft = _noisy(backbone)
    for prompt in ([3, 1, 4], [9], [20, 30, 40, 50]):
        plain = Decoder(backbone).generate(prompt, 40).tokens
        real = Decoder(backbone, draft, tree).generate(prompt, 40)
        starts = trace_answer(backbone, draft, prompt, plain).walk(tree)
        assert len(starts) == real.steps


def test_a_refit_is_taken_only_where_held_out_steps_agree() -> None:
    """Decoding with {(0,), (1,)} visits even positions alone, where (1,) never comes: a recount would drop it."""
    trace = Trace([[0, -1] if i % 2 == 0 else [1, 0] for i in range(41)], [2] * 41)
    naive = most_frequent(count_paths([trace]), 2)
    assert set(naive.paths) == {(0,), (1,)}
    assert most_frequent(count_paths([trace], [trace.walk(naive)]), 2).paths == ((0,),)
    assert fit_tree([trace], [trace], 2) == naive
    # another ending, in which the recounted paths win: after (0,) was accepted, (2, 2) always follows
    fit = Trace([[0, -1] if i % 2 == 0 else [1, -1] for i in range(20)] + [[2, 2]] * 9, [2] * 29)
    refit = fit_tree([fit], [Trace([[2, 2]] * 30, [2] * 30)], 3)
    assert (2, 2) in refit.paths


def test_calibration_end_to_end(tmp_path: Path) -> None:
    backbone = random_backbone("llama", dtype=torch.float32)
    prompts = [[i, i + 1, 2 * i + 1] for i in range(2, 14)]
    told: list[int] = []
    result = calibrate(
        backbone, _noisy(backbone), prompts, max_new_tokens=20, token_budget=150, sizes=(0, 2, 5), on_answer=told.append
    )
    assert (result.answers, sum(told)) == (8, 160)
    assert [choice.tree.size for choice in result.choices] == [0, 2, 5]
    assert result.choices[0].tokens_per_step == 1.0
    assert all(choice.step_ms > 0 for choice in result.choices)
    result.save(tmp_path / "tree.json")
    assert Tree.load(tmp_path / "tree.json") == result.best.tree
    record = json.loads((tmp_path / "tree.json").read_text())
    assert len(record["head_accuracy"]) == 3
    assert len(record["head_accuracy"][0]) == 10
    with pytest.raises(MedusaError, match="only 2 answers"):
        calibrate(backbone, _noisy(backbone), prompts[:2])


def test_speed_decides_not_acceptance() -> None:
    slow = TreeChoice(Tree.cartesian([4, 4]), 3.0, 9.0)
    quick = TreeChoice(Tree.chain(2), 2.0, 4.0)
    assert Calibration([quick, slow], [], 3, 100).best is quick


def test_of_equally_fast_trees_the_smallest_is_taken() -> None:
    small = TreeChoice(Tree.chain(2), 2.0, 4.0)
    lucky = TreeChoice(Tree.cartesian([4, 4]), 4.04, 8.0)
    better = TreeChoice(Tree.cartesian([4, 4]), 4.2, 8.0)
    assert Calibration([small, lucky], [], 3, 100).best is small
    assert Calibration([small, better], [], 3, 100).best is better


def test_tied_logits_have_the_places_that_proposals_give_them() -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, 5.0, 1.0] + [0.0] * 19 + [-1.0]])
    order = logits.topk(5).indices[0].tolist()
    for place, token in enumerate(order):
        assert int(rank_of(logits, torch.tensor([token]))) == place
    assert int(rank_of(logits, torch.tensor([24]))) == -1


def test_a_prompt_that_fills_the_context_is_not_timed_on() -> None:
    backbone = random_backbone("llama")
    long, short = list(range(2, 60)) * 2, [3, 4, 5]
    assert typical_prompt(backbone, [long, short]) == short
    assert len(typical_prompt(backbone, [long])) == backbone.max_context - 48
    with pytest.raises(MedusaError, match="no room"):
        step_latency(backbone, _noisy(backbone), [Tree.empty()], long)
