"""The bytes of a decoding step and the cheaper settings that `--inspect` names, by hand for small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from medusa_train.config.schema import TrainConfig
from medusa_train.training.heads_cost import cheaper_settings, count_step_bytes
from medusa_train.training.memory import _NF4
from tests.families import random_backbone

HIDDEN, INNER, LAYERS, VOCAB = 16, 32, 3, 100
PROJECTIONS = HIDDEN * HIDDEN * 2 + 2 * HIDDEN * 8 + 3 * HIDDEN * INNER  # q, o; k, v; MLP
BODY = LAYERS * (PROJECTIONS + 2 * HIDDEN) + HIDDEN  # and norms
BLOCK = HIDDEN * HIDDEN + HIDDEN


def shape(*, tied: bool = True) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


def config(**keys: Any) -> TrainConfig:
    return TrainConfig(base_model="x", datasets=[{"path": "y"}], **{"medusa_num_heads": 2, **keys}).resolved()


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_step_reads_every_matrix_once_and_looks_tokens_up(tied: bool) -> None:
    size = count_step_bytes(config(), shape(tied=tied), torch.bfloat16)
    assert size.backbone == 2 * (BODY + VOCAB * HIDDEN)


def test_a_quantized_backbone_makes_the_heads_larger_beside_it() -> None:
    size = count_step_bytes(config(load_in_4bit=True), shape(), torch.bfloat16)
    linears, rest = LAYERS * PROJECTIONS, BODY - LAYERS * PROJECTIONS + VOCAB * HIDDEN
    assert size.backbone == round(linears * _NF4 + 2 * rest)
    assert size.draft == 2 * 2 * (BLOCK + VOCAB * HIDDEN)


@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        ({}, 2 * (BLOCK + VOCAB * HIDDEN)),
        ({"medusa_vocab_size": 20}, 2 * (BLOCK + 20 * HIDDEN)),
        ({"medusa_share_lm_head": True}, 2 * BLOCK + VOCAB * HIDDEN),
        ({"medusa_share_lm_head": True, "medusa_vocab_size": 20}, 2 * BLOCK + 20 * HIDDEN),
        ({"medusa_markov_rank": 8}, 2 * (BLOCK + VOCAB * HIDDEN)),  # a few rows
    ],
)
def test_heads_read_a_matrix_each_or_a_shared_one_once(keys: dict[str, Any], weights: int) -> None:
    assert count_step_bytes(config(**keys), shape(), torch.float32).draft == 4 * weights


def test_suggestions_are_smaller_than_what_is_configured() -> None:
    def suggested(vocab_size: int, **keys: Any) -> list[str]:
        return list(cheaper_settings(config(**keys), vocab_size))

    sizes = [f"medusa_vocab_size: {size}" for size in (32768, 16384, 8192)]
    shared = "medusa_share_lm_head: true"
    assert suggested(49152) == [*sizes, shared]
    assert suggested(32768) == [*sizes[1:], shared]
    assert suggested(49152, medusa_vocab_size=16384) == [sizes[2], shared]
    assert suggested(49152, medusa_share_lm_head=True) == sizes
    assert suggested(4096) == [shared]
    # heads without blocks would have no parameters left, and a trained lm_head cannot be shared
    assert suggested(4096, medusa_num_layers=0) == []
    assert suggested(4096, recipe="medusa2", adapter="lora", lora_target_linear=True) == []
    assert suggested(4096, recipe="medusa2", adapter="lora", lora_target_modules=["q_proj"]) == [shared]


@pytest.mark.parametrize("draft", ["hydra", "amphista"])
def test_other_drafts_have_smaller_vocabularies_or_fewer_heads(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_train.training.heads_cost.VOCABULARIES", (1000, 40, 20))
    cfg = config(draft=draft)
    cheaper = cheaper_settings(cfg, VOCAB)
    assert list(cheaper) == [f"{draft}.vocab_size: 40", f"{draft}.vocab_size: 20", f"{draft}.num_heads: 2"]
    full, part, less, half = (count_step_bytes(one, shape(), torch.float32).draft for one in (cfg, *cheaper.values()))
    assert full - part == 4 * 4 * 60 * HIDDEN
    assert part - less == 4 * 4 * 20 * HIDDEN
    assert half < full - 2 * 4 * VOCAB * HIDDEN
    smallest = config(draft=draft, **{draft: {"num_heads": 1, "vocab_size": 20}})
    assert cheaper_settings(smallest, VOCAB) == {}


def test_kangaroo_has_nothing_to_suggest() -> None:
    assert cheaper_settings(config(draft="kangaroo"), VOCAB) == {}


def test_every_family_has_a_plain_step() -> None:
    for family in ("llama", "llama-bias-tied", "gemma2"):
        backbone = random_backbone(family)
        size = count_step_bytes(config(), backbone.config, torch.float32)
        parameters = {id(p): p for p in backbone.model.parameters()}
        tied = backbone.model.get_input_embeddings().weight is backbone.model.get_output_embeddings().weight
        looked_up = 0 if tied else backbone.model.get_input_embeddings().weight.numel()
        assert size.backbone == 4 * (sum(p.numel() for p in parameters.values()) - looked_up)
