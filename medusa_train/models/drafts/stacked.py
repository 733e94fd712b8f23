"""Linear layers of one shape, stacked in memory, so that one product computes all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


class StackedLinears(nn.ModuleList):
    """K linear layers of one shape, all with a bias or none, stacked in memory; they stay so
    through `.to()`.
    """

    def __init__(self, linears: Iterable[nn.Linear]) -> None:
        super().__init__(linears)
        stack_linears(list(self))

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> StackedLinears:
        super()._apply(fn, recurse)  # moves parameters one by one
        stack_linears(list(self))
        return self

    def stacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Return all weights and biases, see `stacked_linears`."""
        return stacked_linears(list(self))


def stack_linears(linears: Sequence[nn.Module]) -> None:
    """Move the weights, and the biases, of linear layers of one shape into one storage each, see
    `stack_in_place`.
    """
    for name in ("weight", "bias"):
        parameters = [getattr(linear, name) for linear in linears]
        if parameters and parameters[0] is not None:
            stack_in_place(parameters)


def stacked_linears(linears: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Return the weights [K, out, in] and biases [K, out] (or None) of K linear layers without a
    copy.

    None if they are not stacked in memory, or if a layer was replaced by one of another class, for
    example prepacked.
    """
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    weight = stacked_view([linear.get_parameter("weight") for linear in linears])
    if weight is None:
        return None
    if linears[0].bias is None:
        return weight, None
    bias = stacked_view([linear.get_parameter("bias") for linear in linears])
    if bias is None:
        return None
    return weight, bias


def stack_in_place(parameters: Sequence[nn.Parameter]) -> None:
    """Move K parameters of one shape and dtype into one storage [K, ...], in place.

    Values, identities, gradients and state dicts stay as they are, and optimizers continue to work;
    torch's recurrent layers do the same in `flatten_parameters`. Memory of twice their size is
    needed only while they are moved.
    """
    if not parameters or stacked_view(parameters) is not None:
        return
    with torch.no_grad():
        storage = parameters[0].new_empty((len(parameters), *parameters[0].shape))  # [K, ...]
        for target, parameter in zip(storage, parameters, strict=True):
            parameter.data = target.copy_(parameter)


def stacked_view(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return K parameters as one tensor [K, ...] on their memory; None if they are not adjacent.

    They stop being adjacent when they are moved, for example into ZeRO's flat buffers.
    """
    first = parameters[0]
    memory = first.untyped_storage().data_ptr()
    # 1. parameter i begins i times its size behind the first one, in the same memory
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
