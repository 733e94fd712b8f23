"""A draft, a batch and a target model's features as small as a loss allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_states import HiddenStates

B, T, D, V, K, DECAY = 4, 11, 6, 17, 3, 0.8
KEPT = torch.tensor([12, 3, 5, 0, 9, 16])


class Heads(nn.Module):
    """K linear heads with a matrix each: all that a loss needs of a draft."""

    def __init__(self, independent: bool = True) -> None:
        super().__init__()
        self.trained_heads = K
        self.independent_heads = independent
        generator = torch.Generator().manual_seed(1)
        self.inner = nn.ParameterList(
            torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(K)
        )
        self.outer = nn.ParameterList(
            torch.randn(V, D, generator=generator, dtype=torch.float64) for _ in range(K)
        )

    def head_states(self, hidden_states: HiddenStates, batch: Rows) -> Iterator[Tensor]:
        for inner in self.inner:
            yield hidden_states.final @ inner

    def loss_positions(self, batch: Rows) -> Tensor | None:
        return None

    def lm_head(self, k: int) -> LMHead:
        return LMHead(self.outer[k - 1])


class Stem(Heads):
    """Heads on a trained layer that they share."""

    def __init__(self) -> None:
        super().__init__(independent=False)
        self.stem = nn.Parameter(
            torch.randn(D, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        )

    def head_states(self, hidden_states: HiddenStates, batch: Rows) -> Iterator[Tensor]:
        yield from super().head_states(
            HiddenStates(torch.tanh(hidden_states.final @ self.stem)), batch
        )


class ReducedHeads(Heads):
    """Heads over KEPT, with a bias, a soft cap and a scale."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        shapes = [(len(KEPT), D)] * K, [(len(KEPT),)] * K
        self.outer, self.bias = (
            nn.ParameterList(
                torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in each
            )
            for each in shapes
        )

    def lm_head(self, k: int) -> LMHead:
        return LMHead(self.outer[k - 1], self.bias[k - 1], 4.0, 0.5, token_map=KEPT)


@dataclass(frozen=True)
class Rows:
    labels: Tensor
    segments: Tensor

    def part(self, rows: slice) -> Rows:
        return Rows(self.labels[rows], self.segments[rows])


def features(seed: int) -> HiddenStates:
    generator = torch.Generator().manual_seed(seed)
    return HiddenStates(torch.randn(B, T, D, generator=generator, dtype=torch.float64))


def part(hidden_states: HiddenStates, rows: slice) -> HiddenStates:
    return HiddenStates(hidden_states.final[rows])


def one_document(labels: Tensor) -> Rows:
    return Rows(labels, torch.zeros_like(labels))
