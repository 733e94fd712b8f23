"""Turn logits into the sampling distribution (temperature, top-k, top-p), and draw from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.errors import ConfigError

#: The nucleus is searched for among the FEW_CANDIDATES largest logits, then among the
#: NUCLEUS_CANDIDATES largest, and only then in the sorted vocabulary. On a CPU, the top 1,024 of
#: 50,000 logits take four times as long as the top 128.
FEW_CANDIDATES = 128
NUCLEUS_CANDIDATES = 1024


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

        Top-p needs one transfer to the host, and another one if a row has a large nucleus.
        """
        vocab = logits.shape[-1]
        # 1. temperature
        logits = logits / self.temperature
        # 2. the k most probable tokens, and all tokens that tie with the last of them
        candidates = min(FEW_CANDIDATES, vocab)
        if 0 < self.top_k < vocab:
            candidates = self.top_k
            smallest = logits.topk(self.top_k).values[..., -1:]  # [..., 1]
            logits = logits.masked_fill(logits < smallest, float("-inf"))
        # 3. the nucleus
        if self.top_p >= 1:
            return logits
        return keep_nucleus(logits, self.top_p, candidates)


def keep_nucleus(logits: Tensor, top_p: float, num_candidates: int) -> Tensor:
    """Set logits [..., V] outside the smallest set of most probable tokens with total probability
    `top_p` to -inf.

    The set is searched for among the `num_candidates` largest logits of each distribution. If their
    probability is below `top_p`, it is searched for among `NUCLEUS_CANDIDATES`. Only if that is too
    few as well, all logits are sorted. Of tied logits at the edge of the set, those with the
    highest token ids are kept, as sorting would do.
    """
    flat = logits.reshape(-1, logits.shape[-1])  # [N, V]
    vocab = flat.shape[-1]
    # 1. how many of the c candidates belong to the set; the most probable one always does
    candidates, tokens = flat.topk(num_candidates)  # [N, c]
    mass = flat.softmax(-1).gather(-1, tokens).cumsum(-1)  # [N, c]
    count = 1 + (mass[:, :-1] < top_p).sum(-1, keepdim=True)  # [N, 1]
    # 2. cut the tokens that are less probable than the last one in the set
    smallest = candidates.gather(-1, count - 1)  # [N, 1]
    cut = flat < smallest  # [N, V]
    # 3. one transfer from the device: whether too many tokens tie with the last one in the set, and
    # whether a distribution has too few candidates
    surplus = vocab - cut.sum(-1, keepdim=True) - count  # [N, 1]
    short = mass[:, -1] < top_p  # [N]
    any_tied, any_short = torch.stack([(surplus > 0).any(), short.any()]).tolist()
    if any_tied:
        tied = flat == smallest  # [N, V]
        cut |= tied & (tied.cumsum(-1, dtype=torch.int32) <= surplus)
    nucleus = flat.masked_fill(cut, float("-inf"))
    # 4. search further in distributions with too few candidates
    if any_short:
        rest = flat[short]
        if num_candidates < NUCLEUS_CANDIDATES < vocab:
            nucleus[short] = keep_nucleus(rest, top_p, NUCLEUS_CANDIDATES)
        else:
            nucleus[short] = keep_nucleus_by_sorting(rest, top_p)
    return nucleus.view_as(logits)


def keep_nucleus_by_sorting(logits: Tensor, top_p: float) -> Tensor:
    """Compute `keep_nucleus` by sorting all logits [..., V]."""
    ascending, tokens = logits.sort(dim=-1, stable=True)  # [..., V]
    # the least probable tokens, with at most 1 - top_p in total; never the most probable token
    tail = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    tail[..., -1] = False
    cut = tail.scatter(-1, tokens, tail)  # by token id
    return logits.masked_fill(cut, float("-inf"))


def uniforms(
    generators: Sequence[torch.Generator], counts: Sequence[int], device: torch.device
) -> Tensor:
    """Draw `counts[b]` numbers in [0, 1) for row b; float64 [B, max(counts)], right-padded with 0.

    Each row draws as many numbers from its generator as it would alone, whatever else is in the
    batch.
    """
    rows: list[Tensor] = []
    for generator, count in zip(generators, counts, strict=True):
        numbers = torch.rand(
            count, generator=generator, dtype=torch.float64, device=generator.device
        )
        rows.append(numbers)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded.to(device)


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """Draw a token from softmax(logits) by inverse transform sampling at `u`, long [...].

    The cumulative sum runs in the order of token ids, not of sorted probabilities. Rounding can
    swap two nearly equal probabilities in a sorted order; in this order it hardly ever changes the
    result. A token of probability zero is never drawn.

    Args:
        logits: [..., V] in float32 (or float64, for tests), -inf for excluded tokens.
        u: float64 [...], in [0, 1).
    """
    # 1. the cumulative distribution in float64: float32 sums would lose tokens below 3e-8. The sum
    # is in place, since a vocabulary per distribution is a large allocation
    cumulative = logits.softmax(-1).double().cumsum_(-1)  # [..., V]
    total = cumulative[..., -1:]  # [..., 1], 1 up to rounding
    # 2. where u falls: always below the total, since u * total never rounds up to it for u < 1
    place = u[..., None] * total  # [..., 1]
    # 3. the first token whose cumulative probability exceeds it
    return torch.searchsorted(cumulative, place, right=True)[..., 0]
