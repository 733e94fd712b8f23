"""medusa-eval: answers, what is counted of them, and every figure of the report computed again from
its files; modes, drafts, scores, grades, comparisons, chats, and what happens when it is stopped.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.behaviour import plain, plain_trees
from tests.behaviour.conftest import KINDS
from tests.behaviour.processes import Process
from tests.behaviour.scripted import write_scripted_model
from tests.behaviour.seams import decode
from tests.behaviour.test_decoding import LOOKUP, ranks_along
from tests.behaviour.world import (
    EOS,
    NARROW,
    QUICK,
    TOKENS,
    Clock,
    evaluate,
    greedy,
    read_json,
    read_lines,
    render,
    train,
    training_keys,
    write_lines,
    write_model,
    write_tree,
)
from tests.fake_server import completion, error, serving

# The answers


def expected_turns(bench: Path, model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return prompt, answer and text of every turn, asked one after the other."""
    turns = []
    for question in read_lines(bench):
        messages = []
        if "system" in question:
            messages.append({"role": "system", "content": question["system"]})
        for number, asked in enumerate(question["turns"], start=1):
            messages.append({"role": "user", "content": asked})
            prompt = tokenizer(render(messages), add_special_tokens=False)["input_ids"]
            answer = greedy(model, prompt, TOKENS)
            text = tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            turns.append(
                {
                    "question_id": question["question_id"],
                    "turn": number,
                    "category": question["category"],
                    "asked": asked,
                    "prompt": prompt,
                    "answer": answer,
                    "text": text,
                }
            )
    return turns


@pytest.fixture(scope="session")
def turns(bench: Path, exact_model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    return expected_turns(bench, exact_model, tokenizer)


def test_answers_are_the_models_greedy_ones_and_steps_follow_from_the_heads(
    evaluated: Path, turns: list[dict[str, Any]], skilled: Callable[[str], Path], exact_model: Any
) -> None:
    draft = plain.PlainDraft.read(skilled("medusa") / "heads", exact_model)
    lines = read_lines(evaluated / "answers.jsonl")
    ranks = read_lines(evaluated / "ranks.jsonl")
    assert len(lines) == len(turns) == 7
    for line, traced, turn in zip(lines, ranks, turns, strict=True):
        for key in ("question_id", "turn", "category", "asked"):
            assert line[key] == turn[key]
        assert line["text"].strip() == turn["text"].strip()
        assert line["prompt_tokens"] == len(turn["prompt"])
        assert line["tokens"] == len(turn["answer"])
        expected = ranks_along(draft, turn["prompt"], turn["answer"])
        assert traced["ranks"] == expected
        assert (traced["question_id"], traced["turn"]) == (turn["question_id"], turn["turn"])
        assert line["accepted"] == plain_trees.steps_of(expected, NARROW)
        assert line["steps"] == len(line["accepted"])
        assert len(line["pieces"]) == len(turn["answer"])
        assert line["exact"]["float32"] == "equal"
        assert set(line["seconds"]) == {"tree", "plain", "generate", "prompt_lookup"}
    assert sum(sum(line["accepted"]) for line in lines) > 5


COPIES = {"max_ngram": 2, "max_tokens": 4, "nodes": 6, "min_probability": 0.1}
#: Drafts by how an evaluation decodes with them: the command's words and the reference's options.
WITH_DRAFTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    kind: ([], {"tree": NARROW}) for kind in KINDS if kind not in ("medusa", "medusa-soft")
}
WITH_DRAFTS["eagle3 dynamic"] = (["--tree", "dynamic:9x3"], {"dynamic": (9, 3)})
WITH_DRAFTS["medusa+prompt_lookup"] = (
    [
        "--draft",
        "medusa+prompt_lookup",
        *(f"lookup.{key}={value}" for key, value in COPIES.items()),
    ],
    {"tree": NARROW, "lookup": ("prompt_lookup", COPIES)},
)


@pytest.mark.parametrize("name", WITH_DRAFTS)
def test_every_draft_through_the_command(
    name: str,
    skilled: Callable[[str], Path],
    bench: Path,
    turns: list[dict[str, Any]],
    exact_model: Any,
    tree_file: Path,
    tmp_path: Path,
) -> None:
    """The tokens are the model's own, and each step accepts what it does in float64."""
    words, options = WITH_DRAFTS[name]
    if "tree" in options:
        words = ["--tree", str(tree_file), *words]
    run = skilled(name.replace("+prompt_lookup", "").partition(" ")[0])
    settings = QUICK | {"generate": False, "prompt_lookup": False, "output_dir": tmp_path / "out"}
    if name.startswith("kangaroo"):
        settings["threshold"] = 0.3
        options = {**options, "threshold": 0.3}
    evaluate("--bench", bench, "--model", run, *words, **settings).ok()
    answers = decode(
        exact_model,
        [turn["prompt"] for turn in turns],
        run / "heads",
        max_new_tokens=TOKENS,
        ends=[EOS],
        **options,
    )
    lines = read_lines(tmp_path / "out" / "answers.jsonl")
    for line, answer, turn in zip(lines, answers, turns, strict=True):
        assert answer.tokens == turn["answer"]
        assert (line["tokens"], line["accepted"]) == (len(answer.tokens), answer.accepted)


