"""Decoding passes of a target model compiled by torch.compile, with fixed memory and few shapes.

A pass over a few tokens spends as much time between kernels as in them. Compilation fuses small
operations and calls kernels without Python. But no shape may depend on the length of the prefix:
keys and values are written to columns given by a tensor, and attention reads a part of the cache
that grows by `BLOCK` positions at a time, masked after the last token. So one program serves plain
decoding, another one serves trees of any size, and two more serve batches with any number of rows.
The tree that single rows verify in most steps can have a program for exactly its size: with 3 nodes
and a 0.5B model, a step took 7 % less time on a CPU.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_train.errors import TargetModelError
from medusa_train.models.target_states import HiddenStates, capture_outputs
from medusa_train.rounding import round_up
from medusa_train.trees.transformers_adapters import NodeCache

#: The part of the cache that attention reads grows by this many positions. Larger blocks read more
#: masked positions: with 128, a step of 32 rows of a 135M model took a fifth longer.
BLOCK = 32
_COUNTER = itertools.count()


def round_up_to_block(positions: int) -> int:
    """Round a number of positions up to a multiple of `BLOCK`."""
    return round_up(positions, BLOCK)


def compiled_capacity(positions: int) -> int:
    """Return the cache capacity that compiled passes over up to `positions` positions need.

    It is one more than the passes read, so that they always read a strict part of the memory.
    Otherwise torch.compile would build a second program for reading the whole memory.
    """
    return round_up_to_block(positions) + 1


def has_compiler(device: torch.device) -> bool:
    """Return whether torch.compile finds what it needs: Triton for a GPU, or a C++ compiler and
    Python.h for a CPU.
    """
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        return bool(has_triton())
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second to import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        return False
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


class Form(NamedTuple):
    """Which passes one program runs.

    Attributes:
        batched: whether passes have several rows.
        tokens: number of tokens of each row, the root included; None: any number from two up.
    """

    batched: bool
    tokens: int | None


def needed_forms(rows: int, trees: bool) -> tuple[Form, ...]:
    """Return the forms for decoding up to `rows` rows at a time: plain decoding and, if `trees`,
    with trees.

    For `rows` above 1 there are only forms with several rows. When a single row of a batch remains,
    its passes are not compiled (see `covers`), which saves the time to compile more programs.
    """
    return tuple(Form(rows > 1, tokens) for tokens in ((1, None) if trees else (1,)))


class CompiledPass:
    """A compiled pass of the decoder layers and lm_head over q new tokens of one or several rows.

    Args:
        body: the decoder, whose weights must not change from now on.
        logits: hidden states [..., d] -> logits [..., V].
        on_cpu: whether passes run on a CPU.
        forms: the passes to compile, see `needed_forms`.
        aux: layers whose output states are returned too.
    """

    def __init__(
        self,
        body: Any,
        logits: Callable[[Tensor], Tensor],
        on_cpu: bool,
        forms: Sequence[Form] = needed_forms(1, True),
        aux: Sequence[nn.Module] = (),
    ) -> None:
        captured: list[Tensor] = []

        def run(
            tokens: Tensor,
            positions: Tensor,
            mask: Tensor,
            columns: Tensor,
            storage: Sequence[Tensor],
        ) -> tuple[HiddenStates, Tensor]:
            captured.clear()
            out = body(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=NodeCache(storage, columns, mask.shape[3]),
                use_cache=True,
            )
            states = torch.cat(captured, dim=-1) if aux else None
            captured.clear()
            return HiddenStates(out.last_hidden_state, states), logits(out.last_hidden_state)

        self._capture = partial(capture_outputs, aux, captured)
        self._on_cpu = on_cpu
        # Only shapes can change between calls. Skipping all other guards saves 10 % of a step.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        if on_cpu:
            options["cpp_wrapper"] = True  # no Python between kernels
        self._run = run
        self._options = options
        self._programs: dict[Form, Callable[..., tuple[HiddenStates, Tensor]]] = {}
        self._ready: set[Form] = set()
        for form in forms:
            self.add(form)

    def add(self, form: Form) -> None:
        """Add a program, which `warm_up` compiles. Does nothing if it is compiled already."""
        if form in self._ready:
            return
        # Every form is a separate function: with so few guards, torch.compile would use one program
        # for several forms. Each gets a copy of the options, because torch.compile removes the
        # filter from the dict.
        self._programs[form] = torch.compile(
            with_unique_code(self._run), options=dict(self._options)
        )

    def covers(self, rows: int, count: int) -> bool:
        """Return whether passes over `count` tokens in each of `rows` rows are compiled."""
        return self._form(rows, count) in self._programs

    def _form(self, rows: int, count: int) -> Form:
        """Return the form of a pass over `count` tokens in each of `rows` rows: the form for
        exactly this size if its program is compiled, else the form for any size.
        """
        exact = Form(rows > 1, count)
        if exact in self._ready:
            return exact
        return Form(rows > 1, 1 if count == 1 else None)

    @torch.inference_mode()
    def warm_up(
        self, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Compile all programs that are not compiled yet.

        The example inputs have different numbers of rows, tokens and positions, because
        torch.compile treats dimensions of equal size as the same dimension.

        Args:
            shape: number of layers, number of key heads, and size of a head.
            device: device of the model.
            dtype: dtype of keys, values and masks.
        """
        from torch._dynamo.exc import TorchDynamoException  # takes a second to import

        layers, heads, dim = shape
        try:
            for form in self._programs:
                if form in self._ready:
                    continue
                rows, memory_rows = (5, 7) if form.batched else (1, 1)
                count = form.tokens or 3
                # room for one committed token and the pass; larger than `count`
                positions = round_up_to_block(1 + count)
                storage = torch.zeros(
                    layers,
                    2,
                    memory_rows,
                    heads,
                    compiled_capacity(2 * positions),
                    dim,
                    dtype=dtype,
                    device=device,
                )
                tokens = torch.zeros(rows, count, dtype=torch.long, device=device)
                # a slice of a larger mask, as in the decoding loop; otherwise its strides would
                # become constants
                mask = torch.full(
                    (rows, 1, count, 2 * positions), float("-inf"), dtype=dtype, device=device
                )
                mask[..., :2] = 0
                columns = torch.arange(1, 1 + count, device=device)
                inputs = (tokens, torch.ones_like(tokens), mask[..., :positions], columns)
                self._compile(form, *inputs, storage.unbind())
        except TorchDynamoException as error:
            needed = (
                "On a CPU it needs a C++ compiler and Python.h (python3-dev), on a GPU Triton; or"
                " leave it out"
            )
            raise TargetModelError(
                f"compile: torch.compile failed: {_first_line(error)}\n{needed}"
            ) from error

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, columns: Tensor, storage: Tensor
    ) -> tuple[HiddenStates, Tensor]:
        """Return hidden states and logits [B, q, V] of q new tokens of each row.

        Args:
            tokens, positions: [B, q].
            mask: additive [B, 1, q, S], -inf after the last token; S is a multiple of `BLOCK`. For
                a single row, it is a slice of a larger mask.
            columns: columns where the keys and values of the tokens are written, long [q] for a
                single row, [B, q] for several.
            storage: memory of the KV cache, [layers, 2, rows, kv_heads, capacity, head_dim] with
                capacity > S. The first B rows are used.
        """
        inputs = (tokens, positions, mask, columns, storage.unbind())
        form = self._form(*tokens.shape)
        if form not in self._ready:
            return self._compile(form, *inputs)
        return self._programs[form](*inputs)

    def _compile(
        self,
        form: Form,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        columns: Tensor,
        storage: Sequence[Tensor],
    ) -> tuple[HiddenStates, Tensor]:
        """Run the first pass of a form, with the dimensions marked that vary between passes."""
        import torch._inductor.config as inductor
        from torch._dynamo import mark_dynamic

        if form.batched:
            mask = mask.contiguous()
            columns = columns.expand(len(tokens), -1).contiguous()
            for tensor in (tokens, positions, mask, columns):
                mark_dynamic(tensor, 0)
        mark_dynamic(mask, 3)
        for layer in storage:
            for dim in (1, 3) if form.batched else (3,):
                mark_dynamic(layer, dim)
        if form.tokens is None:
            for tensor, dim in (
                (tokens, 1),
                (positions, 1),
                (mask, 2),
                (columns, columns.dim() - 1),
            ):
                mark_dynamic(tensor, dim)
        # On a CPU, weights become constants, which can be prepacked, and projections with the same
        # input become one product (from torch 2.12). As options of torch.compile, both settings
        # would take effect too late.
        settings = {"freezing": self._on_cpu, "cpp.enable_concat_linear": self._on_cpu}
        with inductor.patch(settings), self._capture():  # hooks become part of the program
            out = self._programs[form](tokens, positions, mask, columns, storage)
        self._ready.add(form)
        return out


