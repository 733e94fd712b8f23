"""A trainable decoder layer of the target model's class, optionally initialized from one of the
target model's layers. Attention or MLP may be left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.errors import TargetModelError
from medusa_train.models.document_attention import (
    DOCUMENTS,
    document_bounds,
    document_mask,
    register_document_attention,
    separates_documents,
    use_attention,
)
from medusa_train.models.hf_config import has_experts
from medusa_train.models.partitioned import gathered
from medusa_train.models.precision import autocast_dtype, exact_buffers
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import capture_inputs
from medusa_train.trees.masks import apply_sliding_window
from medusa_train.trees.transformers_adapters import PassCache


class DraftLayer(nn.Module):
    """A decoder layer of the target model's class that belongs to a draft: Hydra's prefix layer,
    Amphista's adaptation layers, Kangaroo's adapter.

        states [B, T, d] -- attention -- MLP -- final norm -- states [B, T, d]
                            (each of the last three may be left out)

    It is initialized randomly; `init_from_layer` copies weights of the target model. In training,
    `forward` runs it over whole rows of documents. In decoding, `run` reads prompts and the
    positions of a step, with keys and values in a cache.

    It is an unchanged transformers decoder with a single layer that gets states instead of
    embeddings. So each model family's own forward handles rotary angles, masks and norms. If the
    target model has several layer types, this layer has full attention.

    Args:
        target_model: the model whose layer class and configuration are used; it is not kept.
        final_norm: whether a norm like the target model's final norm follows.
        mlp_size: width of the MLP; None for the target model's width. 0 leaves out the MLP and the
            norms that serve only the MLP, so norm, attention and residual remain (Kangaroo).
        attention: False leaves out the attention and its norms in the same way.
        dtype: dtype of the parameters; by default the target model's.

    Raises:
        TargetModelError: a decoder of this class can't be built with one layer, or changes its
            input before the layer.
    """

    def __init__(
        self,
        target_model: TargetModel,
        *,
        final_norm: bool = True,
        mlp_size: int | None = None,
        attention: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or target_model.dtype
        config = _single_layer_config(target_model)
        # 1. build a decoder with one layer; not every class allows this
        name = type(target_model.body).__name__
        try:
            body = _build_body(target_model, config, final_norm, mlp_size, attention)
            changes_input = _changes_input(body, target_model.hidden_size)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise TargetModelError(f"a draft can't use a layer of {name}: {error}") from error
        if changes_input:
            raise TargetModelError(
                f"a draft can't use a layer of {name}: it changes its input before the first layer"
            )
        self.body = body
        # 2. its attention
        self.window: int | None = None
        if "full_attention" not in target_model.layer_types:
            self.window = target_model.window
        self._by_bounds = False  # whether attention separates documents by their bounds
        self.to(device=target_model.device, dtype=dtype)
        self._use_document_attention(target_model.device, dtype, target_model.dtype)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> DraftLayer:
        """Keep the rotary frequencies in float32 through `.to(dtype)`."""
        with exact_buffers(self.body):
            super()._apply(fn, recurse)
        return self

    def forward(self, states: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Run the layer in training, [B, T, d] -> [B, T, d]; attention stays within documents
        (`segments` [B, T]).
        """
        # 1. several documents or a window: attention by the bounds of documents, if supported
        if self._by_bounds and (self.window is not None or int(segments.max()) > 0):
            return self.run(states, positions, bounds=document_bounds(segments))
        # 2. else with a mask; None: a single document, plain causal attention
        mask_dtype = autocast_dtype(states.device.type) or states.dtype
        mask = document_mask(segments, mask_dtype)  # [B, 1, T, T]
        if mask is not None:
            mask = apply_sliding_window(mask, positions, self.window)
        return self.run(states, positions, mask)

    def _use_document_attention(
        self, device: torch.device, dtype: torch.dtype, compute: torch.dtype
    ) -> None:
        """Separate packed documents by their bounds in training, if this architecture passes the
        bounds to its attention.

        Soft-capped scores ("eager" attention) need a mask instead. The check runs as in training,
        on `device` and under autocast to `compute`, since a GPU may lack the kernel for this dtype
        or head size.
        """
        if self.body.config._attn_implementation == "eager":
            return
        self._by_bounds = True
        register_document_attention()
        width = self.body.config.hidden_size
        states = torch.arange(10 * width, dtype=dtype, device=device).sin().view(2, 5, width)
        try:
            with torch.autocast(device.type, dtype=compute, enabled=compute.itemsize == 2):
                self._by_bounds = separates_documents(self.forward, states)
        except (ImportError, RuntimeError, TypeError, ValueError):
            self._by_bounds = False

    @torch.no_grad()
    def match_rms(self, states: Tensor) -> None:
        """Initialize the final norm's weight so that its output has the root mean square of
        `states` [..., d].
        """
        weight = getattr(self.body.norm, "weight", None)
        if weight is None:
            return
        probe = torch.randn_like(states, dtype=weight.dtype)
        weight.zero_()  # some families' norms multiply by 1 + weight
        offset = self.body.norm(probe).square().mean().sqrt()
        weight.fill_(float(states.float().square().mean().sqrt() - offset))

    def run(
        self,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: PassCache | None = None,
        bounds: dict[str, Any] | None = None,
    ) -> Tensor:
        """Run the decoder over q positions, [B, q, d] -> [B, q, d].

        Args:
            states, positions, mask, cache: see `CachedLayer.run`; no cache in training.
            bounds: bounds of the documents, for attention that separates them without a mask.
        """
        with nullcontext() if bounds is None else use_attention(self.body.config, DOCUMENTS):
            out = self.body(
                inputs_embeds=states,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
                **(bounds or {}),
            )
        return out.last_hidden_state


