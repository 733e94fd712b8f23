"""Compiled decoding passes return the tokens of uncompiled ones; unsupported models are rejected."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.torch_version import TorchVersion

from medusa_train.errors import TargetModelError
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.models import prepack
from medusa_train.models.compiled import BLOCK, CompiledPass, Form, needed_forms
from medusa_train.models.drafts.base import TreeSize
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.drafts.lookahead import LookaheadDraft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.families import random_target_model

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler",
)
JOINS_PROJECTIONS = TorchVersion(torch.__version__) >= "2.12"
TREES = (None, Tree.chain(3), Tree.cartesian([3, 2]))


@dataclass
class Compiled:
    """A compiled target model, prompts, and their answers before it was compiled, by tree."""

    target_model: TargetModel
    draft: MedusaDraft
    prompts: list[list[int]]
    answers: list[list[list[int]]]


def compile_target_model(family: str, dtype: torch.dtype, positions: int = 256) -> Compiled:
    """Compile a random target model; its answers cross the end of a block of the cache."""
    target_model = random_target_model(family, dtype=dtype, max_position_embeddings=positions)
    draft = MedusaDraft.from_target_model(target_model, 3)
    prompt = torch.randint(3, 60, (108,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [prompt, prompt[:3]]
    answers = [
        [Decoder(target_model, draft, tree).generate(one, 40).tokens for one in prompts]
        for tree in TREES
    ]
    with torch._inductor.config.patch("cpp.enable_kernel_profile", True):
        target_model.compile_passes()
    return Compiled(target_model, draft, prompts, answers)


@pytest.fixture(scope="module")
def traced() -> Iterator[Compiled]:
    """A target model whose passes torch.compile traces and then runs as they are, in seconds and
    without a C++ compiler.
    """
    compile_ = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "compile", lambda function, options: compile_(function, backend="eager")
        )
        target_model = compile_target_model("llama", torch.float64)
    yield target_model  # not inside the patch, which would hold for the compiled one too
    torch.compiler.reset()


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    """A target model whose passes are compiled once, for the tests of the group of this name."""
    torch.compiler.reset()
    counters.clear()
    yield compile_target_model("llama", torch.float64, positions=64 * BLOCK)
    torch.compiler.reset()


def check_answers(compiled: Compiled) -> None:
    for tree, expected in zip(TREES, compiled.answers, strict=True):
        decoder = Decoder(compiled.target_model, compiled.draft, tree)
        generations = [decoder.generate(prompt, 40) for prompt in compiled.prompts]
        assert [generation.tokens for generation in generations] == expected
        assert generations[0].steps > 1
    # has branch tokens
    lookahead = Decoder(compiled.target_model, LookaheadDraft(window=3, ngram=3, guesses=2))
    assert [
        lookahead.generate(prompt, 40).tokens for prompt in compiled.prompts
    ] == compiled.answers[0]


def check_products(target_model: TargetModel) -> None:
    """Queries, keys and values; gate and up: four products per layer instead of seven, and one for
    the logits.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps = Decoder(target_model).generate([5, 6, 7], 4, eos_ids=()).steps
    kernels = [
        event for event in profiled.key_averages() if event.key.startswith("aoti_torch_cpu_")
    ]
    products = sum(
        event.count for event in kernels if "mm_out" in event.key or "linear" in event.key
    )
    assert steps == 3
    assert products == 3 * (4 * target_model.num_layers + 1)


@pytest.mark.xdist_group("traced")
def test_traced_passes_give_the_same_tokens(traced: Compiled) -> None:
    check_answers(traced)


