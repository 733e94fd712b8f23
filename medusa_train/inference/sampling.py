"""Turn logits into the sampling distribution (temperature, top-k, top-p), and draw from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.errors import ConfigError

#: Logits per row among which a nucleus is looked for, first and in rows where these are too few,
# before the whole vocabulary is sorted. On a CPU finding 1,024 of 50,000 logits takes four times
# as long as finding 128.
FEW_CANDIDATES, NUCLEUS_CANDIDATES = 128, 1024


@dataclass(frozen=True)
class Sampling:
    """The sampling distribution, with the options applied in the order of transformers' logits
    warpers.

    Attributes:
        temperature: divides the logits; at least 1e-6 (greedy decoding is a rule of its own).
        top_k: keep only the k most probable tokens; 0 keeps all.
        top_p: keep only the smallest set of most probable tokens with this total probability
            (Holtzman et al. 2020, Nucleus Sampling); 1 keeps all.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature >= 1e-6:  # logits would overflow
            problems.append(
                f"temperature must be at least 1e-6 for sampling, got {self.temperature}"
            )
        if self.top_k < 0:
            problems.append(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if problems:
            raise ConfigError(problems)

    def warp(self, logits: Tensor) -> Tensor:
        """Divide logits [..., V] by the temperature and set those outside top-k and top-p to -inf.

        With top-p, the device is read once, or once more for rows with a large nucleus.
        """
        logits = logits / self.temperature
        largest = min(FEW_CANDIDATES, logits.shape[-1])
        if 0 < self.top_k < logits.shape[-1]:
            largest = self.top_k
            logits = logits.masked_fill(
                logits < logits.topk(largest).values[..., -1:], float("-inf")
            )
        return logits if self.top_p >= 1 else keep_nucleus(logits, self.top_p, largest)


def keep_nucleus(logits: Tensor, top_p: float, largest: int) -> Tensor:
    """Set logits [..., V] outside the smallest set of most probable tokens with total probability
    `top_p` to -inf.

    The set is looked for among the `largest` logits of each row, then among `NUCLEUS_CANDIDATES` in
    rows where these hold less than `top_p`; only rows where those hold less, too, are sorted. Of
    equal logits at the edge of the set those with the highest token ids are kept, as by sorting.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    candidates, tokens = rows.topk(largest)
    mass = rows.softmax(-1).gather(-1, tokens).cumsum(-1)
    # the most probable token is always kept
    count = 1 + (mass[:, :-1] < top_p).sum(-1, keepdim=True)
    smallest = candidates.gather(-1, count - 1)
    cut = rows < smallest
    # tokens with the smallest logit that are too many
    surplus = rows.shape[-1] - cut.sum(-1, keepdim=True) - count
    short = mass[:, -1] < top_p
    any_tied, any_short = torch.stack([(surplus > 0).any(), short.any()]).tolist()
    if any_tied:
        tied = rows == smallest
        cut |= tied & (tied.cumsum(-1, dtype=torch.int32) <= surplus)
    nucleus = rows.masked_fill(cut, float("-inf"))
    if any_short:
        more = largest < NUCLEUS_CANDIDATES < rows.shape[-1]
        rest = rows[short]
        nucleus[short] = (
            keep_nucleus(rest, top_p, NUCLEUS_CANDIDATES)
            if more
            else keep_nucleus_by_sorting(rest, top_p)
        )
    return nucleus.view_as(logits)


def keep_nucleus_by_sorting(logits: Tensor, top_p: float) -> Tensor:
    """Compute `keep_nucleus` by sorting all logits [..., V]."""
    ascending, tokens = logits.sort(dim=-1, stable=True)
    tail = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    tail[..., -1] = False  # always keep the most probable token
    return logits.masked_fill(tail.scatter(-1, tokens, tail), float("-inf"))


def uniforms(
    generators: Sequence[torch.Generator], counts: Sequence[int], device: torch.device
) -> Tensor:
    """Draw `counts[b]` numbers in [0, 1) for each row, float64 [B, max(counts)], padded with 0.

    Each row draws from its generator as many numbers as it would alone, whatever else is in the
    batch.
    """
    rows = [
        torch.rand(count, generator=g, dtype=torch.float64, device=g.device)
        for g, count in zip(generators, counts, strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """Draw a token from softmax(logits) by inverse transform sampling at `u`, long [...].

    The cumulative sum runs over token ids rather than sorted probabilities, so that rounding, which
    may swap two nearly equal ones, hardly ever changes the result. A token of probability zero is
    never drawn.

    Args:
        logits: [..., V] in float32 (or float64, for tests), -inf for excluded tokens. u: float64
            [...], in [0, 1).
    """
    # float32 sums would lose tokens below 3e-8; in place, since a vocabulary per row is a large
    # allocation
    cumulative = logits.softmax(-1).double().cumsum_(-1)
    total = cumulative[..., -1:]
    # below the total even where u * total rounds up to it, so that the last token with any mass is
    # drawn then
    place = torch.minimum(
        (u[..., None] * total).to(total.dtype), total.nextafter(torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, place, right=True)[..., 0]
