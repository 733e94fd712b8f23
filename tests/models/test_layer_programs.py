"""One program for all layers of a kind: the text of layers that are not compiled, for all families and
drafts, and as many programs as there are kinds and forms.
"""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from medusa_train.checkpoint.load_model import serve_draft_layers
from medusa_train.config.load import load_config
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import BackboneError, ConfigError
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.inference.runners import FixedShapeRunner
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposer
from medusa_train.models.drafts.lookup import PromptLookupDraft
from medusa_train.models.fused_linears import fuse_linears
from medusa_train.models.layer_programs import LayerPrograms, kind_of
from medusa_train.trees.kv_slots import Slots
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_backbone
from tests.inference.tape import TapeRunner
from tests.inference.test_drafts import KINDS, PROMPTS, TREE, random_draft

#: Kinds of layers, where there are several: with and without a window, or rotary angles.
SEVERAL_KINDS = {"qwen2-window": 2, "smollm3": 2, "gemma3": 2, "gemma2": 2}
TOKENS = 12


@pytest.fixture(autouse=True)
def _forget_programs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def serve(backbone: Backbone, draft: Draft | None = None, backend: str = "eager") -> LayerPrograms:
    """Run the layers by programs, which torch.compile traces; they are not translated to C++."""
    programs = LayerPrograms(backend)
    for index, layer in enumerate(backbone.layers):
        programs.serve(layer, index)
    backbone.layer_programs = programs
    backbone.gpu_kernels = ("layer_programs",)
    if draft is not None:
        serve_draft_layers(programs, draft)
    return programs


def texts(backbone: Backbone, draft: Proposer | None) -> list[list[int]]:
    """Return answers of single rows and of a batch, plain and with a tree."""
    found = []
    for drafting, tree in ((None, Tree.empty()), (draft, TREE)):
        decoder = Decoder(backbone, drafting, tree, Slots(backbone.num_layers, 120, 16))
        found += [decoder.generate(prompt, TOKENS, ()).tokens for prompt in PROMPTS[:2]]
        batch = BatchDecoder(backbone, drafting, tree)
        found += [answer.tokens for answer in batch.generate_batch(PROMPTS, TOKENS, ())]
    return found


def graphs() -> int:
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow  # two minutes for all
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_for_each_form_and_kind(family: str) -> None:
    backbone = random_backbone(family)
    draft = random_draft("medusa", backbone)
    backbone.step_runner = FixedShapeRunner()
    expected = texts(backbone, draft)
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    programs = serve(backbone)
    assert texts(backbone, draft) == expected
    forms = 2 if backbone.rope_switch else 4  # longrope decodes no batches
    assert len({key[0] for key in programs.programs}) == SEVERAL_KINDS.get(family, 1)
    assert len(programs.programs) == graphs() == forms * SEVERAL_KINDS.get(family, 1)
    # 1. other lengths and memory need no others
    assert texts(backbone, draft) == expected
    decoder = Decoder(backbone, draft, TREE, Slots(backbone.num_layers, 126, 32))
    decoder.generate(PROMPTS[2], 2 * TOKENS, ())
    assert graphs() == len(programs.programs)
    # 2. the weights are what they were
    after = backbone.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow  # ten seconds for each
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_all_kinds_in_all_runners(kind: str) -> None:
    backbone = random_backbone("llama")
    draft = random_draft(kind, backbone)
    with draft.no_early_exit():
        expected = texts(backbone, draft)
        programs = serve(backbone, draft)
        for runner in (None, FixedShapeRunner(), TapeRunner()):
            backbone.step_runner = runner
            assert texts(backbone, draft) == expected
    assert graphs() == len(programs.programs)


def test_plain_decoding_of_a_single_row() -> None:
    backbone = random_backbone("llama")
    backbone.step_runner = FixedShapeRunner()
    expected = Decoder(backbone).generate(PROMPTS[0], TOKENS, ()).tokens
    programs = serve(backbone)
    assert Decoder(backbone).generate(PROMPTS[0], TOKENS, ()).tokens == expected
    assert len(programs.programs) == graphs() == 1


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 1}, {"num_hidden_layers": 9}, {"intermediate_size": 96}],
    ids=str,
)
def test_programs_are_as_many_for_any_depth_and_width(changes: dict[str, int]) -> None:
    """Of single rows: one for plain steps, one for all trees."""
    backbone = random_backbone("llama", **changes)
    backbone.step_runner = FixedShapeRunner()
    programs = serve(backbone)
    draft = random_draft("medusa", backbone)
    for drafting, tree in ((None, None), (draft, TREE), (draft, Tree.chain(2))):
        Decoder(backbone, drafting, tree).generate(PROMPTS[0], 4, ())
    assert len(programs.programs) == graphs() == 2


