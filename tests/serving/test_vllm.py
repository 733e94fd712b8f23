"""Exports in a real vLLM: they load, change no greedy answer, and are accepted as often as our own
chain of guesses.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from medusa_train.checkpoint.resolve import find_heads, resolve_model
from medusa_train.export.medusa_heads import path_warning
from medusa_train.export.write import export_run
from tests.checkpoint.vllm_rules import loader_problems
from tests.serving.conftest import (
    HEADS,
    PUBLISHED,
    Chain,
    Export,
    decode_here,
    decode_with_vllm,
    engine,
    tokenize,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serving"), pytest.mark.timeout(3600)]

VARIANTS = [
    "full",
    "reduced",
    "shared",
    "shared_reduced",
    "merged",
    "dflash",
    "eagle3",
    "eagle3_reduced",
    "speculators",
    *PUBLISHED,
]


def interval(successes: int, trials: int, z: float = 3.3) -> tuple[float, float]:
    """Wilson's interval of a binomial rate; z 3.3 covers 99.9 %."""
    rate, square = successes / trials, z * z / trials
    centre = (rate + square / 2) / (1 + square)
    half = z * (rate * (1 - rate) / trials + square / trials / 4) ** 0.5 / (1 + square)
    return centre - half, centre + half


def assert_same_acceptance(vllm: Chain, ours: Chain) -> None:
    assert vllm.drafts > 0
    assert len(vllm.accepted) == len(ours.accepted)
    for theirs, mine in zip(vllm.accepted, ours.accepted, strict=True):
        low, high = interval(theirs, vllm.drafts)
        assert low <= mine / ours.drafts <= high, f"vLLM {vllm}, here {ours}"


@pytest.mark.parametrize("name", VARIANTS)
def test_it_loads_and_greedy_answers_equal_those_without_heads(
    served: dict[str, Any], name: str
) -> None:
    assert "error" not in served[name], served[name]["error"]
    plain = served["plain_merged" if name == "merged" else "plain"]
    assert served[name]["answers"] == plain["answers"]
    assert len(set(map(tuple, plain["answers"]))) == len(plain["answers"])


@pytest.mark.parametrize("name", VARIANTS)
def test_acceptance_by_position_agrees_with_our_chain(
    served: dict[str, Any], exports: dict[str, Export], prompts: list[list[int]], name: str
) -> None:
    ours = decode_here(exports[name], prompts)
    vllm = Chain(**served[name])
    # heads that were never right would agree with anything
    assert sum(ours.accepted) > 0.1 * ours.drafts
    assert_same_acceptance(vllm, ours)
    assert vllm.answers == ours.answers


def test_a_joint_run_is_served_on_its_merged_target_model(served: dict[str, Any]) -> None:
    assert served["plain_merged"]["answers"] != served["plain"]["answers"]


@pytest.mark.parametrize(
    ("name", "fails", "words"),
    [
        ("matrix_missing", False, "lm_heads.1.weight: missing"),
        ("biases_dropped", False, "layers.0.bias: dropped"),
        ("block_missing", True, "blocks.1.layers.0.weight: missing"),
        ("shape", True, "expected"),
        ("vocabulary", True, "truncated_vocab_size is less"),
    ],
)
def test_our_rules_of_the_loader_are_vllms(
    served: dict[str, Any], wrong: dict[str, Export], name: str, fails: bool, words: str
) -> None:
    assert ("error" in served[name]) == fails  # it drops and invents weights in silence
    config = json.loads((wrong[name].directory / "config.json").read_text())
    assert words in "\n".join(
        loader_problems(load_file(wrong[name].directory / "model.safetensors"), config)
    )


def test_the_path_of_the_heads_chooses_the_method(
    served: dict[str, Any], wrong: dict[str, Export]
) -> None:
    assert "error" in served["eagle-path"]
    assert path_warning(str(wrong["eagle-path"].directory)) is not None


def test_more_draft_tokens_than_heads_are_an_error_of_vllm(served: dict[str, Any]) -> None:
    assert f"blocks.{HEADS}." in served["too_many"]["error"]


def test_a_run_of_another_target_model(vllm_python: str, tmp_path: Path) -> None:
    """A run directory named by MEDUSA_SERVING_RUN, such as SmolLM2's."""
    run = os.environ.get("MEDUSA_SERVING_RUN")
    if not run:
        pytest.skip("MEDUSA_SERVING_RUN names no run directory")
    paths = resolve_model(run, None, None)
    heads = export_run(paths, "vllm", tmp_path / "heads").target
    method = "eagle3" if find_heads(heads).layout == "eagle3" else "medusa"
    one = Export(heads, Path(paths.target_model), k=3, method=method)
    questions = [
        "What is the capital of France?",
        "Write a haiku about rain.",
        "Why is the sky blue?",
    ]
    prompts = [tokenize(question, one.model) for question in questions]
    engines = {"plain": {"model": str(one.model), "heads": None}, "heads": engine(one)}
    served = decode_with_vllm(vllm_python, engines, prompts, tmp_path)
    assert served["heads"]["answers"] == served["plain"]["answers"]
    assert_same_acceptance(Chain(**served["heads"]), decode_here(one, prompts))
