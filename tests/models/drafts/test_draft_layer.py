"""Draft layers: initialisation from the target model's layer, packed documents, caches, parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from medusa_train.errors import TargetModelError
from medusa_train.models import document_attention
from medusa_train.models.drafts.base import AcceptedPath, DraftCache, read_prompts
from medusa_train.models.drafts.draft_layer import DraftLayer, init_from_layer, norms_of
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.loading import keep_trainable_kernels, loading_options
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, Rows
from medusa_train.trees.kv_cache import KVCache
from medusa_train.trees.transformers_adapters import PromptCache
from tests.families import FAMILIES, NoTokenizer, random_target_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_layer_is_the_target_model_s(family: str) -> None:
    target_model = random_target_model(family)
    layer = DraftLayer(target_model)
    init_from_layer(layer.body.layers[0], target_model.layer(1))
    theirs = dict(target_model.layer(1).named_parameters())
    for name, parameter in layer.body.layers[0].named_parameters():
        if "mlp" not in name or family != "mixtral":
            assert torch.equal(parameter, theirs[name]), name
        assert parameter.data_ptr() != theirs[name].data_ptr()


def test_an_exit_before_the_last_layer_begins_as_the_whole_model() -> None:
    """The adapter then equals the layer that it replaces."""
    target_model = random_target_model("llama")
    exit_layer = target_model.num_layers - 1
    draft = KangarooDraft.from_target_model(
        target_model, exit_layer=exit_layer, mlp_size=target_model.config.intermediate_size
    )
    tokens = torch.randint(target_model.vocab_size, (1, 9))
    hidden_states = target_model.run(tokens, aux_layers=draft.aux_layers)
    torch.testing.assert_close(
        draft.states(hidden_states, Rows.from_tokens(tokens)),
        hidden_states.final,
        rtol=1e-10,
        atol=1e-10,
    )


class Fused(nn.Module):
    """An MLP with one matrix for gate and up, as Phi-3 has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(4, 2 * width, bias=True)
        self.down_proj = nn.Linear(width, 4, bias=False)


class Apart(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(4, width, bias=True),
            nn.Linear(4, width, bias=True),
        )
        self.down_proj = nn.Linear(width, 4, bias=False)


@pytest.mark.parametrize("kind", [Fused, Apart])
def test_a_narrower_mlp_keeps_the_strongest_units(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    wide, narrow = kind(6), kind(2)
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            view = (
                weight.T
                if name == "down_proj.weight"
                else weight.unflatten(0, (-1, 6)).transpose(0, 1)
            )
            view[[0, 2, 3, 5]] *= 0.01
    init_from_layer(narrow, wide)
    theirs = dict(wide.named_parameters())
    for name, parameter in narrow.named_parameters():
        weight = theirs[name]
        expected = (
            weight[:, [1, 4]]
            if name == "down_proj.weight"
            else weight.unflatten(0, (-1, 6))[:, [1, 4]].flatten(0, 1)
        )
        assert torch.equal(parameter, expected), name


def test_a_wider_mlp_stays_as_it_was() -> None:
    torch.manual_seed(0)
    wide = Apart(6)
    before = {name: parameter.clone() for name, parameter in wide.named_parameters()}
    init_from_layer(wide, Apart(2))
    assert all(torch.equal(parameter, before[name]) for name, parameter in wide.named_parameters())


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    random_target_model("llama", dtype=torch.float32).model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, **loading_options("nf4", torch.float32, torch.device("cpu"))
    )
    keep_trainable_kernels(model)
    target_model = TargetModel(model, NoTokenizer(), "four bits")
    draft = KangarooDraft.from_target_model(target_model, exit_layer=1, dtype=torch.float32)
    theirs = target_model.layer(1).self_attn.q_proj.weight
    expected = functional.dequantize_4bit(theirs.data, theirs.quant_state).float()
    assert torch.equal(draft.adapter.body.layers[0].self_attn.q_proj.weight, expected)


