"""Whether heads can be trained for an architecture and its trees verified; names what is missing. Trains nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from medusa_train.errors import BackboneError
from medusa_train.models.hf_config import KNOWN_LAYER_TYPES

if TYPE_CHECKING:
    from medusa_train.models.backbone import Backbone


#: Config keys of layers that carry a running state in place of keys and values.
_STATE_SPACE = ("mamba_d_state", "ssm_state_size", "state_size", "layers_block_type", "block_types")
_NEEDED = ("attention_mask", "position_ids", "past_key_values")
_FAMILIES = (
    "Llama, Mistral, Qwen2 and 3, Gemma 2 and 3 (text), Phi-3, OLMo 2, SmolLM3, Granite and models built like them"
)


def check_architecture(config: Any, name: str) -> None:
    """Refuse an architecture by its config alone, before any weight is loaded.

    Raises:
        BackboneError: names the architecture and everything that is missing.
    """
    if lacks := list(_lacks(config)):
        raise BackboneError(_refusal(name, _architecture(config), lacks))


def check_model(backbone: Backbone) -> None:
    """Refuse a loaded model that would not do what heads and trees rely on.

    Raises:
        BackboneError: names the class and what is missing.
    """
    kind = type(backbone.model).__name__
    accepted = inspect.signature(type(backbone.body).forward).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    lacks = [f"its forward takes no {name}" for name in _NEEDED if name not in accepted and not open_ended]
    if not lacks and not _logits_are_known(backbone):
        lacks.append(
            "it makes its logits in a way that is not known here (neither lm_head alone, nor with soft-capping or "
            "scaling); heads for it would be wrong"
        )
    if not lacks and not _trees_can_be_verified(backbone):
        lacks.append(
            "it computes a token otherwise when siblings of its ancestors are in the same pass: it does not keep to a "
            "4-D attention mask and to the position ids that it is given"
        )
    if lacks:
        raise BackboneError(_refusal(backbone.name, kind, lacks))


def _refusal(name: str, kind: str, lacks: list[str]) -> str:
    reasons = "".join(f"\n  {reason}" for reason in lacks)
    return f"base_model {name}: {kind} is not supported:{reasons}\nSupported: {_FAMILIES}"


def _architecture(config: Any) -> str:
    names = getattr(config, "architectures", None)
    return names[0] if names else f"the architecture {config.model_type!r}"


def _lacks(config: Any) -> Iterator[str]:
    """What an architecture lacks, as clauses."""
    text = config.get_text_config()
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not own_code:
        yield "transformers has no causal language model of this type, or this version of it does not know it yet"
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder; a draft reads the states of a decoder that reads all the text itself"
    if not getattr(text, "max_position_embeddings", None):
        yield "its config names no max_position_embeddings: a tree's nodes could not be given their positions"
    if getattr(text, "alibi", False):
        yield "its attention goes by distances in the row (ALiBi), which are wrong between the branches of a tree"
    if any(getattr(text, key, None) for key in _STATE_SPACE):
        yield "it has state-space layers, whose state can't branch into a tree"
    if getattr(text, "kv_lora_rank", None):
        yield "its latent attention has keys and values of unlike sizes, for which there is no cache here"
    if getattr(text, "use_bidirectional_attention", False):
        yield "its attention sees later tokens"
    if unknown := sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYER_TYPES):
        yield f"layers of type {', '.join(unknown)} can't be verified by a tree"


@torch.no_grad()
def _logits_are_known(backbone: Backbone) -> bool:
    """Whether the logits that we make of the hidden states are the model's own."""
    probe = torch.arange(min(4, backbone.vocab_size), device=backbone.device)[None]
    theirs = backbone.model(input_ids=probe, use_cache=False).logits.float()
    ours = backbone.logits(backbone.run(probe).hidden).float()
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max().clamp(min=1.0)))


@torch.no_grad()
def _trees_can_be_verified(backbone: Backbone) -> bool:
    """Whether a node of a tree is computed as if its own path were the whole text.

        prefix 0 1 2 | root 3 | siblings 4, 5 | 6, a child of 5       the path: 0 1 2 3 5 6

    Half precision and quantised weights round differently from pass to pass, so there only a gross difference counts;
    and none in a mixture of experts, where rounding may choose another expert.
    """
    exact = backbone.dtype in (torch.float32, torch.float64) and not getattr(backbone.model, "is_quantized", False)
    if backbone.max_context < 8 or (not exact and has_experts(backbone.config)):
        return True
    step = max(1, backbone.vocab_size // 8)
    tokens = torch.arange(7, device=backbone.device) * step % backbone.vocab_size
    path = backbone.run(tokens[[0, 1, 2, 3, 5, 6]][None]).hidden[0, -1].double()
    cache = backbone.new_cache(7)
    backbone.run(tokens[None, :3], cache=cache)
    cache.commit(3)
    positions = torch.tensor([[3, 4, 4, 5]], device=backbone.device)
    node = backbone.run(tokens[None, 3:], positions=positions, mask=_probe_mask(backbone), cache=cache).hidden[0, -1]
    distance = (node.double() - path).norm() / path.norm().clamp(min=1e-12)
    return float(distance) < (1e-3 if exact else 0.25)


def _probe_mask(backbone: Backbone) -> Tensor:
    """The additive mask [1, 1, 4, 7] of the probe: each node sees the prefix, itself and its ancestors."""
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    sees = torch.cat([torch.ones(4, 3, dtype=torch.bool), sees], dim=1)
    mask = torch.zeros(1, 1, 4, 7, dtype=backbone.dtype).masked_fill_(~sees, float("-inf"))
    return mask.to(backbone.device)


def has_experts(config: Any) -> bool:
    """Whether rounding may send a token to another expert."""
    return any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
