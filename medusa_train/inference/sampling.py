"""The distribution that tokens are drawn from, and the draw; knows no tree and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution that is drawn from, in the order of transformers' warpers.

    Attributes:
        temperature: divides the logits; above 0 (greedy decoding is a rule of its own).
        top_k: only this many of the most probable tokens; 0 for all.
        top_p: only the smallest set of most probable tokens that reaches this probability (Holtzman et al. 2020,
            section 3.1); 1 for all.

    Raises:
        ConfigError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature > 0:
            problems.append(f"temperature is {self.temperature}; to sample it has to be above 0")
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}; it has to be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}; it has to be above 0 and at most 1")
        if problems:
            raise ConfigError(problems)

    def warp(self, logits: Tensor) -> Tensor:
        """Logits [..., V] divided by the temperature, with -inf for the tokens that are cut off."""
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            worst = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < worst, float("-inf"))
        if self.top_p < 1:
            rising, tokens = logits.sort(-1)
            tail = rising.softmax(-1).cumsum(-1) <= 1 - self.top_p
            tail[..., -1] = False  # the best token always stays
            logits = logits.masked_fill(tail.scatter(-1, tokens, tail), float("-inf"))
        return logits


def uniforms(generators: Sequence[torch.Generator], count: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), float64 [B, count]: each row from its own generator, whoever else is in the batch."""
    rows = [torch.rand(count, generator=g, dtype=torch.float64, device=g.device) for g in generators]
    return torch.stack(rows).to(device)


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """One token per row of softmax(logits), long [...], by inversion at `u`.

    The tokens stand in the order of their ids and not of their probabilities, so that rounding, which may swap two
    nearly equal ones, hardly ever changes what is drawn. A token of probability zero is never drawn.

    Args:
        logits: [..., V], -inf for what is cut off. u: float64 [...], in [0, 1).
    """
    mass = logits.double().softmax(-1).cumsum(-1)
    whole = mass[..., -1:]
    token = torch.searchsorted(mass, u[..., None] * whole, right=True)
    last = (mass < whole).sum(-1, keepdim=True)  # the last token with any mass, should u * whole round up to the whole
    return torch.minimum(token, last)[..., 0]
