"""Parameters of one shape laid side by side in one storage, so that one product serves all; knows no draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


def stack_in_place(parameters: Sequence[nn.Parameter]) -> None:
    """Move K parameters of one shape and dtype into one storage [K, ...], in place.

    Nothing else changes: values, identities, gradients and state dicts stay, and an optimizer goes on updating them
    (torch's recurrent layers do the same in `flatten_parameters`). The memory that they lay in is given back, so
    twice their size is held only while they move.
    """
    if not parameters or stacked_view(parameters) is not None:
        return
    with torch.no_grad():
        storage = parameters[0].new_empty((len(parameters), *parameters[0].shape))
        for place, parameter in zip(storage, parameters, strict=True):
            parameter.data = place.copy_(parameter)


def stacked_view(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """The K parameters as one tensor [K, ...] on their own memory; None where they lie apart.

    They do after somebody else has laid them out: ZeRO keeps parameters in buffers of its own.
    """
    first = parameters[0]
    origin = first.untyped_storage().data_ptr()
    for i, parameter in enumerate(parameters):
        together = (
            parameter.untyped_storage().data_ptr() == origin
            and parameter.storage_offset() == first.storage_offset() + i * first.numel()
            and parameter.shape == first.shape
            and parameter.dtype == first.dtype
            and parameter.is_contiguous()
        )
        if not together:
            return None
    return first.detach().as_strided(
        (len(parameters), *first.shape), (first.numel(), *first.stride()), first.storage_offset()
    )


class StackedLinears(nn.ModuleList):
    """K linear maps of one shape, each with weights of its own, side by side through `.to()` and its like.

    Args:
        linears: the maps; all of them with a bias, or none.
    """

    def __init__(self, linears: Iterable[nn.Linear]) -> None:
        super().__init__(linears)
        self._stack_in_place()

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> StackedLinears:
        super()._apply(fn, recurse)  # moves parameters one by one
        self._stack_in_place()
        return self

    def stacked(self) -> tuple[Tensor, Tensor | None] | None:
        """The weights [K, out, in] and the biases [K, out] or None, without a copy.

        None where they lie apart, or where each map has become one of another class, with products of its own.
        """
        if any(type(linear) is not nn.Linear for linear in self):
            return None
        weights = stacked_view(self._named("weight"))
        biases = stacked_view(self._named("bias")) if self._has_bias else None
        if weights is None or (biases is None and self._has_bias):
            return None
        return weights, biases

    @property
    def _has_bias(self) -> bool:
        return self[0].bias is not None

    def _named(self, name: str) -> list[nn.Parameter]:
        return [getattr(linear, name) for linear in self]

    def _stack_in_place(self) -> None:
        stack_in_place(self._named("weight"))
        if self._has_bias:
            stack_in_place(self._named("bias"))
