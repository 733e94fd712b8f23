"""Decoding steps against their floor: arithmetic by hand, passes that leave the cache unchanged,
the page.
"""

import json
from pathlib import Path
from typing import Any

import decode
import pytest
import torch
from decode import likely_tree
from decode_steps import Context
from shapes import Rates, Sizes, llama_config, random_model

from medusa_train.inference import step as step_module
from medusa_train.inference.accept import TARGET_ARGMAX, accept
from medusa_train.inference.cuda_graphs import FixedShapeRunner
from medusa_train.inference.fixed_steps import FixedShapeSteps
from medusa_train.models import prepack
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import write_target_model
from tests.inference.tape import TapeRunner

CPU = torch.device("cpu")
SMALL = llama_config(32, 48, 2, 4, 2, 61)
RATES = Rates(1e9, {"float32": 1e10, "bfloat16": 4e10})


def small_target_model() -> TargetModel:
    return TargetModel(random_model(SMALL, torch.float32, CPU), None, "small")


@pytest.mark.parametrize("runner", [FixedShapeRunner(), TapeRunner()], ids=["run", "replayed"])
def test_static_steps_compute_what_passes_do(
    runner: FixedShapeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same keys and values, and again after they have run: they leave the context as it
    was.
    """
    eager, fixed = small_target_model(), small_target_model()
    fixed.step_runner = runner
    passes, static = Context(eager, 20, 8), Context(fixed, 20, 8)
    with torch.inference_mode():
        before = passes._kv_cache.storage(20)[..., :20, :].clone()
        static._kv_cache.storage(20)[..., :20, :] = before
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        step_module, "accept", lambda *given: seen.append(given[2]) or accept(*given)
    )  # type: ignore[func-returns-value]
    for tree in (Tree.empty(), likely_tree(8, 3), Tree.chain(2)):
        one, other = passes.step(tree), static.step(tree)
        for _ in range(3):
            for step in (one, other):
                step.prepare()
                step()
            # a pass begins with token 0 and guesses 1, 2, ...
            assert torch.allclose(other.steps._states.final, one.steps._states.final, atol=1e-5)
            assert isinstance(other.steps, FixedShapeSteps)
            assert torch.equal(other.steps._choices[:, TARGET_ARGMAX], seen[-1].argmax(-1))
        for context in (passes, static):
            assert torch.equal(context._kv_cache.storage(20)[..., :20, :], before)


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        ("full", 3 * (32 * 32 + 32 + 61 * 32)),
        ("40", 3 * (32 * 32 + 32 + 40 * 32)),
        ("shared", 3 * (32 * 32 + 32) + 61 * 32),
    ],
)
def test_weights_that_heads_of_each_kind_read(kind: str, by_hand: int) -> None:
    assert decode.weights_of_heads(Sizes.of(SMALL), kind, 3) == by_hand


def test_settings_of_a_dtype_share_weights_and_heads() -> None:
    shape = decode.Shape("small", None, SMALL, Sizes.of(SMALL))
    first = shape.load("float32", "stock", CPU, ("full", "32768", "shared"))
    second = shape.load("float32", "static", CPU, (), first)
    mine, other = first.target_model.model, second.target_model.model
    assert mine is not other
    assert mine.lm_head.weight.data_ptr() == other.lm_head.weight.data_ptr()
    assert list(second.drafts) == ["full", "32768", "shared"]
    rates = Rates(1e9, {"float32": 1e10})
    setup = decode.Setup("small", 20, "float32", "static")
    names = [case.name for case in decode.timed_calls(second, shape, setup, [16], rates)]
    assert names[-3:] == [
        "loop, tree 16",
        "loop, tree 16, 32768 heads",
        "loop, tree 16, shared heads",
    ]


def test_a_setting_that_fails_is_a_row_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "measure_rates", lambda device, dtypes, seconds: RATES)
    timed_calls, burst = decode.timed_calls, decode._burst

    def failing(one: Any, shape: Any, setup: Any, *given: Any) -> Any:
        if setup.setting == "static":
            raise RuntimeError("no program\nmore")
        return timed_calls(one, shape, setup, *given)

    def failing_later(case: Any, device: Any) -> float:
        if case.name == "heads":
            case.call = lambda: int("x")
        return burst(case, device)

    monkeypatch.setattr(decode, "timed_calls", failing)
    monkeypatch.setattr(decode, "_burst", failing_later)
    model = write_target_model(tmp_path / "model")
    words = ["--shapes", str(model), "--contexts", "32", "--nodes", "2", "--dtypes", "float32"]
    words += ["--settings", "stock", "static", "--seconds", "0.01", "--out", str(tmp_path / "out")]
    assert decode.main(words) == 1
    record = json.loads((tmp_path / "out" / "decode.json").read_text())
    stock, static = record["rows"]
    assert static["obstacle"] == "failed: RuntimeError: no program"
    assert list(stock["ms_and_floor"]) == ["plain", "tree 2", "loop, plain"]
    assert stock["ready_s"] >= 0


def test_the_whole_command_on_a_model_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # takes no time
    monkeypatch.setattr(decode, "measure_rates", lambda device, dtypes, seconds: RATES)
    monkeypatch.setattr(prepack, "_is_faster", lambda weights: False)
    model = write_target_model(tmp_path / "model")
    words = ["--quick", "--shapes", str(model), "--contexts", "32", "300", "--nodes", "2", "16"]
    words += ["--settings", "stock", "prepacked", "static", "compiled"]
    assert (
        decode.main(
            [*words, "--dtypes", "float32", "--seconds", "0.01", "--out", str(tmp_path / "out")]
        )
        == 0
    )
    record = json.loads((tmp_path / "out" / "decode.json").read_text())
    assert record["machine"]["command"].startswith("python benchmarks/decode.py --quick")
    rows = {(one["setting"], one["context"]): one for one in record["rows"]}
    passes = ["plain", "tree 2", "tree 16", "heads"]
    for setting, steps in (
        ("stock", "passes"),
        ("static", "static buffers"),
        ("compiled", "passes"),
    ):
        assert list(rows[setting, 32]["ms_and_floor"]) == [*passes, "loop, plain", "loop, tree 16"]
        assert rows[setting, 32]["steps"] == steps
    assert rows["stock", 300]["obstacle"] == "not run: the model has 256 positions"
    plain = rows["stock", 32]["ms_and_floor"]["plain"][0]
    assert rows["stock", 32]["plain_tokens_per_s"] == pytest.approx(1000 / plain, rel=0.02)
    assert rows["prepacked", 0]["obstacle"].startswith("not prepacked")
    with pytest.raises(SystemExit):
        decode.parse_arguments(["--shapes", "9B"])
