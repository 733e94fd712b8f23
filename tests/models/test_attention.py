"""Documents kept apart by their bounds: as by a mask, and refused where they are not."""

from __future__ import annotations

import pytest
import torch

from medusa_train.data.batch import Batch, collate
from medusa_train.errors import BackboneError
from medusa_train.models.attention import document_bounds, flash_obstacle
from medusa_train.models.backbone import Backbone
from tests.families import random_backbone
from tests.models.test_packing_mask import documents
from tests.varlen import APART, LEAKING


def states(backbone: Backbone, batch: Batch) -> torch.Tensor:
    return backbone.run(batch.tokens, positions=batch.positions, segments=batch.segments).hidden


def test_the_bounds_by_hand() -> None:
    bounds = document_bounds(torch.tensor([[0, 0, 0, 1, -1], [0, 0, 1, 1, 1]]))
    assert bounds["cu_seq_lens_q"].tolist() == [0, 3, 4, 5, 7, 10]
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["cu_seq_lens_k"] is bounds["cu_seq_lens_q"]
    assert bounds["max_length_q"] == bounds["max_length_k"] == 3
    assert document_bounds(torch.zeros(2, 3, dtype=torch.long))["cu_seq_lens_q"].tolist() == [0, 3, 6]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_bounds_keep_documents_apart_as_a_mask_does(family: str) -> None:
    backbone = random_backbone(family)
    batch = collate(documents(), 0)
    real = batch.segments >= 0
    with torch.no_grad():
        masked = states(backbone, batch)
        backbone.use_varlen(APART)
        assert backbone.config._attn_implementation == APART
        torch.testing.assert_close(states(backbone, batch)[real], masked[real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_under_a_mask_also_when_recomputed(recompute: bool) -> None:
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


def test_passes_with_a_mask_or_a_cache_stay_with_the_models_own_attention() -> None:
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


def test_an_attention_that_lets_documents_leak_is_refused() -> None:
    backbone = random_backbone("llama")
    batch = collate(documents(), 0)
    with torch.no_grad():
        masked = states(backbone, batch)
        with pytest.raises(BackboneError, match="LlamaForCausalLM lets packed documents see each other"):
            backbone.use_varlen(LEAKING)
        assert not backbone.varlen
        assert torch.equal(states(backbone, batch), masked)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"device": "cpu"}, "no kernels for a cpu"),
        ({"installed": False}, "not installed"),
        ({"dtype": torch.float32}, "does not compute in float32"),
        ({"capped": True}, "caps its attention scores"),
        ({"known": False}, "architecture does not take"),
    ],
)
def test_what_stands_in_the_way_of_flash_attention(changed: dict, reason: str | None) -> None:
    facts = {"device": "cuda", "dtype": torch.bfloat16, "capped": False, "known": True, "installed": True, **changed}
    found = flash_obstacle(**facts)
    assert found is None if reason is None else reason in str(found)
