"""A decoding pass of a backbone compiled by torch.compile: static memory, few shapes; knows no draft and no tree.

A pass over a few tokens spends as much time between the kernels as in them. Compiled, small operations are fused and
called without Python. For that nothing may depend on how long the prefix is: keys and values are written to slots that
are told by a tensor, and attention looks at a block of the cache that grows by `BLOCK` positions at a time, masked
behind the last one. So there is one program for plain decoding and one for trees, whatever their size.
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
_NUMBERS = itertools.count()


def round_up_to_block(positions: int) -> int:
    """The end of the block that the last of so many positions lies in."""
    return -(-positions // BLOCK) * BLOCK


def compiled_capacity(positions: int) -> int:
    """Of a cache for passes that look at whole blocks.

    One more than they look at: what is looked at is then always a part of the memory, for one program and not two.
    """
    return round_up_to_block(positions) + 1


class _Layer(CacheLayerMixin):
    """One layer's keys and values [2, batch, kv_heads, capacity, head_dim], written at given slots, seen up to S.

    They are written in one piece: where memory is written twice, torch.compile copies all of it instead.
    """

    is_sliding = False

    def __init__(self, stored: Tensor, slots: Tensor, seen: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._stored = stored
        self._slots = slots
        self._seen = seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the memory is there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._stored.index_copy_(3, self._slots, torch.stack([key_states, value_states]))
        # cut here and not by the caller: strides of a part would be taken for constants, of each capacity others
        keys, values = self._stored.narrow(3, 0, self._seen)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen, 0

    def get_seq_length(self) -> int:
        return 0  # only asked for positions and masks, which are handed in

    def get_max_length(self) -> int:
        return self._seen


class _Slots(Cache):
    """All layers' memory as a cache for one pass."""

    def __init__(self, stored: Sequence[Tensor], slots: Tensor, seen: int) -> None:
        super().__init__(layers=[_Layer(one, slots, seen) for one in stored])


def _on_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, by which torch.compile finds the programs it has made.

    With few checks before a call, another model's would be taken for this one's.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}")
    return FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


class CompiledPass:
    """The decoder layers and lm_head over q new tokens of one row.

    Args:
        body: the decoder stack, whose weights stay as they are from now on. logits: [..., d] -> [..., V].
        on_cpu: where they are.
    """

    def __init__(self, body: Any, logits: Callable[[Tensor], Tensor], on_cpu: bool) -> None:
        def run(
            tokens: Tensor, positions: Tensor, mask: Tensor, slots: Tensor, stored: Sequence[Tensor]
        ) -> tuple[Tensor, Tensor]:
            out = body(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=_Slots(stored, slots, mask.shape[3]),
                use_cache=True,
            )
            return out.last_hidden_state, logits(out.last_hidden_state)

        self._body = body
        # Of what is checked before every call only the shapes can change here: all else took a tenth of a step.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        if on_cpu:
            options["cpp_wrapper"] = True  # no Python between the kernels
        self._on_cpu = on_cpu
        # Plain decoding and trees are compiled apart: without those checks one would be taken for the other.
        # Each with options of its own, since torch.compile takes the filter out of what it is given.
        self._plain, self._tree = (torch.compile(_on_its_own(run), options=dict(options)) for _ in range(2))
        self._ready: set[bool] = set()

    @torch.inference_mode()
    def warm_up(self, cache: TreeCache, device: torch.device, dtype: torch.dtype) -> None:
        """Compile both programs, over an empty `cache` with a capacity of `compiled_capacity` some positions.

        Raises:
            BackboneError: this machine can't compile, a C++ compiler missing for instance.
        """
        first = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._body(input_ids=first, position_ids=first, past_key_values=cache, use_cache=True)  # gives it its memory
        cache.commit(1)
        from torch._dynamo.exc import TorchDynamoException  # takes a second to import

        try:
            for count in (1, 3):
                tokens = torch.zeros(1, count, dtype=torch.long, device=device)
                # a part of a larger one, as the loop's: its strides are no constants either
                mask = torch.full((1, 1, count, 2 * BLOCK), float("-inf"), dtype=dtype, device=device)
                mask[..., :2] = 0
                self(tokens, torch.ones_like(tokens), mask[..., :BLOCK], cache.reserve(count), 1)
        except TorchDynamoException as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise BackboneError(
                f"compile: torch.compile failed here: {reason}\n"
                "It needs a C++ compiler (g++ or clang) on a CPU, Triton on a GPU; or leave the key out"
            ) from error

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, stored: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """States [1, q, d] and logits [1, q, V] of q tokens behind `length` committed positions.

        Args:
            tokens, positions: [1, q]. mask: additive [1, 1, q, S], a part of a larger one, -inf behind the last token;
                S is a `round_up_to_block`.
            stored: the cache's memory [layers, 2, 1, kv_heads, capacity, head_dim] for more than S positions; what the
                tokens add is written behind `length`.
        """
        slots = torch.arange(length, length + tokens.shape[1], device=tokens.device)
        given = (tokens, positions, mask, slots, stored.unbind())
        if (tree := len(slots) > 1) not in self._ready:
            return self._compile(*given)
        return (self._tree if tree else self._plain)(*given)

    def _compile(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, slots: Tensor, stored: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The first pass of its kind, told which sizes will be others in those to come."""
        import torch._inductor.config as inductor
        from torch._dynamo import mark_dynamic

        mark_dynamic(mask, 3)
        for one in stored:
            mark_dynamic(one, 3)
        if tree := len(slots) > 1:
            for tensor, dim in ((tokens, 1), (positions, 1), (mask, 2), (slots, 0)):
                mark_dynamic(tensor, dim)
        # weights become constants that a CPU's kernels may lay out to their liking, those of projections that read the
        # same states side by side as one (from torch 2.12 on); as options both come too late
        with inductor.patch({"freezing": self._on_cpu, "cpp.enable_concat_linear": self._on_cpu}):
            out = (self._tree if tree else self._plain)(tokens, positions, mask, slots, stored)
        self._ready.add(tree)
        return out
