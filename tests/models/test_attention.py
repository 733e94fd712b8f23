"""Packed documents separated by their bounds, and grouped-query attention with folded heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from medusa_train.data.batch import Batch, collate
from medusa_train.errors import BackboneError
from medusa_train.inference.generate import Decoder
from medusa_train.models import attention
from medusa_train.models.attention import (
    FOLDED_HEADS,
    document_bounds,
    flash_obstacle,
    folded_head_attention,
    folded_head_forward,
)
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.trees.tree import Tree
from tests.families import random_backbone
from tests.trees.test_masks import documents
from tests.varlen import APART, LEAKING


def states(backbone: Backbone, batch: Batch) -> torch.Tensor:
    return backbone.run(batch.tokens, positions=batch.positions, segments=batch.segments).hidden


def test_bounds_written_out() -> None:
    bounds = document_bounds(torch.tensor([[0, 0, 0, 1, -1], [0, 0, 1, 1, 1]]))
    assert bounds["cu_seq_lens_q"].tolist() == [0, 3, 4, 5, 7, 10]
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["cu_seq_lens_k"] is bounds["cu_seq_lens_q"]
    assert bounds["max_length_q"] == bounds["max_length_k"] == 3
    assert document_bounds(torch.zeros(2, 3, dtype=torch.long))["cu_seq_lens_q"].tolist() == [0, 3, 6]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_bounds_give_the_states_of_a_mask(family: str) -> None:
    backbone = random_backbone(family)
    batch = collate(documents(), 0)
    real = batch.segments >= 0
    with torch.no_grad():
        masked = states(backbone, batch)
        backbone.use_varlen(APART)
        assert backbone.config._attn_implementation == APART
        torch.testing.assert_close(states(backbone, batch)[real], masked[real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("recompute", [False, True])
def test_bounds_give_the_gradients_of_a_mask_with_and_without_checkpointing(recompute: bool) -> None:
    batch = collate(documents(), 0)
    grads = []
    for varlen in (False, True):
        backbone = random_backbone("llama")
        backbone.model.requires_grad_(True).train()
        if varlen:
            backbone.use_varlen(APART)
        if recompute:
            backbone.model.gradient_checkpointing_enable({"use_reentrant": False})
        states(backbone, batch)[batch.segments >= 0].square().sum().backward()
        grads.append(backbone.body.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)


def test_passes_with_a_mask_or_a_cache_use_the_original_attention() -> None:
    backbone = random_backbone("llama")
    tokens, positions = torch.arange(2, 10)[None], torch.arange(8)[None]
    mask = torch.full((8, 8), float("-inf"), dtype=torch.float64).triu(1)[None, None]

    def passes() -> list[torch.Tensor]:
        cache = backbone.new_cache(16)
        return [
            backbone.run(tokens, positions=positions, mask=mask).hidden,
            backbone.run(tokens, cache=cache).hidden,
            backbone.run(tokens).hidden,
        ]

    with torch.no_grad():
        before = passes()
        backbone.use_varlen(APART)
        assert all(torch.equal(*pair) for pair in zip(before, passes(), strict=True))
    assert backbone.config._attn_implementation == APART


def test_an_attention_that_lets_documents_leak_is_rejected() -> None:
    backbone = random_backbone("llama")
    batch = collate(documents(), 0)
    with torch.no_grad():
        masked = states(backbone, batch)
        with pytest.raises(BackboneError, match=r"LlamaForCausalLM with .* lets packed documents attend to each other"):
            backbone.use_varlen(LEAKING)
        assert not backbone.varlen
        assert torch.equal(states(backbone, batch), masked)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"device": "cpu"}, "needs a GPU"),
        ({"installed": False}, "not installed"),
        ({"dtype": torch.float32}, "does not support float32"),
        ({"capped": True}, "soft-caps its attention scores"),
        ({"supported": False}, "architecture does not support"),
    ],
)
def test_reasons_against_flash_attention(changed: dict, reason: str | None) -> None:
    usable = {"device": "cuda", "dtype": torch.bfloat16, "capped": False, "supported": True, "installed": True}
    obstacle = flash_obstacle(**(usable | changed))
    assert obstacle is None if reason is None else reason in str(obstacle)


class AttentionModule(nn.Module):
    """The attributes of a layer that transformers' functions read."""

    is_causal = True

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.num_key_value_groups = shared


def random_states(rows: int, heads: int, kv_heads: int, q: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads + q)
    query = torch.randn(rows, q, heads, 8, generator=generator, dtype=torch.float64).transpose(1, 2)
    key, value = torch.randn(2, rows, kv_heads, keys, 8, generator=generator, dtype=torch.float64)
    return query, key, value


