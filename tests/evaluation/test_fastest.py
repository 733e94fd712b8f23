from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from medusa_train.checkpoint.subject import SubjectPaths, load_backbone, locate
from medusa_train.errors import BackboneError
from medusa_train.evaluation import fastest
from medusa_train.evaluation.fastest import fastest_dtype
from medusa_train.evaluation.memory import Weights
from medusa_train.models.backbone import Backbone


def prompt_of(backbone: Backbone) -> list[int]:
    return [1, 50, 60]


@pytest.fixture
def paths(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> SubjectPaths:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return locate(str(run_dir), None, None)


def failing(for_dtypes: set[str], error: Exception, loaded: list[str]) -> Callable[[SubjectPaths, str], Backbone]:
    def load(paths: SubjectPaths, dtype: str) -> Backbone:
        loaded.append(dtype)
        if dtype in for_dtypes:
            raise error
        return load_backbone(paths, dtype)

    return load


def test_the_dtype_is_chosen_among_measured_ones_and_said(run_dir: Path) -> None:
    said: list[str] = []
    chosen = fastest_dtype(locate(str(run_dir), None, None), prompt_of, said.append)
    assert chosen in ("float32", "bfloat16", "float16")
    assert said[0].startswith(f"dtype: {chosen}, the fastest")
    assert "float32" in said[0]
    assert "bfloat16" in said[0]


def test_a_dtype_without_enough_memory_is_left_out_and_named(
    paths: SubjectPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = failing({"float32"}, torch.OutOfMemoryError("CUDA out of memory."), loaded)
    monkeypatch.setattr(fastest, "load_backbone", load)
    said: list[str] = []
    assert fastest_dtype(paths, prompt_of, said.append) == "bfloat16"
    assert loaded == ["float32", "bfloat16"]
    assert said[0] == "dtype float32: not enough memory; left out"
    assert said[1].startswith("dtype: bfloat16")
    assert "float32" not in said[1]


def test_no_memory_at_all_is_told_and_other_failures_are_not_swallowed(
    paths: SubjectPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastest, "load_backbone", failing({"float32", "bfloat16"}, MemoryError(), []))
    with pytest.raises(BackboneError, match="not enough memory for it here in any dtype"):
        fastest_dtype(paths, prompt_of, lambda line: None)
    monkeypatch.setattr(fastest, "load_backbone", failing({"bfloat16"}, RuntimeError("a bug"), []))
    with pytest.raises(RuntimeError, match="a bug"):
        fastest_dtype(paths, prompt_of, lambda line: None)


def test_the_checkpoints_own_dtype_comes_first_and_what_cannot_fit_is_not_loaded(
    paths: SubjectPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    stored = LlamaConfig(dtype="bfloat16")
    monkeypatch.setattr(fastest, "resolve_backbone", lambda name, trust_remote_code: (name, stored))
    monkeypatch.setattr(fastest, "load_backbone", failing(set(), MemoryError(), loaded))
    monkeypatch.setattr(Weights, "fit", lambda self, dtype: dtype != "float32")
    said: list[str] = []
    assert fastest_dtype(paths, prompt_of, said.append) == "bfloat16"
    assert loaded == ["bfloat16"]
    assert "dtype float32: the weights alone would not fit" in said[0]


def test_the_backbone_is_loaded_as_the_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load(name: str, *, dtype: str, quantization: object, trust_remote_code: bool) -> SimpleNamespace:
        asked.append((name, dtype, quantization, trust_remote_code))
        return SimpleNamespace()

    monkeypatch.setattr(Backbone, "load", load)
    over_4bit = SubjectPaths(Path("run"), "m", None, None, None, quantization="nf4", trust_remote_code=True)
    load_backbone(over_4bit, "bfloat16")
    folded = SubjectPaths(Path("run"), "m", None, None, None, adapter=Path("run/adapter"), quantization="nf4")
    load_backbone(folded, "float32")
    assert asked == [("m", "bfloat16", "nf4", True), ("m", "float32", None, False)]
