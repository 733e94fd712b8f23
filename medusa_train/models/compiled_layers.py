"""Compile the decoder layers of a frozen backbone for the passes of training.

Layers are compiled one by one ("regional compilation"): all layers of a kind share a program, so that compiling takes
seconds whatever their number. What a pass does around its layers stays as it is, forward hooks included: embedding,
rotary angles, masks, bounds of documents, the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from medusa_train.errors import BackboneError
from medusa_train.models.compiled import has_compiler, with_unique_code

#: Dimensions that differ between batches, by the number of dimensions: [documents], [B, T], [B, T, d] and [B, 1, T, T].
_VARYING = {1: (0,), 2: (0, 1), 3: (0, 1), 4: (0, 2, 3)}


class CompiledLayers:
    """Programs of torch.compile for decoder layers, which run in their place within `active`.

    Batch size and length are dynamic dimensions. So each kind of layer is compiled at most four times, when it is first
    needed: for one row and for several, with a mask and without one.

    Args:
        layers: of a backbone whose weights are not trained. kinds: kind of attention of each layer.

    Raises:
        BackboneError: there is no compiler on this machine.
    """

    def __init__(self, layers: nn.ModuleList, kinds: Sequence[str]) -> None:
        device = next(layers[0].parameters()).device
        if not has_compiler(device):
            needed = "a C++ compiler (g++ or clang)" if device.type == "cpu" else "Triton"
            raise BackboneError(f"torch_compile: needs {needed}, which was not found; install it, or leave the key out")
        # functions with code of their own, since the limit of programs that torch.compile keeps is one for each code
        programs = {kind: torch.compile(with_unique_code(_run_layer)) for kind in dict.fromkeys(kinds)}
        self._forwards = [
            (layer, partial(_run_marked, programs[kind], layer)) for layer, kind in zip(layers, kinds, strict=True)
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the layers' programs in a pass without gradients. Decoding, which uses a cache, runs outside.

        Raises:
            BackboneError: torch.compile fails.
        """
        from torch._dynamo.exc import TorchDynamoException  # takes a second to import

        before: list[Any] = [vars(layer).get("forward") for layer, _ in self._forwards]  # accelerate sets it, too
        for layer, program in self._forwards:
            layer.forward = program
        try:
            yield
        except TorchDynamoException as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise BackboneError(f"torch_compile: torch.compile failed: {reason}\nLeave the key out") from error
        finally:
            for (layer, _), forward in zip(self._forwards, before, strict=True):
                if forward is None:
                    del layer.forward
                else:
                    layer.forward = forward


def _run_marked(program: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's program, with the dimensions marked that vary between batches."""
    from torch._dynamo import maybe_mark_dynamic

    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            for dim in _VARYING.get(leaf.dim(), ()):
                maybe_mark_dynamic(leaf, dim)
    return program(layer, *args, **kwargs)


def _run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer by its class, since the layer's own `forward` is the program."""
    return type(layer).forward(layer, *args, **kwargs)
