"""Decoding steps against their floor: arithmetic by hand, passes that leave nothing behind, and a report of it all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import decode
import decode_case
import decode_model
import pytest
import torch
from decode_case import LOOP_TOKENS, Context, Loop, Point, Timed, proposal, take_turns, tree_of
from decode_floor import Rates, Sizes, matrix_rate, read_bandwidth
from decode_model import SETTINGS, Model, Unusable, models_together
from decode_profile import profile_step
from decode_report import Overheads, Row, floor_of, goal_lines, markdown, rows_of
from random_llama import SHAPES, llama_config, quantize_nf4, random_backbone, random_model, shape_config

from medusa_train.errors import BackboneError
from medusa_train.inference.accept import accept
from medusa_train.models import prepack as packed
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import BLOCK
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.prepack import is_packed
from medusa_train.trees.kv_cache import BatchCache
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import write_backbone
from tests.models.test_prepack import needs_onednn

CPU = torch.device("cpu")
SMALL = llama_config(32, 48, 2, 4, 2, 61)
MACHINE = {
    "device": "a CPU",
    "kind": "cpu",
    "cores": 2,
    "threads": 2,
    "load": 0.0,
    "python": "3",
    "torch": "2",
    "cuda": None,
    "transformers": "5",
    "command": "decode.py",
    "date": "today",
}
RATES = Rates(1e9, {"float32": 1e10, "bfloat16": 4e10})
POINT = Point("tiny", "float32", 2, 128, 1, "step")


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return random_backbone(SMALL, torch.float32, CPU, "small")


@pytest.fixture(scope="module")
def draft(backbone: Backbone) -> MedusaDraft:
    return MedusaDraft.from_backbone(backbone, 3)


def test_sizes_are_those_of_the_model(backbone: Backbone, draft: MedusaDraft) -> None:
    sizes = Sizes.of(SMALL)
    numbers = sum(parameter.numel() for parameter in backbone.model.parameters())
    assert sizes.read == numbers - 61 * 32
    assert sizes.model_bytes(2) == 2 * numbers
    assert sizes.head_numbers(3, shared=False) == sum(parameter.numel() for parameter in draft.parameters())
    context = Context(backbone, 10, 2, 4)
    assert context.cache._storage is not None
    assert sizes.cached(15, 2) == context.cache._storage.numel()


def test_the_7b_shape_has_seven_billion_parameters() -> None:
    billions = {name: Sizes.of(shape_config(name)).model_bytes(1) / 1e9 for name in SHAPES}
    assert billions == pytest.approx({"160M": 0.162, "1B": 1.100, "7B": 6.738, "13B": 13.016}, abs=0.001)


def test_the_floor_by_hand() -> None:
    sizes = Sizes(layers=2, hidden=3, vocab=5, body=100, norms=15, queries=4, keys=2)
    assert sizes.read == 100 + 15 + 15
    assert sizes.step_bytes(context=10, batch=4, itemsize=2) == 2 * (130 + 2 * 2 * 2 * 10 * 4)
    # 7 nodes with the root in 4 rows: 2 for every weight of a matrix, and 17 keys and values in each of 2 layers
    assert sizes.step_operations(rows=7, context=10, batch=4) == 4 * 7 * (2 * (100 + 15) + 2 * 2 * 2 * 4 * 17)
    assert sizes.head_numbers(5, shared=False) == 5 * (9 + 3 + 15)
    assert sizes.head_numbers(5, shared=True) == 5 * (9 + 3) + 15
    assert sizes.head_operations(5, batch=2) == 2 * 2 * 5 * (9 + 15)
    rates = Rates(bandwidth=100.0, matrix={"float32": 1000.0})
    assert rates.floor(50, 400, "float32").seconds == 0.5
    assert rates.floor(50, 400, "float32").bound == "bytes"
    assert (rates.floor(50, 800, "float32").seconds, rates.floor(50, 800, "float32").bound) == (0.8, "operations")


def test_a_loop_s_floor_is_that_of_pass_and_heads() -> None:
    sizes = Sizes.of(SMALL)
    step = floor_of(replace(POINT, nodes=1), sizes, RATES, 4)
    heads = floor_of(replace(POINT, what="heads", heads=3), sizes, RATES, 4)
    loop = floor_of(replace(POINT, what="loop", nodes=1, heads=3), sizes, RATES, 4)
    assert (step.bound, heads.bound, loop.bound) == ("bytes", "bytes", "bytes")
    assert loop.seconds == pytest.approx(step.seconds + heads.seconds)
    shared = floor_of(replace(POINT, what="shared heads", heads=3), sizes, RATES, 4)
    assert heads.seconds - shared.seconds == pytest.approx(4 * 2 * 61 * 32 / 1e9)


@pytest.mark.parametrize("nodes", [1, 4, 8, 16, 32, 64, 128])
def test_trees_have_as_many_nodes_as_asked_for(nodes: int) -> None:
    tree = tree_of(nodes, 5)
    assert tree.size == nodes
    assert tree.max_depth == 5 or nodes < 16
    with pytest.raises(ValueError, match="no tree of 4 nodes"):
        tree_of(4, 1, 3)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_pass_leaves_the_context_as_it_was(backbone: Backbone, batch: int) -> None:
    context = Context(backbone, 20, batch, 8)
    assert context.cache._storage is not None
    before = context.cache._storage[:, :, :, :, :20].clone()
    for tree in (Tree.empty(), tree_of(8, 3)):
        step = context.step(tree)
        step()
        step()
    assert context.cache.length == 20
    assert torch.equal(context.cache._storage[:, :, :, :, :20], before)
    if isinstance(context.cache, BatchCache):
        assert context.cache.lengths == [20] * batch


def test_a_pass_computes_what_the_backbone_says_along_a_path(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last node of a chain sees all before it: the same as without any mask."""
    context = Context(backbone, 20, 1, 8)
    seen: list[torch.Tensor] = []
    plain = backbone.logits
    monkeypatch.setattr(backbone, "logits", lambda hidden: seen.append(hidden) or plain(hidden))  # type: ignore[func-returns-value]
    context.step(Tree.chain(3))()
    with torch.inference_mode():
        wanted = backbone.run(torch.arange(4)[None], cache=context.cache).hidden
    assert torch.allclose(seen[0], wanted, atol=1e-5)


