"""Small random target models of the supported families."""

import hashlib

import torch
import transformers
from transformers import AutoModelForCausalLM

from medusa_train.models.architecture import attention_of
from medusa_train.models.loading import model_without_weights
from medusa_train.models.target_model import TargetModel

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# Not tied where embeddings are scaled up: a random model would repeat its last token forever.
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-bias-tied": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3-longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 20,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 20,
            },
        },
    ),
    "llama3": (
        "LlamaConfig",
        {
            "head_dim": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 4.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.25,
        },
    ),
    "granite4": (  # dense, of the class of its hybrids
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 3,
            "mamba_n_heads": 8,
            "embedding_multiplier": 4.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.25,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "deepseek-v3": (  # latent attention: values narrower than keys
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "first_k_dense_replace": 3,
            "n_routed_experts": 0,
        },
    ),
    "mimo-v2": (  # sinks, and layers that differ in their heads
        "MiMoV2FlashConfig",
        {
            "head_dim": 16,
            "v_head_dim": 12,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense"] * 3,
            "n_routed_experts": 0,
        },
    ),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
}


class NoTokenizer:
    """A placeholder for tests that decode token ids only."""

    eos_token_id = None


def random_model(
    family: str, seed: int = 0, std: float = 0.35, **changes: object
) -> transformers.PreTrainedModel:
    """Build a random model with weights large enough that its greedy text varies."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**{**SHAPE, **extra, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, std)
    return model


def random_target_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object
) -> TargetModel:
    """Wrap `random_model` for tests that decode token ids only."""
    model = random_model(family, seed, **changes).to(dtype)
    return TargetModel(model.eval().requires_grad_(False), NoTokenizer(), family)


def digest_of(target_model: TargetModel) -> str:
    """A digest of a target model's configuration and weights, which its device does not change."""
    digest = hashlib.sha256(target_model.model.config.to_json_string().encode())
    for parameter in target_model.model.parameters():
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def without_weights(target_model: TargetModel) -> TargetModel:
    """Return a target model of the same shapes on the meta device."""
    empty = TargetModel(model_without_weights(target_model.model.config), None)
    bias = target_model.lm_head().bias
    if bias is not None:
        empty.output_embeddings.bias = torch.nn.Parameter(bias.to("meta"), requires_grad=False)
    return empty
