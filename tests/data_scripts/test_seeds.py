"""The seed conversations of the embedded tiny backbone: the script that makes them, and the file it made."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from medusa_train.config.paths import PROJECT_ROOT

SEEDS = PROJECT_ROOT / "data" / "seeds"
BENCH = PROJECT_ROOT / "data" / "bench" / "tiny" / "question.jsonl"


@pytest.fixture(scope="module")
def scripts() -> ModuleType:
    sys.path.insert(0, str(SEEDS))
    try:
        import make_tiny
    finally:
        sys.path.remove(str(SEEDS))
    return make_tiny


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return read(SEEDS / "tiny.jsonl")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def turns_of(record: dict) -> list[str]:
    return [turn["value"] for turn in record["conversations"]]


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9_']+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def is_code(text: str) -> bool:
    return re.search(r"\w+\(\w+.*\)", text) is not None


def test_the_committed_file_is_what_the_script_makes(scripts: ModuleType, records: list[dict]) -> None:
    assert scripts.make_seeds(len(records), 0) == records
    assert scripts.make_seeds(20, 1) != records[:20]


def test_seeds_are_sharegpt_with_user_turns_alone_and_a_third_of_them_has_several(records: list[dict]) -> None:
    assert len(records) == 3000
    assert len({record["id"] for record in records}) == 3000
    assert all(turn["from"] == "human" and turn["value"].strip() for r in records for turn in r["conversations"])
    lengths = Counter(len(record["conversations"]) for record in records)
    assert lengths[2] + lengths[3] == 1000
    assert set(lengths) == {1, 2, 3}


def test_no_turn_comes_twice_and_kinds_are_mixed(records: list[dict]) -> None:
    turns = [text for record in records for text in turns_of(record)]
    assert len(set(turns)) == len(turns)
    assert 0.4 < sum(map(is_code, turns)) / len(turns) < 0.5


def test_no_wording_is_left_open(records: list[dict]) -> None:
    for text in (text for record in records for text in turns_of(record)):
        assert not re.search(r"[\[\]|~{}]| [.,?]|\s\s|\ba [aeio]\w", re.sub(r"'\W*'", "''", text)), text


def test_function_names_are_many_and_none_is_asked_for_in_the_bench(records: list[dict]) -> None:
    asked = Counter(m for r in records for text in turns_of(r) for m in re.findall(r"(\w+)\(\w+.*\)", text)[:1])
    assert len(asked) > 450
    in_bench = {m for q in read(BENCH) for text in q["turns"] for m in re.findall(r"(\w+)\(\w+", text)}
    assert not in_bench & set(asked)


def test_no_seed_shares_ten_words_in_a_row_with_the_bench(records: list[dict]) -> None:
    bench = {gram for question in read(BENCH) for text in question["turns"] for gram in grams(text, 10)}
    assert len(bench) > 500
    shared = [gram for r in records for text in turns_of(r) for gram in grams(text, 10) if gram in bench]
    assert not shared


def test_every_scenario_and_family_writes_clean_text(scripts: ModuleType) -> None:
    import drawing
    import families
    import problems

    assert len(problems.SCENARIOS) + len(problems.GRAMMARS) >= 50
    for number in range(20):
        for scenario in problems.SCENARIOS + problems.GRAMMARS:
            d = drawing.Draw(Random(number))
            for text in scenario(d):
                said = d.say(text)
                assert said.endswith((".", "?")), said
                assert not re.search(r"[\[\]|{}]|\b1 \w+s\b(?<!1 plus)", said), said
        for family, _ in families.FAMILIES:
            wanted = family(drawing.Draw(Random(number)))
            assert wanted.name.isidentifier()
            assert compile(f"def {wanted.name}({wanted.arguments}): pass", "f", "exec")


def test_every_idea_gives_a_signature_that_compiles(scripts: ModuleType) -> None:
    import code_requests
    import drawing
    import ideas

    assert len(ideas.IDEAS) >= 120
    for line in ideas.IDEAS:
        wanted = code_requests.from_idea(drawing.Draw(Random(0)), line)
        assert compile(f"def {wanted.name}({wanted.arguments}): pass", "f", "exec")
        assert not re.search(r"\{\d\}", wanted.does), line


def test_the_script_writes_where_it_is_told(
    scripts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "seeds.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_tiny.py", "--count", "6", "--output", str(out)])
    scripts.main()
    assert read(out) == scripts.make_seeds(6, 0)


def test_the_further_conversations_come_from_seeds_that_share_nothing_with_these_and_the_bench(
    scripts: ModuleType, records: list[dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """data/selfdistill/tiny_more.jsonl: the command in the script's own help makes its seeds."""
    words = ["--count", "6000", "--seed", "7", "--name", "more", "--without"]
    known = [str(SEEDS / "tiny.jsonl"), str(BENCH)]
    monkeypatch.setattr(sys, "argv", ["make_tiny.py", *words, *known, "--output", str(tmp_path / "more.jsonl")])
    scripts.main()
    seeds = {record["id"]: turns_of(record) for record in read(tmp_path / "more.jsonl")}
    answered = read(PROJECT_ROOT / "data" / "selfdistill" / "tiny_more.jsonl")
    dropped = read(PROJECT_ROOT / "data" / "selfdistill" / "tiny_more.dropped.jsonl")
    assert [r["id"] for r in answered] == sorted(r["id"] for r in answered)
    assert {r["id"] for r in answered} | {r["id"] for r in dropped} == set(seeds)
    for record in answered:
        said = [message["content"] for message in record["messages"] if message["role"] == "user"]
        assert said == seeds[record["id"]][: len(said)]  # later turns of an answer that was too long are left out
    turns = {text for said in seeds.values() for text in said}
    assert not turns & {text for record in records for text in turns_of(record)}
    bench = {gram for question in read(BENCH) for text in question["turns"] for gram in grams(text, 10)}
    assert not [text for text in turns if grams(text, 10) & bench]