def with_unique_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function with its own code object, which is torch.compile's key for compiled programs.

    Otherwise, with few guards, torch.compile would use the program of another model.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_COUNTER)}")
    return FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def compile_layers(layers: nn.ModuleList) -> Callable[[], AbstractContextManager[None]]:
    """Compile decoder layers with torch.compile, for passes without gradients.

    Batch size and length are dynamic dimensions, so each kind of layer is compiled at most four
    times, when it is first needed: for one or several rows, with or without a mask.

    Returns:
        A context manager within which the layers run compiled. Decoding runs outside.

    Raises:
        TargetModelError: there is no compiler on this machine. The context raises it too, if
            torch.compile fails.
    """
    device = next(layers[0].parameters()).device
    if not has_compiler(device):
        needed = "a C++ compiler (g++ or clang)" if device.type == "cpu" else "Triton"
        raise TargetModelError(
            f"torch_compile: needs {needed}, which was not found; install it, or leave the key out"
        )
    programs = []
    for layer in layers:
        layer.compile(dynamic=True)
        programs.append(layer._compiled_call_impl)

    def use(implementations: Sequence[Any]) -> None:
        # `compile` sets this attribute; torch has no public way to unset it
        for layer, program in zip(layers, implementations, strict=True):
            layer._compiled_call_impl = program

    @contextmanager
    def compiled() -> Iterator[None]:
        from torch._dynamo.exc import TorchDynamoException  # takes a second to import

        use(programs)
        try:
            yield
        except TorchDynamoException as error:
            raise TargetModelError(
                f"torch_compile: torch.compile failed: {_first_line(error)}\nLeave the key out"
            ) from error
        finally:
            use([None] * len(programs))

    use([None] * len(programs))
    return compiled


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
