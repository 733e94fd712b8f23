"""Tests of data/seeds/make_tiny.py: it reproduces the shipped prompts, which share nothing with the
tiny bench.
"""

import json
import re
import sys
from pathlib import Path

import make_tiny
import pytest

from medusa_train.config.paths import PROJECT_ROOT
from tests.data_scripts.scripts import ngrams

PROMPTS = PROJECT_ROOT / "data" / "seeds" / "tiny.jsonl"
BENCH = PROJECT_ROOT / "data" / "bench" / "tiny" / "question.jsonl"
MORE = PROJECT_ROOT / "data" / "selfdistill" / "tiny_more.jsonl"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def user_turns(record: dict) -> list[str]:
    return [turn["value"] for turn in record["conversations"]]


@pytest.fixture(scope="module")
def turns() -> list[str]:
    """Every user turn of the shipped prompts."""
    return [text for record in read(PROMPTS) for text in user_turns(record)]


@pytest.fixture(scope="module")
def bench_ngrams() -> set[tuple[str, ...]]:
    return {
        gram for question in read(BENCH) for text in question["turns"] for gram in ngrams(text, 10)
    }


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["make_tiny.py", *arguments])
    make_tiny.main()


def test_script_reproduces_the_shipped_prompts_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script(monkeypatch, "--output", str(tmp_path / "tiny.jsonl"))
    assert (tmp_path / "tiny.jsonl").read_bytes() == PROMPTS.read_bytes()


def test_prompts_and_bench_share_no_function_name_and_no_ten_words(
    turns: list[str], bench_ngrams: set[tuple[str, ...]]
) -> None:
    assert len(set(turns)) == len(turns)
    names = {name for text in turns for name in re.findall(r"(\w+)\(\w+.*\)", text)[:1]}
    assert len(names) > 450
    assert not names & {
        name for q in read(BENCH) for text in q["turns"] for name in re.findall(r"(\w+)\(\w+", text)
    }
    assert len(bench_ngrams) > 500
    assert not [text for text in turns if ngrams(text, 10) & bench_ngrams]


def test_further_prompts_share_nothing_with_the_shipped_ones_and_the_bench(
    turns: list[str],
    bench_ngrams: set[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command in the script's help gives the prompts of data/selfdistill/tiny_more.jsonl."""
    output = tmp_path / "more.jsonl"
    options = ["--count", "6000", "--seed", "7", "--name", "more", "--output", str(output)]
    run_script(monkeypatch, *options, "--without", str(PROMPTS), str(BENCH))
    prompts = {record["id"]: user_turns(record) for record in read(output)}
    answered, dropped = read(MORE), read(MORE.with_name("tiny_more.dropped.jsonl"))
    assert {record["id"] for record in answered + dropped} == set(prompts)
    for record in answered:
        asked = [message["content"] for message in record["messages"] if message["role"] == "user"]
        # turns after an answer that was too long are dropped
        assert asked == prompts[record["id"]][: len(asked)]
    further = {text for texts in prompts.values() for text in texts}
    assert not further & set(turns)
    assert not [text for text in further if ngrams(text, 10) & bench_ngrams]
