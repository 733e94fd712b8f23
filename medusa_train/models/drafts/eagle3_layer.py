"""EAGLE-3's decoder layer: Llama's, whose attention reads a state and the embedding of the token
after it.
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
from medusa_train.trees.transformers_adapters import NodeCache, PromptCache

#: Cosines and sines of rotary positions.
Angles = tuple[Tensor, Tensor]
#: Runs an attention module over [B, q, 2 d] with these angles, -> [B, q, d].
Attend = Callable[[LlamaAttention | Qwen3Attention, Tensor, Angles], Tensor]


class Eagle3Layer(nn.Module):
    """Llama's decoder layer, whose attention reads a state x and an embedding e (EAGLE-3,
    Inference Pipeline).

        x = x + Attention([norm_e(e) ; norm_x(x)])       q, k, v take 2 d inputs; o returns d
        x = x + MLP(norm(x))

    The names of its weights are those of vLLM's and SGLang's drafts.

    Args:
        config: see `layer_config`.
        norm_before_residual: the first line adds to norm_x(x) in place of x.
        qk_norm: the attention norms each head's queries and keys before their rotary angles, as
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
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.window: int | None = None  # as a `DraftLayer` without a sliding window
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def init_from(self, source: nn.Module) -> None:
        """Copy the weights of a layer of the target model where shapes fit.

        A projection of the attention gets them in the columns that read x; those that read e keep
        their random values.
        """
        # 1. the layer's weights, but neither integers nor FP8, whose scales are parameters, too
        weights: dict[str, Tensor] = {}
        for name, source_weight in source.named_parameters():
            if source_weight.is_floating_point() and source_weight.itemsize > 1:
                weights[name] = source_weight
        # 2. the matrices and biases of the same name
        for name, parameter in self.named_parameters():
            if name not in weights or "norm" in name:
                continue
            weight = weights[name]
            part: Tensor = parameter
            if parameter.dim() == 2:
                part = parameter[:, -weight.shape[-1] :]
            if part.shape == weight.shape:
                part.copy_(weight)
        # 3. the norms, which families name differently: Gemma 2 and 3 also norm what attention and
        # MLP return, and OLMo 2 only that
        norms_outputs = hasattr(source, "post_feedforward_layernorm")
        before_mlp = "pre_feedforward_layernorm" if norms_outputs else "post_attention_layernorm"
        copy_norm(self.hidden_norm, getattr(source, "input_layernorm", None))
        copy_norm(self.post_attention_layernorm, getattr(source, before_mlp, None))

    def forward(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """[B, q, d] and [B, q, d] -> [B, q, d].

        Args:
            embeddings: e. states: x. positions: for rotary angles, long [B, q].
            attend: how the attention finds its keys, which training and decoding do differently.
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

    # Decoding, where a position [e ; x] is one vector of 2 d numbers

    def extend(self, states: Tensor, cache: PromptCache) -> None:
        """Write the keys and values of prompts [B, q, 2 d], after the `cache.length` positions
        before them.

        They depend on no other position, and nobody reads what the layer returns here, so that the
        attention needs no mask.
        """
        positions = torch.arange(states.shape[1], device=states.device) + cache.length
        self._run_cached(states, positions.expand(len(states), -1), None, cache)

    def run_cached(
        self, states: Tensor, positions: Tensor, mask: Tensor, cache: NodeCache
    ) -> Tensor:
        """Run q positions, [B, q, 2 d] -> [B, q, d]; see `DraftLayer.run_cached`."""
        return self._run_cached(states, positions, mask, cache)

    def _run_cached(
        self, states: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Run the layer with keys and values in a cache, [B, q, 2 d] -> [B, q, d]."""

        def attend(
            attention: LlamaAttention | Qwen3Attention, both: Tensor, angles: Angles
        ) -> Tensor:
            out: Tensor = attention(
                both, position_embeddings=angles, attention_mask=mask, past_key_values=cache
            )[0]
            return out

        e, x = states.chunk(2, dim=-1)  # [B, q, d] each
        return self(e, x, positions, attend)


def copy_norm(norm: LlamaRMSNorm, source: nn.Module | None) -> None:
    """Copy the factors of an RMS norm.

    Families store them differently (Gemma adds 1), so they are read off the norm's output for a
    vector of ones. A norm of another kind is left out.
    """
    if source is None:
        return
    weight = next(source.parameters(), None)
    if weight is None:
        return
    ones = torch.ones_like(weight)
    # a bias cancels out, and a norm that subtracts the mean returns 0
    factors = (source(ones) - source(-ones)).float() / 2
    if bool((factors != 0).all()):
        norm.weight.copy_(factors)


def layer_config(config: Any, layer: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Return the configuration of a Llama layer with the sizes and rotary angles of a target
    model's.

    Args:
        config: of the target model's text model. layer: entries that replace these.
    """
    # 1. rotary angles; some families have them for each layer type
    rope = getattr(config, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention", rope) or {})
    rotary_share = rope.pop("partial_rotary_factor", 1.0)
    if rotary_share != 1.0 and rope.get("rope_type") in ("longrope", "proportional"):
        # they are for fewer dimensions than Llama's layer rotates
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    # 2. sizes; a mixture of experts may have no width of its MLP
    mlp_size = largest(config, "intermediate_size") or 4 * config.hidden_size
    heads = config.num_attention_heads
    kv_heads = key_value_heads(config)
    # LlamaConfig, which servers read too, rejects other numbers, such as GLM-4.5's
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
    # 3. what the draft's own configuration says otherwise
    entries.update(layer or {})
    return LlamaConfig(**entries)