def _single_layer_config(target_model: TargetModel) -> Any:
    """Return the target model's config, changed to one layer and an unscaled input."""
    config = copy.deepcopy(target_model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        if "full_attention" in target_model.layer_types:
            config.layer_types = ["full_attention"]
        else:
            config.layer_types = ["sliding_attention"]
    if getattr(config, "no_rope_layers", None):  # SmolLM3: 1 where a layer has rotary embeddings
        config.no_rope_layers = [1]
    # keep the embeddings small: they are built and then removed
    config.vocab_size = 1
    config.pad_token_id = None
    if hasattr(config, "embedding_multiplier"):
        config.embedding_multiplier = 1.0
    config._attn_implementation = target_model.attention
    return config


def _build_body(
    target_model: TargetModel, config: Any, final_norm: bool, mlp_size: int | None, attention: bool
) -> Any:
    """Build a decoder of the target model's class without embeddings, see `DraftLayer`.

    Raises:
        AttributeError, TypeError, ValueError, RuntimeError: this class lacks a part that has to be
            changed, or cannot be built with this config.
    """
    mlp, size_key = mlp_of(target_model.layer(0), config)
    if mlp_size:
        if has_experts(config):
            raise ValueError(
                "its MLP is a mixture of experts, which has no such size; set mlp_size: 0"
            )
        _ = getattr(config, size_key)  # must exist: setting an unknown key would have no effect
        setattr(config, size_key, mlp_size)
    body: Any = type(target_model.body)(config)
    del body.embed_tokens
    _ = body.norm  # must exist: the final norm may have another name
    if not final_norm:
        body.norm = nn.Identity()
    attention_norms, mlp_norms = norms_of(body.layers[0])
    children = [name for name, _ in body.layers[0].named_children() if "norm" in name]
    unknown = [name for name in children if name not in (*attention_norms, *mlp_norms)]
    if unknown and (mlp_size == 0 or not attention):
        raise ValueError(f"it is not known which part of its layer {' and '.join(unknown)} serves")
    if mlp_size == 0:
        _remove(body, mlp, _NoMLP(), mlp_norms)
    if not attention:
        # the only norm of a parallel layer (Cohere) is before both parts
        is_shared = not mlp_norms and mlp_size != 0
        _remove(body, "self_attn", _NoAttention(), [] if is_shared else attention_norms)
    return body


@torch.no_grad()
def _changes_input(body: Any, hidden_size: int) -> bool:
    """Return whether the input of the decoder's only layer differs from the decoder's input."""
    probe = torch.randn(1, 2, hidden_size)
    if probe.is_meta:
        return False
    with capture_inputs(body.layers[0]) as captured:
        body(inputs_embeds=probe, use_cache=False)
    return not torch.equal(captured[0], probe)


class _NoMLP(nn.Module):
    """Replaces a layer's MLP and adds nothing to the residual."""

    def forward(self, states: Tensor) -> Tensor:
        return torch.zeros_like(states)


class _NoAttention(nn.Module):
    """Replaces a layer's attention and adds nothing to the residual. It still writes to caches, so
    that they count its positions.
    """

    def forward(
        self, hidden_states: Tensor, *_: Any, past_key_values: Any = None, **__: Any
    ) -> tuple[Tensor, None]:
        if past_key_values is not None:
            keys = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
            past_key_values.update(keys, keys, 0)
        return torch.zeros_like(hidden_states), None


def mlp_of(layer: nn.Module, config: Any) -> tuple[str, str]:
    """Return the name of a layer's MLP and the config key of its width. Dense Granite 4.0 models
    have their own names.
    """
    if hasattr(layer, "shared_mlp") and not has_experts(config):
        return "shared_mlp", "shared_intermediate_size"
    return "mlp", "intermediate_size"


#: Names of the norms that serve a layer's attention, and its MLP.
_ATTENTION_NORMS = ("input_layernorm", "attention_layernorm", "post_self_attn_layernorm")
_MLP_NORMS = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "pre_mlp_layernorm",
    "post_mlp_layernorm",
    "feedforward_layernorm",
)