@pytest.mark.xdist_group("traced")
def test_plain_steps_and_trees_have_separate_programs(
    traced: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few guards, plain steps would use the program for trees, which is slower."""
    compiled_pass = traced.target_model.compiled
    assert compiled_pass is not None
    calls = set()
    for form, program in compiled_pass._programs.items():
        monkeypatch.setitem(
            compiled_pass._programs,
            form,
            lambda *args, p=program, f=form: (calls.add((f, args[0].shape[1])), p(*args))[1],
        )
    for tree in TREES:
        Decoder(traced.target_model, traced.draft, tree).generate([5, 6, 7], 12)
    assert calls == {(Form(False, 1), 1), (Form(False, None), 4), (Form(False, None), 10)}


def check_tree_of_one_size(compiled: Compiled) -> None:
    """The tree that is named has a program of its size, the other tree the one for all sizes."""
    chain = TREES[1]
    assert chain is not None
    compiled.target_model.compile_tree(chain.size)
    passes = compiled.target_model.compiled
    assert passes is not None
    assert set(passes._programs) == {Form(False, 1), Form(False, None), Form(False, 4)}
    check_answers(compiled)
    used = Mock(wraps=passes._programs[Form(False, 4)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(passes._programs, Form(False, 4), used)
        for tree in TREES:
            Decoder(compiled.target_model, compiled.draft, tree).generate([5, 6, 7], 12)
    assert {call.args[0].shape[1] for call in used.call_args_list} == {4}


@pytest.mark.xdist_group("traced")
def test_traced_passes_over_the_named_tree_give_the_same_tokens(
    traced: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test that uses the target model, since the program of a tree stays."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, options: compile_(function, backend="eager")
    )
    check_tree_of_one_size(traced)


@pytest.mark.xdist_group("compiled")
@needs_compiler
@pytest.mark.slow
def test_compiled_passes_give_the_same_tokens(compiled: Compiled) -> None:
    check_answers(compiled)
    if JOINS_PROJECTIONS:
        check_products(compiled.target_model)


@pytest.mark.xdist_group("compiled")
@needs_compiler
@pytest.mark.slow
def test_there_are_two_programs_for_all_trees_and_lengths(compiled: Compiled) -> None:
    assert counters["stats"]["unique_graphs"] == 2
    for length in (3, BLOCK - 10, 118, 384):
        for tree in TREES:
            # each with its own cache, large or small
            decoder = Decoder(compiled.target_model, compiled.draft, tree)
            decoder.generate(torch.arange(length).remainder(60).tolist(), 30)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.xdist_group("compiled")
@needs_compiler
@pytest.mark.slow
def test_the_cache_is_written_in_place(compiled: Compiled) -> None:
    cache = compiled.target_model.new_kv_cache(64 * BLOCK)
    decoder = Decoder(compiled.target_model, compiled.draft, Tree.chain(3), cache)
    decoder.generate([3, 4, 5], 8)  # allocates the cache
    layer = cache.storage(1)[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        decoder.generate([3, 4, 5], 8)
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    assert 0 < max(sizes) < layer.numel() * layer.element_size()


@pytest.mark.xdist_group("compiled")
@needs_compiler
@pytest.mark.slow
def test_compiled_passes_over_the_named_tree_give_the_same_tokens(compiled: Compiled) -> None:
    """The last test of the group, since the program of a tree stays."""
    check_tree_of_one_size(compiled)
    # one program of each form for all lengths of the text
    assert counters["stats"]["unique_graphs"] == 3


def test_a_tree_has_no_program_where_single_rows_are_not_compiled() -> None:
    target_model = random_target_model("llama")
    target_model.compile_tree(3)
    assert target_model.compiled is None
    target_model.compiled = CompiledPass(
        target_model.body, target_model.logits, on_cpu=True, forms=needed_forms(4, trees=True)
    )
    target_model.compile_tree(3)
    assert set(target_model.compiled._programs) == {Form(True, 1), Form(True, None)}


@pytest.fixture
def warm_ups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Nothing is compiled: the inputs that programs would be compiled with."""
    inputs: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, options: lambda *given: inputs.append(given)
    )
    return inputs


