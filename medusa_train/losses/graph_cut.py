"""Cut an autograd graph in two, so that several losses share one backward pass through a part."""

from __future__ import annotations

import torch
from torch import Tensor


class GraphCut:
    """Detaches states from their graphs and collects their gradients, for one backward pass through
    these graphs later.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def detach(self, state: Tensor) -> Tensor:
        """Return a leaf with the values of `state`, or `state` itself if it needs no gradient."""
        if not state.requires_grad:
            return state
        leaf = state.detach().requires_grad_()
        self._pairs.append((state, leaf))
        return leaf

    def backward(self) -> None:
        """Run the backward pass with the gradients of the leaves."""
        pairs = [(state, leaf.grad) for state, leaf in self._pairs if leaf.grad is not None]
        self._pairs.clear()
        if pairs:
            states, grads = zip(*pairs, strict=True)
            with torch.autocast(states[0].device.type, enabled=False):
                torch.autograd.backward(states, grads)
