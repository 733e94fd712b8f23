"""Record the largest tensor that operations allocate."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Within this context, `numel` is the size of the largest tensor that an operation, forward or
    backward, returned.

    Views do not count, only newly allocated memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if tensor.untyped_storage().data_ptr() not in inputs:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    ]
