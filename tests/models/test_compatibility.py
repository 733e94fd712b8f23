"""Supported architectures pass; others are rejected with the reasons."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma3Config, LlamaConfig, LlamaForCausalLM

from medusa_train.errors import TargetModelError
from medusa_train.models.architecture import check_architecture, check_decodes
from medusa_train.models.compatibility import check_model
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.loading import resolve_target_model
from medusa_train.models.target_model import TargetModel
from tests.families import FAMILIES, NoTokenizer, random_target_model
from tests.model_types import tiny_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supported_families_pass_in_every_precision(family: str, dtype: torch.dtype) -> None:
    target_model = random_target_model(family, dtype=dtype)
    check_architecture(target_model.model.config, family)
    check_model(target_model)


REFUSED = {
    "BloomConfig": ["max_position_embeddings"],
    "MambaConfig": ["max_position_embeddings"],
    "RecurrentGemmaConfig": ["max_position_embeddings"],
    "T5Config": ["no language model of this type", "encoder-decoder"],
    "BartConfig": ["encoder-decoder"],
    "ViTConfig": ["no language model of this type"],
    "MllamaConfig": ["cross-attention"],
}


@pytest.mark.parametrize(("config", "words"), REFUSED.items())
def test_reasons_are_given_before_any_weight_is_loaded(
    tmp_path: Path, config: str, words: list[str]
) -> None:
    built = getattr(transformers, config)()
    built.save_pretrained(tmp_path)
    with pytest.raises(TargetModelError, match="is not supported") as caught:
        resolve_target_model(str(tmp_path))
    for word in (*words, built.model_type, "Llama, Mistral", "docs/reference/models.md"):
        assert word in str(caught.value)


def test_a_missing_feature_is_reported_without_its_consequences() -> None:
    with pytest.raises(TargetModelError) as caught:
        check_architecture(transformers.MllamaConfig(), "x")
    reasons = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert [reason.partition(":")[0] for reason in reasons] == ["  cross-attention"]


NO_TREES = {
    "recurrent state": [
        "Jamba",
        "Bamba",
        "Zamba2",
        "NemotronH",
        "GraniteMoeHybrid",
        "FalconH1",
        "Rwkv",
        "Qwen3Next",
        "Qwen3_5",
        "MiniMax",
        "KimiLinear",
    ],
    "chunked attention": ["Llama4Text", "Llama4"],
    "sparse attention": ["DeepseekV32", "GlmMoeDsa", "DeepseekV4"],
}


@pytest.mark.parametrize(
    ("family", "reason"),
    [(family, reason) for reason, families in NO_TREES.items() for family in families],
)
def test_models_whose_trees_cannot_be_verified_are_named_with_the_reason(
    family: str, reason: str
) -> None:
    config = getattr(transformers, f"{family}Config")()
    check_architecture(config, family)  # drafts can be trained
    with pytest.raises(TargetModelError, match=f"verified here \\({reason}: .* --serve"):
        check_decodes(config, family)


PASSING = [
    "Llama",
    "Mistral",
    "Mixtral",
    "Ministral3",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "Gemma",
    "Gemma2",
    "OPT",
    "Gemma3Text",
    "Gemma3",
    "Phi",
    "Phi3",
    "Phimoe",
    "SmolLM3",
    "Olmo",
    "Olmo2",
    "Olmo3",
    "Olmoe",
    "GPTNeoX",
    "GPT2",
    "Falcon",
    "StableLm",
    "Starcoder2",
    "Granite",
    "GraniteMoe",
    "Cohere",
    "Cohere2",
    "Glm",
    "Glm4",
    "Glm4Moe",
    "Nemotron",
    "Exaone4",
    "Helium",
    "SeedOss",
    "Dots1",
    "Ernie4_5",
    "HunYuanDenseV1",
    "VaultGemma",
    "Apertus",
    # latent attention
    "DeepseekV2",
    "DeepseekV3",
    "Glm4MoeLite",
    "LongcatFlash",
    "MiniCPM3",
    # sinks
    "GptOss",
    "GraniteSWA",
    # heads of several sizes
    "Gemma4Text",
    "Gemma3nText",
    "MiMoV2Flash",
    # text of models that read images
    "Mistral3",
    "Qwen2_5_VL",
    "Qwen3VL",
    "Glm4v",
    "InternVL",
]


@pytest.mark.parametrize("family", PASSING)
def test_configs_of_other_decoders_pass(family: str) -> None:
    config = getattr(transformers, f"{family}Config")()
    check_architecture(config, family)
    check_decodes(config, family)


def test_alibi_and_bidirectional_attention_are_rejected() -> None:
    with pytest.raises(TargetModelError, match="ALiBi"):
        check_architecture(transformers.FalconConfig(alibi=True, max_position_embeddings=64), "x")
    with pytest.raises(TargetModelError, match="later tokens"):
        check_architecture(transformers.Gemma3TextConfig(use_bidirectional_attention=True), "x")


class IgnoresTheMask(LlamaForCausalLM):
    """A model that uses its own causal mask instead of the one it is given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        forward = self.model.forward

        def ignoring(
            *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
        ) -> Any:
            return forward(*args, position_ids=position_ids, **kwargs)

        self.model.forward = ignoring  # type: ignore[method-assign]


