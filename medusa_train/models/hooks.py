"""Reading what passes through a module while a stock forward runs; knows no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def outputs_of(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """Within: the list to which each call adds the states that `module` returned; stays empty for None."""
    seen: list[Tensor] = []
    if module is None:
        yield seen
        return
    hook = module.register_forward_hook(lambda _, __, out: seen.append(out if isinstance(out, Tensor) else out[0]))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Within: the list to which each call adds the states that `module` was given."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, named: seen.append(args[0] if args else named["hidden_states"]), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()
