import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from medusa_train.api import load
from medusa_train.checkpoint import load_model as module
from medusa_train.checkpoint.load_model import (
    compile_cache_dir,
    compile_or_report,
    compile_target_model,
    load_for_decoding,
    load_trained_target_model,
    load_tree,
)
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.config.draft_sections import LookupChoice
from medusa_train.errors import CheckpointError, TargetModelError
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.models import compiled as compiled_module
from medusa_train.models.drafts.base import TreeSize
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.checkpoint.others import fake_run
from tests.evaluation.tiny_model import write_run
from tests.families import random_target_model


def test_heads_over_four_bits_are_loaded_over_four_bits(run_dir: Path) -> None:
    pytest.importorskip("bitsandbytes")
    subject = load_for_decoding(
        replace(resolve_model(str(run_dir), None, None), quantization="nf4"), "float32"
    )
    assert subject.target_model.model.is_quantized
    assert subject.draft is not None
    assert subject.draft.max_depth == 3


def test_auto_counts_the_bytes_of_the_weights_that_are_decoded_with(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merging an adapter dequantizes them."""
    counted: list[object] = []
    monkeypatch.setattr(
        module,
        "auto_dtype_that_fits",
        lambda name, report, *, quantization, **_: counted.append(quantization) or "float32",
    )
    paths = replace(resolve_model(str(run_dir), None, None), quantization="nf4")
    for adapter in (None, run_dir / "adapter"):
        assert module.auto_dtype_of(replace(paths, adapter=adapter), print) == "float32"
    assert counted == ["nf4", None]


def test_the_tree_is_the_run_s_else_a_chain_and_no_deeper_than_the_heads(tmp_path: Path) -> None:
    paths = resolve_model(str(fake_run(tmp_path / "without", tree=False)), None, None)
    assert load_tree(paths, max_depth=4) == Tree.chain(4)
    paths = resolve_model(str(fake_run(tmp_path / "run")), None, None)
    assert load_tree(paths, max_depth=2) == Tree.chain(2)
    with pytest.raises(CheckpointError, match="2 deep, but there are only 1 heads"):
        load_tree(paths, max_depth=1)


def test_loads_target_model_heads_and_tree(run_dir: Path) -> None:
    subject = load_for_decoding(resolve_model(str(run_dir), None, None), "bfloat16")
    assert subject.draft is not None
    assert subject.draft.max_depth == 3
    assert subject.tree == Tree.cartesian([2, 2])
    assert str(subject.target_model.dtype) == "torch.bfloat16"


def test_compiled_programs_lie_in_the_users_cache_or_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are loaded and run, so never in a run, which may be somebody else's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    expected = tmp_path / "cache" / "medusa-train" / "compiled"
    assert compile_cache_dir() == expected
    cache_dir()  # torch names its own default in the environment as soon as it is asked
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    assert compile_cache_dir() == expected
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert compile_cache_dir() == tmp_path / "elsewhere"


def test_a_planted_cache_of_a_run_is_not_read_and_two_models_use_one_cache(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    used: list[str] = []

    class Compiles:
        def compile_passes(self, rows: int, *, trees: bool) -> None:
            used.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    (run_dir / "compiled").mkdir()
    for _ in range(2):
        compile_target_model(Compiles())  # type: ignore[arg-type]
    assert used == [str(tmp_path / "cache" / "medusa-train" / "compiled")] * 2
    assert not any((run_dir / "compiled").iterdir())


def test_a_cache_that_cannot_be_created_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(TargetModelError, match="set TORCHINDUCTOR_CACHE_DIR"):
        compile_target_model(object())  # type: ignore[arg-type]


def test_the_tree_that_every_step_verifies_is_compiled(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_model = Path(resolve_model(str(run_dir), None, None).target_model)
    compiled: list[int] = []
    lines: list[str] = []
    monkeypatch.setattr(TargetModel, "compile_tree", lambda self, nodes: compiled.append(nodes))
    # in place of programs
    monkeypatch.setattr(TargetModel, "can_compile_tree", lambda self, nodes: True)

    def load_and_compile(paths: ModelPaths) -> list[int]:
        compiled.clear()
        model = load_for_decoding(paths, "float32")
        model.compile_tree(lines.append)
        assert model.can_compile_tree == bool(compiled)
        return list(compiled)

    medusa = resolve_model(str(run_dir), None, None)
    assert load_and_compile(medusa) == [Tree.cartesian([2, 2]).size]
    assert load_and_compile(replace(medusa, threshold=0.3)) == []  # stops early
    assert load_and_compile(resolve_model(str(run_dir), None, "none")) == []
    eagle3 = str(write_run(tmp_path / "eagle3", target_model, draft="eagle3"))
    assert len(load_and_compile(resolve_model(eagle3, None, None))) == 1
    assert load_and_compile(resolve_model(eagle3, None, "dynamic")) == []  # many sizes
    copied = LookupChoice.from_keys("prompt_lookup", None)
    assert len(load_and_compile(replace(medusa, lookup=copied))) == 1  # where nothing is added
    window = LookupChoice.from_keys("lookahead", None)
    assert load_and_compile(replace(medusa, lookup=window)) == []  # is added to every tree
    assert not lines


def test_a_tree_that_cannot_be_compiled_is_reported(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TargetModel, nodes: int) -> None:
        raise TargetModelError("compile: no room")

    model = load_for_decoding(resolve_model(str(run_dir), None, None), "float32")
    assert not model.can_compile_tree  # no pass is compiled
    lines: list[str] = []
    model.compile_tree(lines.append)
    assert not lines
    monkeypatch.setattr(TargetModel, "compile_tree", fail)
    model.compile_tree(lines.append)
    assert lines == ["compile: no room\ndecoding with the program for trees of any size"]


def test_dynamic_trees_take_the_place_of_the_fixed_one(run_dir: Path, tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", Path(resolve_model(str(run_dir), None, None).target_model), draft="eagle3"
    )
    for tree, size in (("dynamic", TreeSize(6, 2)), ("dynamic:9x3", TreeSize(9, 3))):
        loaded = load_for_decoding(resolve_model(str(run), None, tree), "float32")
        assert isinstance(loaded.proposer, Eagle3Draft)
        assert isinstance(loaded.draft, Eagle3Draft)
        assert (loaded.proposer.dynamic, loaded.draft.dynamic, loaded.fixed_proposer) == (
            size,
            None,
            loaded.draft,
        )
    prompts = ("Say ay.", "Say oh.")
    fixed, chosen = load(run, dtype="float32"), load(run, tree="dynamic", dtype="float32")
    assert [chosen.generate(p, 24, raw=True) for p in prompts] == [
        fixed.generate(p, 24, raw=True) for p in prompts
    ]


def test_the_target_model_is_loaded_as_the_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load(name: str, **options: object) -> SimpleNamespace:
        keys = ("dtype", "quantization", "trust_remote_code", "special_tokens")
        asked.append((name, *(options[key] for key in keys)))
        return SimpleNamespace(end_answers_by=lambda *template: asked.append(template))

    monkeypatch.setattr("medusa_train.checkpoint.load_model.load_target_model", load)
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
    load_trained_target_model(over_4bit, "bfloat16")
    assert asked == [
        ("m", "bfloat16", "nf4", True, {"eos_token": "<end>"}),
        ("chatml", {"thinking": False}),
    ]


def test_cuda_graphs_need_no_compilation(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = object()
    monkeypatch.setattr(
        "medusa_train.inference.cuda_graphs.graph_runner", lambda device, model: runner
    )
    target_model = load_for_decoding(
        resolve_model(str(run_dir), None, None), "float32"
    ).target_model
    assert target_model.step_runner is runner
    settings = DecodingSettings.of(target_model)
    assert (settings.compiled, settings.graphs) == (False, True)


def test_a_compiler_that_fails_does_not_end_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target_model: TargetModel, **shape: int) -> None:
        raise TargetModelError("compile: torch.compile failed: no room")

    monkeypatch.setattr(module, "compile_target_model", fail)
    lines: list[str] = []
    compile_or_report(random_target_model("llama"), lines.append)
    assert lines == ["compile: torch.compile failed: no room\ndecoding without compiled passes"]


def test_whether_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.cpp_builder import cpp_compiler_search

    cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert not compiled_module.has_compiler(torch.device("cpu"))
    cpp_compiler_search.cache_clear()
