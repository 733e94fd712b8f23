"""Decoding steps against their floor: arithmetic by hand, passes that leave the cache unchanged, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import decode
import decode_steps
import pytest
import torch
from decode import Setup, Timed, likely_tree
from decode_steps import Context, StaticContext, how_steps_run
from shapes import (
    SHAPES,
    Rates,
    Sizes,
    llama_config,
    quantize_nf4,
    random_model,
)

from medusa_train.inference.accept import accept
from medusa_train.models import prepack
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import BLOCK
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.graphs import StepRunner
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import write_backbone
from tests.inference.tape import TapeRunner

CPU = torch.device("cpu")
SMALL = llama_config(32, 48, 2, 4, 2, 61)
RATES = Rates(1e9, {"float32": 1e10, "bfloat16": 4e10})
SETUP = Setup("tiny", 128, "float32", "stock")


def small_backbone() -> Backbone:
    return Backbone(random_model(SMALL, torch.float32, CPU), None, "small")


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return small_backbone()


@pytest.fixture(scope="module")
def draft(backbone: Backbone) -> MedusaDraft:
    return MedusaDraft.from_backbone(backbone, 3)


@pytest.fixture
def as_if_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch.compile by the identity, which takes no time."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def test_sizes_are_those_of_the_model(backbone: Backbone, draft: MedusaDraft) -> None:
    sizes = Sizes.of(SMALL)
    weights = sum(parameter.numel() for parameter in backbone.model.parameters())
    assert (sizes.read, sizes.total) == (weights - 61 * 32, weights)
    assert sizes.head_weights(3) == sum(parameter.numel() for parameter in draft.parameters())
    context = Context(backbone, 10, 4)
    assert context.cache._storage is not None
    assert sizes.cached(15, 1) == context.cache._storage.numel()
    billions = {name: Sizes.of(llama_config(*shape)).total / 1e9 for name, shape in SHAPES.items()}
    assert billions == pytest.approx({"160M": 0.162, "1B": 1.100, "7B": 6.738, "13B": 13.016}, abs=0.001)


def test_the_floor_by_hand() -> None:
    sizes = Sizes(layers=2, hidden=3, vocab=5, body=100, norms=15, queries=4, keys=2)
    assert sizes.read == 100 + 15 + 15
    assert sizes.cached(10, 4) == 2 * 2 * 2 * 10 * 4
    # 7 nodes with the root in 4 rows: 2 for every weight of a matrix, and 17 keys and values in each of 2 layers
    assert sizes.step_operations(nodes=7, context=10, batch=4) == 4 * 7 * (2 * (100 + 15) + 2 * 2 * 2 * 4 * 17)
    assert sizes.head_weights(5) == 5 * (9 + 3 + 15)
    assert sizes.head_operations(5, batch=2) == 2 * 2 * 5 * (9 + 15)
    rates = Rates(bandwidth=100.0, matrix={"float32": 1000.0})
    assert (rates.floor(50, 400, "float32"), rates.floor(50, 800, "float32")) == (0.5, 0.8)


@pytest.mark.parametrize("steps", ["passes", "static buffers", "CUDA graphs"])
def test_floors_of_loops_hold_pass_and_heads(steps: str) -> None:
    backbone = small_backbone()
    backbone.step_runner = {"passes": None, "static buffers": StepRunner(), "CUDA graphs": TapeRunner()}[steps]
    shape, setup = decode.Shape("small", None, SMALL, Sizes.of(SMALL)), replace(SETUP, context=20)
    heads = MedusaDraft.from_backbone(backbone, 5)
    rates = Rates(1.0, {"float32": 1e30})  # floors are bytes
    floors = {}
    for case in decode.timed_calls(decode.Loaded(backbone, heads), shape, setup, [16], rates):
        case.prepare()
        case.call()
        floors[case.name] = case.floor
        assert case.how() == steps
    assert list(floors) == ["plain", "tree 16", "heads", "loop, plain", "loop, tree 16"]
    assert floors["loop, plain"] == floors["plain"] == 4 * (shape.sizes.read + shape.sizes.cached(20, 1))
    assert floors["loop, tree 16"] == floors["tree 16"] + floors["heads"]


@pytest.mark.parametrize("nodes", [1, 16, 128])
def test_trees_have_as_many_nodes_as_asked_for(nodes: int) -> None:
    tree = likely_tree(nodes)
    assert tree.size == nodes
    assert tree.max_depth == 5 or nodes < 16
    with pytest.raises(ValueError, match="fewer than 4 nodes"):
        likely_tree(4, 1, 3)


def test_a_pass_leaves_the_context_as_it_was(backbone: Backbone) -> None:
    context = Context(backbone, 20, 8)
    assert context.cache._storage is not None
    before = context.cache._storage[:, :, :, :, :20].clone()
    for tree in (Tree.empty(), likely_tree(8, 3)):
        step = context.step(tree)
        step()
        step()
    assert context.cache.length == 20
    assert torch.equal(context.cache._storage[:, :, :, :, :20], before)


def test_a_pass_computes_what_the_backbone_does_along_a_path(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last node of a chain attends to all before it, as without a mask."""
    context = Context(backbone, 20, 8)
    seen: list[torch.Tensor] = []
    plain = backbone.logits
    monkeypatch.setattr(backbone, "logits", lambda hidden: seen.append(hidden) or plain(hidden))  # type: ignore[func-returns-value]
    context.step(Tree.chain(3))()
    with torch.inference_mode():
        expected = backbone.run(torch.arange(4)[None], cache=context.cache).hidden
    assert torch.allclose(seen[0], expected, atol=1e-5)