def test_trees_of_all_sizes_are_compiled_with_sizes_that_differ(
    warm_ups: list[tuple[Any, ...]],
) -> None:
    target_model = random_target_model("llama", max_position_embeddings=256)
    target_model.compile_passes()
    for nodes in (1, BLOCK - 2, BLOCK - 1, 2 * BLOCK - 1, 2 * BLOCK, 100):
        target_model.compile_tree(nodes)
        tokens, positions, mask, columns, storage = warm_ups[-1]
        count, read, capacity = nodes + 1, mask.shape[3], storage[0].shape[3]
        assert tokens.shape == positions.shape == (1, count)
        assert count <= columns.max() < read < capacity
        assert len({count, read, mask.stride(2), capacity}) == 4


def test_a_tree_is_compiled_once(warm_ups: list[tuple[Any, ...]]) -> None:
    target_model = random_target_model("llama")
    target_model.compile_passes()
    target_model.compile_tree(3)
    assert target_model.compiled is not None
    programs = dict(target_model.compiled._programs)
    target_model.compile_tree(3)
    assert target_model.compiled._programs == programs
    assert len(warm_ups) == 3


def test_the_program_for_all_sizes_takes_the_place_of_one_that_fails(
    warm_ups: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def fail(*given: object) -> None:
        raise TorchDynamoException("no room")

    target_model = random_target_model("llama")
    target_model.compile_passes()
    monkeypatch.setattr(torch, "compile", lambda function, options: fail)
    with pytest.raises(TargetModelError, match=r"torch\.compile failed: no room"):
        target_model.compile_tree(3)
    passes = target_model.compiled
    assert passes is not None
    tokens = torch.zeros(1, 4, dtype=torch.long)
    _, _, mask, columns, storage = warm_ups[-1]
    passes(tokens, tokens, mask, columns, torch.stack(storage))
    assert warm_ups[-1][0] is tokens


def test_a_tree_has_no_program_where_memory_is_short(
    warm_ups: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target_model = random_target_model("llama")
    target_model.compile_passes()
    weights = sum(one.numel() * one.element_size() for one in target_model.model.parameters())
    monkeypatch.setattr(prepack, "free_memory", lambda device: 2 * weights)
    with pytest.raises(TargetModelError, match="too little memory is free"):
        target_model.compile_tree(3)
    assert len(warm_ups) == 2
    monkeypatch.setattr(prepack, "free_memory", lambda device: 3 * weights)
    target_model.compile_tree(3)
    assert len(warm_ups) == 3


def check_batches(target_model: TargetModel) -> None:
    """Batches of several sizes, whose rows end at different times, past the end of a block."""
    draft = MedusaDraft.from_target_model(target_model, 3)
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, 60, (n,), generator=generator).tolist() for n in (3, 108, 40, 7, 90, 5)
    ]
    free = [Decoder(target_model).generate(prompt, 30, ()).tokens for prompt in prompts]
    eos = [free[0][4], free[3][11]]
    alone = [Decoder(target_model).generate(prompt, 30, eos).tokens for prompt in prompts]
    assert len({len(answer) for answer in alone}) > 2
    assert target_model.compiled is not None
    assert not target_model.compiled.covers(1, 1)
    for tree in TREES:
        for count in (6, 2):
            batch = BatchDecoder(target_model, draft, tree).generate_batch(prompts[:count], 30, eos)
            assert [out.tokens for out in batch] == alone[:count]
    batch = BatchDecoder(target_model, LookaheadDraft(window=3, ngram=3, guesses=2)).generate_batch(
        prompts, 30, eos
    )
    assert [out.tokens for out in batch] == alone


@pytest.mark.xdist_group("traced")
def test_traced_passes_of_batches_give_the_tokens_of_single_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, options: compile_(function, backend="eager")
    )
    target_model = random_target_model("llama", max_position_embeddings=384)
    target_model.compile_passes(rows=6)
    graphs = counters["stats"]["unique_graphs"]
    check_batches(target_model)
    assert counters["stats"]["unique_graphs"] == graphs
    torch.compiler.reset()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_batches_give_the_tokens_of_single_rows(family: str) -> None:
    torch.compiler.reset()
    target_model = random_target_model(family, max_position_embeddings=384)
    target_model.compile_passes(rows=6)
    graphs = counters["stats"]["unique_graphs"]
    check_batches(target_model)
    assert counters["stats"]["unique_graphs"] == graphs


