"""Warn of target models for which vLLM cannot draft with EAGLE-3."""

from __future__ import annotations

from typing import Any

VLLM_VERSION = "0.32"
#: This version's own model classes that are not `SupportsEagle3`: they do not pass the states of
#: inner layers to an EAGLE-3 draft. Models without a class in vLLM (SmolLM3, OLMo 2) are not listed,
#: because they run on its Transformers backend, which passes these states.
WITHOUT_EAGLE3 = frozenset(
    (
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "DbrxForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoeForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "GPT2LMHeadModel",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HYV3ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "Lfm2ForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "OPTForCausalLM",
        "OlmoeForCausalLM",
        "PhiMoEForCausalLM",
        "Qwen2MoeForCausalLM",
        "StableLmForCausalLM",
    )
)


def vllm_eagle3_warnings(config: Any) -> list[str]:
    """Return a warning if vLLM cannot read the states that an EAGLE-3 draft needs from a target
    model.

    Args:
        config: the target model's transformers configuration.
    """
    architectures = getattr(config, "architectures", None) or []
    without = [name for name in architectures if name in WITHOUT_EAGLE3]
    if not without:
        return []
    return [
        f"vLLM {VLLM_VERSION} cannot draft with EAGLE-3 for {without[0]} by its own class of that"
        " model, which gives no states of inner layers (SupportsEagle3). Start the server with"
        " --model-impl transformers: that backend gives them, if no layer is recurrent. Medusa"
        " heads need no such states"
    ]
