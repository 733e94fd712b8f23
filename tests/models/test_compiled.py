"""Compiled decoding passes give the tokens of the plain ones; models that they can't serve are refused."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.torch_version import TorchVersion

from medusa_train.errors import BackboneError
from medusa_train.inference.generate import Decoder
from medusa_train.models.compiled import BLOCK, CompiledPass
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.trees.tree import Tree
from tests.families import random_backbone

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile needs a C++ compiler"
)
TREES = (None, Tree.chain(3), Tree.cartesian([3, 2]))


def assert_same_answers(family: str, dtype: torch.dtype) -> None:
    """Plain and tree decoding, with answers that cross the end of a block of the cache."""
    backbone = random_backbone(family, dtype=dtype, max_position_embeddings=2 * BLOCK)
    draft = MedusaDraft.from_backbone(backbone, 3)
    prompt = torch.randint(3, 60, (BLOCK - 20,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = (prompt, prompt[:3])
    plain = [[Decoder(backbone, draft, tree).generate(one, 60).tokens for one in prompts] for tree in TREES]
    backbone.compile_passes()
    for tree, expected in zip(TREES, plain, strict=True):
        decoder = Decoder(backbone, draft, tree)
        made = [decoder.generate(one, 60) for one in prompts]
        assert [one.tokens for one in made] == expected
        assert made[0].steps > 1


@needs_compiler
def test_compiled_passes_give_the_same_tokens() -> None:
    assert_same_answers("llama", torch.float64)


def test_both_programs_are_called_with_few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes the filter out of the options that it is given."""
    given: list[set[str]] = []
    compiling = torch.compile

    def compile_(function: Any, options: dict[str, Any]) -> Any:
        given.append(set(options))
        return compiling(function, options=options)

    monkeypatch.setattr(torch, "compile", compile_)
    backbone = random_backbone("llama")
    CompiledPass(backbone.body, backbone.logits, on_cpu=True)
    assert given == [{"guard_filter_fn", "cpp_wrapper"}] * 2


@needs_compiler
def test_plain_steps_have_a_program_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks before a call being few, a tree's program would take them, and be slower."""
    backbone = random_backbone("llama", max_position_embeddings=2 * BLOCK)
    backbone.compile_passes()
    assert backbone.compiled is not None
    rows = []
    for name in ("_plain", "_tree"):
        program = getattr(backbone.compiled, name)
        monkeypatch.setattr(
            backbone.compiled,
            name,
            lambda *given, p=program, n=name: (rows.append((n, given[0].shape[1])), p(*given))[1],
        )
    draft = MedusaDraft.from_backbone(backbone, 3)
    for tree in TREES:
        Decoder(backbone, draft, tree).generate([5, 6, 7], 12)
    assert set(rows) == {("_plain", 1), ("_tree", 4), ("_tree", 10)}


@needs_compiler
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="older releases leave projections apart")
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float64), ("qwen2", torch.bfloat16)])
def test_projections_that_read_the_same_states_are_one_product(family: str, dtype: torch.dtype) -> None:
    """Queries, keys and values; gate and up: four products in a layer and not seven, and one for the logits."""
    backbone = random_backbone(family, dtype=dtype, max_position_embeddings=2 * BLOCK)
    with torch._inductor.config.patch("cpp.enable_kernel_profile", True):
        backbone.compile_passes()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        steps = Decoder(backbone).generate([5, 6, 7], 4, eos_ids=()).steps
    kernels = [e for e in seen.key_averages() if e.key.startswith("aoti_torch_cpu_")]
    products = sum(e.count for e in kernels if "mm_out" in e.key or "linear" in e.key)
    assert steps == 3
    assert products == 3 * (4 * backbone.num_layers + 1)


@needs_compiler
@pytest.mark.slow
def test_there_are_two_programs_whatever_the_tree_and_the_length() -> None:
    torch.compiler.reset()
    backbone = random_backbone("llama", max_position_embeddings=8 * BLOCK)
    draft = MedusaDraft.from_backbone(backbone, 3)
    backbone.compile_passes()
    made = counters["stats"]["unique_graphs"]
    for length in (3, BLOCK - 10, 3 * BLOCK):
        for tree in TREES:
            decoder = Decoder(backbone, draft, tree)  # with a cache of its own, large or small
            decoder.generate(torch.arange(length).remainder(60).tolist(), 30)
    assert counters["stats"]["unique_graphs"] == made


@needs_compiler
@pytest.mark.slow
def test_the_cache_is_written_in_place() -> None:
    torch.compiler.reset()
    backbone = random_backbone("llama", max_position_embeddings=64 * BLOCK)
    backbone.compile_passes()
    cache = backbone.new_cache(64 * BLOCK)
    decoder = Decoder(backbone, MedusaDraft.from_backbone(backbone, 3), Tree.chain(3), cache)
    decoder.generate([3, 4, 5], 8)  # makes the memory
    layer = cache.reserve(1)[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        decoder.generate([3, 4, 5], 8)
    assert seen.profiler is not None
    found = seen.profiler.kineto_results
    assert found is not None
    sizes = [event.nbytes() for event in found.events() if event.name() == "[memory]"]
    assert 0 < max(sizes) < layer.numel() * layer.element_size()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "granite", "olmo2"])
def test_other_families_too(family: str) -> None:
    assert_same_answers(family, torch.float64)


@pytest.mark.parametrize(("family", "reason"), [("mistral-window", "sliding windows"), ("phi3-longrope", "longrope")])
def test_what_a_compiled_pass_cannot_see_is_refused(family: str, reason: str) -> None:
    with pytest.raises(BackboneError, match=reason):
        random_backbone(family).compile_passes()


def test_a_machine_that_cannot_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def fails(*args: object) -> None:
        raise TorchDynamoException("\nno C++ compiler found\nand a long story")

    backbone = random_backbone("llama")
    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    with pytest.raises(BackboneError, match=r"failed here: no C\+\+ compiler found\n"):
        backbone.compile_passes()
    assert backbone.compiled is None
