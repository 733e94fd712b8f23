"""The tree that is fitted to a draft: what it was fitted to, what each size is worth on other
answers, and which one is chosen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.behaviour import plain, plain_trees
from tests.behaviour.scripted import write_scripted_model
from tests.behaviour.test_decoding import ranks_along
from tests.behaviour.world import (
    Clock,
    evaluate,
    greedy,
    make_chats,
    read_json,
    read_lines,
    render,
    train,
    training_keys,
    write_lines,
)

SIZES = {0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63}


@pytest.fixture(scope="module")
def fitted(model: Path, own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that fitted a tree to its prompts, which are of its training data."""
    out = tmp_path_factory.mktemp("fitted") / "run"
    keys = training_keys(model, own, out, medusa_num_heads=3, calibration_tokens=240)
    keys |= {"micro_batch_size": 8, "max_steps": 50, "lr_scheduler": "constant"}
    train(**keys | {"logging_steps": 50}).ok()
    return out


def traces_of(run: Path) -> list[list[plain_trees.Ranks]]:
    """Return the ranks of each answer, by conversation, from tree_traces.npz."""
    with np.load(run / "tree_traces.npz") as arrays:
        ranks = arrays["ranks"].tolist()
        tokens = np.cumsum(arrays["tokens"]).tolist()
        answers = np.cumsum(arrays["answers"]).tolist()
    traces = [ranks[start:end] for start, end in pairwise([0, *tokens])]
    return [traces[start:end] for start, end in pairwise([0, *answers])]


def test_traces_are_ranks_along_the_models_greedy_answers(
    fitted: Path, own: Path, exact_model: Any, tokenizer: Any
) -> None:
    draft = plain.PlainDraft.read(fitted / "heads", exact_model)
    expected = []
    for record in read_lines(own):
        prompt = tokenizer(render(record["messages"][:1]))["input_ids"]
        answer = greedy(exact_model, prompt, 30)
        expected.append(ranks_along(draft, prompt, answer))
    found = [answer for chat in traces_of(fitted) for answer in chat]
    assert found
    assert all(answer in expected for answer in found)
    assert len({json.dumps(answer) for answer in found}) == len(found)
    about = read_json(fitted / "tree.json")["calibration"]
    assert about["answers"] == len(found)
    assert about["tokens"] == sum(len(answer) for answer in found)
    assert about["conversations"] == len(traces_of(fitted))


def check_choice(
    tree: dict[str, Any], conversations: Sequence[Sequence[plain_trees.Ranks]]
) -> None:
    """Compare all that tree.json says, but for times, with the traces."""
    answers = [answer for chat in conversations for answer in chat]
    accuracy = plain_trees.accuracy(answers)
    for row, expected in zip(tree["head_accuracy"], accuracy, strict=True):
        assert row == pytest.approx(expected, abs=5.1e-5)
    sizes = [entry["nodes"] for entry in tree["sizes"]]
    assert sizes == sorted(sizes)
    depths: list[int | None] = [None, *range(1, len(accuracy) + 1)]
    # where the answers have fewer paths than a size, all of them are the tree
    smaller = {len(plain_trees.fit(answers, size, d)) for size in (4, 8, 16, 63) for d in depths}
    assert set(sizes) <= SIZES | smaller
    assert 0 in sizes
    for entry in tree["sizes"]:
        size = entry["nodes"]
        paths = [tuple(path) for path in entry["medusa_choices"]]
        assert len(paths) == size
        fitting = [d for d in depths if set(plain_trees.fit(answers, size, d)) == set(paths)]
        assert fitting or not size, paths
        rates = [plain_trees.cross_validated(conversations, size, 3, d) for d in fitting] or [1.0]
        assert any(entry["tokens_per_step"] == pytest.approx(r, abs=1e-4) for r in rates)
        speed = 1000 * entry["tokens_per_step"] / entry["step_ms"]
        assert entry["tokens_per_s"] == pytest.approx(speed, rel=2e-3)
    best = max(entry["tokens_per_s"] for entry in tree["sizes"])
    chosen = next(entry for entry in tree["sizes"] if entry["tokens_per_s"] >= 0.98 * best - 0.1)
    near = [e["nodes"] for e in tree["sizes"] if abs(e["tokens_per_s"] / best - 0.98) < 1e-3]
    assert tree["nodes"] in {chosen["nodes"], *near}
    (entry,) = [entry for entry in tree["sizes"] if entry["nodes"] == tree["nodes"]]
    assert tree["medusa_choices"] == entry["medusa_choices"]
    assert tree["tokens_per_step"] == entry["tokens_per_step"]


