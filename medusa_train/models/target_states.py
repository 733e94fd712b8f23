"""Hidden states of the target model that drafts read, the rows of tokens they belong to, and hooks
that capture them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of the target model at T positions.

    Attributes:
        final: [B, T, d], states after the final norm: the input of lm_head. `final[:, t]` predicts
            token t + 1.
        aux: [B, T, n d], auxiliary hidden states: the concatenated outputs of n layers; None if
            there are none. Arguments named `aux_layers` list these layers in ascending order, as
            numbers 1 .. num_layers.
    """

    final: Tensor
    aux: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The states, and the auxiliary hidden states if there are any."""
        return [self.final] if self.aux is None else [self.final, self.aux]

    def map(self, function: Callable[[Tensor], Tensor]) -> HiddenStates:
        """Apply a function to each of `tensors`."""
        return HiddenStates(*map(function, self.tensors))


class TokenRows(Protocol):
    """Right-padded rows of one or more documents each, all tensors [B, T]; a training batch
    implements it.
    """

    @property
    def tokens(self) -> Tensor:
        """Token ids."""

    @property
    def positions(self) -> Tensor:
        """Position ids, starting at 0 in each document."""

    @property
    def segments(self) -> Tensor:
        """Index of the document within the row; -1 for padding."""


@dataclass(frozen=True)
class Rows:
    """Plain implementation of `TokenRows`."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor

    @classmethod
    def from_tokens(cls, tokens: Tensor) -> Rows:
        """Build rows of one unpadded document each from token ids [B, T]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(tokens, positions, torch.zeros_like(tokens))


@contextmanager
def capture_outputs(
    modules: Sequence[nn.Module], captured: list[Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """Yield a list (`captured`, or a new one) to which each call of one of `modules` appends the
    states it returns.
    """
    if captured is None:
        captured = []

    def append(_: nn.Module, __: object, out: Any) -> None:
        # layers may return a tuple
        captured.append(_first_stream(out if isinstance(out, Tensor) else out[0]))

    hooks = [module.register_forward_hook(append) for module in modules]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


def _first_stream(states: Tensor) -> Tensor:
    """Return states [B, T, d]. Gemma 3n's layers return several streams, [n, B, T, d], of which the
    first one predicts tokens.
    """
    return states[0] if states.dim() == 4 else states


@contextmanager
def capture_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which each call of `module` appends the hidden states it receives."""
    captured: list[Tensor] = []

    def append(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.append(_first_stream(args[0] if args else kwargs["hidden_states"]))

    hook = module.register_forward_pre_hook(append, with_kwargs=True)
    try:
        yield captured
    finally:
        hook.remove()