@pytest.mark.parametrize("kind", [None, "medusa", "prompt_lookup"])
def test_single_rows_in_exact_sizes_are_served_too(kind: str | None) -> None:
    """On a GPU these are steps of drafts that choose their trees, and of models without graphs."""
    backbone = random_backbone("llama")
    draft: Proposer | None = None
    if kind == "prompt_lookup":
        draft = PromptLookupDraft()
    elif kind is not None:
        draft = random_draft(kind, backbone)
    tree = TREE if kind == "medusa" else None
    expected = Decoder(backbone, draft, tree).generate(PROMPTS[0], TOKENS, ())
    programs = serve(backbone)
    ran: list[bool] = []
    run = programs._run
    programs._run = lambda *given: ran.append(True) or run(*given)  # type: ignore[method-assign]
    answer = Decoder(backbone, draft, tree).generate(PROMPTS[0], TOKENS, ())
    assert answer.tokens == expected.tokens
    assert len(ran) == answer.steps * backbone.num_layers  # all but the prompt
    assert len(programs.programs) == graphs()  # whatever the lengths


def test_other_passes_run_as_they_are() -> None:
    """Prompts, and passes with gradients."""
    backbone = random_backbone("llama")
    tokens = torch.tensor([PROMPTS[0]])
    expected = backbone.run(tokens).hidden
    programs = serve(backbone)
    assert torch.equal(backbone.run(tokens).hidden, expected)
    Decoder(backbone).generate(PROMPTS[0], 1, ())
    assert programs.programs == {}


def test_a_kind_is_all_that_a_program_takes_for_constant() -> None:
    first, second = random_backbone("llama").layers[:2]
    assert kind_of(first) == kind_of(second)
    second.self_attn.scaling *= 2
    assert kind_of(first) != kind_of(second)
    norms = random_backbone("llama", rms_norm_eps=1e-3).layers
    assert kind_of(norms[0]) != kind_of(first)
    biased = random_backbone("llama", attention_bias=True).layers
    assert kind_of(biased[0]) != kind_of(first)
    sliding, full = random_backbone("gemma3").layers[:2]
    assert kind_of(sliding) != kind_of(full)


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied", "gemma3", "qwen3", "phi3"])
def test_fused_products_change_neither_weights_nor_text(family: str) -> None:
    backbone = random_backbone(family)
    expected = Decoder(backbone).generate(PROMPTS[0], TOKENS, ()).tokens
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    groups = [fuse_linears(layer) for layer in backbone.layers]
    assert groups == [0 if family == "phi3" else 2] * 3  # Phi 3's are one product already
    after = backbone.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert Decoder(backbone).generate(PROMPTS[0], TOKENS, ()).tokens == expected
    assert [fuse_linears(layer) for layer in backbone.layers] == [0] * 3  # not a second time


@pytest.mark.parametrize(("family", "fused"), [("llama", True), ("phi3", False)])
def test_a_model_without_products_to_fuse_is_refused(
    family: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = random_backbone(family)
    backbone.device = torch.device("cuda")
    monkeypatch.setattr("medusa_train.models.backbone.has_compiler", lambda device: True)
    if fused:
        backbone.use_gpu_kernels(["fused_linears"])
        assert backbone.gpu_kernels == ("fused_linears",)
        return
    with pytest.raises(BackboneError, match=r"Phi3ForCausalLM have no projections.*Leave it out"):
        backbone.use_gpu_kernels(["fused_linears"])


def test_projections_with_adapters_stay() -> None:
    layer = random_backbone("llama").layers[0]

    class Other(torch.nn.Linear):
        """As LoRA's or NF4's."""

    layer.mlp.up_proj = Other(32, 48, bias=False)
    assert fuse_linears(layer) == 1
    assert "forward" not in vars(layer.mlp.gate_proj)


@pytest.mark.slow  # ten seconds
def test_each_layer_reads_its_own_fused_weights() -> None:
    backbone = random_backbone("llama")
    draft = random_draft("medusa", backbone)
    expected = texts(backbone, draft)
    for layer in backbone.layers:
        fuse_linears(layer)
    backbone.step_runner = FixedShapeRunner()
    programs = serve(backbone)
    assert texts(backbone, draft) == expected
    assert graphs() == len(programs.programs) == 4


@pytest.mark.slow  # a minute: translated to C++
def test_programs_of_inductor() -> None:
    backbone = random_backbone("llama", dtype=torch.float32)
    draft = random_draft("medusa", backbone)
    backbone.step_runner = FixedShapeRunner()
    expected = [
        Decoder(backbone, drafting, TREE).generate(PROMPTS[0], TOKENS, ()).tokens
        for drafting in (None, draft)
    ]
    serve(backbone, backend="inductor")
    found = [
        Decoder(backbone, drafting, TREE).generate(PROMPTS[0], TOKENS, ()).tokens
        for drafting in (None, draft)
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gpu_kernels": ["layer_programs"], "compile": True}, "set compile: false"),
        ({"gpu_kernels": ["coordinate_descent"]}, "add layer_programs"),
        ({"gpu_kernels": ["layer_program"]}, "layer_program"),
    ],
)
def test_keys_that_do_not_go_together(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(EvalConfig, None, flags=flags)


def test_compiled_passes_and_programs_exclude_each_other() -> None:
    backbone = random_backbone("llama")
    assert backbone.compile_obstacle is None
    backbone.layer_programs = LayerPrograms()
    assert backbone.compile_obstacle is not None
    assert "layer programs" in backbone.compile_obstacle
