"""Runs that commit 8d79f769 wrote (fixtures/README.md): they load, evaluate, export and go on as then."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import medusa_train
from tests.behaviour.fixtures import make_fixture
from tests.behaviour.fixtures.make_fixture import EVALUATIONS, EXPORTS, RUNS
from tests.behaviour.world import FIXTURES, read_json, read_lines, selfdistill, tensors

EVALUATED = read_json(FIXTURES / "evaluations.json")
EXPORTED = read_json(FIXTURES / "exports.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model, the data and the runs."""
    where = tmp_path_factory.mktemp("stored")
    for name in ("model", "data", "run", "drafts"):
        shutil.copytree(FIXTURES / name, where / name)
    return where


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs name their model and data by paths relative to the fixture."""
    monkeypatch.chdir(place)


def assert_alike(found: Any, expected: Any, at: str) -> None:
    """Compare all that was stored; new entries beside it may come, and numbers may be rounded."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), at
        assert expected.keys() <= found.keys(), at
        for key, value in expected.items():
            assert_alike(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), at
        assert len(found) == len(expected), at
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{at}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6), at
    else:
        assert found == expected, at


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_gives_the_stored_answers_steps_and_figures(
    name: str, tmp_path: Path
) -> None:
    found = make_fixture.run_evaluation(name, tmp_path / "out")
    assert_alike(found, EVALUATED[name], name)


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_holds_the_stored_names_shapes_and_values(name: str, tmp_path: Path) -> None:
    found = make_fixture.run_export(name, tmp_path / "out")
    assert_alike(found, EXPORTED[name], name)


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_run_loads_and_answers(name: str) -> None:
    loaded = medusa_train.load(name, dtype="float32")
    expected = EVALUATED[Path(name).name]["answers"]
    questions = read_lines(Path("data/questions.jsonl"))
    for question, line in zip(questions[:4], expected[:4], strict=True):
        reply = loaded.reply(question["turns"][0], max_new_tokens=24)
        assert reply.read().strip() == line["text"].strip()
        assert (len(reply.tokens), reply.steps) == (line["tokens"], line["steps"])


def test_the_stored_run_speeds_up_its_models_own_answers(tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    words = ["--prompts", "data/prompts.jsonl", "--output", out, "heads=run"]
    keys = {"temperature": 0, "dtype": "float32", "max_new_tokens": 32}
    selfdistill(*words, **keys, drop_truncated=False, drop_looping=False).ok()
    stored = {r["id"]: r["messages"] for r in read_lines(Path("data/own.jsonl"))}
    assert {r["id"]: r["messages"] for r in read_lines(out)} == stored


def test_the_stored_checkpoint_goes_on_or_says_what_to_do(place: Path, tmp_path: Path) -> None:
    run = Path("run")
    stored = tensors(FIXTURES / "run" / "heads" / "medusa_lm_head.safetensors")
    (checkpoint,) = (FIXTURES / "run" / "checkpoints").glob("step-*")
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "heads" / "medusa_lm_head.safetensors").unlink()
    goes_on = make_fixture.train_run(
        "run", "--resume", output_dir=str(tmp_path / "run"), calibration_tokens=0
    )
    if goes_on.code != 0:
        goes_on.fails(1, str(checkpoint.name), "checkpoint")
        return
    found = tensors(tmp_path / "run" / "heads" / "medusa_lm_head.safetensors")
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_fixture_is_small_and_holds_no_path_of_a_machine() -> None:
    files = [path for path in FIXTURES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    for path in files:
        if path.suffix in (".json", ".jsonl", ".yaml", ".md", ".jinja"):
            text = path.read_text(encoding="utf-8")
            assert not re.search("/(home|tmp|root)/", text)
            assert str(FIXTURES) not in text
