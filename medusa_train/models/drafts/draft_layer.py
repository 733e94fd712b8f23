"""A trainable decoder layer of the backbone's class, initialized from one of its; attention or MLP
may be absent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.errors import BackboneError
from medusa_train.models.backbone import Backbone
from medusa_train.models.document_attention import (
    document_bounds,
    register_document_attention,
    separates_documents,
)
from medusa_train.models.features import capture_inputs
from medusa_train.models.hf_config import decoder_of, has_experts
from medusa_train.models.partitioned import gathered
from medusa_train.models.precision import autocast_dtype, exact_buffers
from medusa_train.trees.masks import apply_sliding_window, document_mask
from medusa_train.trees.slots import PromptCache, SlotCache


class DraftLayer(nn.Module):
    """A randomly initialized causal decoder layer of the backbone's kind: Hydra's prefix layer,
    Amphista's stages.

    It is a stock transformers decoder with a single layer, run on states in place of embeddings, so
    that rotary angles, masks and norms of each model family are handled by its own forward. Where
    layers differ in their attention, this one has full attention.

    Args:
        backbone: the model whose layer class and configuration are used; it is not kept.
        final_norm: whether a norm follows, of the kind of the backbone's final norm.
        mlp_size: width of the MLP; None for the backbone's. 0 leaves out the MLP and the norms that
            serve only it: norm, attention, residual (Kangaroo).
        attention: False leaves out the attention and its norms in the same way.
        dtype: dtype of the parameters; by default the backbone's.

    Raises:
        BackboneError: a decoder of this class can't be built with one layer, or changes its input
            before the layer.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        final_norm: bool = True,
        mlp_size: int | None = None,
        attention: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config, self.window = _single_layer_config(backbone)
        mlp, size = mlp_of(backbone.layer(0), config)
        name = type(backbone.body).__name__
        try:
            if mlp_size and has_experts(config):
                raise ValueError(
                    "its MLP is a mixture of experts, which has no such size; set mlp_size: 0"
                )
            if mlp_size:
                # raises AttributeError where setting it would have no effect
                _ = getattr(config, size)
                setattr(config, size, mlp_size)
            body: Any = type(backbone.body)(config)
            del body.embed_tokens
            _ = body.norm  # raises AttributeError where the final norm has another name
            if not final_norm:
                body.norm = nn.Identity()
            if mlp_size == 0:
                _remove(body, mlp, _NoMLP(), backbone.hidden_size)
            if not attention:
                _remove(body, "self_attn", _NoAttention(), backbone.hidden_size)
            with torch.no_grad(), capture_inputs(body.layers[0]) as captured:
                probe = torch.randn(1, 2, backbone.hidden_size)
                body(inputs_embeds=probe, use_cache=False)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise BackboneError(f"a draft can't use a layer of {name}: {error}") from error
        if not torch.equal(captured[0], probe):
            raise BackboneError(
                f"a draft can't use a layer of {name}: it changes its input before the first layer"
            )
        self.body = body
        self._attention: str = config._attn_implementation
        self._documents: str | None = None
        self.to(device=backbone.device, dtype=dtype or backbone.dtype)
        self._use_document_attention(backbone.device, dtype or backbone.dtype, backbone.dtype)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> DraftLayer:
        """Keep the rotary frequencies in float32 through `.to(dtype)`."""
        with exact_buffers(self.body):
            super()._apply(fn, recurse)
        return self

    def forward(self, states: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Run the layer in training, [B, T, d] -> [B, T, d]; attention stays within documents
        (`segments` [B, T]).
        """
        if self._documents is not None and (self.window is not None or int(segments.max()) > 0):
            return self._run(states, positions, bounds=document_bounds(segments))
        mask = document_mask(segments, autocast_dtype(states.device.type) or states.dtype)
        if mask is not None:
            mask = apply_sliding_window(mask, positions, 0, self.window)
        return self._run(states, positions, mask)

    def _use_document_attention(
        self, device: torch.device, dtype: torch.dtype, compute: torch.dtype
    ) -> None:
        """Separate packed documents by their bounds in training, if this architecture passes them
        to its attention.

        Soft-capped scores ("eager" attention) need a mask. Checked as in training, on `device` and
        under autocast to `compute`, since a GPU may lack the kernel for this dtype or head size.
        """
        if self._attention == "eager":
            return
        self._documents = register_document_attention()
        width = self.body.config.hidden_size
        states = torch.arange(10 * width, dtype=dtype, device=device).sin().view(2, 5, width)
        try:
            with torch.autocast(device.type, dtype=compute, enabled=compute.itemsize == 2):
                separate = separates_documents(self.forward, states)
        except (ImportError, RuntimeError, TypeError, ValueError):
            separate = False
        if not separate:
            self._documents = None

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

    def extend(self, states: Tensor, cache: PromptCache) -> Tensor:
        """Decoding: read prompts, [B, q, d] -> [B, q, d], after the `cache.length` positions before
        them.
        """
        positions = torch.arange(states.shape[1], device=states.device) + cache.length
        return self._run(states, positions.expand(len(states), -1), None, cache)

    def run_slots(
        self, states: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache
    ) -> Tensor:
        """Run q further positions [B, q, d] in decoding; their keys and values go to slots of
        `cache`.

        Args:
            mask: additive [B, 1, q, key_length], sliding windows applied.
        """
        return self._run(states, positions, mask, cache)

    def _run(
        self,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: PromptCache | SlotCache | None = None,
        bounds: dict[str, Any] | None = None,
    ) -> Tensor:
        self.body.config._attn_implementation = self._documents if bounds else self._attention
        out = self.body(
            inputs_embeds=states,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            **(bounds or {}),
        )
        return out.last_hidden_state


def _single_layer_config(backbone: Backbone) -> tuple[Any, int | None]:
    """The backbone's config for a decoder of one layer that does not scale its input, and this
    layer's window.
    """
    config = copy.deepcopy(backbone.config)
    layer_type = (
        "full_attention" if "full_attention" in backbone.layer_types else "sliding_attention"
    )
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [layer_type]
    if getattr(config, "no_rope_layers", None):  # SmolLM3: 1 where a layer has rotary embeddings
        config.no_rope_layers = [1]
    config.vocab_size, config.pad_token_id = 1, None
    if hasattr(config, "embedding_multiplier"):
        config.embedding_multiplier = 1.0
    config._attn_implementation = backbone.attention
    return config, backbone.window if layer_type == "sliding_attention" else None


class _NoMLP(nn.Module):
    """Takes the place of a layer's MLP and adds nothing to the residual."""

    def forward(self, states: Tensor) -> Tensor:
        return torch.zeros_like(states)


class _NoAttention(nn.Module):
    """Takes the place of a layer's attention and adds nothing to the residual; caches still count
    its positions.
    """

    def forward(
        self, hidden_states: Tensor, *_: Any, past_key_values: Any = None, **__: Any
    ) -> tuple[Tensor, None]:
        if past_key_values is not None:
            keys = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
            past_key_values.update(keys, keys, 0)
        return torch.zeros_like(hidden_states), None


def layer_to_copy(model: Any) -> nn.Module:
    """Return a decoder layer of the kind that a `DraftLayer` copies; BackboneError if the decoder
    lacks a part.
    """
    body = decoder_of(model)
    if missing := [name for name in ("layers", "embed_tokens") if not hasattr(body, name)]:
        raise BackboneError(
            f"a draft can't use a layer of {type(body).__name__}: it has no `{missing[0]}`"
        )
    layer: nn.Module = body.layers[0]
    return layer


def mlp_of(layer: nn.Module, config: Any) -> tuple[str, str]:
    """Return the names of a layer's MLP and of its size in the text config; dense Granite 4.0
    models have others.
    """
    shared = "shared_" if hasattr(layer, "shared_mlp") and not has_experts(config) else ""
    return f"{shared}mlp", f"{shared}intermediate_size"


def _remove(body: Any, name: str, replacement: nn.Module, hidden_size: int) -> None:
    """Replace a part of the layer; remove its norms: the modules that a probe's gradient no longer
    reaches.
    """
    layer = body.layers[0]
    if not isinstance(getattr(layer, name, None), nn.Module):
        raise AttributeError(f"its layers have no module `{name}` to remove")
    setattr(layer, name, replacement)
    probe = torch.randn(2, 1, 3, hidden_size)
    with torch.enable_grad():
        (
            body(inputs_embeds=probe[0], use_cache=False).last_hidden_state * probe[1]
        ).sum().backward()
    for child, part in list(layer.named_children()):
        unread = not any(p.grad is not None and bool(p.grad.any()) for p in part.parameters())
        if unread and not isinstance(part, (_NoMLP, _NoAttention)):
            setattr(layer, child, nn.Identity())
    body.zero_grad()


# Initialization from a layer of the backbone

#: A parameter to initialize and the source weight of the same name.
Pair = tuple[nn.Parameter, Tensor]


@torch.no_grad()
def init_from_layer(layer: nn.Module, source: nn.Module) -> None:
    """Copy the weights of `source` into `layer`, a layer of the same kind whose MLP may be narrower
    or removed.

    A narrower MLP keeps the units with the largest input and output weights. A wider MLP, a mixture
    of experts, and modules that `source` lacks keep their initialization. Quantized weights are
    dequantized.
    """
    with gathered(source.parameters()):
        _copy_weights(layer, source)


def _copy_weights(layer: nn.Module, source: nn.Module) -> None:
    source_modules = dict(source.named_modules())
    pairs: list[Pair] = []
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = _plain_weight(source_modules[path], name) if path in source_modules else None
            if weight is not None:
                pairs.append((parameter, weight))
    same = [(parameter, weight) for parameter, weight in pairs if parameter.shape == weight.shape]
    narrower = [
        (parameter, weight) for parameter, weight in pairs if parameter.shape != weight.shape
    ]
    for parameter, weight in (*same, *_strongest_units(narrower)):
        parameter.copy_(weight)


def _strongest_units(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the parameters of a narrower MLP with the source weights of its strongest units.

    Input weights are [n * units, d] (n matrices in one, for example gate and up) or biases [n *
    units]; the output weight is [d, units].
    """
    output = [
        (parameter, weight)
        for parameter, weight in pairs
        if weight.dim() == 2 and len(parameter) == len(weight)
    ]
    if len(output) != 1 or any(weight.dim() > 2 for _, weight in pairs):
        return
    kept, units = output[0][0].shape[1], output[0][1].shape[1]
    if kept > units:
        return
    strength = output[0][1].float().norm(dim=0)
    inputs = [(parameter, weight) for parameter, weight in pairs if parameter is not output[0][0]]
    for _, weight in inputs:
        if weight.dim() == 2:
            strength = strength * weight.float().view(-1, units, weight.shape[1]).norm(dim=2).prod(
                dim=0
            )
    strongest = strength.topk(kept).indices.sort().values
    yield output[0][0], output[0][1][:, strongest]
    for parameter, weight in inputs:
        yield parameter, weight.unflatten(0, (-1, units))[:, strongest].flatten(0, 1)


def _plain_weight(module: Any, name: str) -> Tensor | None:
    """Return a parameter of a module in floating point, dequantized if needed; None if there is no
    such parameter.
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, nn.Parameter):
        return None
    if weight.dtype.itemsize == 1 and weight.is_floating_point():
        return None  # FP8, whose scales are parameters of their own
    if type(weight) is nn.Parameter:
        return weight.detach()
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    dequantized: Tensor = dequantize_bnb_weight(weight, getattr(module, "state", None))
    return dequantized.detach()
