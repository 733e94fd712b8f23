"""Compiled decoding passes return the tokens of uncompiled ones; unsupported models are rejected."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.torch_version import TorchVersion

from medusa_train.errors import BackboneError
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import BLOCK, CompiledPass
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.trees.tree import Tree
from tests.families import random_backbone

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile needs a C++ compiler"
)
joins_projections = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.12", reason="older releases of torch do not join projections"
)
TREES = (None, Tree.chain(3), Tree.cartesian([3, 2]))


@dataclass
class Compiled:
    """A compiled backbone, prompts, and their answers before it was compiled, by tree."""

    backbone: Backbone
    draft: MedusaDraft
    prompts: list[list[int]]
    answers: list[list[list[int]]]


def compile_backbone(family: str, dtype: torch.dtype) -> Compiled:
    """Compile a random backbone; its answers cross the end of a block of the cache."""
    backbone = random_backbone(family, dtype=dtype, max_position_embeddings=2 * BLOCK)
    draft = MedusaDraft.from_backbone(backbone, 3)
    prompt = torch.randint(3, 60, (BLOCK - 20,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [prompt, prompt[:3]]
    answers = [[Decoder(backbone, draft, tree).generate(one, 40).tokens for one in prompts] for tree in TREES]
    with torch._inductor.config.patch("cpp.enable_kernel_profile", True):
        backbone.compile_passes()
    return Compiled(backbone, draft, prompts, answers)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    yield compile_backbone("llama", torch.float64)
    torch.compiler.reset()


def check_answers(compiled: Compiled) -> None:
    for tree, expected in zip(TREES, compiled.answers, strict=True):
        decoder = Decoder(compiled.backbone, compiled.draft, tree)
        generations = [decoder.generate(prompt, 40) for prompt in compiled.prompts]
        assert [generation.tokens for generation in generations] == expected
        assert generations[0].steps > 1


def check_products(backbone: Backbone) -> None:
    """Queries, keys and values; gate and up: four products per layer instead of seven, and one for the logits."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps = Decoder(backbone).generate([5, 6, 7], 4, eos_ids=()).steps
    kernels = [event for event in profiled.key_averages() if event.key.startswith("aoti_torch_cpu_")]
    products = sum(event.count for event in kernels if "mm_out" in event.key or "linear" in event.key)
    assert steps == 3
    assert products == 3 * (4 * backbone.num_layers + 1)


@needs_compiler
def test_compiled_passes_give_the_same_tokens(compiled: Compiled) -> None:
    check_answers(compiled)


@needs_compiler
def test_plain_steps_and_trees_have_separate_programs(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few guards, plain steps would use the program for trees, which is slower."""
    compiled_pass = compiled.backbone.compiled
    assert compiled_pass is not None
    calls = set()
    for name in ("_plain", "_tree"):
        program = getattr(compiled_pass, name)
        monkeypatch.setattr(
            compiled_pass, name, lambda *args, p=program, n=name: (calls.add((n, args[0].shape[1])), p(*args))[1]
        )
    for tree in TREES:
        Decoder(compiled.backbone, compiled.draft, tree).generate([5, 6, 7], 12)
    assert calls == {("_plain", 1), ("_tree", 4), ("_tree", 10)}


@needs_compiler
@joins_projections
def test_projections_with_the_same_input_are_one_product(compiled: Compiled) -> None:
    check_products(compiled.backbone)


@needs_compiler
@joins_projections
@pytest.mark.slow
def test_projections_with_the_same_input_are_one_product_in_bfloat16() -> None:
    check_products(compile_backbone("qwen2", torch.bfloat16).backbone)


def test_both_programs_have_few_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile removes the filter from the options that it is given."""
    options_seen: list[set[str]] = []
    compile_ = torch.compile

    def recording(function: Any, options: dict[str, Any]) -> Any:
        options_seen.append(set(options))
        return compile_(function, options=options)

    monkeypatch.setattr(torch, "compile", recording)
    backbone = random_backbone("llama")
    CompiledPass(backbone.body, backbone.logits, on_cpu=True)
    assert options_seen == [{"guard_filter_fn", "cpp_wrapper"}] * 2


@needs_compiler
@pytest.mark.slow
def test_there_are_two_programs_for_all_trees_and_lengths() -> None:
    torch.compiler.reset()
    backbone = random_backbone("llama", max_position_embeddings=8 * BLOCK)
    draft = MedusaDraft.from_backbone(backbone, 3)
    backbone.compile_passes()
    graphs = counters["stats"]["unique_graphs"]
    for length in (3, BLOCK - 10, 3 * BLOCK):
        for tree in TREES:
            decoder = Decoder(backbone, draft, tree)  # each with its own cache, large or small
            decoder.generate(torch.arange(length).remainder(60).tolist(), 30)
    assert counters["stats"]["unique_graphs"] == graphs


@needs_compiler
@pytest.mark.slow
def test_the_cache_is_written_in_place() -> None:
    torch.compiler.reset()
    backbone = random_backbone("llama", max_position_embeddings=64 * BLOCK)
    backbone.compile_passes()
    cache = backbone.new_cache(64 * BLOCK)
    decoder = Decoder(backbone, MedusaDraft.from_backbone(backbone, 3), Tree.chain(3), cache)
    decoder.generate([3, 4, 5], 8)  # allocates the cache
    layer = cache.reserve(1)[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        decoder.generate([3, 4, 5], 8)
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    assert 0 < max(sizes) < layer.numel() * layer.element_size()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "granite", "olmo2"])
def test_other_families_give_the_same_tokens(family: str) -> None:
    check_answers(compile_backbone(family, torch.float64))


@pytest.mark.parametrize(
    ("family", "reason"), [("mistral-window", "sliding windows"), ("phi3-longrope", "uses longrope")]
)
def test_unsupported_models_are_rejected(family: str, reason: str) -> None:
    with pytest.raises(BackboneError, match=reason):
        random_backbone(family).compile_passes()


def test_a_machine_that_cannot_compile_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def fail(*args: object) -> None:
        raise TorchDynamoException("\nno C++ compiler found\nand a long story")

    backbone = random_backbone("llama")
    monkeypatch.setattr(torch, "compile", lambda function, **options: fail)
    with pytest.raises(BackboneError, match=r"torch\.compile failed: no C\+\+ compiler found\n"):
        backbone.compile_passes()
    assert backbone.compiled is None