def test_drafts_without_training_through_the_command(
    model: Path,
    bench: Path,
    own: Path,
    turns: list[dict[str, Any]],
    exact_model: Any,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    answers = [record["messages"][1]["content"] for record in read_lines(own)]
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "prompt_lookup": ("lookup", {**LOOKUP, "nodes": 30}),
        "lookahead": ("lookahead", {"window": 3, "ngram": 3, "guesses": 4}),
        "rest": ("rest", {"max_ngram": 5, "max_tokens": 6, "nodes": 12}),
    }
    for name, (section, keys) in settings.items():
        written = [f"{section}.{key}={value}" for key, value in keys.items()]
        given = dict(keys)
        if name == "rest":
            written.append(f"rest.datastore={own}")
            given["datastore"] = [tokenizer(text)["input_ids"] for text in answers]
        out = tmp_path / name
        evaluate(
            "--bench", bench, "--base-model", model, "--draft", name, *written,
            **QUICK, output_dir=out,
        ).ok()  # fmt: skip
        expected = decode(
            exact_model, [turn["prompt"] for turn in turns], lookup=(name, given),
            max_new_tokens=TOKENS, ends=[EOS],
        )  # fmt: skip
        lines = read_lines(out / "answers.jsonl")
        assert [line["text"].strip() for line in lines] == [t["text"].strip() for t in turns]
        assert sum(sum(line["accepted"]) for line in lines) > 0
        if name != "rest":  # which tokenizes its datastore as chats
            assert [line["accepted"] for line in lines] == [a.accepted for a in expected]


# The report


def recomputed(lines: list[dict[str, Any]], ranks: list[plain_trees.Ranks]) -> dict[str, Any]:
    """Return figures of a group of answers from their lines."""

    def rate(decoder: str, chosen: list[dict[str, Any]] | None = None) -> float:
        used = lines if chosen is None else chosen
        return sum(x["tokens"] for x in used) / sum(x["seconds"][decoder] for x in used)

    accepted = [count for line in lines for count in line["accepted"]]
    lengths = Counter(accepted)
    calm = [line for line in lines if not line["loops"]]
    heads = len(ranks[0][0])
    return {
        "answers": len(lines),
        "acceleration_rate": sum(x["tokens"] - 1 for x in lines) / sum(x["steps"] for x in lines),
        "tokens_per_s": rate("tree"),
        "baseline_tokens_per_s": rate("plain"),
        "generate_tokens_per_s": rate("generate"),
        "speedup": rate("tree") / rate("plain"),
        "speedup_over_generate": rate("tree") / rate("generate"),
        "speedup_over_fastest": rate("tree") / max(rate("plain"), rate("generate")),
        "looping_answers": sum(line["loops"] for line in lines),
        "speedup_without_loops": rate("tree", calm) / rate("plain", calm),
        "accepted_lengths": [lengths[n] for n in range(max(lengths) + 1)],
        "ctar": [
            sum(count >= w for count in accepted) / len(accepted)
            for w in range(1, max(accepted) + 1)
        ],
        "chain_rates": [
            plain_trees.tokens_per_step(ranks, [(0,) * d for d in range(1, k + 1)])
            for k in range(1, heads + 1)
        ],
        "head_accuracy": plain_trees.accuracy(ranks),
        "equal_answers": sum(line["exact"]["float32"] == "equal" for line in lines),
        "tie_answers": sum(line["exact"]["float32"] == "tie" for line in lines),
        "equal_answers_bf16": equal_in_bfloat16(lines),
    }


def equal_in_bfloat16(lines: list[dict[str, Any]]) -> int | None:
    """Count equal answers; None on processors that emulate bfloat16, where none are compared."""
    if "bfloat16" not in lines[0]["exact"]:
        return None
    return sum(line["exact"]["bfloat16"] == "equal" for line in lines)