@needs_compiler
@pytest.mark.skipif(not JOINS_PROJECTIONS, reason="older releases of torch do not join projections")
@pytest.mark.slow
def test_projections_with_the_same_input_are_one_product_in_bfloat16() -> None:
    torch.compiler.reset()
    check_products(compile_target_model("qwen2", torch.bfloat16).target_model)


def test_both_programs_have_few_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile removes the filter from the options that it is given."""
    options_seen: list[set[str]] = []
    compile_ = torch.compile

    def recording(function: Any, options: dict[str, Any]) -> Any:
        options_seen.append(set(options))
        return compile_(function, options=options)

    monkeypatch.setattr(torch, "compile", recording)
    target_model = random_target_model("llama")
    CompiledPass(target_model.body, target_model.logits, on_cpu=True)
    assert options_seen == [{"guard_filter_fn", "cpp_wrapper"}] * 2


def check_early_states(kind: type[Eagle3Draft] | type[KangarooDraft]) -> None:
    """A draft that reads early states, or ran the layers itself, accepts the same guesses with
    compiled passes.
    """
    target_model = random_target_model("llama", max_position_embeddings=256)
    draft = kind.from_target_model(
        target_model,
        num_heads=3,
        **({} if kind is Eagle3Draft else {"exit_layer": 1, "threshold": 0.3}),
    )
    prompts, tree = [list(range(3, 30)), [7, 8]], Tree.cartesian([3, 2])
    drafts = (
        [draft, draft.with_dynamic_trees(TreeSize(9, 3))]
        if isinstance(draft, Eagle3Draft)
        else [draft]
    )
    decoders = [Decoder(target_model, one, tree) for one in drafts]
    before = [decoder.generate(prompt, 40, ()) for decoder in decoders for prompt in prompts]
    assert any(any(out.accepted) for out in before)
    target_model.decoding_aux_layers = draft.aux_layers
    target_model.compile_passes()
    passes = target_model.compiled
    assert passes is not None
    compiled = Mock(wraps=passes)
    target_model.compiled = compiled
    decoders = [Decoder(target_model, one, tree) for one in drafts]
    after = [decoder.generate(prompt, 40, ()) for decoder in decoders for prompt in prompts]
    assert [(out.tokens, out.accepted) for out in after] == [
        (out.tokens, out.accepted) for out in before
    ]
    assert compiled.call_count == sum(out.steps for out in after)


AUX_DRAFTS = pytest.mark.parametrize("kind", [Eagle3Draft, KangarooDraft])


@AUX_DRAFTS
@pytest.mark.xdist_group("traced")
def test_traced_passes_return_early_states(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile

    def trace(function: Any, options: dict[str, Any]) -> Any:
        # no others that see hooks come and go
        few_guards = {"guard_filter_fn": options["guard_filter_fn"]}
        return compile_(function, backend="eager", options=few_guards)

    monkeypatch.setattr(torch, "compile", trace)
    check_early_states(kind)
    torch.compiler.reset()


@AUX_DRAFTS
@needs_compiler
@pytest.mark.slow
def test_compiled_passes_return_early_states(kind: Any) -> None:
    torch.compiler.reset()
    check_early_states(kind)


@pytest.mark.parametrize(
    ("family", "reason"), [("mistral-window", "sliding"), ("phi3-longrope", "uses longrope")]
)
def test_unsupported_models_are_rejected(family: str, reason: str) -> None:
    with pytest.raises(TargetModelError, match=reason):
        random_target_model(family).compile_passes()


def test_a_machine_that_cannot_compile_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def fail(*args: object) -> None:
        raise TorchDynamoException("\nno C++ compiler found\nand a long story")

    target_model = random_target_model("llama")
    monkeypatch.setattr(torch, "compile", lambda function, **options: fail)
    with pytest.raises(TargetModelError, match=r"torch\.compile failed: no C\+\+ compiler found\n"):
        target_model.compile_passes()
    assert target_model.compiled is None
