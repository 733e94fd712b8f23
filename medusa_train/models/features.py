"""What a draft reads of the backbone; knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Features:
    """States of the backbone at T positions.

    Attributes:
        hidden: [B, T, d], after the final norm: what `lm_head` reads. `hidden[:, t]` predicts the token t + 1.
    """

    hidden: Tensor
