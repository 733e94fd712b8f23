"""Ranks, rank paths, simulated decoding and the choice of a tree."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from medusa_train.errors import MedusaError
from medusa_train.inference import tree_search as calibrate_module
from medusa_train.inference.generate import Decoder
from medusa_train.inference.traces import AcceptedLength, Trace, head_accuracy, rank_of, tokens_per_step, trace_answer
from medusa_train.inference.tree_fit import (
    SEARCHES,
    chain_trees,
    compare_searches,
    count_paths,
    dense_trees,
    fit_tree,
    independent_trees,
    joint_trees,
    most_frequent,
    shallower_trees,
)
from medusa_train.inference.tree_search import (
    Calibration,
    TreeCandidate,
    calibrate,
    measure_step_latency,
    median_prompt,
)
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
    assert TRACE.simulate(tree) == [0, 2, 3]
    assert tokens_per_step([TRACE], tree) == 5 / 3
    assert TRACE.simulate(Tree.empty()) == [0, 1, 2, 3, 4]
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
    assert most_frequent(counts, 4, max_depth=1).paths == ((0,), (1,))
    assert most_frequent(counts, 4, max_depth=2) == most_frequent(counts, 4)
    wide = Trace([[0, 0, 0], [0, 0, 1], [1, 0, 0], [2, 1, 0], [0, 1, 2]] * 4, [3] * 20)
    deep = fit_tree([wide], [wide], 5)
    assert deep.max_depth == 3
    flat = shallower_trees(deep, lambda size, depth: fit_tree([wide], [wide], size, depth))
    assert [(tree.size, tree.max_depth) for tree in flat] == [(5, 2)]  # there are three first tokens only


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
    monkeypatch.setattr(calibrate_module, "trace_answers", lambda *given, **options: [answer] * 6)
    result = calibrate(backbone, MedusaDraft.from_backbone(backbone, 3), [[1, 2, 3]], sizes=(2, 3, 5))
    assert [choice.tree.size for choice in result.candidates] == sorted(
        {choice.tree.size for choice in result.candidates}
    )
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
    for place, known in enumerate(trace.targets):
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
        starts = trace_answer(backbone, draft, prompt, plain).simulate(tree)
        assert len(starts) == real.steps


def test_a_refit_is_taken_only_where_held_out_steps_agree() -> None:
    """Decoding with {(0,), (1,)} visits even positions alone, where (1,) never comes: a recount would drop it."""
    trace = Trace([[0, -1] if i % 2 == 0 else [1, 0] for i in range(41)], [2] * 41)
    naive = most_frequent(count_paths([trace]), 2)
    assert set(naive.paths) == {(0,), (1,)}
    assert most_frequent(count_paths([trace], [trace.simulate(naive)]), 2).paths == ((0,),)
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
    assert [choice.tree.size for choice in result.candidates] == [0, 2, 5]
    assert result.candidates[0].tokens_per_step == 1.0
    assert all(choice.step_ms > 0 for choice in result.candidates)
    result.save(tmp_path / "tree.json")
    assert Tree.load(tmp_path / "tree.json") == result.best.tree
    record = json.loads((tmp_path / "tree.json").read_text())
    assert len(record["head_accuracy"]) == 3
    assert len(record["head_accuracy"][0]) == 10
    with pytest.raises(MedusaError, match="got 2"):
        calibrate(backbone, _noisy(backbone), prompts[:2])


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


def test_tied_logits_have_the_places_that_proposals_give_them() -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, 5.0, 1.0] + [0.0] * 19 + [-1.0]])
    order = logits.topk(5).indices[0].tolist()
    for place, token in enumerate(order):
        assert int(rank_of(logits, torch.tensor([token]))) == place
    assert int(rank_of(logits, torch.tensor([24]))) == -1


def test_a_prompt_that_fills_the_context_is_not_timed_on() -> None:
    backbone = random_backbone("llama")
    long, short = list(range(2, 60)) * 2, [3, 4, 5]
    assert median_prompt(backbone, [long, short]) == short
    assert len(median_prompt(backbone, [long])) == backbone.max_context - 48
    with pytest.raises(MedusaError, match="exceed the model's context"):
        measure_step_latency(backbone, _noisy(backbone), [Tree.empty()], long)


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
        column = [row[head] for t in traces for row, known in zip(t.ranks, t.targets, strict=True) if known > head]
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

    walk = Trace.simulate

    def watched(self: Trace, tree: Tree | AcceptedLength) -> list[int]:
        judged.append(id(self))
        assert id(self) not in seen[-1]
        return walk(self, tree)

    monkeypatch.setattr(Trace, "simulate", watched)
    (found,) = compare_searches(talks, [4], {"joint": spy}, folds=3)
    assert sorted(judged) == sorted(id(one[0]) for one in talks)
    assert found.by_size[4] == 1.0


def test_one_conversation_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least two conversations"):
        compare_searches([talk(random.Random(1))], [4])
