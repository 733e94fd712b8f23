"""Run the first decoder layers of a transformers model separately from the remaining ones.

A draft that exits early (Kangaroo) runs the first layers on one level of the tree after the other.
Verification continues from the same states and runs the remaining layers on all nodes at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from medusa_train.errors import TargetModelError
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.transformers_adapters import NodeCache

#: Cosines and sines of a rotary embedding, [B, T, head_dim] each.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerInputs:
    """Inputs that decoder layers take besides hidden states, for the T positions of a pass.

    Attributes:
        positions: position ids [B, T].
        angles: rotary embedding by layer type.
        masks: additive masks by layer type, [B, 1, T, S] over the S columns that are read.
    """

    positions: Tensor
    angles: dict[str, Angles]
    masks: dict[str, Tensor]

    def slice(self, first: int, last: int) -> LayerInputs:
        """Return the inputs of positions first .. last - 1."""
        angles = {
            kind: (cos[:, first:last], sin[:, first:last])
            for kind, (cos, sin) in self.angles.items()
        }
        masks = {kind: mask[:, :, first:last] for kind, mask in self.masks.items()}
        return replace(self, positions=self.positions[:, first:last], angles=angles, masks=masks)


class LayerRunner:
    """Runs decoder layers one by one, with the arguments that the model's forward passes to them.

    Raises:
        TargetModelError: the decoder has no `layers`, `rotary_emb` or `norm`.
    """

    def __init__(self, body: Any, layer_types: Sequence[str]) -> None:
        if missing := [
            name for name in ("layers", "rotary_emb", "norm") if not hasattr(body, name)
        ]:
            raise TargetModelError(
                f"{type(body).__name__} cannot run layer by layer: it has no {', '.join(missing)}"
            )
        self.body = body
        self.layer_types = list(layer_types)
        # the rotary embedding takes device and dtype from this tensor
        self._weight: Tensor = next(body.parameters())
        # Gemma 3 has one rotary embedding per layer type
        self._angles_per_type = (
            "layer_type" in inspect.signature(body.rotary_emb.forward).parameters
        )

    def inputs(self, positions: Tensor, mask: Tensor | Mapping[str, Tensor]) -> LayerInputs:
        """Build the inputs of a pass over `positions` [B, T]; `mask` is one mask for all layers, or
        one per layer type.
        """
        masks = dict.fromkeys(self.layer_types, mask) if isinstance(mask, Tensor) else dict(mask)
        return LayerInputs(positions, self._angles(positions), masks)

    def _angles(self, positions: Tensor) -> dict[str, Angles]:
        types = dict.fromkeys(self.layer_types)
        if self._angles_per_type:
            return {kind: self.body.rotary_emb(self._weight, positions, kind) for kind in types}
        return dict.fromkeys(types, self.body.rotary_emb(self._weight, positions))

    def run(self, states: Tensor, layers: range, inputs: LayerInputs, cache: NodeCache) -> Tensor:
        """Run `states` [B, T, d] through `layers`, which write keys and values to `cache`."""
        for i in layers:
            kind = self.layer_types[i]
            out = self.body.layers[i](
                states,
                attention_mask=inputs.masks[kind],
                position_embeddings=inputs.angles[kind],
                position_ids=inputs.positions,
                past_key_values=cache,
            )
            states = out[0] if isinstance(out, tuple) else out
        return states


class LayerSplit:
    """A model's decoder layers in two parts: layers 0 .. l - 1, and the remaining layers with the
    final norm.

    Args:
        runner: runs the layers.
        exit_layer: number of layers in the first part, l.
        embed: token ids [B, T] -> input of the first layer [B, T, d].
        attention: returns a context manager within which the layers take additive masks.
    """

    def __init__(
        self,
        runner: LayerRunner,
        exit_layer: int,
        embed: Callable[[Tensor], Tensor],
        attention: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._runner = runner
        self._first = range(exit_layer)
        self._rest = range(exit_layer, len(runner.layer_types))
        self._embed = embed
        self._attention = attention

    def inputs(self, positions: Tensor, masks: Mapping[str, Tensor] | None) -> LayerInputs:
        """Prepare a pass over positions [B, T] with a mask per layer type, sliding windows applied.

        Raises:
            ValueError: no masks.
        """
        if masks is None:
            raise ValueError("layers that are run separately need masks")
        return self._runner.inputs(positions, masks)

    def run_first(self, tokens: Tensor, inputs: LayerInputs, cache: NodeCache) -> Tensor:
        """Return the states [B, T, d] of `tokens` [B, T] after the first l layers, which write
        their keys and values to `cache`.
        """
        with self._attention():
            return self._runner.run(self._embed(tokens), self._first, inputs, cache)

    def run_rest(self, aux: Tensor, inputs: LayerInputs, cache: NodeCache) -> HiddenStates:
        """Run the remaining layers and the final norm on `aux` [B, T, d], the concatenated outputs
        of `run_first`.
        """
        with self._attention():
            states = self._runner.run(aux, self._rest, inputs, cache)
        return HiddenStates(self._runner.body.norm(states), aux)
