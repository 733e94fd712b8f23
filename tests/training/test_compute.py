"""The arithmetic that `--inspect` counts, by hand for a small model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, GPTNeoXConfig, LlamaConfig, PretrainedConfig

from medusa_train.config.schema import TrainConfig
from medusa_train.training.compute import UTILIZATION, estimate_hours, estimate_operations

HIDDEN, INNER, LAYERS, VOCAB, WIDTH = 16, 32, 3, 100, 64
SHAPE = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LAYER = HIDDEN * HIDDEN * 2 + 2 * HIDDEN * 8 + 3 * HIDDEN * INNER + 2 * HIDDEN  # q, o; k, v; MLP; norms
PASS = 1000 * LAYERS * (2 * LAYER + 4 * HIDDEN * WIDTH / 2)
HEAD = HIDDEN * HIDDEN + HIDDEN + VOCAB * HIDDEN
LM_HEAD = 2 * VOCAB * HIDDEN * 600


def operations(epochs: float = 1.0, **keys: Any) -> float:
    cfg = TrainConfig(base_model="x", datasets=[{"path": "y"}], medusa_num_heads=2, **keys)
    return estimate_operations(cfg, SHAPE, tokens=1000, supervised=600, width=WIDTH, epochs=epochs)


def test_a_frozen_backbone_runs_forward_and_heads_both_ways() -> None:
    assert operations() == pytest.approx(PASS + 6 * 2 * HEAD * 600)
    assert operations(epochs=2.5) == pytest.approx(2.5 * operations())


def test_states_on_disk_save_the_backbone_after_the_first_epoch() -> None:
    assert operations(epochs=3, cache_hidden_states=True) == pytest.approx(PASS + 3 * 6 * 2 * HEAD * 600)


def test_joint_training_adds_the_teacher_the_recomputation_and_the_backward_pass() -> None:
    heads = 6 * 2 * HEAD * 600
    adapter = {"recipe": "medusa2", "adapter": "lora", "medusa_self_distillation": True}
    assert operations(**adapter) == pytest.approx(3 * PASS + 3 * LM_HEAD + heads)
    assert operations(**adapter, gradient_checkpointing=True) == pytest.approx(4 * PASS + 3 * LM_HEAD + heads)
    assert operations(recipe="medusa2") == pytest.approx(3 * PASS + 3 * LM_HEAD + heads)  # weights of all layers


def test_a_shared_lm_head_is_multiplied_with_but_not_trained() -> None:
    blocks = 2 * (HIDDEN * HIDDEN + HIDDEN)
    shared = 4 * VOCAB * HIDDEN  # forward, and backward for the heads' states
    assert operations(medusa_share_lm_head=True) == pytest.approx(PASS + (6 * blocks + 2 * shared) * 600)
    reduced = operations(medusa_share_lm_head=True, medusa_vocab_size=20)
    assert reduced == pytest.approx(PASS + (6 * blocks + 2 * shared / 5) * 600)
    adapter = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 8 + 2 * HIDDEN
    kangaroo = operations(draft="kangaroo", kangaroo={"num_heads": 6})
    assert kangaroo == pytest.approx(PASS + LM_HEAD + (6 * adapter + shared) * 600)


def test_a_markov_bias_is_a_product_per_head_after_a_lookup() -> None:
    added = operations(medusa_markov_rank=4) - operations()
    assert added == pytest.approx(6 * 2 * 4 * VOCAB * 600)
    reduced = {"medusa_vocab_size": 20}
    added = operations(**reduced, medusa_markov_rank=4) - operations(**reduced)
    assert added == pytest.approx(6 * 2 * 4 * 20 * 600)


def test_hours_are_operations_over_the_assumed_share_of_the_rate() -> None:
    assert estimate_hours(3600 * UTILIZATION * 1e12, 1e12) == pytest.approx(1.0)


@pytest.mark.parametrize("family", [FalconConfig(alibi=False), GPTNeoXConfig()], ids=lambda config: config.model_type)
def test_layers_are_counted_under_any_name(family: PretrainedConfig) -> None:
    """Falcon's list of layers is called `h`."""
    family.update({"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64})
    family.update({"intermediate_size": 64, "ffn_hidden_size": 64})
    cfg = TrainConfig(base_model="x", datasets=[{"path": "y"}])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family)
    layers = sum(p.numel() for name, p in model.named_parameters() if ".h." in name or ".layers." in name)
    total = estimate_operations(cfg, family, tokens=10, supervised=0, width=8, epochs=1)
    assert total == 10 * (2 * layers + 4 * 2 * 32 * 8 / 2)
