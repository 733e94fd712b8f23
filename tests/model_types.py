"""Tiny random models of the types of transformers that drafts are trained for."""

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from medusa_train.models.architecture import attention_of, auto_class

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
#: Types whose token trees are verified, with entries of their configs.
DECODED: dict[str, dict[str, Any]] = {
    **{
        model_type: {}
        for model_type in (
            "llama",
            "qwen2",
            "qwen3",
            "qwen2_moe",
            "qwen3_moe",
            "mixtral",
            "mistral",
            "ministral3",
            "glm",
            "glm4",
            "glm4_moe",
            "granite",
            "granitemoe",
            "olmo2",
            "olmo3",
            "exaone4",
            "exaone_moe",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "hy_v3",
            "minimax_m2",
            "ernie4_5",
            "ernie4_5_moe",
            "seed_oss",
            "smollm3",
            "phi3",
            "phimoe",
            "gemma2",
            "cohere",
            "cohere2",
            "cohere2_moe",
            "nemotron",
            "apertus",
            "arcee",
            "afmoe",
            "dots1",
            "laguna",
            "solar_open",
        )
    },
    "granitemoehybrid": {  # dense
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * 4,
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 4},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 320,
    },
    # heads of two widths; shared between layers; of two numbers
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 320,
        "pad_token_id": 0,
    },
    "mimo_v2_flash": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    # latent attention
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "minicpm3": {},
    # sinks
    "gpt_oss": {},
    "granite_swa": {},
    # text of models that also read images
    "mistral3": {},
    "qwen2_5_vl": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "glm4v": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "internvl": {},
    "gemma4": {},
}
#: Types whose token trees cannot be verified: recurrent, chunked and sparse layers.
TRAINED: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "falcon_h1": {"mamba_n_heads": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention", "moe"]},
    "minimax": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {},
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "deepseek_v4": {},
}

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "query_pre_attn_scalar": 8,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 16,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    # recurrent, chunked and sparse layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "attention_chunk_size": 8,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    # tokens
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 8,
    "out_hidden_size": 32,
}


def tiny_config(model_type: str, vocab_size: int, **changes: Any) -> Any:
    """Return a config of a type with small sizes; of a type that reads images, of both parts."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config()
    if text is not default:
        tiny = tiny_config(text.model_type, vocab_size, **changes).to_dict()
        return kind(text_config=tiny, vision_config=_VISION, tie_word_embeddings=False)
    keys = default.to_dict()
    sizes = {key: value for key, value in _SIZES.items() if key in keys}
    if "qk_rope_head_dim" in sizes:  # latent attention has as many heads of keys as of queries
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    of_type = {**DECODED, **TRAINED}
    sizes |= of_type.get(model_type, of_type.get(model_type.removesuffix("_text"), {}))
    return kind(**{**sizes, "vocab_size": vocab_size, **changes})


def tiny_model(model_type: str, vocab_size: int, **changes: Any) -> transformers.PreTrainedModel:
    """Return a random model of a type, with weights large enough that its greedy text varies."""
    config = tiny_config(model_type, vocab_size, **changes)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, attn_implementation=attention_of(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model
