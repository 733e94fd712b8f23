"""Projections of the same states as one product: queries, keys and values; gate and up.

        q_proj [q, d]                    one weight [q + k + v, d], of which
        k_proj [k, d]      becomes       the modules' weights are views:
        v_proj [v, d]                    names and values stay what they were

On a GPU each product of few tokens loses some microseconds beside the reading of its weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

#: Modules of a decoder layer, and those of their projections that read the same states, in the order in
# which they are called.
GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


class _Fused:
    """The projections of a group, of which the first one computes all."""

    def __init__(self, projections: list[nn.Linear]) -> None:
        self.sizes = [projection.out_features for projection in projections]
        self.weight = torch.cat([projection.weight.data for projection in projections])
        self.bias: Tensor | None = None
        if projections[0].bias is not None:
            self.bias = torch.cat([projection.bias.data for projection in projections])
        self.parts: tuple[Tensor, ...] | None = None
        # views: there is no second copy of the weights
        for projection, part in zip(projections, self.weight.split(self.sizes), strict=True):
            projection.weight.data = part

    def part(self, index: int, states: Tensor) -> Tensor:
        """Return the result of projection `index`; they are called in order, on the same states."""
        if index == 0:
            self.parts = linear(states, self.weight, self.bias).split(self.sizes, -1)
        parts = self.parts
        assert parts is not None
        if index == len(self.sizes) - 1:
            self.parts = None
        return parts[index]


@torch.no_grad()
def fuse_linears(layer: nn.Module) -> int:
    """Compute the groups of a decoder layer as one product each, and return how many there are.

    Projections that are quantized, prepacked or have an adapter stay as they are, and so do those that a
    family computes as one already. The weights must not move from now on.
    """
    count = 0
    for owner_name, names in GROUPS:
        owner = getattr(layer, owner_name, None)
        projections: list[Any] = [getattr(owner, name, None) for name in names]
        if not _can_fuse(projections):
            continue
        fused = _Fused(projections)
        for index, projection in enumerate(projections):
            projection.forward = partial(fused.part, index)
        count += 1
    return count


def _can_fuse(projections: list[Any]) -> bool:
    if any(type(projection) is not nn.Linear for projection in projections):
        return False
    if any("forward" in vars(projection) for projection in projections):
        return False
    biased = {projection.bias is not None for projection in projections}
    dtypes = {projection.weight.dtype for projection in projections}
    return len(biased) == 1 and len(dtypes) == 1
