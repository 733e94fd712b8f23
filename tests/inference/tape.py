"""An imitation of CUDA graphs on a CPU: the operations of a step are recorded once and repeated on
the same tensors.

As in a graph, nothing that the host computed is computed again: shapes, addresses and numbers stay
as they were.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_train.inference.cuda_graphs import GraphRunner, Step

#: Operations that wait for the device, or copy from the host: capture fails on a GPU.
UNCAPTURABLE = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
}


class Tape(TorchDispatchMode):
    """Records operations while it is active, and repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in UNCAPTURABLE:
            raise AssertionError(f"{func} can't be captured")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Repeat the operations; their results go where they went first."""
        for func, args, kwargs, first in self._calls:
            for old, new in zip(
                tree_leaves(first), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRunner(GraphRunner):
    """Records each step while it first runs: here recording is the first run, where a GPU's capture
    runs nothing.

    Attributes:
        captures: steps recorded so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0

    def _warm_up(self, step: Step) -> None:
        """Leave the first run to `_capture`."""

    def _capture(self, step: Step) -> Tape:
        self.captures += 1
        with Tape() as tape:
            step()
        return tape
