"""Every JSON file that the commands read, damaged in many ways: a sentence, never a traceback; what
nothing reads is named.

The mutations are whole files that are something else, and values, keys and entries that are wrong,
missing, repeated, further or huge. They are drawn at random, from the seed MEDUSA_TEST_SEED (1 by
default, so that two runs of the same code agree).
"""

import contextlib
import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import medusa_train
from medusa_train.cli import evaluate, export, selfdistill, train
from medusa_train.errors import MedusaError
from medusa_train.io import parse_json
from tests.evaluation.tiny_model import write_target_model

DEEP = 3000
WHOLE = [
    "",
    "null",
    "[]",
    "[1]",
    "5",
    '"x"',
    "{}",
    "{",
    "\x00",
    '{"a":' * DEEP,
    "[" * DEEP + "]" * DEEP,
]
VALUES = [
    "null",
    "[]",
    "[1]",
    '["x"]',
    "{}",
    '{"a":1}',
    '"x"',
    '""',
    "-1",
    "0",
    "0.5",
    "true",
    "1e999",
    "-1e999",
    "NaN",
    "9" * 5000,
    "[[1e999]]",
]
#: Not tried in the target model's files: transformers would build so many layers.
HUGE = "1" + "0" * 30
#: Mutations of each file that are tried in a run.
TRIED = 25


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of values, three levels deep, of lists the first two items."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = list(enumerate(value))[:2]
    for key, inner in items:
        yield (*path, key)
        if len(path) < 2:
            yield from paths_of(inner, (*path, key))


def mutated(text: str, path: tuple[Any, ...], raw: str | None) -> str:
    """Return JSON with another value at `path`, or without it."""
    value = copy.deepcopy(json.loads(text))
    parent = value
    for part in path[:-1]:
        parent = parent[part]
    if raw is None:
        del parent[path[-1]]
        return json.dumps(value)
    parent[path[-1]] = "@MARK@"
    return json.dumps(value).replace('"@MARK@"', raw)


def mutations(text: str, values: list[str], source: random.Random) -> Iterator[str]:
    yield from WHOLE
    places = list(paths_of(json.loads(text)))
    for _ in range(TRIED):
        raw = source.choice([*values, None])
        yield mutated(text, source.choice(places), raw)