class IgnoresPositions(LlamaForCausalLM):
    """A model that counts positions along the row instead of using the ids it is given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        forward = self.model.forward

        def ignoring(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        self.model.forward = ignoring  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [IgnoresTheMask, IgnoresPositions])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_cannot_verify_a_tree_is_rejected(
    kind: type[LlamaForCausalLM], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, eos_token_id=None)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.5)
    # passes without the fault
    check_model(TargetModel(LlamaForCausalLM(config).to(dtype).eval(), NoTokenizer()))
    with pytest.raises(TargetModelError, match="4-D attention mask") as caught:
        check_model(TargetModel(model.to(dtype).eval(), NoTokenizer()))
    assert kind.__name__ in str(caught.value)


class ExpertsIgnoreTheMask(transformers.MixtralForCausalLM):
    """A mixture of experts that uses its own causal mask."""

    def __init__(self, config: transformers.MixtralConfig) -> None:
        super().__init__(config)
        forward = self.model.forward
        self.model.forward = lambda *args, attention_mask=None, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts_that_cannot_verify_a_tree_is_rejected(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=1, num_local_experts=8, sliding_window=None, eos_token_id=None
    )
    check_model(
        TargetModel(transformers.MixtralForCausalLM(config).to(dtype).eval(), NoTokenizer())
    )
    faulty = TargetModel(ExpertsIgnoreTheMask(config).to(dtype).eval(), NoTokenizer())
    if dtype == torch.float32:
        for parameter in faulty.model.parameters():
            torch.nn.init.normal_(parameter, 0, 0.5)
    with pytest.raises(TargetModelError, match="4-D attention mask"):
        check_model(faulty)


@pytest.mark.parametrize(
    "family", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "Glm4Moe", "Phimoe"]
)
def test_experts_of_every_family_are_probed_in_half_precision(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(
        **SMALL,
        num_key_value_heads=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        eos_token_id=None,
        pad_token_id=None,
    )
    check_model(
        TargetModel(
            getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval(),
            NoTokenizer(),
        )
    )


EXPERTS_IN_GROUPS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "n_routed_experts": 16,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 8,
        "moe_intermediate_size": 16,
    },
    "gpt_oss": {},
}


@pytest.mark.parametrize("model_type", EXPERTS_IN_GROUPS)
def test_as_few_experts_are_probed_as_there_are(model_type: str) -> None:
    model = tiny_model(model_type, 64, **EXPERTS_IN_GROUPS[model_type])
    check_model(TargetModel(model.to(torch.bfloat16).eval(), NoTokenizer()))


def test_a_forward_without_position_ids_is_rejected() -> None:
    class NoPositions(LlamaForCausalLM):
        pass

    class Body(transformers.LlamaModel):
        def forward(
            self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None
        ) -> Any:  # type: ignore[override]
            raise AssertionError("not called")

    model = NoPositions(LlamaConfig(**SMALL, eos_token_id=None))
    model.model.__class__ = Body
    with pytest.raises(TargetModelError, match="takes no position_ids"):
        check_model(TargetModel(model, NoTokenizer()))


def test_of_a_model_that_reads_images_the_text_part_is_used() -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = random_target_model("gemma3").config.to_dict()
    config = Gemma3Config(
        text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8}
    )
    check_architecture(config, "gemma3")
    target_model = TargetModel(
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval(), None
    )
    check_model(target_model)
    assert len(Eagle3Draft.from_target_model(target_model).lm_heads) == 1


def test_an_exception_of_an_unknown_family_becomes_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    unexpected = KeyError("no such layer")
    monkeypatch.setattr(target_model, "run", Mock(side_effect=unexpected))
    with pytest.raises(TargetModelError, match=r"is not supported:\n  KeyError .*no such layer"):
        check_model(target_model)


class ReadsAhead(LlamaForCausalLM):
    """A model whose states depend on the last token of the row."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        forward = self.model.forward

        def reading_ahead(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            out.last_hidden_state = out.last_hidden_state + out.last_hidden_state[:, -1:]
            return out

        self.model.forward = reading_ahead  # type: ignore[method-assign]


def test_a_model_without_trees_that_reads_the_padding_is_rejected() -> None:
    config = LlamaConfig(**SMALL, eos_token_id=None)
    for kind in (LlamaForCausalLM, ReadsAhead):
        target_model = TargetModel(kind(config).eval(), NoTokenizer())
        target_model.tree_unsupported_reason = "recurrent state"
        if kind is LlamaForCausalLM:
            check_model(target_model)
            continue
        with pytest.raises(TargetModelError, match="depends on later tokens of the row"):
            check_model(target_model)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_named(name: str) -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    with torch.no_grad():
        dict(target_model.model.named_parameters())[name][0, 0] = float("nan")
    with pytest.raises(TargetModelError, match=f"values of {re.escape(name)} is NaN or infinite"):
        check_model(target_model)


def test_logits_that_overflow_are_named() -> None:
    target_model = random_target_model("llama", dtype=torch.float16)
    with torch.no_grad():
        target_model.model.get_output_embeddings().weight.fill_(60000.0)
        target_model.model.model.norm.weight.fill_(100.0)
    with pytest.raises(TargetModelError, match="not finite in float16, though its weights are"):
        check_model(target_model)