def norms_of(layer: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the norms that serve a layer's attention, and its MLP. The only norm of a
    parallel layer serves both; it is in the first list.
    """
    names = [name for name, _ in layer.named_children()]
    attention = [name for name in names if name in _ATTENTION_NORMS]
    mlp = [name for name in names if name in _MLP_NORMS]
    if "post_attention_layernorm" in names:
        # In Llama, this norm is before the MLP. In families with other norms around the MLP (Gemma,
        # OLMo 2, EXAONE 4, AFMoE), it is after the attention. GLM-4 has Llama's norm, and norms
        # after both parts
        follows_attention = bool(set(mlp) - {"post_mlp_layernorm"})
        (attention if follows_attention else mlp).append("post_attention_layernorm")
    return attention, mlp


def _remove(body: Any, name: str, replacement: nn.Module, norms: Sequence[str]) -> None:
    """Replace a part of the layer, and remove the norms that serve only this part."""
    layer = body.layers[0]
    if not isinstance(getattr(layer, name, None), nn.Module):
        raise AttributeError(f"its layers have no module `{name}` to remove")
    setattr(layer, name, replacement)
    for norm in norms:
        setattr(layer, norm, nn.Identity())


# Initialization from a layer of the target model

#: A parameter to initialize, and the source weight of the same name.
Pair = tuple[nn.Parameter, Tensor]


@torch.no_grad()
def init_from_layer(layer: nn.Module, source: nn.Module) -> None:
    """Copy the weights of `source` into `layer`, a layer of the same class whose MLP may be
    narrower or removed.

    A narrower MLP gets the units with the largest input and output weights. A wider MLP, a mixture
    of experts, and modules that `source` lacks keep their initialization. Quantized weights are
    dequantized.
    """
    with gathered(source.parameters()):
        _copy_weights(layer, source)


def _copy_weights(layer: nn.Module, source: nn.Module) -> None:
    # 1. pairs of parameters with the same name
    source_modules = dict(source.named_modules())
    same_shape: list[Pair] = []
    other_shape: list[Pair] = []
    for path, module in layer.named_modules():
        if path not in source_modules:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            weight = _plain_weight(source_modules[path], name)
            if weight is None:
                continue
            pairs = same_shape if parameter.shape == weight.shape else other_shape
            pairs.append((parameter, weight))
    # 2. pairs of different shapes belong to a narrower MLP
    for parameter, weight in [*same_shape, *_strongest_units(other_shape)]:
        parameter.copy_(weight)


def _strongest_units(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the parameters of a narrower MLP with the source weights of the strongest units.

    Input weights are [n * units, d] (n matrices in one, for example gate and up), input biases [n *
    units]; the output weight is [d, units]. The result is empty if the parameters have other
    shapes.
    """
    # 1. the output weight is the matrix whose first dimension is not narrower
    outputs = []
    inputs = []
    for parameter, weight in pairs:
        if weight.dim() > 2:
            return []
        if weight.dim() == 2 and len(parameter) == len(weight):
            outputs.append((parameter, weight))
        else:
            inputs.append((parameter, weight))
    if len(outputs) != 1:
        return []
    output, output_weight = outputs[0]
    num_kept = output.shape[1]
    units = output_weight.shape[1]
    if num_kept > units:
        return []
    # 2. a unit's strength: the product of the norms of its weights
    strength = output_weight.float().norm(dim=0)  # [units]
    for _, weight in inputs:
        if weight.dim() == 2:
            matrices = weight.float().view(-1, units, weight.shape[1])  # [n, units, d]
            strength = strength * matrices.norm(dim=2).prod(dim=0)
    # 3. the strongest units, in their original order
    strongest = strength.topk(num_kept).indices.sort().values  # [num_kept]
    narrowed = [(output, output_weight[:, strongest])]
    for parameter, weight in inputs:
        rows_by_unit = weight.unflatten(0, (-1, units))  # [n, units, d] or [n, units]
        narrowed.append((parameter, rows_by_unit[:, strongest].flatten(0, 1)))
    return narrowed


def _plain_weight(module: Any, name: str) -> Tensor | None:
    """Return a parameter of a module as floating-point numbers, dequantized if needed; None if
    there is no such parameter, or it is FP8.
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, nn.Parameter):
        return None
    if weight.dtype.itemsize == 1 and weight.is_floating_point():
        return None  # FP8: its scales are separate parameters
    if type(weight) is nn.Parameter:
        return weight.detach()
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    dequantized: Tensor = dequantize_bnb_weight(weight, getattr(module, "state", None))
    return dequantized.detach()