def invoke(app: typer.Typer, *arguments: str) -> str:
    """Run a command; an exception other than its exit is one that a user sees as a traceback."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2), result.output
    assert result.exit_code == 0 or "error: " in result.output
    return result.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a target model, runs of each kind, an evaluation, its copy, and answers."""
    with pytest.MonkeyPatch.context() as patched:
        directory = tmp_path_factory.mktemp("damaged")
        patched.chdir(directory)
        write_target_model(Path("backbone"))
        turns = [[("user", f"Q{n}"), ("assistant", f"A{n}")] for n in range(8)]
        chats = [
            {"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns
        ]
        Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        questions = [{"question_id": n, "turns": [f"q{n}"]} for n in range(2)]
        Path("bench.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
        keys = [
            "base_model=backbone",
            "datasets=chats.jsonl",
            "micro_batch_size=2",
            "max_steps=1",
        ]
        keys += ["bf16=false", "sequence_len=256", "val_set_size=0", "calibration_tokens=0"]
        for draft in ("medusa", "hydra", "eagle3", "kangaroo", "amphista"):
            heads = ["medusa_num_heads=2"] if draft == "medusa" else [f"draft={draft}"]
            heads += ["kangaroo.exit_layer=1"] if draft == "kangaroo" else []
            invoke(train.app, *keys, *heads, f"output_dir={draft}")
        lora = ["medusa_num_heads=2", "adapter=lora", "lora_r=2", "lora_target_linear=true"]
        invoke(train.app, *keys, *lora, "medusa_only_heads=false", "output_dir=lora")
        sizes = [{"nodes": n, "tokens_per_step": 1.5, "tokens_per_s": 9.0} for n in (2, 4)]
        tree = {"medusa_choices": [[0], [1], [0, 0]], "nodes": 4, "sizes": sizes}
        Path("medusa/tree.json").write_text(json.dumps(tree), encoding="utf-8")
        invoke(evaluate.app, *EVALUATION)
        shutil.copytree("medusa/eval/bench", "earlier")
        invoke(selfdistill.app, *ANSWERS)
        assert all(Path(name).is_file() for name, _ in FILES)
        yield directory


EVALUATION = ["--model", "medusa", "--bench", "bench.jsonl", "dtype=float32", "max_new_tokens=6"]
EVALUATION += ["warmup=0", "exactness=false"]
ANSWERS = ["--prompts", "bench.jsonl", "--output", "own.jsonl", "base_model=backbone"]
ANSWERS += ["temperature=0", "dtype=float32", "max_new_tokens=6", "drop_truncated=false"]
ANSWERS += ["drop_looping=false"]


def loaded(run: str) -> Callable[[], object]:
    def load() -> None:
        with contextlib.suppress(MedusaError):
            medusa_train.load(run, dtype="float32").generate("hi", max_new_tokens=3)

    return load


def evaluated() -> str:
    return invoke(evaluate.app, *EVALUATION)


def compared() -> str:
    return invoke(evaluate.app, "--compare", "medusa/eval/bench/report.json", "earlier/report.json")


def answered() -> str:
    return invoke(selfdistill.app, *ANSWERS)


def exported(run: str, to: str) -> Callable[[], object]:
    return lambda: invoke(export.app, run, "--to", to)


FILES: list[tuple[str, Callable[[], object]]] = [
    ("medusa/tree.json", loaded("medusa")),
    ("medusa/tree.json", evaluated),
    ("medusa/heads/config.json", loaded("medusa")),
    ("medusa/heads/config.json", exported("medusa", "vllm")),
    ("hydra/heads/config.json", loaded("hydra")),
    ("kangaroo/heads/config.json", loaded("kangaroo")),
    ("amphista/heads/config.json", loaded("amphista")),
    ("eagle3/heads/config.json", loaded("eagle3")),
    ("eagle3/heads/config.json", exported("eagle3", "vllm")),
    ("lora/adapter/adapter_config.json", loaded("lora")),
    ("lora/adapter/adapter_config.json", exported("lora", "merged")),
    ("backbone/config.json", loaded("medusa")),
    ("backbone/config.json", exported("medusa", "vllm")),
    ("backbone/generation_config.json", loaded("medusa")),
    ("backbone/tokenizer_config.json", loaded("medusa")),
    ("medusa/eval/bench/answers.jsonl", evaluated),
    ("medusa/eval/bench/ranks.jsonl", evaluated),
    ("earlier/report.json", compared),
    ("own.jsonl", answered),
    ("own.settings.json", answered),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "act"), FILES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(FILES)])
def test_damaged_files_are_named(
    name: str, act: Callable[[], object], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    seed = int(os.environ.get("MEDUSA_TEST_SEED", "1"))
    source = random.Random(seed)
    path = place / name
    original = path.read_text(encoding="utf-8")
    first, newline, rest = original.partition("\n") if name.endswith("l") else (original, "", "")
    try:
        values = VALUES if name.startswith("backbone") else [*VALUES, HUGE]
        for text in mutations(first, values, source):
            path.write_text(text + newline + rest, encoding="utf-8")
            try:
                act()
            except Exception as error:
                pytest.fail(f"{name} as {text[:300]!r} (seed {seed}): {error!r}")
    finally:
        path.write_text(original, encoding="utf-8")
    act()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
        ('{"a":' * DEEP, "nested too deeply"),
        ("{", "Expecting"),
        ("9" * 5000, "digits"),
    ],
)
def test_json_that_python_reads_or_raises_otherwise_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