# longrope's angles depend on the largest position of a pass
STEADY = [family for family in FAMILIES if family != "phi3-longrope"]
LENGTHS = [11, 3, 7]
TOLERANCE = 1e-6  # attention in eager form has its softmax in float32 whatever the model is in


def random_layer(family: str, **options: Any) -> DraftLayer:
    layer = DraftLayer(random_target_model(family), **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
    return layer


def alone(layer: DraftLayer, states: torch.Tensor) -> torch.Tensor:
    """[T, d] -> [T, d] of one document, without an explicit mask."""
    rows = Rows.from_tokens(torch.zeros(1, len(states), dtype=torch.long))
    with torch.no_grad():
        return layer(states[None], rows.positions, rows.segments)[0]


@pytest.mark.parametrize("mlp_size", [None, 0, 5])
@pytest.mark.parametrize("family", STEADY)
def test_packed_documents_are_computed_as_if_alone(family: str, mlp_size: int | None) -> None:
    layer = random_layer(family, mlp_size=mlp_size)
    documents = [torch.randn(length, 32, dtype=torch.float64) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    segments = torch.cat([torch.full((length,), i) for i, length in enumerate(LENGTHS)])[None]
    packed = layer(torch.cat(documents)[None], positions, segments)[0]
    for ours, document in zip(packed.split(LENGTHS), documents, strict=True):
        assert torch.allclose(ours, alone(layer, document), atol=TOLERANCE)
    one = layer(torch.cat(documents)[None], torch.arange(sum(LENGTHS))[None], 0 * segments)
    last = sum(LENGTHS[:-1])  # where the last document begins
    assert not torch.allclose(packed[last], one[0, last])


def test_a_kernel_that_fails_in_the_compute_dtype_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters are float32 in training, attention runs in the target model's dtype."""

    def kernel(joined: list[torch.Tensor], *arguments: Any) -> torch.Tensor:
        if joined[0].dtype == torch.bfloat16:
            raise RuntimeError("no kernel image is available")
        return working(joined, *arguments)

    working = document_attention._one_by_one
    monkeypatch.setattr(document_attention, "_one_by_one", kernel)
    layer = DraftLayer(random_target_model("llama", dtype=torch.bfloat16), dtype=torch.float32)
    segments = torch.tensor([[0, 0, 0, 1, 1]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (
            layer(torch.randn(1, 5, 32), torch.tensor([[0, 1, 2, 0, 1]]), segments).isfinite().all()
        )


@pytest.mark.parametrize("family", STEADY)
def test_bounds_of_documents_give_the_states_and_gradients_of_a_mask(family: str) -> None:
    layer = random_layer(family)
    if family == "gemma2":
        assert not layer._by_bounds
        pytest.skip("soft-capped scores need a mask")
    lengths = [*LENGTHS, 2]
    states = torch.randn(2, sum(lengths), 32, dtype=torch.float64, requires_grad=True)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    segments = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)]).repeat(
        2, 1
    )
    segments[1, -2:] = -1
    weights = torch.randn_like(states) * (segments >= 0)[..., None]
    results = []
    for by_bounds in (layer._by_bounds, False):
        layer._by_bounds = by_bounds
        out = layer(states, positions, segments) * weights
        results.append([out, *torch.autograd.grad(out.sum(), [states, *layer.parameters()])])
    for ours, masked in zip(*results, strict=True):
        torch.testing.assert_close(ours, masked, rtol=1e-8, atol=1e-8)


COLUMNS = 48


def read_path(
    layer: DraftLayer, kv_cache: KVCache, new: torch.Tensor, starts: list[int]
) -> torch.Tensor:
    cache = DraftCache(kv_cache.storage(COLUMNS), COLUMNS, 127)
    return cache.read_path(layer, new, torch.tensor(starts))


@pytest.mark.parametrize("family", STEADY)
def test_the_cache_holds_what_was_committed_and_nothing_else(family: str) -> None:
    """The padding of prompts and paths is overwritten; rows end and join."""
    layer = random_layer(family)
    prompts = [torch.randn(length, 32, dtype=torch.float64) for length in LENGTHS]
    texts = list(prompts)
    kv_cache = KVCache(1, COLUMNS, COLUMNS)
    kv_cache.make_room(3, COLUMNS)
    rows = [0, 1, 2]
    with torch.no_grad():
        padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=7.0)
        out = read_prompts(layer, padded, PromptCache(kv_cache, 0, 3))
        for row, length in enumerate(LENGTHS):
            expected = alone(layer, prompts[row])
            assert torch.allclose(out[row, :length], expected, atol=TOLERANCE)
        for step, counts in enumerate([[1, 3, 2], [4, 1, 1], [2, 2], [1, 3, 2, 1]]):
            if step == 2:
                rows = [0, 2]
                kv_cache.copy_row(2, 1, COLUMNS)
            if step == 3:
                # rows join: one with a prompt, and one whose only position is read with the next
                # ones
                texts += [
                    torch.randn(6, 32, dtype=torch.float64),
                    torch.empty(0, 32, dtype=torch.float64),
                ]
                padded = nn.utils.rnn.pad_sequence(texts[3:], batch_first=True, padding_value=7.0)
                kv_cache.make_room(4, COLUMNS)
                read_prompts(layer, padded, PromptCache(kv_cache, 2, 2))
                rows = [0, 2, 3, 4]
            new = torch.randn(len(rows), max(counts), 32, dtype=torch.float64)
            out = read_path(layer, kv_cache, new, [len(texts[row]) for row in rows])
            for i, row in enumerate(rows):
                start = len(texts[row])
                texts[row] = torch.cat([texts[row], new[i, : counts[i]]])
                expected = alone(layer, texts[row])[start:]
                assert torch.allclose(out[i, : counts[i]], expected, atol=TOLERANCE)