def assert_figures(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            assert [pytest.approx(row, rel=1e-9) for row in value] == found[name], name
        else:
            assert found[name] == pytest.approx(value, rel=1e-9), name


def test_every_figure_of_the_report_follows_from_the_answers(evaluated: Path) -> None:
    report = read_json(evaluated / "report.json")
    lines = read_lines(evaluated / "answers.jsonl")
    ranks = [line["ranks"] for line in read_lines(evaluated / "ranks.jsonl")]
    assert_figures(report["overall"], recomputed(lines, ranks))
    assert list(report["categories"]) == ["known", "new|er"]
    for category, figures in report["categories"].items():
        chosen = [n for n, line in enumerate(lines) if line["category"] == category]
        assert_figures(figures, recomputed([lines[n] for n in chosen], [ranks[n] for n in chosen]))
    assert report["baselines"] == report["overall"]["baselines"]
    for name, figures in report["baselines"].items():
        speed = sum(x["tokens"] for x in lines) / sum(x["seconds"][name] for x in lines)
        assert figures["tokens_per_s"] == pytest.approx(speed)
        assert figures["equal_to_plain"] == 7
        tree = report["overall"]["tokens_per_s"]
        assert figures["speedup"] == pytest.approx(tree / speed)
        plain_speed = report["overall"]["baseline_tokens_per_s"]
        assert figures["over_plain"] == pytest.approx(speed / plain_speed)
    assert report["baselines"]["plain"]["tokens_per_step"] == 1.0
    assert report["baselines"]["generate"]["tokens_per_step"] is None
    assert report["baselines"]["prompt_lookup"]["tokens_per_step"] >= 1.0
    assert report["overall"]["overhead"] > 0
    assert (
        0
        < report["overall"]["time_to_first_token_s"]
        < max(line["seconds"]["tree"] for line in lines)
    )


def test_intervals_are_those_of_a_bootstrap_over_questions(evaluated: Path) -> None:
    report = read_json(evaluated / "report.json")
    questions: dict[Any, list[dict[str, Any]]] = {}
    for line in read_lines(evaluated / "answers.jsonl"):
        questions.setdefault(line["question_id"], []).append(line)
    groups = list(questions.values())
    samples: dict[str, list[float]] = {"acceleration_rate": [], "speedup": [], "tokens_per_s": []}
    for chosen in itertools.product(groups, repeat=len(groups)):
        drawn = [line for group in chosen for line in group]
        tokens = sum(line["tokens"] for line in drawn)
        tree, base = (sum(line["seconds"][name] for line in drawn) for name in ("tree", "plain"))
        samples["acceleration_rate"].append((tokens - len(drawn)) / sum(x["steps"] for x in drawn))
        samples["speedup"].append(base / tree)
        samples["tokens_per_s"].append(tokens / tree)
    for name, values in samples.items():
        values.sort()
        low, high = report["overall"]["intervals"][name]
        assert values[len(values) // 100] <= low <= values[len(values) // 20]
        assert values[-len(values) // 20] <= high <= values[-len(values) // 100]
        assert low <= report["overall"][name] <= high
    assert set(report["overall"]["intervals"]) == {
        *("acceleration_rate", "overhead", "speedup", "speedup_over_generate"),
        *("speedup_over_fastest", "tokens_per_s"),
    }


def test_what_was_measured_is_recorded(
    evaluated: Path, skilled: Callable[[str], Path], bench: Path
) -> None:
    report = read_json(evaluated / "report.json")
    meta = report["meta"]
    expected = {
        "bench": "questions",
        "questions": 5,
        "skipped_turns": 0,
        "max_new_tokens": TOKENS,
        "stop_tokens": [EOS],
        "decoding": {"acceptance": "greedy", "batch_size": 1},
        "dtype": "float32",
        "compiled": False,
        "cuda_graphs": False,
        "draft": None,
        "heads": 3,
        "tree_nodes": 4,
        "tree_depth": 2,
        "tree_file": "narrow.json",
        "plain_equal_generate": 7,
        "resumed_turns": 0,
        "torch": torch.__version__,
    }
    assert {name: meta[name] for name in expected} == expected
    bfloat16 = meta["exactness"].pop("bfloat16")
    assert meta["exactness"] == {"float32": "compared"}
    answers = read_lines(evaluated / "answers.jsonl")
    emulated = equal_in_bfloat16(answers) is None
    assert bfloat16 == ("this device emulates it, which takes too long" if emulated else "compared")
    assert str(bench) in meta["command"]
    assert report["tree"]["medusa_choices"] == [list(path) for path in NARROW]
    ranks = [line["ranks"] for line in read_lines(evaluated / "ranks.jsonl")]
    steps, taken = 0, Counter[plain_trees.Path]()
    for answer in ranks:
        position = 0
        for accepted in plain_trees.steps_of(answer, NARROW):
            path = plain_trees.path_at(answer, position)
            taken.update(path[:d] for d in range(1, len(path) + 1))
            steps += 1
            position += accepted + 1
    assert report["tree"]["accepted"] == pytest.approx([taken[path] / steps for path in NARROW])


def test_pages_show_the_figures(evaluated: Path) -> None:
    overall = read_json(evaluated / "report.json")["overall"]
    page = (evaluated / "report.html").read_text(encoding="utf-8")
    text = (evaluated / "report.md").read_text(encoding="utf-8")
    for shown in (page, text):
        assert f"{overall['acceleration_rate']:.2f}" in shown
        assert f"{overall['speedup']:.2f}x" in shown
        assert "7/7" in shown
        assert "known" in shown
        assert "questions" in shown
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert text.startswith("#")


def test_answers_in_fastchats_format(evaluated: Path, skilled: Callable[[str], Path]) -> None:
    (path,) = (evaluated / "model_answer").iterdir()
    lines = read_lines(evaluated / "answers.jsonl")
    by_question: dict[Any, list[dict[str, Any]]] = {}
    for line in lines:
        by_question.setdefault(line["question_id"], []).append(line)
    for record in read_lines(path):
        answered = by_question[record["question_id"]]
        (choice,) = record["choices"]
        assert choice["turns"] == [line["text"] for line in answered]
        assert choice["decoding_steps"] == [line["steps"] for line in answered]
        assert choice["new_tokens"] == [line["tokens"] for line in answered]
        lengths = sum(choice["accept_lengths"])
        assert lengths == sum(line["tokens"] - 1 for line in answered)
        assert record["category"] == answered[0]["category"]


# Modes


def test_greedy_batches_give_the_same(
    skilled: Callable[[str], Path], bench: Path, tree_file: Path, evaluated: Path, tmp_path: Path
) -> None:
    words = ["--bench", bench, "--model", skilled("medusa"), "--tree", tree_file]
    evaluate(*words, "--batch-size", 3, **QUICK, output_dir=tmp_path / "out").ok()
    for line, alone in zip(
        read_lines(tmp_path / "out" / "answers.jsonl"),
        read_lines(evaluated / "answers.jsonl"),
        strict=True,
    ):
        for key in ("question_id", "turn", "text", "tokens", "accepted", "steps"):
            assert line[key] == alone[key]
    report = read_json(tmp_path / "out" / "report.json")
    assert report["meta"]["decoding"]["batch_size"] == 3
    assert set(report["baselines"]) == {"plain", "generate"}
    rate = read_json(evaluated / "report.json")["overall"]["acceleration_rate"]
    assert report["overall"]["acceleration_rate"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (
            ["--acceptance", "sampling", "--temperature", "0.8", "--top-p", "0.9"],
            "sampling-t0.8-top_p0.9",
        ),
        (["--acceptance", "typical", "epsilon=0.2"], "typical-t0.7-epsilon0.2"),
    ],
)
def test_sampled_evaluations_repeat(
    words: list[str],
    name: str,
    skilled: Callable[[str], Path],
    bench: Path,
    tree_file: Path,
    tmp_path: Path,
) -> None:
    texts = []
    for seed in (1, 1, 2):
        out = tmp_path / str(len(texts))
        settings = QUICK | {"generate": False, "seed": seed, "output_dir": out}
        command = ["--bench", bench, "--model", skilled("medusa"), "--tree", tree_file, *words]
        evaluate(*command, **settings).ok()
        texts.append([line["text"] for line in read_lines(out / "answers.jsonl")])
        report = read_json(out / "report.json")
        assert report["overall"]["equal_answers"] is None
        assert report["meta"]["decoding"]["acceptance"] == words[1]
    assert texts[0] == texts[1]
    if words[1] == "sampling":
        assert texts[0] != texts[2]
    run = tmp_path / "run"
    run.symlink_to(skilled("medusa"))
    evaluate("--bench", bench, "--model", run, "--tree", tree_file, *words, **QUICK, limit=1).ok()
    (made,) = (run / "eval").glob(f"questions-narrow-*-{name}")
    assert (made / "report.json").is_file()


def test_without_a_tree_heads_are_traced_and_nothing_is_drafted(
    skilled: Callable[[str], Path], bench: Path, evaluated: Path, tmp_path: Path
) -> None:
    words = ["--bench", bench, "--model", skilled("medusa"), "--tree", "none"]
    evaluate(*words, **QUICK, output_dir=tmp_path / "out").ok()
    report = read_json(tmp_path / "out" / "report.json")
    assert report["overall"]["speedup"] is None
    theirs = read_lines(evaluated / "ranks.jsonl")
    assert read_lines(tmp_path / "out" / "ranks.jsonl") == theirs


def test_the_chain_of_first_guesses_without_a_tree_file(
    skilled: Callable[[str], Path], bench: Path, evaluated: Path, tmp_path: Path
) -> None:
    words = ["--bench", bench, "--model", skilled("medusa") / "heads"]
    shown = evaluate(*words, **QUICK, output_dir=tmp_path / "out").ok()
    shown.says("no tree.json", "--calibrate")
    ranks = [line["ranks"] for line in read_lines(evaluated / "ranks.jsonl")]
    chain = [(0,), (0, 0), (0, 0, 0)]
    for line, answer in zip(read_lines(tmp_path / "out" / "answers.jsonl"), ranks, strict=True):
        assert line["accepted"] == plain_trees.steps_of(answer, chain)


def test_limits_take_the_categories_in_turn(model: Path, bench: Path, tmp_path: Path) -> None:
    evaluate(
        "--bench", bench, "--base-model", model, "--limit", 4, **QUICK, output_dir=tmp_path / "out"
    ).ok()
    lines = read_lines(tmp_path / "out" / "answers.jsonl")
    assert list(dict.fromkeys(line["question_id"] for line in lines)) == [11, 12, "x", 15]


def test_questions_beyond_the_context_are_skipped_and_counted(model: Path, tmp_path: Path) -> None:
    questions = [
        {"question_id": 1, "turns": ["one"]},
        {"question_id": 2, "turns": ["~" * 300, "two"]},
        {"question_id": 3, "turns": ["three"]},
    ]
    path = write_lines(tmp_path / "long.jsonl", questions)
    shown = evaluate("--bench", path, "--base-model", model, **QUICK, output_dir=tmp_path / "out")
    shown.ok().says("turns were skipped")
    report = read_json(tmp_path / "out" / "report.json")
    assert (report["overall"]["answers"], report["meta"]["skipped_turns"]) == (2, 2)


def test_templates_and_end_tokens_of_an_evaluation(
    model: Path, tokenizer: Any, exact_model: Any, tmp_path: Path
) -> None:
    """A template by name, or as a file, with variables; another token that ends answers."""
    path = write_lines(tmp_path / "q.jsonl", [{"question_id": 1, "turns": ["two red"]}])
    template = tmp_path / "mine.jinja"
    template.write_text("{{ style }}{% for m in messages %}[{{ m.content }}]{% endfor %}:")
    words = ["--bench", path, "--base-model", model, "--chat-template", template]
    keys = QUICK | {"output_dir": tmp_path / "out", "chat_template_kwargs": {"style": "S"}}
    evaluate(*words, **keys).ok()
    prompt = tokenizer("S[two red]:")["input_ids"]
    answer = greedy(exact_model, prompt, TOKENS)
    (line,) = read_lines(tmp_path / "out" / "answers.jsonl")
    assert (line["prompt_tokens"], line["tokens"]) == (len(prompt), len(answer))
    assert line["text"].strip() == tokenizer.decode(answer, skip_special_tokens=True).strip()
    end = next(token for token in answer[2:] if tokenizer.decode([token]).isalnum())
    name = tokenizer.convert_ids_to_tokens(end)
    keys |= {"special_tokens": {"eos_token": name}, "output_dir": tmp_path / "ends"}
    evaluate(*words, **keys).ok()
    (line,) = read_lines(tmp_path / "ends" / "answers.jsonl")
    assert line["tokens"] == answer.index(end) + 1


# Scores


GSM8K = [
    {"question": "How many?", "answer": "So many.\n#### 42"},
    {"question": "And how many?", "answer": "#### 41"},
    {"question": "In all?", "answer": "Many: 3\n#### 1,042"},
]


@pytest.mark.parametrize(
    ("pieces", "correct"),
    [
        (["4", "2"], [True, False, False]),
        (["#### 42", " eggs of", " 50"], [True, False, False]),
        (["\\boxed{41}", " is it, not", " 7"], [False, True, False]),
        (["$1,042.00"], [False, False, True]),
        (["<think>42</think>\n", "41"], [False, True, False]),
        (["nothing"], [False, False, False]),
    ],
    ids=["last number", "marked", "boxed", "thousands", "after the reasoning", "none"],
)
def test_results_of_calculations_are_scored(
    pieces: list[str], correct: list[bool], tmp_path: Path
) -> None:
    model = write_scripted_model(tmp_path / "model", *pieces)
    path = write_lines(tmp_path / "gsm.jsonl", GSM8K * 2)
    evaluate(
        "--bench",
        path,
        "--base-model",
        model,
        "--draft",
        "prompt_lookup",
        **QUICK,
        generate=False,
        output_dir=tmp_path / "out",
    ).ok()
    lines = read_lines(tmp_path / "out" / "answers.jsonl")
    assert [line["text"] for line in lines] == ["".join(pieces).strip()] * 6
    assert [line["scores"]["plain"]["correct"] for line in lines] == correct * 2
    assert "####" in lines[0]["asked"]
    scores = read_json(tmp_path / "out" / "report.json")["overall"]["scores"]
    rate = sum(correct) / 3
    assert (scores["answers"], scores["plain"]["correct"]) == (6, 2 * sum(correct))
    assert scores["tree"]["rate"] == pytest.approx(rate)
    assert scores["differing"] == 0
    z = 1.959964
    center, spread = rate + z**2 / 12, z * math.sqrt(rate * (1 - rate) / 6 + z**2 / 144)
    expected = [
        max(0.0, (center - spread) / (1 + z**2 / 6)),
        min(1.0, (center + spread) / (1 + z**2 / 6)),
    ]
    assert scores["plain"]["interval"] == pytest.approx(expected, abs=1e-9)


HUMANEVAL = [
    {
        "task_id": f"HumanEval/{n}",
        "prompt": "def f(x):\n    '''Return more.'''\n",
        "entry_point": "f",
        "canonical_solution": "    return x + 1\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n}\n",
    }
    for n in (2, 3)
]


def test_answers_that_loop_are_counted(tmp_path: Path) -> None:
    """A sequence of eight tokens that stands there three times, which takes 24 tokens here."""
    letters = [f" {letter}" for letter in "abcdefgh"]
    model = write_scripted_model(tmp_path / "model", *letters, loops=True)
    bench = write_lines(tmp_path / "one.jsonl", [{"question_id": 1, "turns": ["?"]}])
    words = ["--bench", bench, "--base-model", model]
    for tokens, loops in ((23, False), (24, True)):
        keys = QUICK | {"max_new_tokens": tokens, "output_dir": tmp_path / str(tokens)}
        evaluate(*words, **keys, generate=False, prompt_lookup=False).ok()
        (line,) = read_lines(tmp_path / str(tokens) / "answers.jsonl")
        assert (line["tokens"], line["loops"]) == (tokens, loops)
        overall = read_json(tmp_path / str(tokens) / "report.json")["overall"]
        assert overall["looping_answers"] == int(loops)


def test_code_is_not_run_unasked_and_decoded_without_scores(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path / "model", "    return x + 1")
    path = write_lines(tmp_path / "code.jsonl", HUMANEVAL)
    words = ["--bench", path, "--base-model", model]
    evaluate(*words, **QUICK, output_dir=tmp_path / "out").fails(2, "allow_code_execution")
    evaluate("--bench", "humaneval", "--base-model", model).fails(2, "allow_code_execution")
    evaluate(*words, **QUICK, output_dir=tmp_path / "out", score=False).ok()
    lines = read_lines(tmp_path / "out" / "answers.jsonl")
    assert [line["text"] for line in lines] == ["return x + 1"] * 2
    assert read_json(tmp_path / "out" / "report.json")["overall"]["scores"] is None


def test_code_is_run_in_a_sandbox_or_not_at_all(tmp_path: Path) -> None:
    answer = ["```python\n", "def f(x):\n    return x + 1\n", "```"]
    model = write_scripted_model(tmp_path / "model", *answer)
    path = write_lines(tmp_path / "code.jsonl", HUMANEVAL)
    shown = evaluate(
        "--bench",
        path,
        "--base-model",
        model,
        **QUICK,
        allow_code_execution=True,
        output_dir=tmp_path / "out",
    )
    if shown.code:  # no sandbox works here
        shown.fails(2, "allow_code_execution")
        return
    lines = read_lines(tmp_path / "out" / "answers.jsonl")
    assert [line["scores"]["plain"]["correct"] for line in lines] == [True, False]


def test_rouge_of_references(tmp_path: Path) -> None:
    scorer_module = pytest.importorskip("rouge_score.rouge_scorer")
    model = write_scripted_model(tmp_path / "model", "running", " dogs", " here")
    references = ["the dog runs here", "", "cats"]
    questions = [
        {"question_id": n, "turns": ["?"], "reference": [text]} for n, text in enumerate(references)
    ]
    path = write_lines(tmp_path / "sums.jsonl", questions)
    evaluate(
        "--bench", path, "--base-model", model, **QUICK, rouge=True, output_dir=tmp_path / "out"
    ).ok()
    found = read_json(tmp_path / "out" / "report.json")["rouge"]
    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = scorer_module.RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(text, "running dogs here") for text in references if text]
    assert found["answers"] == 2
    for kind in kinds:
        mean = sum(score[kind].fmeasure for score in scores) / 2
        assert found["plain"][kind] == pytest.approx(100 * mean)


def test_a_judge_grades_answers(
    model: Path, bench: Path, turns: list[dict[str, Any]], tmp_path: Path, monkeypatch: Any
) -> None:
    """Requests that fail are sent again; grades are kept, and asked for once."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-judge-0123456789")
    grades = ["[[7]]", "I say [[3]] and then [[4/10]]", "no grade", "[[11]]", "[[9.5]]", "[[1]]"]

    def script(number: int, body: dict[str, Any]) -> Any:
        if number < 2:
            return error([503, 500][number], "busy", retry_after="0")
        text = body["messages"][-1]["content"]
        if text == "Hello":  # whether the judge replies at all
            return 200, {}, json.dumps(completion(body, text="Hi")).encode()
        place = max(n for n, turn in enumerate(turns) if asked(turn) in text)
        reply = completion(body, text=[*grades, "[[2]]"][place])
        return 200, {}, json.dumps(reply).encode()

    def asked(turn: dict[str, Any]) -> str:
        return f"message {turn['turn']}\n{turn['asked']}\n\n### Assistant, answer {turn['turn']}"

    words = ["--bench", bench, "--base-model", model]
    with serving(script) as server:
        keys = QUICK | {"output_dir": tmp_path / "out", "judge_base_url": server.url}
        keys |= {"judge_model": "examiner", "judge_concurrency": 1}
        evaluate(*words, **keys).ok()
        judged = read_json(tmp_path / "out" / "report.json")["judge"]
        count = len(server.bodies)
        assert count == 2 + 1 + 7
        assert set(server.authorization) == {"Bearer sk-judge-0123456789"}
        assert server.bodies[3]["temperature"] == 0
        evaluate(*words, **keys).ok()
        assert len(server.bodies) == count + 1  # the judge is greeted again, and grades nothing
    given = [7, 4, None, None, 9.5, 1, 2]
    by_turn: dict[str, list[float]] = {}
    by_category: dict[str, list[float]] = {}
    for turn, grade in zip(turns, given, strict=True):
        if grade is not None:
            by_turn.setdefault(str(turn["turn"]), []).append(grade)
            by_category.setdefault(turn["category"], []).append(grade)
    known = [grade for grade in given if grade is not None]
    assert judged["score"] == pytest.approx(sum(known) / len(known))
    assert judged["turns"] == {n: pytest.approx(sum(g) / len(g)) for n, g in by_turn.items()}
    assert judged["categories"] == {
        n: pytest.approx(sum(g) / len(g)) for n, g in by_category.items()
    }
    assert (judged["graded"], judged["without_grade"], judged["failed"]) == (5, 2, 0)


def test_a_judge_reads_the_chat_with_its_references_so_far(model: Path, tmp_path: Path) -> None:
    question = {"question_id": 1, "turns": ["one two", "three"], "system": "Be short."}
    question["reference"] = ["REFERENCE A", "REFERENCE B"]
    bench = write_lines(tmp_path / "b.jsonl", [question, {"question_id": 2, "turns": ["large"]}])
    with serving(
        lambda n, body: (200, {}, json.dumps(completion(body, text="[[5]]")).encode())
    ) as server:
        keys = QUICK | {"output_dir": tmp_path / "out", "judge_base_url": server.url}
        keys |= {"judge_model": "examiner", "judge_concurrency": 1, "generate": False}
        evaluate("--bench", bench, "--base-model", model, **keys).ok()
        asked = server.bodies[1:]  # after the greeting
        read = ["\n".join(m["content"] for m in body["messages"]) for body in asked]
    texts = [line["text"].strip() for line in read_lines(tmp_path / "out" / "answers.jsonl")]
    parts = ["Be short.", "one two", "REFERENCE A", texts[0], "three", "REFERENCE B", texts[1]]
    for shown, count in ((read[0], 4), (read[1], 7)):
        places = [shown.find(part) for part in parts[:count]]
        assert -1 not in places
        assert places == sorted(places)
        assert not any(part in shown for part in parts[max(count, 5) : 6])
    assert "REFERENCE" not in read[2]
    assert "large" in read[2]
    assert texts[2] in read[2]


def test_overhead_and_speed_where_all_answers_take_as_long(
    skilled: Callable[[str], Path],
    bench: Path,
    tree_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step with the tree then takes as much longer as there are fewer steps."""
    monkeypatch.setattr(time, "perf_counter", Clock())
    words = ["--bench", bench, "--model", skilled("medusa"), "--tree", tree_file]
    evaluate(*words, **QUICK, output_dir=tmp_path / "out").ok()
    overall = read_json(tmp_path / "out" / "report.json")["overall"]
    assert overall["acceleration_rate"] > 1.1
    assert overall["overhead"] == pytest.approx(overall["acceleration_rate"])
    assert overall["speedup"] == pytest.approx(1.0)
    assert overall["time_to_first_token_s"] == pytest.approx(Clock.tick)


def test_quality_before_and_after_joint_training(
    model: Path,
    chats: Path,
    held_out: Path,
    exact_model: Any,
    documents: Any,
    bench: Path,
    tmp_path: Path,
) -> None:
    from tests.behaviour.test_joint_training import LORA, merged

    keys = training_keys(model, chats, tmp_path / "run", max_steps=4, **LORA)
    keys |= {"val_set_size": None, "test_datasets": [{"path": str(held_out)}]}
    train(**keys).ok()
    evaluate(
        "--bench", bench, "--model", tmp_path / "run", "--limit", 1, **QUICK, generate=False
    ).ok()
    (path,) = (tmp_path / "run" / "eval").glob("*/report.json")
    joint = read_json(path)["joint"]
    adapter = plain.read_weights(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    weights = merged(exact_model, 3.0)(adapter)
    before, after, kl, count = 0.0, 0.0, 0.0, 0
    for document in documents[1]:
        old = plain.run_model(exact_model, document.tokens).logits.log_softmax(-1)
        new = plain.run_model(exact_model, document.tokens, weights).logits.log_softmax(-1)
        for t, token in plain.targets_of(document, 0):
            before, after = before - float(old[t, token]), after - float(new[t, token])
            kl += float((old[t].exp() * (old[t] - new[t])).sum())
            count += 1
    assert joint["tokens"] == count
    assert joint["perplexity_before"] == pytest.approx(math.exp(before / count), rel=1e-3)
    assert joint["perplexity_after"] == pytest.approx(math.exp(after / count), rel=1e-3)
    assert joint["kl"] == pytest.approx(kl / count, rel=1e-2)
    assert abs(before - after) > 1e-2
    # it decodes with the merged adapter
    (line,) = read_lines(path.with_name("answers.jsonl"))[:1]
    with torch.no_grad():
        for name, weight in weights.items():
            exact = dict(exact_model.named_parameters())[name]
            weights[name] = exact.clone()
            exact.copy_(weight)
    try:
        answer = greedy(exact_model, line_prompt(bench, exact_model), TOKENS)
        assert line["tokens"] == len(answer)
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                dict(exact_model.named_parameters())[name].copy_(weight)


def line_prompt(bench: Path, model: Any) -> list[int]:
    from tests.behaviour.world import build_tokenizer

    first = read_lines(bench)[0]["turns"][0]
    prompt: list[int] = build_tokenizer()(render([{"role": "user", "content": first}]))["input_ids"]
    return prompt


# Comparing, chatting, stopping


def test_compared_evaluations(
    evaluated: Path, skilled: Callable[[str], Path], bench: Path, tree_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    words = ["--bench", bench, "--model", skilled("eagle3"), "--tree", tree_file]
    evaluate(*words, **QUICK | {"max_new_tokens": 12}, output_dir=other).ok()
    out = tmp_path / "compare"
    shown = evaluate("--compare", evaluated, other, "--output-dir", out).ok()
    shown.says("different max_new_tokens: 20, 12")
    ours, theirs = (read_json(path / "report.json")["overall"] for path in (evaluated, other))
    page = (out / "compare.html").read_text(encoding="utf-8")
    written = json.dumps(read_json(out / "compare.json"))
    for figures in (ours, theirs):
        assert f"{figures['acceleration_rate']:.2f}" in shown.text
        assert f"{figures['speedup']:.2f}x" in page
        assert str(figures["acceleration_rate"]) in written
    evaluate("--compare", evaluated).fails(2, "two")
    evaluate("--compare", evaluated, tmp_path / "none").fails(1, "no such")
    (tmp_path / "damaged.json").write_text('{"meta": {}}')
    evaluate("--compare", evaluated, tmp_path / "damaged.json").fails(1, "damaged.json")
    evaluate("--compare", evaluated, other, "--limit", 3).fails(2, "--limit")


def test_other_modes_are_not_compared(
    evaluated: Path, model: Path, bench: Path, tmp_path: Path
) -> None:
    evaluate(
        "--bench", bench, "--base-model", model, "--limit", 1, "--acceptance", "sampling", **QUICK,
        generate=False, output_dir=tmp_path / "sampled",
    ).ok()  # fmt: skip
    evaluate("--compare", evaluated, tmp_path / "sampled").fails(1, "different modes")


def test_chats_in_the_terminal(
    skilled: Callable[[str], Path], tree_file: Path, exact_model: Any, tokenizer: Any
) -> None:
    from medusa_train.cli import evaluate as module

    words = ["--interactive", "--model", str(skilled("medusa")), "--tree", str(tree_file)]
    words += ["--dtype", "float32", "--max-new-tokens", "9"]
    lines = "two red\n/new\nlarge\n/temperature 0.5\n/exit\n"
    result = CliRunner().invoke(module.app, words, input=lines, catch_exceptions=False)
    assert result.exit_code == 0
    for asked in ("two red", "large"):
        prompt = tokenizer(render([{"role": "user", "content": asked}]))["input_ids"]
        text = tokenizer.decode(greedy(exact_model, prompt, 9), skip_special_tokens=True)
        assert as_in_a_terminal(text) in result.stdout
    assert "tokens per step" in result.stdout
    evaluate("--interactive", "--calibrate", "--model", skilled("medusa")).fails(2, "--calibrate")


def as_in_a_terminal(text: str) -> str:
    """Return an answer as a chat in the terminal shows it."""
    shown = (c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(shown).strip()


def test_a_chat_in_the_terminal_goes_on_with_its_own_answers(
    skilled: Callable[[str], Path], tree_file: Path, exact_model: Any, tokenizer: Any
) -> None:
    from medusa_train.cli import evaluate as module

    words = ["--interactive", "--model", str(skilled("medusa")), "--tree", str(tree_file)]
    words += ["--dtype", "float32", "--max-new-tokens", "9"]
    lines = "two red\nlarge\n/exit\n"
    result = CliRunner().invoke(module.app, words, input=lines, catch_exceptions=False)
    messages: list[dict[str, str]] = []
    for asked in ("two red", "large"):
        messages.append({"role": "user", "content": asked})
        prompt = tokenizer(render(messages))["input_ids"]
        text = tokenizer.decode(greedy(exact_model, prompt, 9), skip_special_tokens=True)
        assert as_in_a_terminal(text) in result.stdout
        messages.append({"role": "assistant", "content": text})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_evaluation_goes_on(
    number: int,
    skilled: Callable[[str], Path],
    bench: Path,
    tree_file: Path,
    evaluated: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    words = ["--bench", bench, "--model", skilled("medusa"), "--tree", tree_file]
    words += [f"{key}={value}" for key, value in QUICK.items()]
    process = Process(tmp_path / "log", "eval", *words, f"output_dir={out}")
    log = out / "turns.jsonl"
    there = process.wait_for(lambda: log.exists() and len(log.read_bytes().splitlines()) > 2)
    code = process.send(number) if there else process.end()
    if code == 0:
        pytest.skip("it ended before the signal")
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    evaluate(*words, output_dir=out).ok().says("resuming an interrupted evaluation")
    assert not log.exists()
    report = read_json(out / "report.json")
    assert report["meta"]["resumed_turns"] > 0
    for line, whole in zip(
        read_lines(out / "answers.jsonl"), read_lines(evaluated / "answers.jsonl"), strict=True
    ):
        for key in ("question_id", "turn", "text", "tokens", "accepted"):
            assert line[key] == whole[key]


def test_an_assistant_model_is_a_baseline(model: Path, bench: Path, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small", num_hidden_layers=1, seed=4)
    evaluate(
        "--bench", bench, "--base-model", model, "--limit", 2, "--draft", "prompt_lookup", **QUICK,
        assistant_model=small, output_dir=tmp_path / "out",
    ).ok()  # fmt: skip
    baselines = read_json(tmp_path / "out" / "report.json")["baselines"]
    (name,) = set(baselines) - {"plain", "generate", "prompt_lookup"}
    assert baselines[name]["equal_to_plain"] == 2
    evaluate("--bench", bench, "--base-model", model, assistant_model="./none").fails(1, "./none")


# Mistakes


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"question_id": 1}'], ["bench.jsonl:1", "turns"]),
        (['{"question_id": 1, "turns": []}'], ["bench.jsonl:1"]),
        (['{"question_id": 1, "turns": ["a"]}', "{"], ["bench.jsonl:2"]),
        (['{"question_id": 1, "turns": ["a"]}'] * 2, ["bench.jsonl:2", "used before"]),
        (['{"question_id": true, "turns": ["a"]}'], ["bench.jsonl:1", "question_id"]),
        ([], ["bench.jsonl"]),
    ],
)
def test_bad_questions_are_named(
    lines: list[str], words: list[str], model: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "bench.jsonl", lines)
    evaluate("--bench", path, "--base-model", model, **QUICK).fails(1, *words)


def test_what_is_not_there_is_named(
    model: Path, bench: Path, skilled: Callable[[str], Path], tmp_path: Path
) -> None:
    evaluate("--bench", "no_such", "--base-model", model).fails(1, "no_such", "mtbench")
    evaluate("--bench", bench, "--model", tmp_path / "none").fails(1, str(tmp_path / "none"))
    evaluate("--bench", bench, "--base-model", "./none").fails(1, "./none")
    evaluate("--bench", bench, "--model", skilled("medusa"), "--tree", "none.json").fails(
        1, "none.json"
    )
    deep = write_tree(tmp_path / "deep.json", [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])
    evaluate("--bench", bench, "--model", skilled("medusa"), "--tree", deep, **QUICK).fails(
        1, "4 deep", "3 heads"
    )
    evaluate("--bench", bench, "--model", skilled("medusa"), "--tree", "dynamic").fails(1, "eagle3")
    evaluate("--bench", bench, "--model", skilled("medusa"), "--draft", "eagle3+rest").fails(2)


@pytest.mark.parametrize(
    "content",
    [
        '{"medusa_choices": [[0], [0]]}',
        '{"medusa_choices": [[0, 0]]}',
        '{"medusa_choices": [[-1]]}',
        "[",
        "{}",
    ],
)
def test_a_tree_that_is_none_is_refused(
    content: str, bench: Path, skilled: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "tree.json"
    path.write_text(content)
    evaluate("--bench", bench, "--model", skilled("medusa"), "--tree", path, **QUICK).fails(
        1, "tree.json"
    )


def test_an_empty_tree_drafts_nothing_and_says_so(
    bench: Path, skilled: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_tree(tmp_path / "tree.json", [])
    words = ["--bench", bench, "--model", skilled("medusa"), "--tree", path, "--limit", 1]
    shown = evaluate(*words, **QUICK, output_dir=tmp_path / "out").ok()
    assert shown.text.count("so the heads draft nothing") == 1
    assert read_json(tmp_path / "out" / "report.json")["overall"]["speedup"] is None
