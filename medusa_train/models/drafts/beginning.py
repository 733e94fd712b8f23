"""Lets a draft's layer begin with the weights of one of the backbone's layers; knows no draft and no training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from medusa_train.models.quantization import plain_weight

#: A parameter to begin anew, and the weight of the same name.
Pair = tuple[nn.Parameter, Tensor]


@torch.no_grad()
def begin_as(layer: nn.Module, like: nn.Module) -> None:
    """Copy the weights of `like` into `layer`, a decoder layer of its kind whose MLP may be narrower or left out.

    A narrower MLP keeps the units whose weights, coming in and going out, are largest; a wider one, or one of experts,
    stays as it was, and so does what `like` has not under the same name. Quantised weights are dequantised.
    """
    theirs = dict(like.named_modules())
    pairs: list[Pair] = []
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = plain_weight(theirs[path], name) if path in theirs else None
            if weight is not None:
                pairs.append((parameter, weight))
    same = [(parameter, weight) for parameter, weight in pairs if parameter.shape == weight.shape]
    narrower = [(parameter, weight) for parameter, weight in pairs if parameter.shape != weight.shape]
    for parameter, weight in (*same, *_narrowed(narrower)):
        parameter.copy_(weight)


def _narrowed(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The same parameters with the strongest units of an MLP's weights.

    Coming in [n * units, d] (n matrices in one, gate and up for instance) or a bias [n * units]; going out [d, units].
    """
    out = [(parameter, weight) for parameter, weight in pairs if weight.dim() == 2 and len(parameter) == len(weight)]
    if len(out) != 1 or any(weight.dim() > 2 for _, weight in pairs):
        return
    kept, units = out[0][0].shape[1], out[0][1].shape[1]
    if kept > units:
        return
    strength = out[0][1].float().norm(dim=0)
    coming = [(parameter, weight) for parameter, weight in pairs if parameter is not out[0][0]]
    for _, weight in coming:
        if weight.dim() == 2:
            strength = strength * weight.float().view(-1, units, weight.shape[1]).norm(dim=2).prod(dim=0)
    best = strength.topk(kept).indices.sort().values
    yield out[0][0], out[0][1][:, best]
    for parameter, weight in coming:
        yield parameter, weight.unflatten(0, (-1, units))[:, best].flatten(0, 1)
