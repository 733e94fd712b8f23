"""Whether counts come from a distribution: Pearson's chi-square test, without another library."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """How likely counts at least this far off are; 0 where something impossible was counted.

    Cells that expect fewer than five are pooled into one, as the approximation asks for.
    """
    counts, expected = counts.double().flatten(), probabilities.double().flatten() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return 0.0
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = torch.tensor(float(possible.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
