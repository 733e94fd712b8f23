"""Drafts whose heads have linear layers of the same shapes. They are stacked in memory, so that one
matrix product computes all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from medusa_train.models.drafts.base import Draft

D = TypeVar("D", bound="StackedDraft")

#: The weights [K, out, in] and biases [K, out] (or None) of K linear layers.
Stack = tuple[Tensor, Tensor | None]


class StackedDraft(Draft):
    """A draft whose heads have linear layers of the same shapes. Their parameters are stacked in
    memory, also after `.to()`.
    """

    def parallel_linears(self) -> list[list[Any]]:
        """Return lists of linear layers; each list has the layers of the same shape of heads 1..K,
        either all with a bias or all without.
        """
        raise NotImplementedError

    def stack_heads(self) -> None:
        """Stack the weights, and the biases, of each list of `parallel_linears` in memory."""
        for linears in self.parallel_linears():
            for name in ("weight", "bias"):
                parameters = [getattr(linear, name) for linear in linears]
                if parameters and parameters[0] is not None:
                    stack_in_place(parameters)

    def stacked(self) -> list[Stack] | None:
        """Return the stack of each list of `parallel_linears`, without a copy.

        None if they are not stacked in memory, or if a layer was replaced by a layer of another
        class, for example a prepacked one.
        """
        stacks: list[Stack] = []
        for linears in self.parallel_linears():
            if any(type(linear) is not nn.Linear for linear in linears):
                return None
            weight = stacked_view([linear.weight for linear in linears])
            bias: Tensor | None = None
            if linears[0].bias is not None:
                bias = stacked_view([linear.bias for linear in linears])
            if weight is None or (bias is None and linears[0].bias is not None):
                return None
            stacks.append((weight, bias))
        return stacks

    def _apply(self: D, fn: Callable[..., Tensor], recurse: bool = True) -> D:
        super()._apply(fn, recurse)  # moves parameters one by one
        self.stack_heads()
        return self


def stack_in_place(parameters: Sequence[nn.Parameter]) -> None:
    """Move K parameters of one shape and dtype into one storage [K, ...], in place.

    Values, identities, gradients and state dicts do not change, and optimizers continue to work;
    torch's recurrent layers do the same in `flatten_parameters`. Twice the memory is needed only
    during the move.
    """
    if not parameters or stacked_view(parameters) is not None:
        return
    with torch.no_grad():
        storage = parameters[0].new_empty((len(parameters), *parameters[0].shape))  # [K, ...]
        for target, parameter in zip(storage, parameters, strict=True):
            parameter.data = target.copy_(parameter)


def stacked_view(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return K parameters as a view [K, ...] of their memory; None if they are not adjacent.

    They are no longer adjacent after being moved, for example into ZeRO's flat buffers.
    """
    first = parameters[0]
    memory = first.untyped_storage().data_ptr()
    # 1. parameter i must start i times its size after the first one, in the same storage
    for i, parameter in enumerate(parameters):
        adjacent = (
            parameter.untyped_storage().data_ptr() == memory
            and parameter.storage_offset() == first.storage_offset() + i * first.numel()
            and parameter.shape == first.shape
            and parameter.dtype == first.dtype
            and parameter.is_contiguous()
        )
        if not adjacent:
            return None
    # 2. one tensor over all of them
    shape = (len(parameters), *first.shape)
    strides = (first.numel(), *first.stride())
    return first.detach().as_strided(shape, strides, first.storage_offset())
