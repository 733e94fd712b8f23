"""The target model: finding models, rejecting unsupported ones, masks with sliding windows, and auxiliary
states.
"""

from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, LlamaConfig, LlamaForCausalLM

from medusa_train.errors import TargetModelError
from medusa_train.models.compatibility import check_model
from medusa_train.models.hf_config import context_length
from medusa_train.models.loading import resolve_target_model
from medusa_train.models.target_model import TargetModel
from tests.families import FAMILIES, NoTokenizer, random_model, random_target_model
from tests.models.test_compatibility import SMALL


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_of_a_packed_row_gets_the_models_states(family: str) -> None:
    """Sliding windows included: the document is longer than the windows, and a 4-D mask replaces
    the model's.
    """
    target_model = random_target_model(family)
    tokens = torch.arange(2, 28)[None]
    positions = torch.cat([torch.arange(24), torch.arange(2)])[None]
    segments = torch.tensor([[0] * 24 + [1] * 2])
    with torch.no_grad():
        ours = target_model.run(tokens, positions=positions, segments=segments).final[:, :24]
        assert torch.allclose(ours, target_model.run(tokens[:, :24]).final, atol=1e-9)


def test_a_mistyped_relative_path_is_not_taken_for_a_hub_name() -> None:
    with pytest.raises(
        TargetModelError, match=r"data/tinny: no such directory.*did you mean data/tiny\?"
    ):
        resolve_target_model("data/tinny")


def test_a_missing_directory_and_an_unreachable_hub_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TargetModelError, match="no such directory"):
        resolve_target_model(str(tmp_path / "nothing"))
    with pytest.raises(TargetModelError, match=r"no config\.json"):
        resolve_target_model(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TargetModelError, match="hf download somebody/some-model"):
        resolve_target_model("somebody/some-model")
    with pytest.raises(
        TargetModelError, match=r"models/some-model: no such directory.*make smollm2-model"
    ):
        resolve_target_model("models/some-model")


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetModelError, match=r"cannot read config\.json"):
        resolve_target_model(str(tmp_path))


def test_unknown_transforms_of_logits_are_rejected() -> None:
    class Strange(LlamaForCausalLM):
        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.5
            return out

    config = LlamaConfig(**SMALL, eos_token_id=None)
    with pytest.raises(TargetModelError, match="its logits are not lm_head"):
        check_model(TargetModel(Strange(config), NoTokenizer()))


def test_a_model_without_a_decoder_is_rejected() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.base_model_prefix = "thinker"
    del model.model
    with pytest.raises(
        TargetModelError, match="LlamaForCausalLM is not supported: it has no decoder"
    ):
        TargetModel(model, NoTokenizer())


def test_layers_that_trees_do_not_support_have_a_reason() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    for kind, words in (
        ("chunked_attention", "chunked attention: "),
        ("new", "layers of type new"),
    ):
        model.config.layer_types = [kind]
        unsupported_reason = TargetModel(model, NoTokenizer()).tree_unsupported_reason
        assert unsupported_reason is not None
        assert unsupported_reason.startswith(words)


def test_a_target_model_is_frozen_and_has_the_models_sizes() -> None:
    target_model = random_target_model("llama")
    assert not any(p.requires_grad for p in target_model.model.parameters())
    assert not target_model.model.training
    assert (
        target_model.hidden_size,
        target_model.vocab_size,
        target_model.num_layers,
        target_model.max_context,
    ) == (32, 61, 3, 128)


def test_angles_stay_exact_in_another_dtype() -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    rotary, positions = target_model.body.rotary_emb, torch.tensor([[100_000]])
    exact = rotary(torch.zeros(1), positions)[0]
    converted = target_model.to_dtype("bfloat16")
    assert converted.dtype == torch.bfloat16
    assert {p.dtype for p in converted.model.parameters()} == {torch.bfloat16}
    assert torch.equal(rotary(torch.zeros(1), positions)[0], exact)


def test_a_stray_window_in_a_llama_config_is_ignored() -> None:
    config = LlamaConfig(**SMALL)
    config.sliding_window = 3
    assert set(TargetModel(LlamaForCausalLM(config), NoTokenizer()).layer_types) == {
        "full_attention"
    }
    assert set(random_target_model("mistral-window").layer_types) == {"sliding_attention"}


def test_a_model_without_a_context_length_is_rejected() -> None:
    with pytest.raises(TargetModelError, match="max_position_embeddings"):
        context_length(BloomConfig())
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    assert context_length(LlamaConfig(max_position_embeddings=128, rope_parameters=scaled)) == 512
    scaled |= {"rope_type": "yarn", "original_max_position_embeddings": 100}
    assert context_length(LlamaConfig(max_position_embeddings=128, rope_parameters=scaled)) == 400


@pytest.mark.parametrize("family", FAMILIES)
def test_early_states_and_embeddings_are_the_models(family: str) -> None:
    target_model = random_target_model(family)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    with torch.no_grad():
        expected = target_model.model(
            tokens, use_cache=False, output_hidden_states=True
        ).hidden_states
        hooks = [
            (len(layer._forward_hooks), len(layer._forward_pre_hooks))
            for layer in target_model.body.layers
        ]
        aux = target_model.run(tokens, aux_layers=(1, 2)).aux
        assert torch.equal(aux, torch.cat([expected[1], expected[2]], dim=-1))
        assert torch.allclose(target_model.embedding()(tokens), expected[0], rtol=1e-6)
    assert target_model.run(tokens).aux is None
    assert hooks == [
        (len(layer._forward_hooks), len(layer._forward_pre_hooks))
        for layer in target_model.body.layers
    ]
    with pytest.raises(TargetModelError, match="no layer 4: "):
        target_model.run(tokens, aux_layers=(4,))


def test_transformed_embeddings_are_rejected() -> None:
    class Strange(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.model.layers[0].register_forward_pre_hook(
                lambda _, args, named: ((args[0].roll(1, -1), *args[1:]), named),
                with_kwargs=True,
                prepend=True,
            )

    config = LlamaConfig(**SMALL)
    with pytest.raises(TargetModelError, match="not a scaled token embedding"):
        TargetModel(Strange(config), NoTokenizer()).embedding()


def test_a_target_model_leaves_the_model_that_it_wraps_as_it_is() -> None:
    model = random_model("llama").train()
    TargetModel(model, NoTokenizer())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
