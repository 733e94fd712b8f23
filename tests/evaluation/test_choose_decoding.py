"""`dtype: auto` and `compile: auto`: what is measured, and what is chosen by it."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from medusa_train import choose_decoding as module
from medusa_train.checkpoint.load_model import (
    LoadedModel,
    load_backbone_without_adapter,
    load_for_decoding,
)
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.choose_decoding import (
    COMPILE_SECONDS,
    FACTOR,
    GPU_SAVING,
    SAVING,
    Decisions,
    WeightMemory,
    choose_dtype,
    compile_if_repaid,
    decide_dtype,
    plain_step_seconds,
)
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import BackboneError
from medusa_train.evaluation import run_bench
from medusa_train.evaluation.calibrate import chooses_compilation
from medusa_train.evaluation.questions import load_bench
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.models import compiled as compiled_module
from medusa_train.models import precision
from medusa_train.models.backbone import Backbone
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree
from tests.evaluation.test_run_bench import use_kernels_as_on_a_gpu
from tests.families import random_backbone


def choose(paths: ModelPaths) -> tuple[str, list[str]]:
    """The dtype that is chosen and the lines that are printed."""
    progress = RunProgress(Console(file=io.StringIO(), width=400), line_seconds=float("inf"))
    dtype = choose_dtype("Say ay.", paths, progress)
    return dtype, progress.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_TOKENS", 5)
    monkeypatch.setattr(module, "PROBE_ROUNDS", 1)
    # whatever processor runs the tests
    monkeypatch.setattr(module, "emulates", lambda device, dtype: False)


@pytest.fixture
def paths(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPaths:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return resolve_model(str(run_dir), None, None)


def failing(
    for_dtypes: set[str], error: Exception, loaded: list[str]
) -> Callable[[ModelPaths, str], Backbone]:
    def load(paths: ModelPaths, dtype: str) -> Backbone:
        loaded.append(dtype)
        if dtype in for_dtypes:
            raise error
        return load_backbone_without_adapter(paths, dtype)

    return load


def test_a_dtype_without_enough_memory_is_left_out_and_other_errors_propagate(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(dtypes: set[str], error: Exception) -> list[str]:
        loaded: list[str] = []
        monkeypatch.setattr(module, "load_backbone_without_adapter", failing(dtypes, error, loaded))
        return loaded

    loaded = fails({"float32"}, torch.OutOfMemoryError("CUDA out of memory."))
    chosen, lines = choose(paths)
    assert (chosen, loaded) == ("bfloat16", ["float32", "bfloat16"])
    assert lines[0] == "dtype float32: not enough memory; left out"
    assert "float32" not in lines[1]
    fails({"float32", "bfloat16"}, MemoryError())
    with pytest.raises(BackboneError, match="not enough memory in any dtype"):
        choose(paths)
    fails({"bfloat16"}, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        choose(paths)


def test_the_checkpoints_dtype_comes_first_and_weights_that_do_not_fit_are_not_loaded(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    stored = LlamaConfig(dtype="bfloat16")
    monkeypatch.setattr(module, "resolve_backbone", lambda name, trust_remote_code: (name, stored))
    monkeypatch.setattr(
        module, "load_backbone_without_adapter", failing(set(), MemoryError(), loaded)
    )
    monkeypatch.setattr(WeightMemory, "fit", lambda self, dtype: dtype != "float32")
    chosen, lines = choose(paths)
    assert chosen == "bfloat16"
    assert loaded == ["bfloat16"]
    assert "dtype float32: the weights do not fit" in lines[0]


@pytest.mark.parametrize(
    ("dtypes_that_fit", "chosen"),
    [
        ({"float32", "bfloat16"}, "float32"),
        ({"bfloat16"}, "bfloat16"),
        (set(), "float32"),
    ],
)
def test_a_cpu_that_emulates_bfloat16_takes_it_only_if_float32_does_not_fit(
    dtypes_that_fit: set[str],
    chosen: str,
    paths: ModelPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is timed, and what a processor with bfloat16 chose for this run does not count."""
    monkeypatch.setattr(module, "emulates", lambda device, dtype: True)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: False)
    monkeypatch.setattr(WeightMemory, "fit", lambda self, dtype: dtype in dtypes_that_fit)
    monkeypatch.setattr(module, "choose_dtype", lambda *given: pytest.fail("it was timed"))
    decisions = Decisions(tmp_path)
    decisions.keep("dtype", module._conditions(paths), "bfloat16")
    progress = RunProgress(Console(file=io.StringIO(), width=400))
    assert decide_dtype("Say ay.", paths, decisions, progress) == chosen
    shown = progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert ("in float32, more than is free; this CPU is slow" in shown) == (chosen == "bfloat16")


