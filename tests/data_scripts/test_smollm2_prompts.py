"""Prompts for SmolLM2: the same on every run, complete sentences, and none of the bench."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from medusa_train.config.paths import PROJECT_ROOT
from tests.data_scripts.scripts import load_script, ngrams

BENCH = PROJECT_ROOT / "data" / "bench" / "smollm2" / "question.jsonl"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("make_prompts.py")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path) -> list[dict]:
    monkeypatch.setattr(
        sys, "argv", ["make_prompts.py", "smollm2", "--count", "900", "--output", str(output)]
    )
    script.main()
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def bench_turns() -> list[str]:
    return [
        turn
        for line in BENCH.read_text(encoding="utf-8").splitlines()
        for turn in json.loads(line)["turns"]
    ]


def test_prompts_are_reproducible_complete_and_not_in_the_bench(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records = run(script, monkeypatch, tmp_path / "a.jsonl")
    run(script, monkeypatch, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert len({record["conversations"][0]["value"] for record in records}) == len(records) == 900
    assert Counter(len(record["conversations"]) for record in records) == {1: 603, 2: 297}
    assert set(Counter(record["category"] for record in records).values()) == {100}
    bench = {gram for turn in bench_turns() for gram in ngrams(turn)}
    for record in records:
        for turn in record["conversations"]:
            text = turn["value"]
            assert not re.search(r"[{}]|\s\s|\ba [aeio]\w", text.replace("a one", "")), text
            assert not ngrams(text) & bench, text
