"""`compile: auto` compiles where the questions ahead clearly repay it, and says why."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from medusa_train.checkpoint import choose_compile as shared
from medusa_train.checkpoint.choose_compile import COMPILE_SECONDS, FACTOR, SAVING, Outlook
from medusa_train.checkpoint.load_model import LoadedModel, load_with_draft
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import BackboneError
from medusa_train.evaluation import choose_compile as module
from medusa_train.evaluation.choose_compile import compile_if_repaid
from medusa_train.evaluation.questions import Bench, Question, load_bench
from medusa_train.inference.decoding_form import DecodingForm
from medusa_train.models import compiled as compiled_module
from medusa_train.models.backbone import Backbone
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree
from tests.families import random_backbone

Choose = Callable[..., tuple[bool, str]]
ENOUGH = FACTOR * COMPILE_SECONDS / SAVING  # seconds of plain steps


def test_the_saving_must_clearly_exceed_the_cost() -> None:
    assert Outlook(1000, 1.01 * ENOUGH / 1000, 0).repaid
    assert not Outlook(1000, 0.99 * ENOUGH / 1000, 0).repaid
    assert not Outlook(1000, 1.01 * ENOUGH / 1000, 100).repaid  # the tree has to be fitted again
    assert Outlook(1000, 0.99 * ENOUGH / 1000, -100).repaid  # without compilation it would have to be
    assert str(Outlook(40_960, 0.025, 0)) == (
        "40,960 steps of 25.0 ms are expected, of which it may save 256 s, more than 2 times the 60 s of compilation"
    )
    assert str(Outlook(4_096, 0.025, 1000)).endswith(
        "it may save 26 s, not more than 2 times the 85 s of compilation and fitting the tree again"
    )


@pytest.fixture
def model(run_dir: Path) -> LoadedModel:
    return load_with_draft(resolve_model(str(run_dir), None, None), "float32")


@pytest.fixture
def choose(model: LoadedModel, run_dir: Path, bench_file: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Decide for 6 turns of 100 tokens with steps of `step` seconds: whether passes were compiled, and the output."""

    def run(
        step: float,
        earlier: bool | None = None,
        tree: Path | None = None,
        backbone: Backbone | None = None,
        bench: Bench | None = None,
        **keys: object,
    ) -> tuple[bool, str]:
        compiled: list[Backbone] = []

        def compile_backbone(backbone: Backbone, paths: ModelPaths, *, rows: int, trees: bool) -> None:
            assert (rows, trees) == (cfg.batch_size, True)
            compiled.append(backbone)

        monkeypatch.setattr(shared, "compile_backbone", compile_backbone)
        monkeypatch.setattr(module, "plain_step_seconds", lambda backbone, prompt, rows, advance: step * rows)
        named = None if tree is None else str(tree)
        cfg = EvalConfig(bench=str(bench_file), max_new_tokens=100, compile="auto", tree=named, **keys)
        paths = resolve_model(str(run_dir), None, tree)
        progress = RunProgress(Console(file=io.StringIO(), width=300))
        loaded = model if backbone is None else replace(model, backbone=backbone)
        compile_if_repaid(cfg, bench or load_bench(str(bench_file)), loaded, paths, progress, earlier)
        return bool(compiled), progress.console.file.getvalue()  # type: ignore[attr-defined]

    monkeypatch.setattr(shared, "has_compiler", lambda device: True)
    return run


def test_long_benches_are_compiled(choose: Choose, bench_file: Path) -> None:
    assert choose(1.01 * ENOUGH / 600)[0]
    compiled, output = choose(0.99 * ENOUGH / 600)
    assert not compiled
    assert "compile: no, 600 steps of 792.0 ms are expected" in output
    longer = Bench("twice", bench_file, [Question(i, "a", ("q",) * 6, "") for i in range(2)])
    assert choose(0.51 * ENOUGH / 600, bench=longer)[0]


def test_batches_take_fewer_steps(choose: Choose) -> None:
    """6 turns in batches of 4: two batches, whose steps take four times as long here."""
    assert choose(1.01 * ENOUGH / 800, batch_size=4)[0]
    compiled, output = choose(0.99 * ENOUGH / 800, batch_size=4)
    assert not compiled
    assert "compile: no, 200 steps" in output


def test_an_interrupted_evaluation_keeps_its_decision(choose: Choose) -> None:
    assert choose(0.0, earlier=True) == (True, "compile: yes, as in the interrupted evaluation\n")
    assert choose(100.0, earlier=False) == (False, "compile: no, as in the interrupted evaluation\n")


def test_what_cannot_be_compiled_is_not(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = random_backbone("mistral-window")
    assert choose(100.0, backbone=windows) == (False, "compile: no, the model has sliding windows\n")
    monkeypatch.setattr(shared, "has_compiler", lambda device: False)
    compiled, output = choose(100.0)
    assert not compiled
    assert "no C++ compiler" in output


def test_fitting_the_tree_again_is_part_of_the_cost(
    choose: Choose, model: LoadedModel, run_dir: Path, tmp_path: Path
) -> None:
    form, path = DecodingForm.of(model.backbone), run_dir / "tree.json"
    before = path.read_text(encoding="utf-8")
    try:
        for fitted, repaid in ((form, False), (replace(form, dtype="bfloat16"), True)):
            Tree.cartesian([2, 2]).save(path, **fitted.record())
            # with another dtype the tree is fitted again in any case
            assert choose(1.5 * ENOUGH / 600, calibration_tokens=200)[0] == repaid
        named = tmp_path / "named.json"
        Tree.cartesian([2, 2]).save(named, **form.record())
        assert choose(1.5 * ENOUGH / 600, calibration_tokens=200, tree=named)[0]
    finally:
        path.write_text(before, encoding="utf-8")


def test_a_failing_compiler_does_not_end_the_evaluation(
    model: LoadedModel, run_dir: Path, bench_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(backbone: Backbone, paths: ModelPaths, **shape: int) -> None:
        raise BackboneError("compile: torch.compile failed: no room")

    monkeypatch.setattr(shared, "compile_backbone", fail)
    progress = RunProgress(Console(file=io.StringIO(), width=300))
    cfg = EvalConfig(bench=str(bench_file), compile="auto")
    compile_if_repaid(
        cfg, load_bench(str(bench_file)), model, resolve_model(str(run_dir), None, None), progress, earlier=True
    )
    assert "torch.compile failed: no room\ndecoding without compiled passes" in progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert model.backbone.compiled is None


def test_whether_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import cpp_compiler_search

    cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert not compiled_module.has_compiler(torch.device("cpu"))
    cpp_compiler_search.cache_clear()
