"""What a draft reads: states of the backbone, and the tokens that they belong to; knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class FeatureSpec:
    """Which states a draft asks for, besides those after the final norm.

    Attributes:
        early: additionally the states after so many decoder layers (1 .. number of layers); None: no others.
    """

    early: int | None = None


#: The states after the final norm alone.
PLAIN = FeatureSpec()


@dataclass(frozen=True)
class Features:
    """States of the backbone at T positions.

    Attributes:
        hidden: [B, T, d], after the final norm: what `lm_head` reads. `hidden[:, t]` predicts the token t + 1.
        early: [B, T, d], after the first `FeatureSpec.early` decoder layers; None where nobody asked.
    """

    hidden: Tensor
    early: Tensor | None = None


class TokenRows(Protocol):
    """Right-padded rows of one or more documents each, all [B, T]; a training batch is one."""

    @property
    def tokens(self) -> Tensor:
        """Token ids."""

    @property
    def positions(self) -> Tensor:
        """Position ids, from 0 in each document."""

    @property
    def segments(self) -> Tensor:
        """The document that a position belongs to; -1: padding."""


@dataclass(frozen=True)
class Rows:
    """`TokenRows` by themselves."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor

    @classmethod
    def of(cls, tokens: Tensor) -> Rows:
        """Rows of one whole document each."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(tokens, positions, torch.zeros_like(tokens))
