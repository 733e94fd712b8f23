"""Tests of data/bench/tiny: the form of its questions, and that none is copied from the standard library."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path

from medusa_train.config.paths import PROJECT_ROOT
from tests.data_scripts.scripts import ngrams, words_of

BENCH = PROJECT_ROOT / "data" / "bench" / "tiny" / "question.jsonl"
QUESTIONS = [json.loads(line) for line in BENCH.read_text(encoding="utf-8").splitlines()]
PROMPTS = [text for question in QUESTIONS for text in question["turns"]]


def test_48_different_questions_of_two_turns_in_eight_categories() -> None:
    assert [question["question_id"] for question in QUESTIONS] == list(range(1, 49))
    assert sorted(Counter(question["category"] for question in QUESTIONS).values()) == [6] * 8
    assert len(PROMPTS) == 96
    for number, text in enumerate(PROMPTS):
        assert not any(ngrams(text) & ngrams(other) for other in PROMPTS[number + 1 :]), text


def test_no_eight_words_come_from_the_standard_library() -> None:
    bench = {gram for text in PROMPTS for gram in ngrams(text)}
    beginnings = {gram[:2] for gram in bench}
    for path in Path(sysconfig.get_path("stdlib")).rglob("*.py"):
        if not {"site-packages", "dist-packages", "test"}.isdisjoint(path.parts):
            continue
        words = words_of(path.read_text(encoding="utf-8", errors="replace"))
        hits = [i for i, pair in enumerate(pairwise(words)) if pair in beginnings and tuple(words[i : i + 8]) in bench]
        assert not hits, (path, words[hits[0] : hits[0] + 8])