@pytest.mark.parametrize("family", STEADY)
def test_a_single_row_needs_no_explicit_mask(family: str) -> None:
    """A prompt is read in parts; what was not committed is overwritten."""
    layer = random_layer(family)
    text = torch.randn(20, 32, dtype=torch.float64)
    whole = alone(layer, text)
    kv_cache = KVCache(1, COLUMNS, COLUMNS)
    done = 0
    with torch.no_grad():
        for size, count in ((9, 9), (1, 1), (4, 4), (5, 2), (4, 4)):
            out = read_prompts(
                layer, text[None, done : done + size], PromptCache(kv_cache, 0, 1, done)
            )
            assert torch.allclose(out[0, :count], whole[done : done + count], atol=TOLERANCE)
            done += count


@pytest.mark.parametrize(
    "options", [{}, {"mlp_size": 0}, {"mlp_size": 5}, {"final_norm": False}], ids=str
)
@pytest.mark.parametrize(
    "family", ["llama", "mistral-window", "qwen3", "gemma3", "granite", "olmo2"]
)
def test_every_parameter_gets_a_gradient_and_none_is_the_target_models(
    family: str, options: dict[str, Any]
) -> None:
    target_model = random_target_model(family)
    layer = DraftLayer(target_model, dtype=torch.float32, **options)
    out = layer(torch.randn(1, 6, 32), torch.arange(6)[None], torch.zeros(1, 6, dtype=torch.long))
    (out * torch.randn(1, 6, 32)).sum().backward()
    named = dict(layer.named_parameters())
    assert all(
        p.dtype == torch.float32 and p.grad is not None and p.grad.any() for p in named.values()
    )
    assert any("mlp" in name for name in named) != (options.get("mlp_size") == 0)
    assert ("body.norm.weight" in named) == options.get("final_norm", True)
    assert not {p.data_ptr() for p in target_model.model.parameters()} & {
        p.data_ptr() for p in named.values()
    }
    assert not any("embed" in name for name in named)


