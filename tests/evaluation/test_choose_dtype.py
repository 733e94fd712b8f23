import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import LlamaConfig

from medusa_train.checkpoint.load_model import load_base_model
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.errors import BackboneError
from medusa_train.evaluation import choose_dtype as module
from medusa_train.evaluation.choose_dtype import Round, WeightMemory, choose_dtype, free_memory, is_out_of_memory
from medusa_train.evaluation.questions import Bench, Question
from medusa_train.models.backbone import Backbone
from medusa_train.progress import RunProgress

BENCH = Bench("one", Path("one.jsonl"), (Question(1, "general", ("Say ay.",), "one.jsonl:1"),))


def choose(paths: ModelPaths) -> tuple[str, list[str]]:
    """The dtype that is chosen and the lines that are printed."""
    progress = RunProgress(Console(file=io.StringIO(), width=400), line_seconds=float("inf"))
    dtype = choose_dtype(BENCH, paths, progress)
    return dtype, progress.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "reference_seconds", lambda device: 1.0)
    monkeypatch.setattr(module, "PROBE_TOKENS", 5)
    monkeypatch.setattr(module, "PROBE_ROUNDS", 1)
    monkeypatch.setattr(module, "emulates_bf16", lambda device: False)  # whatever processor runs the tests


@pytest.fixture
def paths(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPaths:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return resolve_model(str(run_dir), None, None)


def failing(for_dtypes: set[str], error: Exception, loaded: list[str]) -> Callable[[ModelPaths, str], Backbone]:
    def load(paths: ModelPaths, dtype: str) -> Backbone:
        loaded.append(dtype)
        if dtype in for_dtypes:
            raise error
        return load_base_model(paths, dtype)

    return load


def test_the_chosen_dtype_and_the_measurements_are_printed(run_dir: Path) -> None:
    chosen, lines = choose(resolve_model(str(run_dir), None, None))
    assert chosen in ("float32", "bfloat16", "float16")
    assert lines[0].startswith(f"dtype: {chosen}, the fastest")
    assert "float32" in lines[0]
    assert "bfloat16" in lines[0]


def test_a_dtype_without_enough_memory_is_left_out_and_named(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = failing({"float32"}, torch.OutOfMemoryError("CUDA out of memory."), loaded)
    monkeypatch.setattr(module, "load_base_model", load)
    chosen, lines = choose(paths)
    assert chosen == "bfloat16"
    assert loaded == ["float32", "bfloat16"]
    assert lines[0] == "dtype float32: not enough memory; left out"
    assert lines[1].startswith("dtype: bfloat16")
    assert "float32" not in lines[1]


def test_too_little_memory_for_any_dtype_is_an_error_and_other_errors_propagate(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_base_model", failing({"float32", "bfloat16"}, MemoryError(), []))
    with pytest.raises(BackboneError, match="not enough memory for it in any dtype"):
        choose(paths)
    monkeypatch.setattr(module, "load_base_model", failing({"bfloat16"}, RuntimeError("a bug"), []))
    with pytest.raises(RuntimeError, match="a bug"):
        choose(paths)


def test_the_checkpoints_dtype_comes_first_and_weights_that_do_not_fit_are_not_loaded(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    stored = LlamaConfig(dtype="bfloat16")
    monkeypatch.setattr(module, "resolve_backbone", lambda name, trust_remote_code: (name, stored))
    monkeypatch.setattr(module, "load_base_model", failing(set(), MemoryError(), loaded))
    monkeypatch.setattr(WeightMemory, "fit", lambda self, dtype: dtype != "float32")
    chosen, lines = choose(paths)
    assert chosen == "bfloat16"
    assert loaded == ["bfloat16"]
    assert "dtype float32: the weights do not fit" in lines[0]


def test_emulated_bfloat16_is_left_out_unless_nothing_else_fits(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain step of one row may be as fast; a tree's rows are not."""
    monkeypatch.setattr(module, "emulates_bf16", lambda device: True)
    stored = LlamaConfig(dtype="bfloat16")
    monkeypatch.setattr(module, "resolve_backbone", lambda name, trust_remote_code: (name, stored))
    loaded: list[str] = []
    monkeypatch.setattr(module, "load_base_model", failing(set(), MemoryError(), loaded))
    chosen, lines = choose(paths)
    assert (chosen, loaded) == ("float32", ["float32"])
    assert lines[0] == "dtype bfloat16: emulated on this device, so slow for trees; left out"
    monkeypatch.setattr(module, "load_base_model", failing({"float32"}, MemoryError(), loaded))
    assert choose(paths)[0] == "bfloat16"


def test_a_disturbed_measurement_is_repeated(paths: ModelPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process slows down bfloat16's first rounds: they do not decide."""
    rounds = {
        "float32": [[Round(2.0, 1.0), Round(2.1, 1.2)]],
        "bfloat16": [[Round(3.0, 4.0), Round(4.0, 1.6)], [Round(1.0, 1.1), Round(9.0, 5.0)]],
    }

    def measured(backbone: Backbone, *rest: object) -> list[Round]:
        return rounds[str(backbone.dtype).removeprefix("torch.")].pop(0)

    monkeypatch.setattr(module, "time_plain_steps", measured)
    chosen, lines = choose(paths)
    assert chosen == "bfloat16"
    assert "dtype bfloat16: another process slowed the machine down" in lines[0]
    assert "float32 2000.00 ms, bfloat16 1000.00 ms" in lines[1]


def test_a_machine_that_stays_busy_makes_the_choice_unreliable(
    paths: ModelPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = {"float32": [Round(2.0, 1.0)], "bfloat16": [Round(3.0, 4.0)]}
    monkeypatch.setattr(
        module, "time_plain_steps", lambda backbone, *rest: rounds[str(backbone.dtype).removeprefix("torch.")]
    )
    chosen, lines = choose(paths)
    assert chosen == "float32"
    assert "the choice of dtype is unreliable" in lines[1]


def test_the_backbone_is_loaded_as_the_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load(name: str, *, dtype: str, quantization: object, trust_remote_code: bool) -> SimpleNamespace:
        asked.append((name, dtype, quantization, trust_remote_code))
        return SimpleNamespace()

    monkeypatch.setattr("medusa_train.checkpoint.load_model.load_backbone", load)
    over_4bit = ModelPaths(Path("run"), "m", None, None, None, quantization="nf4", trust_remote_code=True)
    load_base_model(over_4bit, "bfloat16")
    folded = ModelPaths(Path("run"), "m", None, None, None, adapter=Path("run/adapter"), quantization="nf4")
    load_base_model(folded, "float32")
    assert asked == [("m", "bfloat16", "nf4", True), ("m", "float32", None, False)]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            True,
        ),
        (RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_is_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_cpu_allocators_error_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_memory_of_weights_by_dtype_with_quantized_weights_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(10, 10, bias=False)
    model.packed = nn.Parameter(torch.zeros(30, dtype=torch.uint8), requires_grad=False)
    weights = WeightMemory.of(model, CPU)
    assert (weights.numbers, weights.quantized) == (100, 30)
    monkeypatch.setattr(module, "free_memory", lambda device: 429)
    assert weights.fit("bfloat16")
    assert not weights.fit("float32")
    monkeypatch.setattr(module, "free_memory", lambda device: None)
    assert weights.fit("float32")


def test_free_memory_of_a_cpu() -> None:
    free = free_memory(CPU)
    assert free is None or free > 1 << 20
