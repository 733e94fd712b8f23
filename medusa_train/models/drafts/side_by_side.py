"""Parameters of one shape laid side by side in one storage, so that one product serves all; knows no draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def lay_side_by_side(parameters: Sequence[nn.Parameter]) -> None:
    """Move K parameters of one shape and dtype into one storage [K, ...], in place.

    Nothing else changes: values, identities, gradients and state dicts stay, and an optimizer goes on updating them
    (torch's recurrent layers do the same in `flatten_parameters`). The memory that they lay in is given back, so
    twice their size is held only while they move.
    """
    if not parameters or side_by_side(parameters) is not None:
        return
    with torch.no_grad():
        storage = parameters[0].new_empty((len(parameters), *parameters[0].shape))
        for place, parameter in zip(storage, parameters, strict=True):
            parameter.data = place.copy_(parameter)


def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor | None:
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
