"""EAGLE-3's decoder layer: Llama's, except that its attention reads a state and the embedding of
the next token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from medusa_train.models.hf_config import head_dim, key_value_heads, largest
from medusa_train.models.precision import exact_buffers
from medusa_train.trees.transformers_adapters import PassCache

#: Cosines and sines of rotary positions.
Angles = tuple[Tensor, Tensor]
#: Runs an attention module over [B, q, 2 d] with these angles, -> [B, q, d].
Attend = Callable[[LlamaAttention | Qwen3Attention, Tensor, Angles], Tensor]


class Eagle3Layer(nn.Module):
    """Llama's decoder layer, except that its attention reads a state x and an embedding e (EAGLE-3,
    Inference Pipeline).

        x = x + Attention([norm_e(e) ; norm_x(x)])       q, k, v take 2 d inputs; o returns d
        x = x + MLP(norm(x))

    Its weights have the names that vLLM and SGLang use in their drafts.

    Args:
        config: see `layer_config`.
        norm_before_residual: the first line adds to norm_x(x) instead of x.
        qk_norm: the attention norms the queries and keys of each head before rotating them, as
            Qwen3's does.
    """

    def __init__(
        self, config: LlamaConfig, norm_before_residual: bool = False, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)  # norm_e
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)  # norm_x
        self.self_attn: LlamaAttention | Qwen3Attention
        if qk_norm:
            self.self_attn = Qwen3Attention(config, layer_idx=0)
        else:
            self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)
        self.rotary_emb = RotaryEmbedding(config)
        self.window: int | None = None  # no sliding window, see `DraftLayer.window`
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def init_from(self, source: nn.Module) -> None:
        """Copy the weights of a layer of the target model where shapes fit.

        In the attention's projections, they go to the columns that read x; the columns that read e
        keep their random values.
        """
        # 1. the layer's weights, except integers and FP8, whose scales are separate parameters
        weights: dict[str, Tensor] = {}
        for name, source_weight in source.named_parameters():
            if source_weight.is_floating_point() and source_weight.itemsize > 1:
                weights[name] = source_weight
        # 2. copy matrices and biases of the same name
        for name, parameter in self.named_parameters():
            if name not in weights or "norm" in name:
                continue
            weight = weights[name]
            part: Tensor = parameter
            if parameter.dim() == 2:
                part = parameter[:, -weight.shape[-1] :]
            if part.shape == weight.shape:
                part.copy_(weight)
        # 3. copy the norms, whose names differ between families: Gemma 2 and 3 also norm the
        # outputs of attention and MLP, and OLMo 2 norms only the outputs
        norms_outputs = hasattr(source, "post_feedforward_layernorm")
        before_mlp = "pre_feedforward_layernorm" if norms_outputs else "post_attention_layernorm"
        copy_norm(self.hidden_norm, getattr(source, "input_layernorm", None))
        copy_norm(self.post_attention_layernorm, getattr(source, before_mlp, None))

    def forward(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Run the layer, [B, q, d] and [B, q, d] -> [B, q, d].

        Args:
            embeddings: e.
            states: x.
            positions: positions of the rotary angles, long [B, q].
            attend: runs the attention. Training and decoding find its keys in different ways.
        """
        # 1. attention over both
        normed_states = self.hidden_norm(states)  # [B, q, d]
        residual = normed_states if self.norm_before_residual else states
        both = torch.cat([self.input_layernorm(embeddings), normed_states], dim=-1)  # [B, q, 2 d]
        attended = attend(self.self_attn, both, self.rotary_emb(both, positions))  # [B, q, d]
        states = residual + attended
        # 2. MLP
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out

    def run(
        self, states: Tensor, positions: Tensor, mask: Tensor | None, cache: PassCache
    ) -> Tensor:
        """Run q positions in decoding, [B, q, 2 d] -> [B, q, d]; see `CachedLayer.run`. The input of
        a position is one vector [e ; x].
        """

        def attend(
            attention: LlamaAttention | Qwen3Attention, both: Tensor, angles: Angles
        ) -> Tensor:
            out: Tensor = attention(
                both, position_embeddings=angles, attention_mask=mask, past_key_values=cache
            )[0]
            return out

        e, x = states.chunk(2, dim=-1)  # [B, q, d] each
        return self(e, x, positions, attend)


class RotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's rotary embedding, whose frequencies stay in float32 through `.to(dtype)`."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> RotaryEmbedding:
        with exact_buffers(self):
            super()._apply(fn, recurse)  # changes the module in place
        return self


def copy_norm(norm: LlamaRMSNorm, source: nn.Module | None) -> None:
    """Copy the factors of an RMS norm.

    Families store them differently (Gemma adds 1), so they are computed from the norm's output for
    a vector of ones. Other kinds of norms are not copied.
    """
    if source is None:
        return
    weight = next(source.parameters(), None)
    if weight is None:
        return
    ones = torch.ones_like(weight)
    # a bias cancels out, and a norm that subtracts the mean gives 0
    factors = (source(ones) - source(-ones)).float() / 2
    if bool((factors != 0).all()):
        norm.weight.copy_(factors)


def layer_config(config: Any, layer: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Return the configuration of a Llama layer with the sizes and rotary angles of a target model.

    Args:
        config: text config of the target model.
        layer: entries that replace those of the result.
    """
    # 1. rotary angles; some families have parameters for each layer type
    rope = getattr(config, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention", rope) or {})
    rotary_share = rope.pop("partial_rotary_factor", 1.0)
    if rotary_share != 1.0 and rope.get("rope_type") in ("longrope", "proportional"):
        # these parameters are for fewer dimensions than Llama's layer rotates
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    # 2. sizes; the config of a mixture of experts may have no `intermediate_size`
    mlp_size = largest(config, "intermediate_size") or 4 * config.hidden_size
    heads = config.num_attention_heads
    kv_heads = key_value_heads(config)
    # LlamaConfig, which servers use too, requires a width divisible by the heads; GLM-4.5's is not
    if config.hidden_size % heads:
        heads = config.hidden_size // head_dim(config)
        kv_heads = math.gcd(heads, kv_heads)
    entries: dict[str, Any] = {
        "vocab_size": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim(config),
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope or None,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    # 3. the entries of the draft's own configuration
    entries.update(layer or {})
    return LlamaConfig(**entries)
