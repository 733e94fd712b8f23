"""The first decoder layers of a stock model by themselves, and the rest from their states; knows no draft and no loop.

A self-speculative draft exits early (Kangaroo, section 3.1): the first layers of the backbone make the states that
it guesses from, level by level of a tree, and verification goes on from the same states. So a pass is prepared once
for all nodes of a tree (`Split.places`), the first layers run over one part of it after the other (`Split.first`), and
the other layers over the whole (`Split.rest`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_train.errors import BackboneError
from medusa_train.models.compatibility import has_experts
from medusa_train.models.features import Features
from medusa_train.trees.kv_cache import TreeCache

if TYPE_CHECKING:
    from medusa_train.models.backbone import Backbone


#: What a body must have for its layers to be run one by one.
_PARTS = ("layers", "rotary_emb", "norm")

#: Cosines and sines of a rotary embedding, [B, T, head_dim] each.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Places:
    """Where the T positions of one pass stand, and what each may see.

    Attributes:
        positions: [B, T] position ids.
        angles: of the rotary embedding, by layer type.
        masks: additive, [1 or B, 1, T, S] over S = committed + `start` + T keys, by layer type; None: each position
            sees every key, which is right for a single one.
        start: how many pending positions of the cache stand before these.
    """

    positions: Tensor
    angles: dict[str, Angles]
    masks: dict[str, Tensor | None]
    start: int = 0

    def part(self, first: int, last: int) -> Places:
        """Positions first .. last - 1 alone, behind those before them."""
        behind = self.positions.shape[1] - last
        return replace(
            self,
            positions=self.positions[:, first:last],
            angles={kind: (cos[:, first:last], sin[:, first:last]) for kind, (cos, sin) in self.angles.items()},
            masks={
                kind: None if mask is None else mask[:, :, first:last, : mask.shape[3] - behind]
                for kind, mask in self.masks.items()
            },
            start=self.start + first,
        )


class Layers:
    """The decoder layers of a stock body, called one by one as its own forward calls them, and for less.

    Args:
        body: has layers, rotary_emb and norm. kinds: the type of attention of each layer.
    """

    def __init__(self, body: Any, kinds: Sequence[str]) -> None:
        self.body = body
        self.kinds = list(kinds)
        self._like: Tensor = next(body.parameters())  # tells the rotary embedding device and dtype
        # Gemma 3 has angles for each type of layer; elsewhere all share them
        self._by_kind = "layer_type" in inspect.signature(body.rotary_emb.forward).parameters

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._like.dtype

    def angles(self, positions: Tensor) -> dict[str, Angles]:
        """The rotary embedding at `positions` [B, T], by layer type."""
        if self._by_kind:
            return {kind: self.body.rotary_emb(self._like, positions, kind) for kind in dict.fromkeys(self.kinds)}
        return dict.fromkeys(self.kinds, self.body.rotary_emb(self._like, positions))

    def places(self, positions: Tensor, mask: Tensor | None) -> Places:
        """A pass over `positions` [B, T] with one mask for all layers, see `Places`."""
        return Places(positions, self.angles(positions), dict.fromkeys(self.kinds, mask))

    def run(self, states: Tensor, layers: range, places: Places, cache: TreeCache) -> Tensor:
        """`states` [B, T, d] through `layers`; keys and values stay pending, behind `places.start` others."""
        cache.ahead = places.start
        for i in layers:
            kind = self.kinds[i]
            out = self.body.layers[i](
                states,
                attention_mask=places.masks[kind],
                position_embeddings=places.angles[kind],
                position_ids=places.positions,
                past_key_values=cache,
            )
            states = out[0] if isinstance(out, tuple) else out
        cache.ahead = 0
        return states


def check_exit(layers: int, of: int, name: str) -> None:
    """Refuse an early exit where a backbone of so many layers has none.

    Raises:
        BackboneError: it is not between 1 and `of` - 1.
    """
    if not 0 < layers < of:
        raise BackboneError(f"an early exit after {layers} layers: {name} has {of}, so choose 1 to {of - 1}")


class Split:
    """A backbone's decoder layers in two parts: 0 .. l - 1, and l .. with the final norm.

    They are the model's own modules; that nothing of its forward is missed is found out by running a probe both ways.

    Args:
        backbone: of stock architecture. layers: l, the depth of the early exit.

    Raises:
        BackboneError: l is not between 1 and the number of layers, or this architecture can't be run in parts.
    """

    def __init__(self, backbone: Backbone, layers: int) -> None:
        check_exit(layers, backbone.num_layers, backbone.name or "the backbone")
        if lacks := [name for name in _PARTS if not hasattr(backbone.body, name)]:
            raise BackboneError(f"{_kind(backbone)} can't be run in parts: its body has no {', '.join(lacks)}")
        self.backbone = backbone
        self._first = range(layers)
        self._rest = range(layers, backbone.num_layers)
        self._layers = Layers(backbone.body, _layer_kinds(backbone))
        self._embedding = backbone.embedding()
        self._check()

    def places(self, positions: Tensor, mask: Tensor | None, prefix: int) -> Places:
        """Prepare a pass over T positions behind `prefix` columns of the cache.

        Args:
            positions: [B, T] position ids, of all nodes.
            mask: additive [1 or B, 1, T, prefix + T], windows not yet laid over it; None for a chain in a single
                row, each part of which is one position that sees all before it.

        Raises:
            ValueError: no mask, and layers with a sliding window.
        """
        kinds = self._layers.kinds
        if mask is None and self.backbone.layer_types != {"full_attention"}:
            raise ValueError("layers with a sliding window need a mask")
        masks = None if mask is None else self.backbone.windowed(mask, positions, prefix)
        by_kind = masks if isinstance(masks, dict) else dict.fromkeys(kinds, masks)
        return Places(positions, self._layers.angles(positions), by_kind)

    def first(self, tokens: Tensor, places: Places, cache: TreeCache) -> Tensor:
        """The states [B, T, d] of `tokens` [B, T] after the first layers.

        Their keys and values are pending in the cache's first l layers, behind `places.start` others.
        """
        with self.backbone.masks_allowed(True):
            return self._layers.run(self._embedding(tokens), self._first, places, cache)

    def rest(self, early: Tensor, places: Places, cache: TreeCache) -> Features:
        """What the whole model makes of the states `early` [B, T, d] that `first` made, in any number of parts."""
        with self.backbone.masks_allowed(True):
            states = self._layers.run(early, self._rest, places, cache)
        return Features(self._layers.body.norm(states), early)

    @torch.no_grad()
    def _check(self) -> None:
        """Run a small tree in two parts, the first of them in two passes, against the whole model.

        Raises:
            BackboneError: they differ, or the layers can't be called so.
        """
        backbone = self.backbone
        step = max(1, backbone.vocab_size // 8)
        tokens = torch.arange(5, device=backbone.device)[None] * step % backbone.vocab_size
        positions = torch.tensor([[2, 3, 3]], device=backbone.device)  # behind two others: a root and two children
        sees = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], device=backbone.device)
        mask = torch.zeros(1, 1, 3, 5, dtype=backbone.dtype, device=backbone.device)
        mask.masked_fill_(sees == 0, float("-inf"))
        cache = backbone.new_cache(5)
        backbone.run(tokens[:, :2], cache=cache)
        cache.commit(2)
        whole = backbone.run(tokens[:, 2:], positions=positions, mask=mask, cache=cache).hidden
        try:
            places = self.places(positions, mask, 2)
            early = [self.first(tokens[:, 2 + a : 2 + b], places.part(a, b), cache) for a, b in ((0, 1), (1, 3))]
            ours = self.rest(torch.cat(early, dim=1), places, cache).hidden
        except (TypeError, AttributeError, KeyError) as error:
            raise BackboneError(f"{_kind(backbone)} can't be run in parts: {error}") from error
        exact = backbone.dtype in (torch.float32, torch.float64) and not getattr(backbone.model, "is_quantized", False)
        distance = float((ours.double() - whole.double()).norm() / whole.double().norm().clamp(min=1e-12))
        if distance > (1e-3 if exact else 0.25) and (exact or not has_experts(backbone.config)):
            raise BackboneError(
                f"{_kind(backbone)} can't be run in parts: its layers one by one do not give what it gives itself"
            )


def _kind(backbone: Backbone) -> str:
    return f"base_model {backbone.name}: {type(backbone.model).__name__}"


def _layer_kinds(backbone: Backbone) -> list[str]:
    """The type of attention of each layer."""
    kinds = getattr(backbone.config, "layer_types", None) or [next(iter(backbone.layer_types))] * backbone.num_layers
    return list(kinds[: backbone.num_layers])