@pytest.fixture
def as_if_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled passes are the functions that would be compiled, which takes no time."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def small_backbone() -> Backbone:
    """One that a test may change."""
    return random_backbone(SMALL, torch.float32, CPU, "small")


def test_a_compiled_pass_computes_what_the_plain_one_does(
    as_if_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = small_backbone()
    trees = (Tree.empty(), tree_of(8, 3), Tree.chain(2))
    plain = Context(own, 123, 1, 8)
    plain_steps = [plain.step(tree) for tree in trees]
    own.compile_passes()
    compiled = Context(own, 123, 1, 8)
    assert (plain.cache.capacity, compiled.cache.capacity) == (132, 2 * BLOCK + 1)
    assert plain.cache._storage is not None
    assert compiled.cache._storage is not None
    before = plain.cache._storage[..., :123, :].clone()
    with torch.inference_mode():
        compiled.cache._storage[..., :123, :] = before
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(decode_case, "accept", lambda *given: seen.append(given[2]) or accept(*given))  # type: ignore[func-returns-value]
    passes: list[int] = []
    pass_of = own.compiled
    assert pass_of is not None
    own.compiled = lambda *given: passes.append(given[2].shape[3]) or pass_of(*given)  # type: ignore[assignment, func-returns-value]
    for tree, plain_step in zip(trees, plain_steps, strict=True):
        plain_step()
        compiled.step(tree)()
        assert torch.allclose(seen[-1], seen[-2], atol=1e-5)
    assert passes == [BLOCK, 2 * BLOCK, BLOCK]  # the blocks that 123 + 1, 9 and 3 reach into
    assert compiled.cache.length == 123
    assert torch.equal(compiled.cache._storage[..., :123, :], before)


def test_the_loop_takes_compiled_passes(as_if_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = small_backbone()
    own.compile_passes()
    pass_of, counts = own.compiled, []
    assert pass_of is not None
    own.compiled = lambda *given: counts.append(given[0].shape[1]) or pass_of(*given)  # type: ignore[assignment, func-returns-value]
    loop = Loop(own, MedusaDraft.from_backbone(own, 3), Tree.chain(3), 12)
    loop.ready()
    loop()
    assert counts == [4]


def test_the_loop_goes_on_and_begins_anew(backbone: Backbone, draft: MedusaDraft) -> None:
    loop = Loop(backbone, draft, Tree.chain(3), 12)
    for _ in range(2 * LOOP_TOKENS):
        loop.ready()
        loop()


def test_cases_take_turns_and_one_that_does_not_fit_drops_out() -> None:
    order: list[str] = []

    def full() -> None:
        order.append("full")
        raise torch.OutOfMemoryError

    cases = [
        Timed(replace(POINT, nodes=0), lambda: order.append("plain")),
        Timed(replace(POINT, nodes=1), lambda: order.append("tree")),
        Timed(replace(POINT, nodes=2), full),
    ]
    take_turns(cases, CPU, 1.0, least=4, most=4)
    assert order[:9] == ["plain"] * 4 + ["tree"] * 4 + ["full"]
    assert order[9:] == ["plain"] * 4 + ["tree"] * 4
    assert [len(case.seconds) for case in cases] == [6, 6, 0]
    assert cases[2].obstacle == "does not fit"


def test_slow_cases_need_not_be_called_often() -> None:
    calls: list[int] = []
    case = Timed(POINT, lambda: calls.append(1))
    take_turns([case], CPU, 0.0)
    assert len(case.seconds) == 3  # one turn
    assert len(calls) == 4  # one of them untimed


def test_rates_are_measured() -> None:
    assert read_bandwidth(CPU, 0.0, size=1 << 20) > 0
    assert matrix_rate(CPU, torch.float32, 0.0, width=64) > 0


def test_random_models_are_made_in_their_dtype_and_in_4_bits() -> None:
    model = random_model(llama_config(64, 128, 2, 4, 2, 61), torch.bfloat16, CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits = model(torch.arange(8)[None]).logits
    assert logits.isfinite().all()
    assert logits.float().std() > 0.1
    pytest.importorskip("bitsandbytes")
    quantize_nf4(model)
    packed = model(torch.arange(8)[None]).logits
    assert 0.8 < torch.cosine_similarity(packed.float(), logits.float(), dim=-1).mean() < 0.9999


def row(what: str, nodes: int, ms: float, dtype: str = "float32", **further: object) -> Row:
    heads = 5 if "heads" in what else 0
    point = replace(POINT, what=what, nodes=nodes, dtype=dtype, heads=heads, **further)  # type: ignore[arg-type]
    return Row(point, ms, ms / 2, "bytes", 9)


def test_overheads_are_over_the_own_and_over_the_fastest_plain_step() -> None:
    rows = [row("step", 0, 4.0), row("step", 16, 6.0), row("heads", 0, 1.0), row("loop", 0, 5.0), row("loop", 16, 8.0)]
    rows += [row("step", 0, 3.0, "bfloat16"), row("step", 0, 1.0, "bfloat16", context=1024)]
    over = Overheads(rows)
    assert (over.own(rows[1]), over.fastest(rows[1]), over.whole(rows[1])) == (1.5, 2.0, 1.75)
    assert (over.own(rows[2]), over.whole(rows[0])) == (0.25, None)
    assert over.own(rows[4]) == over.fastest(rows[4]) == 1.6
    assert rows[1].fraction == 0.5


def test_settings_have_plain_steps_and_heads_of_their_own() -> None:
    rows = [row("step", 0, 4.0), row("step", 16, 6.0), row("heads", 0, 1.0)]
    rows += [row("step", 0, 2.0, setting="packed"), row("step", 16, 3.0, setting="packed")]
    rows += [row("heads", 0, 0.5, setting="packed")]
    over = Overheads(rows)
    assert (over.own(rows[1]), over.fastest(rows[1]), over.whole(rows[1])) == (1.5, 3.0, 1.75)
    assert (over.own(rows[4]), over.fastest(rows[4]), over.whole(rows[4])) == (1.5, 1.5, 1.75)


def test_goals_on_a_cpu_take_the_best_setting_for_both() -> None:
    rows = [
        row("step", 0, 4.0),
        row("step", 16, 6.0),
        row("step", 0, 3.0, "bfloat16", setting="packed"),
        row("step", 16, 4.5, "bfloat16", setting="packed"),
        row("step", 0, 3.2, "bfloat16", setting="compiled"),
        row("step", 16, 3.6, "bfloat16", setting="compiled"),
    ]
    assert goal_lines(MACHINE, rows) == [
        "- kept: tiny, context 128: a tree of 16 takes 1.20 of the fastest plain step, at most 1.25 "
        "(tree: 3.600 ms, bfloat16 compiled, 2 threads; plain: 3.000 ms, bfloat16 packed, 2 threads; "
        "their floors: 1.20)"
    ]
    assert "floors" not in goal_lines(MACHINE, [rows[0], replace(rows[1], floor_ms=None)])[0]
    (line,) = goal_lines(MACHINE, rows[:4])
    assert line.startswith("- **missed**: tiny, context 128: a tree of 16 takes 1.50 of")
    rows += [row("step", 0, 9.0, shape="160M"), row("step", 16, 9.9, shape="160M")]
    assert [line[:16] for line in goal_lines(MACHINE, rows)] == ["- kept: tiny, co", "- kept: 160M, co"]


def test_goals_on_a_gpu() -> None:
    at = {"shape": "7B", "context": 1024, "dtype": "bfloat16"}
    rows = [row("step", 0, 10.0, **at), row("step", 64, 10.5, **at), row("heads", 0, 1.0, **at)]  # type: ignore[arg-type]
    lines = goal_lines({**MACHINE, "kind": "cuda"}, rows)
    assert lines == [
        "- **missed**: 7B: a plain step takes 2.00 of its floor, at most 1.25",
        "- kept: 7B: a tree of 64 takes 1.05 plain steps, at most 1.08",
        "- **missed**: 7B: with its heads 1.15 plain steps, at most 1.12 with cheaper heads",
        "- **missed**: 7B: 5 heads take 2.00 of their floor, at most 1.25",
    ]
    compiled = row("step", 64, 10.5, **at, setting="compiled")  # type: ignore[arg-type]
    plain = row("step", 0, 10.0, **at, setting="compiled")  # type: ignore[arg-type]
    lines = goal_lines({**MACHINE, "kind": "cuda"}, [*rows, plain, compiled])
    assert lines[4:] == [
        "- **missed**: 7B compiled: a plain step takes 2.00 of its floor, at most 1.25",
        "- kept: 7B compiled: a tree of 64 takes 1.05 plain steps, at most 1.08",
    ]


def test_what_does_not_fit_is_a_row() -> None:
    cases = [Timed(POINT, seconds=[0.004]), Timed(replace(POINT, batch=8), obstacle="does not fit")]
    rows = rows_of(cases, Sizes.of(SMALL), RATES, {"float32": 4})
    rows.append(Row(Point("13B", "float32", 0, 0, 0, "step"), obstacle="does not fit: needs 52.1 GB, 18.0 GB are free"))
    text = markdown(MACHINE, RATES, rows)
    assert "a CPU, 2 cores, 2 threads, Python 3, torch 2, transformers 5, today" in text
    assert "`decode.py`" in text
    assert "| float32 | stock | 2 | plain step | 4.000 |" in text
    assert "## tiny, batch 8, context 128" in text
    assert "| float32 | stock | 2 | plain step | does not fit |" in text
    assert "## 13B\n" in text
    assert "needs 52.1 GB" in text


def test_packed_and_compiled_models_hold_a_second_copy() -> None:
    shape = decode.Shape.of("160M")
    needs = {setting: shape.needs(Model("bfloat16", setting), CPU, 128, 1, 16) for setting in SETTINGS}
    copied = 2 * (shape.sizes.read + shape.sizes.head_numbers(5, shared=False))
    assert needs["packed"] == needs["compiled"] == needs["stock"] + copied
    gpu = torch.device("cuda")
    assert shape.needs(Model("bfloat16", "compiled"), gpu, 128, 1, 16) == needs["stock"]
    # eight rows, without loops; never compiled
    assert shape.needs(Model("bfloat16", "packed"), CPU, 128, 8, 16) > needs["packed"]
    assert shape.needs(Model("bfloat16", "compiled"), CPU, 128, 8, 16) == needs["compiled"]


def test_models_that_do_not_fit_together_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = decode.parse_arguments(["--quick", "--shapes", "7B", "--settings", "stock"])
    shape = decode.Shape.of("7B")

    def found(gigabytes: int) -> list[tuple[list[Model], str]]:
        monkeypatch.setattr(decode_model, "free_memory", lambda device: gigabytes * 10**9)
        return list(models_together(shape, asked, CPU))

    full, half = Model("float32", "stock"), Model("bfloat16", "stock")
    assert found(60) == [([full, half], "")]
    assert found(40) == [([full], ""), ([half], "")]
    (first, obstacle), second = found(20)
    assert (first, second) == ([full], ([half], ""))
    assert obstacle.startswith("does not fit: needs 3")
    # 17, 32 and 32 GB
    asked.dtypes, asked.settings = ["bfloat16"], list(SETTINGS)
    assert found(60) == [([half, Model("bfloat16", "packed")], ""), ([Model("bfloat16", "compiled")], "")]


def test_defaults_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = decode.parse_arguments(["--quick"])
    assert (asked.settings, asked.threads) == (list(SETTINGS), [torch.get_num_threads()])
    assert decode.parse_arguments(["--settings", "compiled", "stock"]).settings == ["stock", "compiled"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = decode.parse_arguments(["--threads", "1"])
    assert (asked.settings, asked.threads) == (["stock", "compiled"], [0])


def model_shape(directory: Path) -> decode.Shape:
    return decode.Shape.of(str(write_backbone(directory / "model")))


@needs_onednn
def test_packed_models_have_packed_weights_and_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_faster", lambda weights: True)
    shape = replace(model_shape(tmp_path), directory=None, config=SMALL)  # with random weights
    made = shape.load(Model("bfloat16", "packed"), CPU)
    assert is_packed(made.backbone.model)
    assert [draft._packed is not None for draft in made.drafts.values()] == [True, True]
    made = shape.load(Model("bfloat16", "stock"), CPU)
    assert not is_packed(made.backbone.model)


def test_settings_that_do_nothing_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model_shape(tmp_path)
    monkeypatch.setattr(packed, "_faster", lambda weights: False)
    with pytest.raises(Unusable, match="nothing was packed: no faster here"):
        shape.load(Model("float32", "packed"), CPU)
    with pytest.raises(Unusable, match="for CPUs only"):
        shape.load(Model("float32", "packed"), torch.device("cuda"))

    def refuses(backbone: Backbone) -> None:
        raise BackboneError("compile: small has sliding windows; leave the key out")

    monkeypatch.setattr(Backbone, "compile_passes", refuses)
    with pytest.raises(Unusable, match=r"^not compiled: small has sliding windows$"):
        shape.load(Model("float32", "compiled"), CPU)


def test_compiled_passes_are_measured_on_the_threads_they_are_for(tmp_path: Path, as_if_compiled: None) -> None:
    shape = model_shape(tmp_path)
    model = Model("float32", "compiled")
    one = shape.load(model, CPU)
    passes: list[tuple[int, int]] = []
    pass_of = one.backbone.compiled
    assert pass_of is not None

    def counted(*given: torch.Tensor) -> object:
        passes.append((given[0].shape[1], torch.get_num_threads()))
        return pass_of(*given)  # type: ignore[arg-type]

    one.backbone.compiled = counted  # type: ignore[assignment]
    asked = decode.parse_arguments(["--contexts", "20", "--nodes", "4", "--threads", "1", "2"])
    cases = decode.cases_of(shape, {model: one}, asked, Point("model", "", 0, 20, 1, "step"))
    assert passes == [(1, 2), (5, 2), (1, 2)]  # beforehand: plain step, tree, plain loop
    assert [case.point.threads for case in cases if case.obstacle] == [1]
    assert "compiled for 2 threads" in cases[0].obstacle
    assert {case.point.threads for case in cases[1:]} == {2}
    assert {case.point.setting for case in cases} == {"compiled"}


def test_the_profile_names_operators(backbone: Backbone) -> None:
    assert "aten::mm" in profile_step(Context(backbone, 10, 1, 4).step(Tree.chain(2)), CPU, steps=2)


def test_a_proposal_fills_the_tree(backbone: Backbone, draft: MedusaDraft) -> None:
    made = proposal(backbone, draft, Tree.chain(3), 2)()
    assert made.tokens.shape == (2, 4)  # type: ignore[attr-defined]


def test_an_unknown_shape_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.parse_arguments(["--shapes", "8B"])
    assert "--shapes 8B: neither tiny, 160M" in capsys.readouterr().err


def test_the_whole_command_on_a_model_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_if_compiled: None
) -> None:
    monkeypatch.setattr(decode, "measure_rates", lambda device, dtypes, seconds: RATES)
    monkeypatch.setattr(packed, "_faster", lambda weights: False)
    model = write_backbone(tmp_path / "model")
    words = ["--quick", "--shapes", str(model), "--contexts", "32", "300", "--nodes", "2", "16", "--batch", "1", "2"]
    words += ["--threads", "1", "--seconds", "0.01", "--profile", "--out", str(tmp_path / "out")]
    assert decode.main(words) == 0
    record = json.loads((tmp_path / "out" / "decode.json").read_text())
    assert record["machine"]["command"].startswith("python benchmarks/decode.py --quick")
    assert record["rates"]["bandwidth"] == 1e9
    rows = record["rows"]
    found: dict[tuple[object, ...], list[str]] = {}
    for one in rows:
        found.setdefault((one["setting"], one["dtype"], one["batch"], one["context"]), []).append(one["name"])
    passes = ["plain step", "tree of 2", "tree of 16", "5 heads", "5 heads, shared lm_head"]
    loops = ["loop, plain", "loop, tree of 16"]
    for setting in ("stock", "compiled"):
        assert found[setting, "float32", 1, 32] == [*passes, *loops]
    assert found["stock", "bfloat16", 2, 32] == passes
    assert len(rows) == 2 * (7 + 5 + 2) + 2 * (7 + 1 + 2) + 2
    assert all(one["ms"] > 0 and one["fraction"] > 0 for one in rows if one["context"] == 32 and not one["obstacle"])
    assert {one["obstacle"] for one in rows if one["context"] == 300} == {"can't run: the model reads 256 positions"}
    (single,) = {one["obstacle"] for one in rows if (one["context"], one["batch"]) == (32, 2) and one["obstacle"]}
    assert single == "can't run: passes are compiled for single rows"
    unpacked = [one["obstacle"] for one in rows if one["setting"] == "packed"]
    assert [one[:18] for one in unpacked] == ["nothing was packed"] * 2
    assert (tmp_path / "out" / "profile-model-bfloat16-stock-tree16.txt").read_text().count("aten::") > 5
    assert (tmp_path / "out" / "profile-model-float32-compiled-plain.txt").is_file()
    assert "## model, batch 2, context 32" in (tmp_path / "out" / "decode.md").read_text()
