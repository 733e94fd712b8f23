"""Say for which backbones vLLM can draft with EAGLE-3."""

from __future__ import annotations

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.models.loading import resolve_backbone

VLLM_VERSION = "0.32"
#: Classes of models that are `SupportsEagle3` in this version: they give an EAGLE-3 draft the states
#: of inner layers.
EAGLE3_ARCHITECTURES = frozenset(
    (
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "Cohere2MoeForCausalLM",
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "MiniCPM3ForCausalLM",
        "MiniCPMForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "Mistral3ForConditionalGeneration",
        "NemotronHForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    )
)


def vllm_eagle3_warnings(paths: ModelPaths) -> list[str]:
    """Warn of a backbone from which vLLM cannot take the states that an EAGLE-3 draft reads."""
    _, config = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    architectures = getattr(config, "architectures", None) or []
    if not architectures or not EAGLE3_ARCHITECTURES.isdisjoint(architectures):
        return []
    return [
        f"vLLM {VLLM_VERSION} cannot draft with EAGLE-3 for {architectures[0]}: its class of that"
        " model gives no states of inner layers (SupportsEagle3). A later version may; export"
        " Medusa heads otherwise"
    ]
