"""Decoding passes of a backbone compiled by torch.compile, with fixed memory and few shapes.

A pass over a few tokens spends as much time between kernels as in them. Compilation fuses small operations and calls
kernels without Python, but nothing may depend on the length of the prefix: keys and values are written to slots given
by a tensor, and attention reads a part of the cache that grows by `BLOCK` positions at a time, masked after the last
token. So one program serves plain decoding and another one trees of any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_train.errors import BackboneError
from medusa_train.trees.kv_cache import TreeCache

BLOCK = 128
_COUNTER = itertools.count()


def round_up_to_block(positions: int) -> int:
    """Round a number of positions up to a multiple of `BLOCK`."""
    return -(-positions // BLOCK) * BLOCK


def compiled_capacity(positions: int) -> int:
    """Return the cache capacity that compiled passes over up to `positions` positions need.

    It is one more than they read, so that what they read is always a strict part of the memory: torch.compile would
    otherwise build a second program for the whole memory.
    """
    return round_up_to_block(positions) + 1


class CompiledPass:
    """A compiled pass of the decoder layers and lm_head over q new tokens of a single row.

    Args:
        body: the decoder, whose weights must not change from now on.
        logits: [..., d] -> [..., V].
        on_cpu: whether the weights are on a CPU.
    """

    def __init__(self, body: Any, logits: Callable[[Tensor], Tensor], on_cpu: bool) -> None:
        def run(
            tokens: Tensor, positions: Tensor, mask: Tensor, slots: Tensor, storage: Sequence[Tensor]
        ) -> tuple[Tensor, Tensor]:
            out = body(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=_SlotCache(storage, slots, mask.shape[3]),
                use_cache=True,
            )
            return out.last_hidden_state, logits(out.last_hidden_state)

        self._body = body
        self._on_cpu = on_cpu
        # Only shapes can change between calls. Skipping all other guards saves a tenth of a step.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        if on_cpu:
            options["cpp_wrapper"] = True  # no Python between kernels
        # Plain decoding and trees are separate functions: with so few guards torch.compile would use one program for
        # both. Each gets a copy of the options, since torch.compile removes the filter from the dict it is given.
        self._plain, self._tree = (torch.compile(_with_unique_code(run), options=dict(options)) for _ in range(2))
        self._ready: set[bool] = set()

    @torch.inference_mode()
    def warm_up(self, cache: TreeCache, device: torch.device, dtype: torch.dtype) -> None:
        """Compile both programs, over an empty `cache` with the capacity `compiled_capacity(2 * BLOCK)`.

        Raises:
            BackboneError: torch.compile fails, for instance without a C++ compiler.
        """
        first = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._body(input_ids=first, position_ids=first, past_key_values=cache, use_cache=True)  # allocates the cache
        cache.commit(1)
        from torch._dynamo.exc import TorchDynamoException  # takes a second to import

        try:
            for count in (1, 3):
                tokens = torch.zeros(1, count, dtype=torch.long, device=device)
                # a slice of a larger mask, as in the decoding loop, or its strides would become constants
                mask = torch.full((1, 1, count, 2 * BLOCK), float("-inf"), dtype=dtype, device=device)
                mask[..., :2] = 0
                self(tokens, torch.ones_like(tokens), mask[..., :BLOCK], cache.reserve(count), 1)
        except TorchDynamoException as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise BackboneError(
                f"compile: torch.compile failed: {reason}\n"
                "It needs a C++ compiler (g++ or clang) on a CPU, Triton on a GPU; or leave the key out"
            ) from error

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, storage: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states [1, q, d] and logits [1, q, V] of q tokens after `length` committed positions.

        Args:
            tokens, positions: [1, q].
            mask: additive [1, 1, q, S], a slice of a larger one, -inf after the last token; S is a multiple of `BLOCK`.
            storage: the cache's memory [layers, 2, 1, kv_heads, capacity, head_dim] with capacity > S; the keys and
                values of the tokens are written after `length` positions.
        """
        slots = torch.arange(length, length + tokens.shape[1], device=tokens.device)
        inputs = (tokens, positions, mask, slots, storage.unbind())
        is_tree = len(slots) > 1
        if is_tree not in self._ready:
            return self._compile(is_tree, *inputs)
        return (self._tree if is_tree else self._plain)(*inputs)

    def _compile(
        self, is_tree: bool, tokens: Tensor, positions: Tensor, mask: Tensor, slots: Tensor, storage: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run the first pass of its kind, with the dimensions marked that vary between passes."""
        import torch._inductor.config as inductor
        from torch._dynamo import mark_dynamic

        mark_dynamic(mask, 3)
        for layer in storage:
            mark_dynamic(layer, 3)
        if is_tree:
            for tensor, dim in ((tokens, 1), (positions, 1), (mask, 2), (slots, 0)):
                mark_dynamic(tensor, dim)
        # On a CPU weights become constants, which can be prepacked, and projections with the same input become one
        # product (from torch 2.12). As options of torch.compile both settings take effect too late.
        with inductor.patch({"freezing": self._on_cpu, "cpp.enable_concat_linear": self._on_cpu}):
            out = (self._tree if is_tree else self._plain)(tokens, positions, mask, slots, storage)
        self._ready.add(is_tree)
        return out


def _with_unique_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function with a code object of its own, the key under which torch.compile finds compiled programs.

    With few guards, the program of another model would be used otherwise.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_COUNTER)}")
    return FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


class _SlotCache(Cache):
    """The storage of all layers as transformers' cache for one pass.

    Args:
        storage: per layer [2, batch, kv_heads, capacity, head_dim].
        slots: positions at which new keys and values are written, long [q].
        key_length: number of positions that attention reads.
    """

    def __init__(self, storage: Sequence[Tensor], slots: Tensor, key_length: int) -> None:
        super().__init__(layers=[_SlotLayer(layer, slots, key_length) for layer in storage])


class _SlotLayer(CacheLayerMixin):
    """One layer of a `_SlotCache`.

    Keys and values are written at once: if memory is written twice, torch.compile copies all of it instead.
    """

    is_sliding = False

    def __init__(self, storage: Tensor, slots: Tensor, key_length: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._storage = storage
        self._slots = slots
        self._key_length = key_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; the memory is allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._storage.index_copy_(3, self._slots, torch.stack([key_states, value_states]))
        # sliced here: strides of a slice made by the caller would become constants, different for each capacity
        keys, values = self._storage.narrow(3, 0, self._key_length)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._key_length, 0

    def get_seq_length(self) -> int:
        return 0  # only used to derive positions and masks, which are given

    def get_max_length(self) -> int:
        return self._key_length
