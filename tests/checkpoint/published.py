"""Drafts as their authors publish them: the entries of config.json and the names, dtypes and files
of the tensors, at the sizes of a small target model and with random numbers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Published:
    """A draft of EAGLE-3.

    Attributes:
        config: entries at the top; `layer`: those of the layer.
        nested: whether the layer's entries stand in transformer_layer_config.
        prefix: of the layer's tensors. file: with the weights.
        without: tensors that the file lacks.
        qk_norm: whether the attention norms queries and keys.
    """

    config: Mapping[str, Any]
    layer: Mapping[str, Any]
    nested: bool = False
    prefix: str = "midlayer."
    file: str = "model.safetensors"
    dtype: torch.dtype = torch.bfloat16
    without: tuple[str, ...] = ("embed_tokens.weight",)
    qk_norm: bool = False


def speculators(version: str, **entries: Any) -> dict[str, Any]:
    """The entries at the top that speculators writes."""
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "base_model_ep_plan": None,
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/verifier"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": version,
        "target_hidden_size": None,
        "torch_dtype": "float32",
        "transformers_version": "4.55.2",
        **entries,
    }


#: Entries of transformer_layer_config beside sizes and rotary angles.
SPECULATORS_LAYER = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "use_cache": True,
}
LLAMA3_ANGLES = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
AUTHORS_LAYER = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
}

EAGLE3: dict[str, Published] = {
    # Llama 3.1 8B and others of 2025: its own copy of the embeddings, float32
    "speculators-0.2": Published(
        speculators("0.2.0.dev11", norm_before_residual=True),
        {**SPECULATORS_LAYER, **LLAMA3_ANGLES},
        nested=True,
        prefix="layers.0.",
        dtype=torch.float32,
        without=(),
    ),
    # Qwen3, with the layer of Llama; layers are named null
    "speculators-0.5": Published(
        speculators(
            "0.5.0.dev5",
            norm_before_residual=True,
            norm_before_fc=False,
            eagle_aux_hidden_state_layer_ids=None,
            embed_requires_grad=False,
            tie_word_embeddings=False,
        ),
        {**SPECULATORS_LAYER, "rope_scaling": None, "rope_theta": 10000.0},
        nested=True,
        prefix="layers.0.",
        without=(),
    ),
    # the default of 2026: the layer of Qwen3, and EAGLE 3.1
    "speculators-qwen3": Published(
        speculators(
            "0.7.0",
            norm_before_residual=False,
            fc_norm=True,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=[2, 4, 6],
        ),
        {
            **SPECULATORS_LAYER,
            "model_type": "qwen3",
            "layer_types": ["full_attention"],
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "sliding_window": None,
            "use_sliding_window": False,
        },
        nested=True,
        prefix="layers.0.",
        without=("t2d",),
        qk_norm=True,
    ),
    # EAGLE's authors, and the copies of SGLang: a pickle of float16
    "authors": Published(
        {"architectures": ["LlamaForCausalLM"]},
        AUTHORS_LAYER,
        file="pytorch_model.bin",
        dtype=torch.float16,
    ),
    # SpecForge: outputs of these layers, counted from 0
    "specforge": Published(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
                "use_aux_hidden_state": True,
            },
        },
        {**AUTHORS_LAYER, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None},
    ),
    # NVIDIA's Model Optimizer, which writes the layers in the order of a Python set
    "modelopt": Published(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 5, 3],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": None,
            },
        },
        {
            **AUTHORS_LAYER,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 2048,
            },
        },
    ),
    # all tokens, by the target model's lm_head
    "without-lm-head": Published(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None},
        {**AUTHORS_LAYER, "rope_theta": 500000.0},
        without=("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"),
    ),
}


SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layer, which differ from a small target model's heads and MLP."""

    vocab_size: int
    hidden_size: int
    draft_vocab_size: int
    intermediate_size: int = 40
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16

    def entries(self) -> dict[str, int]:
        """The entries of config.json."""
        return {key: getattr(self, key) for key in SIZE_KEYS}


def write_eagle3(directory: Path, published: Published, sizes: Sizes) -> dict[str, Tensor]:
    """Write the files of such a draft; return its tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    layer = {**published.layer, **sizes.entries()}
    config: dict[str, Any] = {"draft_vocab_size": sizes.draft_vocab_size, **published.config}
    if published.nested:
        config["transformer_layer_config"] = layer
    else:
        config = {**layer, **config}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(published, sizes)
    path = directory / published.file
    if path.suffix == ".safetensors":
        save_file(tensors, str(path), metadata={"format": "pt"})
    else:
        torch.save(tensors, path)
    return tensors


def random_tensors(published: Published, sizes: Sizes) -> dict[str, Tensor]:
    """All tensors of the draft but for those that its file lacks."""
    generator = torch.Generator().manual_seed(0)
    d = sizes.hidden_size
    inner = sizes.num_attention_heads * sizes.head_dim
    inner_kv = sizes.num_key_value_heads * sizes.head_dim
    prefix = published.prefix
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (sizes.vocab_size, d),
        "fc.weight": (d, 3 * d),
        "norm.weight": (d,),
        "lm_head.weight": (sizes.draft_vocab_size, d),
        f"{prefix}input_layernorm.weight": (d,),
        f"{prefix}hidden_norm.weight": (d,),
        f"{prefix}post_attention_layernorm.weight": (d,),
        f"{prefix}self_attn.q_proj.weight": (inner, 2 * d),
        f"{prefix}self_attn.k_proj.weight": (inner_kv, 2 * d),
        f"{prefix}self_attn.v_proj.weight": (inner_kv, 2 * d),
        f"{prefix}self_attn.o_proj.weight": (d, inner),
        f"{prefix}mlp.gate_proj.weight": (sizes.intermediate_size, d),
        f"{prefix}mlp.up_proj.weight": (sizes.intermediate_size, d),
        f"{prefix}mlp.down_proj.weight": (d, sizes.intermediate_size),
    }
    if published.qk_norm:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (sizes.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (sizes.head_dim,)
    if published.config.get("fc_norm"):
        for i in range(3):
            shapes[f"fc_norm.{i}.weight"] = (d,)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(*shape, generator=generator)
        if len(shape) == 1:
            values = 1 + 0.2 * values
        else:
            values = values * shape[-1] ** -0.5
        tensors[name] = values.to(published.dtype)
    chosen = torch.randperm(sizes.vocab_size, generator=generator)[: sizes.draft_vocab_size]
    drafted = chosen.sort().values
    tensors["d2t"] = drafted - torch.arange(sizes.draft_vocab_size)
    tensors["t2d"] = torch.zeros(sizes.vocab_size, dtype=torch.bool)
    tensors["t2d"][drafted] = True
    return {name: tensor for name, tensor in tensors.items() if name not in published.without}
