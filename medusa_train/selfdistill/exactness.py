"""Whether an answer made in a batch is the one that would have been made alone. Knows no text and no batch.

Products of many rows round otherwise than products of one, so that a near tie may fall the other way. One pass over
the finished answer finds the near ties; an answer without any is what decoding it alone gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone

#: How far rounding may move a logit, relative to the largest: ten times what was seen. Other dtypes promise nothing.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}
_SUMS = 1e-12  # how far rounding may move a sum of probabilities in double precision
_ROWS = 256  # positions whose logits are in memory at a time


@torch.inference_mode()
def is_certain(
    backbone: Backbone,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> bool:
    """Whether no token of an answer hangs on rounding.

    Args:
        prompt, tokens: what was continued, and with what. sampling: None for greedy decoding.
        generator: in the state in which the answer was begun, one number having been drawn for each token.

    Raises:
        KeyError: the backbone computes in a dtype of which nothing is promised.
    """
    read = torch.tensor([[*prompt, *tokens[:-1]]], device=backbone.device)
    hidden = backbone.run(read).hidden[0, len(prompt) - 1 :]
    chosen = torch.tensor(tokens, device=backbone.device)
    u = None
    if sampling is not None:
        assert generator is not None  # whoever samples has one
        # One by one, as they were drawn: a generator gives other numbers when asked for many at once.
        numbers = [torch.rand(1, generator=generator, dtype=torch.float64, device=generator.device) for _ in tokens]
        u = torch.cat(numbers).to(backbone.device)
    for start in range(0, len(tokens), _ROWS):
        rows = slice(start, start + _ROWS)
        logits = backbone.logits(hidden[rows]).double()
        error = ROUNDING[backbone.dtype] * logits.abs().amax(-1, keepdim=True).clamp(min=1.0)
        if sampling is None or u is None:
            sure = _surely_best(logits, chosen[rows], error)
        else:
            sure = _surely_drawn(logits, chosen[rows], u[rows], sampling, error)
        if not bool(sure.all()):
            return False
    return True


def _surely_best(logits: Tensor, tokens: Tensor, error: Tensor) -> Tensor:
    """Whether each token [N] is the argmax of logits [N, V] by more than twice `error` [N, 1]."""
    best, place = logits.topk(2)
    return (place[:, 0] == tokens) & (best[:, 0] - best[:, 1] > 2 * error[:, 0])


def _surely_drawn(logits: Tensor, tokens: Tensor, u: Tensor, sampling: Sampling, error: Tensor) -> Tensor:
    """Whether inversion at `u` [N] gives the tokens [N], however the logits are moved within `error` [N, 1]."""
    warped = sampling.warp(logits)
    shift = error / sampling.temperature
    mass = warped.softmax(-1).cumsum(-1)
    upper = mass.gather(-1, tokens[:, None])
    lower = torch.where(tokens[:, None] > 0, mass.gather(-1, (tokens[:, None] - 1).clamp(min=0)), 0.0)
    place = u[:, None] * mass[:, -1:]
    above = (lower == 0.0) | (place - lower > _moved(lower, shift))
    below = (upper >= mass[:, -1:]) | (upper - place > _moved(upper, shift))
    inside = (lower <= place) & (place < upper)
    return (inside & above & below)[:, 0] & _surely_cut(logits, sampling, shift)


def _moved(mass: Tensor, shift: Tensor) -> Tensor:
    """How far probabilities of sets of tokens may move when each logit / T moves by `shift` at most.

    Odds change by a factor between exp(-2 shift) and exp(2 shift), so that sets that are nearly sure, or nearly
    impossible, hardly move.
    """
    return mass * (1 - mass) * torch.expm1(2 * shift) + _SUMS


def _surely_cut(logits: Tensor, sampling: Sampling, shift: Tensor) -> Tensor:
    """Whether the same tokens fall to top-k and top-p however logits / T are moved within `shift` [N, 1]."""
    sure = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        best = scaled.topk(sampling.top_k + 1).values
        sure &= best[:, -2] - best[:, -1] > 2 * shift[:, 0]
        scaled = scaled.masked_fill(scaled < best[:, -2:-1], float("-inf"))
    if sampling.top_p < 1:
        rising = scaled.sort(-1).values
        mass = rising.softmax(-1).cumsum(-1)
        sure &= ((mass - (1 - sampling.top_p)).abs() > _moved(mass, shift)).all(-1)
        # What is left or cut must not change places either: the least kept and the best cut are told apart.
        kept = (mass > 1 - sampling.top_p).int().argmax(-1, keepdim=True)
        edge = rising.gather(-1, kept) - rising.gather(-1, (kept - 1).clamp(min=0))
        sure &= ((kept == 0) | (edge > 2 * shift))[:, 0]
    return sure