def test_a_tree_of_each_size_is_rated_on_other_answers(fitted: Path) -> None:
    tree = read_json(fitted / "tree.json")
    check_choice(tree, traces_of(fitted))
    form = tree["form"]
    assert (form["dtype"], form["device"], form["compiled"]) == ("float32", "cpu", False)


def test_calibration_fits_it_again_on_other_prompts(
    skilled: Callable[[str], Path], own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the bench, where the run's data are gone; the tree goes where `output_dir` says."""
    monkeypatch.setattr(time, "perf_counter", Clock())
    run = skilled("eagle3") / "heads"
    texts = [record["messages"][0]["content"] for record in read_lines(own)]
    bench = write_lines(
        tmp_path / "b.jsonl", [{"question_id": n, "turns": [t]} for n, t in enumerate(texts)]
    )
    words = ["--calibrate", "--bench", bench, "--model", run]
    keys = {"dtype": "float32", "calibration_tokens": 160, "max_new_tokens": 24}
    shown = evaluate(*words, **keys, output_dir=tmp_path / "out").ok()
    tree = read_json(tmp_path / "out" / "tree.json")
    check_choice(tree, traces_of(tmp_path / "out"))
    assert len({entry["step_ms"] for entry in tree["sizes"]}) == 1
    most = max(entry["tokens_per_step"] for entry in tree["sizes"])
    assert tree["tokens_per_step"] >= 0.98 * most - 1e-3  # more nodes bring less than 2 %
    smaller = [entry for entry in tree["sizes"] if entry["nodes"] < tree["nodes"]]
    assert all(entry["tokens_per_step"] <= 0.98 * most + 1e-3 for entry in smaller)
    shown.says(
        "chosen:", f"{tree['tokens_per_step']:.2f} tokens per step" if tree["nodes"] else "plain"
    )
    evaluate("--calibrate", "--bench", bench, "--base-model", "x").fails(1)


def test_short_answers_are_traced_until_there_are_enough_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has three tokens and the one that ends it."""
    monkeypatch.setattr(time, "perf_counter", Clock())
    model = write_scripted_model(tmp_path / "model", " one", " two", " red")
    data = write_lines(tmp_path / "d.jsonl", [{"messages": c} for c in make_chats(40, turns=1)])
    train(**training_keys(model, data, tmp_path / "run", calibration_tokens=40, max_steps=1)).ok()
    about = read_json(tmp_path / "run" / "tree.json")["calibration"]
    assert about == {"conversations": 10, "answers": 10, "tokens": 40}


def test_too_few_chats_give_no_tree_and_say_so(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "two.jsonl", [{"messages": c} for c in make_chats(2)])
    keys = training_keys(model, data, tmp_path / "run", calibration_tokens=60)
    train(**keys).ok().says("no tree was chosen", "--calibrate")
    assert not (tmp_path / "run" / "tree.json").exists()


def test_a_tree_is_used_as_it_was_chosen(fitted: Path, own: Path, tmp_path: Path) -> None:
    """A run without a `--tree` decodes with its tree.json."""
    text = read_lines(own)[0]["messages"][0]["content"]
    bench = write_lines(tmp_path / "b.jsonl", [{"question_id": 1, "turns": [text]}])
    evaluate(
        "--bench", bench, "--model", fitted, dtype="float32", max_new_tokens=20, warmup=0,
        exactness=False, output_dir=tmp_path / "out",
    ).ok()  # fmt: skip
    tree = read_json(fitted / "tree.json")
    report = read_json(tmp_path / "out" / "report.json")
    assert report["meta"]["tree_nodes"] == tree["nodes"]
    (line,) = read_lines(tmp_path / "out" / "answers.jsonl")
    (traced,) = read_lines(tmp_path / "out" / "ranks.jsonl")
    paths = [tuple(path) for path in tree["medusa_choices"]]
    assert line["accepted"] == plain_trees.steps_of(traced["ranks"], paths)
    sizes = {entry["nodes"]: entry["tokens_per_step"] for entry in tree["sizes"]}
    shown = {entry["nodes"]: entry["tokens_per_step"] for entry in report["calibration"]["sizes"]}
    assert shown == sizes