def test_a_gpu_that_emulates_bfloat16_does_not_time_it(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "emulates", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    assert module._candidates(paths) == ["float32", "float16"]


def test_the_checkpoints_dtype_stays_unless_another_is_clearly_faster(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, expected in ((1.7, "float32"), (1.65, "bfloat16")):
        steps = {torch.float32: 2.0, torch.bfloat16: seconds}
        monkeypatch.setattr(
            module,
            "plain_step_seconds",
            lambda backbone, prompt, steps=steps: steps[backbone.dtype],
        )
        chosen, lines = choose(paths)
        assert chosen == expected
        assert ("kept, since no other is 20 % faster" in lines[0]) == (expected == "float32")


def test_a_kernel_of_16_bits_leaves_float32_out(
    paths: ModelPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backbone, "use_gpu_kernels", use_kernels_as_on_a_gpu)
    split = replace(paths, gpu_kernels=("layer_programs", "split_attention"))
    dtype, shown = choose(split)
    assert dtype == "bfloat16"
    assert "dtype float32: split_attention takes 16 bits; left out" in shown
    # what was chosen with other kernels, or with none, is another decision
    answers = ["float32", "bfloat16"]
    monkeypatch.setattr(module, "choose_dtype", lambda *given: answers.pop(0))
    progress = RunProgress(Console(file=io.StringIO()))
    decisions = Decisions(tmp_path)
    for given, expected in ((paths, "float32"), (split, "bfloat16"), (paths, "float32")):
        assert decide_dtype("Say ay.", given, decisions, progress) == expected


def test_the_dtype_of_a_run_is_decided_once_on_a_machine(
    paths: ModelPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later timing, which noise turns round, changes neither dtype nor tree."""
    answers = ["bfloat16", "float32", "float32"]
    monkeypatch.setattr(module, "choose_dtype", lambda *given: answers.pop(0))

    def decide(*directories: Path) -> tuple[str, str]:
        progress = RunProgress(Console(file=io.StringIO(), width=400))
        dtype = decide_dtype("Say ay.", paths, Decisions(*directories), progress)
        return dtype, progress.console.file.getvalue()  # type: ignore[attr-defined]

    home, out = tmp_path / "run", tmp_path / "out"
    assert decide(home, home) == ("bfloat16", "")
    dtype, shown = decide(home, out)
    assert dtype == "bfloat16"
    assert f"dtype: bfloat16, as chosen before ({home / 'decoding.json'}; dtype=NAME" in shown
    assert not out.exists()
    monkeypatch.setattr(module, "device_name", lambda device: "another machine")
    assert decide(home, home)[0] == "float32"
    monkeypatch.undo()
    (home / "decoding.json").write_text("[{", encoding="utf-8")
    monkeypatch.setattr(module, "choose_dtype", lambda *given: "float16")
    assert decide(home, home)[0] == "float16"  # a damaged file is written again
    assert len(json.loads((home / "decoding.json").read_text(encoding="utf-8"))) == 1


def test_whether_to_compile_is_decided_once(
    model: LoadedModel,
    run_dir: Path,
    bench_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes: list[bool | None] = [None, False, True]
    monkeypatch.setattr(run_bench, "compile_if_repaid", lambda *given, **shape: outcomes.pop(0))
    monkeypatch.setattr(run_bench, "compile_or_report", lambda *given, **shape: None)
    paths = replace(resolve_model(str(run_dir), None, None), home=tmp_path)
    bench = load_bench(str(bench_file))

    def decide(tokens: int) -> str:
        progress = RunProgress(Console(file=io.StringIO(), width=400))
        cfg = EvalConfig(max_new_tokens=tokens)
        run_bench._choose_compile(cfg, bench, model, paths, None, progress)
        return progress.console.file.getvalue()  # type: ignore[attr-defined]

    decide(100)  # failed, which may be different another time
    decide(100)
    assert "compile: no, as chosen before for as many steps" in decide(100)
    decide(50)
    assert "compile: yes, as chosen before for as many steps" in decide(50)
    assert not outcomes


def test_the_backbone_is_loaded_as_the_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load(name: str, **options: object) -> SimpleNamespace:
        keys = ("dtype", "quantization", "trust_remote_code", "special_tokens")
        asked.append((name, *(options[key] for key in keys)))
        return SimpleNamespace(end_answers_by=lambda *template: asked.append(template))

    monkeypatch.setattr("medusa_train.checkpoint.load_model.load_backbone", load)
    over_4bit = ModelPaths(
        Path("run"),
        "m",
        None,
        None,
        "chatml",
        quantization="nf4",
        trust_remote_code=True,
        special_tokens={"eos_token": "<end>"},
        chat_template_kwargs={"thinking": False},
    )
    load_backbone_without_adapter(over_4bit, "bfloat16")
    folded = ModelPaths(
        Path("run"), "m", None, None, None, adapter=Path("run/adapter"), quantization="nf4"
    )
    load_backbone_without_adapter(folded, "float32")
    assert asked == [
        ("m", "bfloat16", "nf4", True, {"eos_token": "<end>"}),
        ("chatml", {"thinking": False}),
        ("m", "float32", None, False, {}),
        (None, {}),
    ]


ENOUGH = FACTOR * COMPILE_SECONDS / SAVING  # seconds of plain steps


def compiled_for(
    monkeypatch: pytest.MonkeyPatch, backbone: Backbone, steps: list[float], compiler: bool = True
) -> tuple[list[tuple[int, bool]], list[str]]:
    """Decide for 600 steps; return what was compiled and the lines.

    Args:
        steps: seconds of a plain step each time they are measured.
    """
    compiled: list[tuple[int, bool]] = []

    def compile_backbone(backbone: Backbone, paths: ModelPaths, *, rows: int, trees: bool) -> None:
        compiled.append((rows, trees))
        backbone.compiled = object()  # type: ignore[assignment]

    monkeypatch.setattr(module, "compile_backbone", compile_backbone)
    monkeypatch.setattr(module, "has_compiler", lambda device: compiler)
    monkeypatch.setattr(module, "plain_step_seconds", lambda *given: steps.pop(0))
    lines: list[str] = []
    paths = ModelPaths(Path("run"), "m", None, None, None)
    compile_if_repaid(backbone, paths, 600, [1, 2], lines.append, rows=4, trees=False)
    return compiled, lines


def test_passes_are_compiled_where_the_steps_repay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = random_backbone("llama")
    assert compiled_for(monkeypatch, backbone, [1.01 * ENOUGH / 600])[0] == [(4, False)]
    compiled, (line,) = compiled_for(monkeypatch, backbone, [0.99 * ENOUGH / 600])
    assert (compiled, line.startswith("compile: no, 600 steps of 792.0 ms are expected")) == (
        [],
        True,
    )
    compiled, (line,) = compiled_for(monkeypatch, backbone, [100.0], compiler=False)
    assert (compiled, line) == ([], "compile: no, there is no C++ compiler (on a GPU: no Triton)")
    compiled, (line,) = compiled_for(monkeypatch, random_backbone("mistral-window"), [100.0])
    assert (compiled, line) == ([], "compile: no, the model has sliding windows")


def test_the_program_of_a_tree_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = random_backbone("llama")
    paths = ModelPaths(Path("run"), "m", None, None, None)
    monkeypatch.setattr(module, "has_compiler", lambda device: True)
    monkeypatch.setattr(module, "plain_step_seconds", lambda *given: 0.0)
    monkeypatch.setattr(module, "LAYER_SECONDS", 100)

    def seconds(**shape: Any) -> int:
        lines: list[str] = []
        compile_if_repaid(backbone, paths, 600, [1, 2], lines.append, **shape)
        return int(lines[0].split(" s it takes")[0].split()[-1])

    assert backbone.num_layers == 3
    assert seconds(trees=False) == 300
    assert seconds() == 600
    assert seconds(tree_program=True) == 900
    assert seconds(tree_program=True, rows=4) == 600


def test_on_a_gpu_measured_steps_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside CUDA graphs compilation saves less, and programs that are not faster are dropped."""
    backbone = random_backbone("llama")
    backbone.device = torch.device("cuda")  # the timings are faked
    enough = FACTOR * COMPILE_SECONDS / GPU_SAVING / 600
    assert compiled_for(monkeypatch, backbone, [0.99 * enough])[0] == []
    assert compiled_for(monkeypatch, backbone, [1.01 * enough, 0.9 * enough])[0] == [(4, False)]
    assert backbone.compiled is not None
    lines = compiled_for(monkeypatch, backbone, [1.01 * enough, 1.02 * enough])[1]
    assert lines[1].startswith("compile: dropped, steps take")
    assert backbone.compiled is None


def test_cuda_graphs_need_no_compilation(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = object()
    monkeypatch.setattr(
        "medusa_train.inference.cuda_graphs.graph_runner", lambda device, model: runner
    )
    backbone = load_for_decoding(resolve_model(str(run_dir), None, None), "float32").backbone
    assert backbone.step_runner is runner
    settings = DecodingSettings.of(backbone)
    assert (settings.compiled, settings.graphs) == (False, True)


@pytest.fixture
def model(run_dir: Path) -> LoadedModel:
    return load_for_decoding(resolve_model(str(run_dir), None, None), "float32")


@pytest.mark.parametrize(("batch_size", "steps"), [(1, 600), (4, 200)])
def test_the_steps_of_a_bench(
    model: LoadedModel,
    run_dir: Path,
    bench_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    steps: int,
) -> None:
    """6 turns of 100 tokens; in batches of 4, these are two batches."""
    seen: list[tuple[object, ...]] = []

    def record(
        backbone: Backbone,
        paths: ModelPaths,
        steps: int,
        *given: object,
        rows: int,
        trees: bool,
        tree_program: bool,
    ) -> None:
        seen.append((steps, rows, trees, tree_program))

    monkeypatch.setattr(run_bench, "compile_if_repaid", record)
    cfg = EvalConfig(max_new_tokens=100, batch_size=batch_size)
    paths, progress = (
        resolve_model(str(run_dir), None, None),
        RunProgress(Console(file=io.StringIO())),
    )
    run_bench._choose_compile(cfg, load_bench(str(bench_file)), model, paths, None, progress)
    assert seen == [(steps, batch_size, True, True)]


def test_compilation_is_chosen_by_default_where_the_tree_was_fitted_to_it(
    model: LoadedModel, tmp_path: Path
) -> None:
    tree = tmp_path / "tree.json"
    paths = ModelPaths(tmp_path, "m", None, tree, None)
    for compiled in (False, True):
        Tree.cartesian([2, 2]).save(
            tree, **replace(DecodingSettings.of(model.backbone), compiled=compiled).record()
        )
        assert chooses_compilation(EvalConfig(), paths) == compiled
        assert not chooses_compilation(EvalConfig(compile=False), paths)
        assert chooses_compilation(EvalConfig(compile="auto"), paths)


def test_an_interrupted_evaluation_keeps_its_decision_and_a_failing_compiler_does_not_end_it(
    model: LoadedModel, run_dir: Path, bench_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(backbone: Backbone, paths: ModelPaths, **shape: int) -> None:
        raise BackboneError("compile: torch.compile failed: no room")

    monkeypatch.setattr(module, "compile_backbone", fail)
    for earlier in (True, False):
        progress = RunProgress(Console(file=io.StringIO(), width=300))
        paths = resolve_model(str(run_dir), None, None)
        run_bench._choose_compile(
            EvalConfig(), load_bench(str(bench_file)), model, paths, earlier, progress
        )
        shown = progress.console.file.getvalue()  # type: ignore[attr-defined]
        assert f"compile: {'yes' if earlier else 'no'}, as in the interrupted evaluation" in shown
        assert (
            "torch.compile failed: no room\ndecoding without compiled passes" in shown
        ) == earlier
    assert model.backbone.compiled is None


def test_steps_of_batches_are_timed() -> None:
    backbone = random_backbone("llama", dtype=torch.float32)
    for rows in (1, 3):
        assert 0 < plain_step_seconds(backbone, [0] * 500, rows) < 1


def test_whether_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import cpp_compiler_search

    cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert not compiled_module.has_compiler(torch.device("cpu"))
    cpp_compiler_search.cache_clear()
