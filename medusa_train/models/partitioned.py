"""Read and change weights that DeepSpeed's ZeRO-3 has partitioned, by gathering them while a block
of code runs.

Everything here is a collective operation: all processes call it for the same parameters in the same
order. Parameters that are not partitioned, or already gathered, are left unchanged, so the same
code works without DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_partitioned(tensor: Tensor) -> bool:
    """Return whether this process holds only a part of a parameter, in its `ds_tensor`."""
    status = getattr(tensor, "ds_status", None)
    return status is not None and status.name != "AVAILABLE"


def full_shape(tensor: Tensor) -> torch.Size:
    """Return the full shape of a parameter, partitioned or not."""
    shape: torch.Size = tensor.ds_shape if is_partitioned(tensor) else tensor.shape  # type: ignore[attr-defined]
    return shape


@contextmanager
def gathered(parameters: Iterable[Tensor], *, modify: bool = False) -> Iterator[None]:
    """Within this context, gather partitioned `parameters` in all processes. With `modify`, rank
    0's values are kept afterwards.
    """
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if modify else None):
        yield


@contextmanager
def gathering_modules(model: nn.Module) -> Iterator[None]:
    """Within this context, gather each module's weights while its forward pass runs. For passes
    without gradients, before there is a DeepSpeed engine that does it.
    """
    running: dict[nn.Module, ExitStack] = {}

    def enter(module: nn.Module, args: Any) -> None:
        # it may still be gathered if an earlier pass raised an error in it
        if module not in running:
            running[module] = ExitStack()
            running[module].enter_context(gathered(module.parameters(recurse=False)))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop(module).close()

    with ExitStack() as hooks:
        for module in model.modules():
            if any(is_partitioned(parameter) for parameter in module.parameters(recurse=False)):
                hooks.callback(module.register_forward_pre_hook(enter).remove)
                hooks.callback(module.register_forward_hook(leave).remove)
        try:
            yield
        finally:
            for stack in reversed(running.values()):  # of a pass that raised an error
                stack.close()


def whole_copies(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return full tensors by name; partitioned ones are gathered one at a time and copied to CPU
    memory.

    With `keep` False, the process only takes part in gathering, and gets an empty dict.
    """
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        to_copy = is_partitioned(tensor)  # check before it is gathered
        with gathered([tensor]):
            if keep:
                copies[name] = tensor.detach().to("cpu", copy=True) if to_copy else tensor.detach()
    return copies


def make_whole(parameters: Iterable[nn.Parameter], *, keep: bool) -> None:
    """End the partitioning of parameters that are no longer used for computation.

    With `keep` True, the process holds the full parameters in CPU memory afterwards; in other
    processes they are empty.
    """
    for parameter in parameters:
        if not is_partitioned(parameter):
            continue
        with gathered([parameter]):
            copy = parameter.detach().to("cpu", copy=True) if keep else None
        if copy is not None:
            parameter.data = copy
            parameter.ds_status = type(parameter.ds_status).AVAILABLE  # type: ignore[attr-defined]


def to_float32(module: nn.Module) -> None:
    """Upcast a module's weights to float32; each process converts its own part."""
    for parameter in module.parameters():
        if is_partitioned(parameter):
            part = parameter.ds_tensor  # type: ignore[attr-defined]
            part.data = part.data.float()
    module.float()
