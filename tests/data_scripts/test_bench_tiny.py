"""The bench of the embedded tiny backbone: its form, and that nothing in it is copied."""

from __future__ import annotations

import json
import re
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from medusa_train.config.paths import PROJECT_ROOT

BENCH = PROJECT_ROOT / "data" / "bench" / "tiny" / "question.jsonl"
GSM8K = PROJECT_ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.fixture(scope="module")
def questions() -> list[dict]:
    return [json.loads(line) for line in BENCH.read_text(encoding="utf-8").splitlines()]


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9_']+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_it_has_two_turns_each_in_eight_categories(questions: list[dict]) -> None:
    assert [question["question_id"] for question in questions] == list(range(1, 49))
    assert set(Counter(question["category"] for question in questions).values()) == {6}
    assert len({question["category"] for question in questions}) == 8
    assert all(len(question["turns"]) == 2 for question in questions)


def test_no_two_prompts_begin_alike(questions: list[dict]) -> None:
    openings = Counter(tuple(text.split()[:5]) for question in questions for text in question["turns"])
    assert max(openings.values()) == 1
    texts = [text for question in questions for text in question["turns"]]
    for number, text in enumerate(texts):
        assert not any(grams(text, 8) & grams(other, 8) for other in texts[number + 1 :]), text


def test_code_questions_name_what_they_want_once(questions: list[dict]) -> None:
    names = [
        re.search(r"(\w+)\(", text)
        for question in questions
        if question["category"].startswith("code_")
        for text in question["turns"]
    ]
    # "A function named `directory_size(root)`": every request carries a signature
    assert all(names)
    assert len({match[1] for match in names if match}) == 48


@pytest.mark.skipif(not GSM8K.is_file(), reason="the training problems are not on this machine")
def test_nothing_is_taken_from_the_training_problems(questions: list[dict]) -> None:
    bench = {gram for question in questions for text in question["turns"] for gram in grams(text, 8)}
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        shared = grams(json.loads(line)["question"], 8) & bench
        assert not shared, shared


def test_nothing_is_taken_from_the_standard_library(questions: list[dict]) -> None:
    bench = {gram for question in questions for text in question["turns"] for gram in grams(text, 8)}
    root = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in root.rglob("*.py") if "packages" not in path.parts[-2] and "test" not in path.parts]
    firsts = {gram[:2] for gram in bench}
    for path in sources:
        if "site-packages" in path.parts:
            continue
        words = re.findall(r"[a-z0-9_']+", path.read_text(encoding="utf-8", errors="replace").lower())
        pairs = pairwise(words)
        hits = [i for i, pair in enumerate(pairs) if pair in firsts and tuple(words[i : i + 8]) in bench]
        assert not hits, (path, words[hits[0] : hits[0] + 8])