def tree_mask(rows: int, q: int, keys: int) -> Tensor:
    """A random mask per row, which hides some keys from each query but never all."""
    hidden = torch.rand(rows, 1, q, keys, generator=torch.Generator().manual_seed(q)) < 0.4
    hidden[..., 0] = False
    return torch.zeros(rows, 1, q, keys, dtype=torch.float64).masked_fill(hidden, float("-inf"))


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Compute attention head by head."""
    shared = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // shared].transpose(1, 2) * scaling
        scores = scores if mask is None else scores + mask[:, 0]
        heads.append(scores.softmax(-1) @ value[:, head // shared])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (1, 1), (8, 1)])
@pytest.mark.parametrize("q", [1, 2, 5])
@pytest.mark.parametrize("masks", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_folded_heads_give_the_reference(
    heads: int, kv_heads: int, q: int, masks: int, dtype: torch.dtype, tolerance: float
) -> None:
    query, key, value = (tensor.to(dtype) for tensor in random_states(2, heads, kv_heads, q, 11))
    mask = tree_mask(masks, q, 11) if masks else None
    result = folded_head_attention(query, key, value, None if mask is None else mask.to(dtype), 0.3)
    expected = reference(query.double(), key.double(), value.double(), mask, 0.3)
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("q", [1, 5])
def test_values_may_have_another_size(q: int) -> None:
    query, key, value = random_states(2, 6, 2, q, 11)
    result = folded_head_attention(query.bfloat16(), key.bfloat16(), value[..., :3].bfloat16(), None, 0.3)
    expected = reference(query, key, value[..., :3], None, 0.3)
    torch.testing.assert_close(result.double(), expected, rtol=3e-2, atol=3e-2)


def test_a_soft_cap_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **kwargs: seen.append(kwargs["softcap"]))
    with torch.no_grad():
        folded_head_forward(AttentionModule(2), *random_states(1, 4, 2, 1, 5), None, softcap=30.0)
    assert seen == [30.0]


@pytest.mark.parametrize("case", ["gradient", "prefill", "mask by head"])
def test_other_passes_use_the_function_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> Tensor:
        raise AssertionError("folded_head_attention was called")

    monkeypatch.setattr(attention, "folded_head_attention", never)
    q = 5
    query, key, value = random_states(1, 4, 2, q, q)
    mask = {"prefill": None, "mask by head": tree_mask(1, q, q).repeat(1, 4, 1, 1)}.get(case, tree_mask(1, q, q))
    with torch.set_grad_enabled(case == "gradient"):
        query.requires_grad_(case == "gradient")
        result, _ = folded_head_forward(AttentionModule(2), query, key, value, mask)
        expected, _ = sdpa_attention_forward(AttentionModule(2), query, key, value, mask)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        if case == "gradient":
            ours, stock = (torch.autograd.grad(out.square().sum(), query)[0] for out in (result, expected))
            torch.testing.assert_close(ours, stock, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_model_decodes_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_is_faster", lambda *shape: True)
    backbone = random_backbone(family)
    draft = MedusaDraft.from_backbone(backbone, 3)
    prompt, trees = [5, 9, 11, 3], (None, Tree.cartesian([3, 2]))
    expected = [Decoder(backbone, draft, tree).generate(prompt, 24).tokens for tree in trees]
    lengths: set[int] = set()
    original = attention.folded_head_attention
    monkeypatch.setattr(
        attention, "folded_head_attention", lambda *args: (lengths.add(args[0].shape[2]), original(*args))[1]
    )
    backbone.prepack_weights()
    assert backbone.attention == backbone.config._attn_implementation == FOLDED_HEADS
    assert [Decoder(backbone, draft, tree).generate(prompt, 24).tokens for tree in trees] == expected
    assert lengths == {1, 10}  # plain steps, and a tree of nine nodes and its root


def test_a_bfloat16_model_gives_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_is_faster", lambda *shape: True)
    backbone = random_backbone("llama", dtype=torch.bfloat16)
    tokens = torch.arange(6)[None]
    cache = backbone.new_cache(8)
    with torch.inference_mode():
        backbone.run(tokens[:, :5], cache=cache)
        cache.commit(5)
        position = torch.tensor([[5]])
        stock = backbone.run(tokens[:, 5:], positions=position, cache=cache).hidden
        backbone.prepack_weights()
        assert backbone.attention == backbone.config._attn_implementation == FOLDED_HEADS
        ours = backbone.run(tokens[:, 5:], positions=position, cache=cache).hidden
    torch.testing.assert_close(ours, stock, rtol=5e-2, atol=5e-2)


def test_it_is_not_used_if_slower_or_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_is_faster", lambda *shape: True)
    capped = random_backbone("gemma2", dtype=torch.bfloat16)
    capped.prepack_weights()
    assert capped.attention == capped.config._attn_implementation == "eager"
    monkeypatch.setattr(attention, "_is_faster", lambda *shape: False)
    slower = random_backbone("llama", dtype=torch.bfloat16)
    slower.prepack_weights()
    assert slower.attention == "sdpa"