@pytest.mark.parametrize("runner", [StepRunner(), TapeRunner()], ids=["run", "replayed"])
def test_static_steps_compute_what_passes_do(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same keys and values, and again after they have run: they leave the context as it was."""
    backbone = small_backbone()
    passes, static = Context(backbone, 20, 8), StaticContext(backbone, runner, 20, 8)
    assert passes.cache._storage is not None
    with torch.inference_mode():
        static.cache.storage(20)[..., :20, :] = passes.cache._storage[..., :20, :]
    before = static.cache.storage(20)[..., :20, :].clone()
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(decode_steps, "accept", lambda *given: seen.append(given[2]) or accept(*given))  # type: ignore[func-returns-value]
    for tree in (Tree.empty(), likely_tree(8, 3), Tree.chain(2)):
        passes.step(tree)()
        step = static.step(tree)
        for _ in range(3):
            step.prepare()
            step()
            # a pass begins with token 0 and guesses 1, 2, ...
            assert torch.allclose(step.steps._logits, seen[-1], atol=1e-5)
        assert torch.equal(static.cache.storage(20)[..., :20, :], before)


def test_a_failed_capture_is_no_graph() -> None:
    backbone = small_backbone()
    runner = backbone.step_runner = TapeRunner()
    assert how_steps_run(backbone) == "CUDA graphs"
    runner.works = False
    assert how_steps_run(backbone) == "static buffers"


@pytest.mark.usefixtures("as_if_compiled")
def test_a_compiled_pass_computes_what_the_plain_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    own = small_backbone()
    trees = (Tree.empty(), likely_tree(8, 3), Tree.chain(2))
    plain = Context(own, 123, 8)
    plain_steps = [plain.step(tree) for tree in trees]
    own.compile_passes()
    compiled = Context(own, 123, 8)
    assert (plain.cache.capacity, compiled.cache.capacity) == (132, 5 * BLOCK + 1)
    assert plain.cache._storage is not None
    assert compiled.cache._storage is not None
    before = plain.cache._storage[..., :123, :].clone()
    with torch.inference_mode():
        compiled.cache._storage[..., :123, :] = before
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(decode_steps, "accept", lambda *given: seen.append(given[2]) or accept(*given))  # type: ignore[func-returns-value]
    for tree, plain_step in zip(trees, plain_steps, strict=True):
        plain_step()
        compiled.step(tree)()
        assert torch.allclose(seen[-1], seen[-2], atol=1e-5)
    assert compiled.cache.length == 123
    assert torch.equal(compiled.cache._storage[..., :123, :], before)


def test_cases_take_turns_and_one_that_does_not_fit_drops_out() -> None:
    order: list[str] = []

    def full() -> None:
        order.append("full")
        raise torch.OutOfMemoryError

    cases = [
        Timed(SETUP, "plain", lambda: order.append("plain")),
        Timed(SETUP, "tree 1", lambda: order.append("tree")),
        Timed(SETUP, "tree 2", full),
    ]
    decode.time_in_turns(cases, CPU, 1.0, minimum=4, maximum=4)
    assert order == ["plain"] * 4 + ["tree"] * 4 + ["full"] + ["plain"] * 4 + ["tree"] * 4
    assert [len(case.seconds) for case in cases] == [6, 6, 0]
    assert cases[2].obstacle == "does not fit"


def test_random_models_are_made_in_their_dtype_and_in_4_bits() -> None:
    model = random_model(llama_config(64, 128, 2, 4, 2, 61), torch.bfloat16, CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits = model(torch.arange(8)[None]).logits
    assert logits.isfinite().all()
    assert logits.float().std() > 0.1
    pytest.importorskip("bitsandbytes")
    quantize_nf4(model)
    quantized = model(torch.arange(8)[None]).logits
    assert 0.8 < torch.cosine_similarity(quantized.float(), logits.float(), dim=-1).mean() < 0.9999


def test_models_that_do_not_fit_together_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    args = decode.parse_arguments(["--shapes", "7B", "--contexts", "128", "--nodes", "16", "--settings", "stock"])
    shape = decode.Shape.of("7B")  # 30.1 GB in float32 and 15.1 in bfloat16, heads included
    monkeypatch.setattr(decode.Shape, "load", lambda self, dtype, setting, device: dtype)
    for gigabytes, fit in ((60, ["float32", "bfloat16"]), (40, ["float32"]), (20, ["bfloat16"])):
        monkeypatch.setattr(decode, "free_memory", lambda device, size=gigabytes: size * 10**9)
        loaded, obstacles = decode.load_models(shape, args, CPU)
        assert list(loaded.values()) == fit
        assert [model[0] for model, _ in obstacles] == [name for name in args.dtypes if name not in fit]
        assert all(text.startswith("does not fit: needs ") for _, text in obstacles)


@pytest.mark.usefixtures("as_if_compiled")
def test_the_whole_command_on_a_model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "measure_rates", lambda device, dtypes, seconds: RATES)
    monkeypatch.setattr(prepack, "_is_faster", lambda weights: False)
    model = write_backbone(tmp_path / "model")
    words = ["--quick", "--shapes", str(model), "--contexts", "32", "300", "--nodes", "2", "16"]
    words += ["--settings", "stock", "prepacked", "static", "compiled"]
    assert decode.main([*words, "--dtypes", "float32", "--seconds", "0.01", "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "decode.json").read_text())
    assert record["machine"]["command"].startswith("python benchmarks/decode.py --quick")
    rows = {(one["setting"], one["context"]): one for one in record["rows"]}
    passes = ["plain", "tree 2", "tree 16", "heads"]
    for setting, steps in (("stock", "passes"), ("static", "static buffers"), ("compiled", "passes")):
        assert list(rows[setting, 32]["ms_and_floor"]) == [*passes, "loop, plain", "loop, tree 16"]
        assert rows[setting, 32]["steps"] == steps
    assert rows["stock", 300]["obstacle"] == "not run: the model has 256 positions"
    assert rows["prepacked", 0]["obstacle"].startswith("not prepacked")
    with pytest.raises(SystemExit):
        decode.parse_arguments(["--shapes", "8B"])
