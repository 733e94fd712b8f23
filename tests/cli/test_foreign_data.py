"""The three commands on data with columns, keys of turns and files that nothing reads: each is named
with its count.

The names are drawn at random from MEDUSA_TEST_SEED, so that no list of names in the code can know them.
"""

import json
import os
import random
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from medusa_train.cli import evaluate, selfdistill, train
from tests.evaluation.tiny_model import write_target_model

LETTERS = string.ascii_lowercase + "_àßжλ名"
ENDINGS = [".txt", ".md", ".csv", ".jsonl.bak", ".json.lock", ""]
VALUES = [0, False, "", "x", [], {}, 1.5, [{"role": "user"}], "\u2028"]


class Foreign:
    """Draws names, adds them to records, and counts how often each is there."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.columns: Counter[str] = Counter()
        self.turn_keys: Counter[str] = Counter()
        self.column_names = [self.name() for _ in range(4)]
        self.turn_key_names = [self.name() for _ in range(3)]

    def name(self) -> str:
        return "".join(self.source.choices(LETTERS, k=self.source.randint(6, 12)))

    def add(self, values: dict[str, Any], names: list[str], counts: Counter[str]) -> None:
        """Add some of `names` to `values`, nulls included, which do not count."""
        for name in names:
            if self.source.random() < 0.3:
                continue
            values[name] = self.source.choice([None, *VALUES])
            if values[name] is not None:
                counts[name] += 1

    def chat(self, number: int, has_answer: bool) -> dict[str, Any]:
        roles = ["user", "assistant"] if has_answer else ["user"]
        turns: list[dict[str, Any]] = [{"role": role, "content": f"n{number}"} for role in roles]
        for turn in turns:
            self.add(turn, self.turn_key_names, self.turn_keys)
        record: dict[str, Any] = {"id": f"c{number}", "messages": turns}
        self.add(record, self.column_names, self.columns)
        return record

    def question(self, number: int) -> dict[str, Any]:
        record: dict[str, Any] = {"question_id": number, "turns": [f"q{number}"]}
        self.add(record, self.column_names, self.columns)
        return record

    def assert_named(self, output: str) -> None:
        """Each column and key is named once, with its count."""
        line = " ".join(output.split())
        for name, count in (self.columns + self.turn_keys).items():
            assert line.count(f"{name} ({count})") == 1, (name, count, output)


def write(path: Path, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")


def invoke(app: typer.Typer, *arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def assert_files_named(output: str, directory: str, files: list[str]) -> None:
    line = " ".join(output.split())
    assert line.count(f"{directory}: {len(files)} not read: ") == 1, output
    (found,) = line.split(f"{directory}: {len(files)} not read: ")[1:]
    for file in files:
        assert file in found, output


@pytest.mark.slow
def test_each_command_names_what_it_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("MEDUSA_TEST_SEED", "1"))
    print(f"seed of the names: {seed}")  # shown if the test fails
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    write_target_model(tmp_path / "backbone")

    # 1. data in a directory, beside files that are no data, another split and a directory
    data = Foreign(seed)
    Path("data").mkdir()
    files = [data.name() + ending for ending in data.source.sample(ENDINGS, 4)]
    for file in files:
        Path("data", file).write_text("x", encoding="utf-8")
    beside = data.name() + "/"
    Path("data", beside).mkdir()
    other_split = f"test-{data.name()}.jsonl"
    Path("data", other_split).write_text("x", encoding="utf-8")
    files += [beside, other_split]
    for number, name in enumerate([data.name(), f"train_{data.name()}"]):
        records = [data.chat(10 * number + index, has_answer=True) for index in range(10)]
        write(Path("data", f"{name}.jsonl"), records)

    # 2. training, its plan first; the second time the tokens come from the cache
    keys = {
        "base_model": "backbone",
        "datasets": "[{path: data}]",
        "output_dir": "run",
        "medusa_num_heads": 2,
        "micro_batch_size": 2,
        "max_steps": 2,
        "val_set_size": 0.2,
        "calibration_tokens": 60,
        "bf16": "false",
        "sequence_len": 256,
    }
    overrides = [f"{name}={value}" for name, value in keys.items()]
    for options in (["--inspect"], []):
        output = invoke(train.app, *overrides, *options)
        data.assert_named(output)
        assert_files_named(output, "data", files)

    # 3. self-distillation: prompts in a file, then in a directory
    prompts = Foreign(seed + 1)
    records = [prompts.chat(number, has_answer=False) for number in range(8)]
    Path("prompts").mkdir()
    write(Path("prompts", "chats.jsonl"), records)
    answering = ["base_model=backbone", "temperature=0", "dtype=float32", "max_new_tokens=6"]
    answering += ["drop_truncated=false", "drop_looping=false"]
    source = ["--prompts", "prompts/chats.jsonl", "--output", "own.jsonl"]
    prompts.assert_named(invoke(selfdistill.app, *source, *answering))
    files = [prompts.name() + ending for ending in ENDINGS[:2]]
    for file in files:
        Path("prompts", file).write_text("x", encoding="utf-8")
    source = ["--prompts", "prompts", "--output", "again.jsonl"]
    output = invoke(selfdistill.app, *source, *answering)
    prompts.assert_named(output)
    assert_files_named(output, "prompts", files)

    # 4. evaluation: a question file, then chats
    questions = Foreign(seed + 2)
    write(Path("questions.jsonl"), [questions.question(number) for number in range(4)])
    chats = Foreign(seed + 3)
    write(Path("chats.jsonl"), [chats.chat(number, has_answer=False) for number in range(4)])
    measuring = ["--model", "run", "dtype=float32", "max_new_tokens=4", "warmup=0"]
    questions.assert_named(invoke(evaluate.app, "--bench", "questions.jsonl", *measuring))
    chats.assert_named(invoke(evaluate.app, "--bench", "chats.jsonl", *measuring))
