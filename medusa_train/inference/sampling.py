"""Turn logits into the sampling distribution (temperature, top-k, top-p), and draw from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """The sampling distribution, with the options applied in the order of transformers' logits warpers.

    Attributes:
        temperature: divides the logits; above 0 (greedy decoding is a rule of its own).
        top_k: keep only the k most probable tokens; 0 keeps all.
        top_p: keep only the smallest set of most probable tokens with this total probability (Holtzman et al. 2020,
            Nucleus Sampling); 1 keeps all.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature > 0:
            problems.append(f"temperature must be above 0 for sampling, got {self.temperature}")
        if self.top_k < 0:
            problems.append(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if problems:
            raise ConfigError(problems)

    def warp(self, logits: Tensor) -> Tensor:
        """Divide logits [..., V] by the temperature and set those outside top-k and top-p to -inf."""
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest_kept = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
        if self.top_p < 1:
            ascending, tokens = logits.sort(-1)
            tail = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            tail[..., -1] = False  # always keep the most probable token
            logits = logits.masked_fill(tail.scatter(-1, tokens, tail), float("-inf"))
        return logits


def uniforms(generators: Sequence[torch.Generator], count: int, device: torch.device) -> Tensor:
    """Draw numbers in [0, 1), float64 [B, count]; each row from its generator, whatever else is in the batch."""
    rows = [torch.rand(count, generator=g, dtype=torch.float64, device=g.device) for g in generators]
    return torch.stack(rows).to(device)


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """Draw a token from softmax(logits) by inverse transform sampling at `u`, long [...].

    The cumulative sum runs over token ids rather than sorted probabilities, so that rounding, which may swap two nearly
    equal ones, hardly ever changes the result. A token of probability zero is never drawn.

    Args:
        logits: [..., V], -inf for excluded tokens. u: float64 [...], in [0, 1).
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    total = cumulative[..., -1:]
    token = torch.searchsorted(cumulative, u[..., None] * total, right=True)
    last = (cumulative < total).sum(-1, keepdim=True)  # last token with any mass, in case u * total rounds up to total
    return torch.minimum(token, last)[..., 0]