@pytest.mark.parametrize(
    ("names", "attention", "mlp"),
    [
        ("input post_attention", "input", "post_attention"),
        (
            "input post_attention pre_feedforward post_feedforward",
            "input post_attention",
            "pre_feedforward post_feedforward",
        ),
        ("post_attention post_feedforward", "post_attention", "post_feedforward"),
        (
            "input post_attention post_self_attn post_mlp",
            "input post_self_attn",
            "post_attention post_mlp",
        ),
        ("input post_attention pre_mlp post_mlp", "input post_attention", "pre_mlp post_mlp"),
        ("attention feedforward", "attention", "feedforward"),
        ("input", "input", ""),
    ],
    ids=["llama", "gemma2", "olmo2", "glm4", "afmoe", "apertus", "cohere"],
)
def test_norms_belong_to_the_part_that_they_are_next_to(
    names: str, attention: str, mlp: str
) -> None:
    layer = nn.Module()
    for name in names.split():
        setattr(layer, f"{name}_layernorm", nn.Identity())
    found = [{name.removesuffix("_layernorm") for name in part} for part in norms_of(layer)]
    assert found == [set(attention.split()), set(mlp.split())]


def test_a_norm_of_an_unknown_part_is_an_error_if_a_part_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target_model = random_target_model("llama")
    built = LlamaDecoderLayer.__init__

    def with_another_norm(self: LlamaDecoderLayer, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.third_norm = nn.Identity()

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", with_another_norm)
    DraftLayer(target_model)
    for part in ({"attention": False}, {"mlp_size": 0}):
        with pytest.raises(TargetModelError, match="which part of its layer third_norm serves"):
            DraftLayer(target_model, **part)


@pytest.mark.parametrize("names", [1, 2])
def test_angles_stay_exact_in_half_precision(names: int) -> None:
    """Also for one tensor under two names, as in some releases of transformers."""
    layer = random_layer("llama")
    if names == 2:
        layer.body.rotary_emb.register_buffer(
            "of_old", layer.body.rotary_emb.inv_freq, persistent=False
        )
    exact = {
        name: buffer.clone() for name, buffer in layer.body.named_buffers(remove_duplicate=False)
    }
    layer.bfloat16()
    assert exact
    assert all(
        torch.equal(buffer, exact[name])
        for name, buffer in layer.body.named_buffers(remove_duplicate=False)
    )
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


def accepted_path(states: torch.Tensor, paths: list[list[int]]) -> AcceptedPath:
    """Paths of nodes whose tokens are their states, padded at the end."""
    longest = max(map(len, paths))
    return AcceptedPath(
        HiddenStates(states),
        states[..., 0],
        path=torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths]),
        counts=torch.tensor([len(path) for path in paths]),
        starts=torch.tensor([10, 20])[: len(paths)],
    )


def test_states_at_the_accepted_nodes() -> None:
    states = torch.arange(10).view(2, 5, 1)
    for path in ([0, 1, 2], [0, 2, 4]):
        assert accepted_path(states[:1], [path]).along_path(states[:1]).flatten().tolist() == path
    accepted = accepted_path(states, [[0], [0, 3]])
    along = accepted.along_path(states)
    assert along[0, 0] == 0
    assert along[1, :, 0].tolist() == [5, 8]
    assert accepted.last(along).flatten().tolist() == [0, 8]
    following = accepted.following(torch.tensor([40, 41]))
    assert following[0, 0] == 40
    assert following[1].tolist() == [8, 41]
    assert accepted.lengths.tolist() == [11, 22]


def test_a_body_that_needs_more_than_its_config_is_refused() -> None:
    class Body(type(random_target_model("llama").body)):  # type: ignore[misc]
        def __init__(self, config: LlamaConfig, more: int) -> None:
            super().__init__(config)

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    model.model = Body(model.config, 1)
    with pytest.raises(TargetModelError, match="a layer of Body"):
        DraftLayer(TargetModel(model, NoTokenizer()))
