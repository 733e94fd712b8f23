"""Programs of torch.compile for the decoder layers of decoding passes: one serves all layers of a kind.

    layer 0   layer 1   layer 2  ...        of one class, with the same numbers but for weights
        \\         |         /
          one program per form              a single row or several, one token per row or a tree

A whole model in one program takes minutes to compile. What that saves between layers is little where
steps are CUDA graphs. Nothing in a program depends on the length of the prefix: keys and values are
written to columns given by a tensor, and attention reads as many as the mask has.

torch.compile is told to trust that only tensors differ between calls, which saves a tenth of a step. So
whatever else a layer reads is a constant of its program, and part of the key under which it is found:
every number and switch of the layer and of its parts, but its index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache

from medusa_train.models.compiled import BLOCK, Form, compiled_capacity, with_unique_code
from medusa_train.trees.transformers_adapters import SlotCache, SlotPlace

#: What a layer reads beside its states: mask, positions and angles by their names.
Options = Mapping[str, Any]
#: Runs a layer on states with a cache of its own.
Run = Callable[[nn.Module, Tensor, Options, Cache], Any]

# sizes with which programs are compiled, of which no two are equal: torch.compile takes dimensions of
# the same size for the same dimension
_ROWS, _MEMORY_ROWS, _NODES = 5, 7, 3
_SCALARS = (bool, int, float, str, type(None))


class LayerPrograms:
    """Compiles layers, and runs their programs where passes write to given columns.

    Attributes:
        programs: by kind of layer, form of the pass, and what it reads that is no tensor.
    """

    def __init__(self, backend: str = "inductor", *, coordinate_descent: bool = False) -> None:
        """Compile with a backend of torch.compile.

        Args:
            coordinate_descent: let Inductor try several tilings for steps of one token, which takes
                longer.
        """
        self._backend = backend
        self._coordinate_descent = coordinate_descent
        self.programs: dict[Any, Callable[..., Any]] = {}

    def serve(self, layer: nn.Module, index: int) -> None:
        """Run a transformers layer by its programs from now on.

        Args:
            index: of its keys and values in the cache.
        """
        plain = partial(type(layer).forward, layer)
        kind = kind_of(layer)

        def forward(states: Tensor, **options: Any) -> Any:
            cache = options.pop("past_key_values", None)
            place = self._place(cache, index, states, options.get("attention_mask"))
            if place is None:
                return plain(states, past_key_values=cache, **options)
            return self._run(kind, _run_layer, layer, states, options, place)

        layer.__dict__["forward"] = forward

    def serve_slots(self, layer: Any) -> None:
        """Run a draft's own layer, such as `Eagle3Layer`, by its programs from now on."""
        kind = kind_of(layer)
        plain = layer.run_slots

        def run_slots(states: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Any:
            place = self._place(cache, 0, states, mask)
            if place is None:
                return plain(states, positions, mask, cache)
            options = {"positions": positions, "attention_mask": mask}
            return self._run(kind, _run_slots, layer, states, options, place)

        layer.__dict__["run_slots"] = run_slots

    @staticmethod
    def _place(cache: Any, index: int, states: Tensor, mask: Any) -> SlotPlace | None:
        """Return where a layer writes; None for passes that no program computes: over prompts, with
        gradients, without a mask, or over one row of the memory of several.
        """
        if not isinstance(cache, SlotCache) or not isinstance(mask, Tensor):
            return None
        place = cache.place(index)
        if torch.is_grad_enabled() or isinstance(place.columns, int):
            return None
        alone = len(states) == 1
        return place if alone == (place.storage.shape[1] == 1) else None

    def _run(
        self,
        kind: Any,
        run: Run,
        layer: nn.Module,
        states: Tensor,
        options: Options,
        place: SlotPlace,
    ) -> Any:
        """Run the program of a kind of layer, which is compiled before where there is none yet."""
        # 1. the same layout in every call
        form = Form.of(*states.shape[:2])
        mask = options["attention_mask"].expand(len(states), -1, -1, -1)  # [B, 1, q, S]
        others = {name: value for name, value in options.items() if name != "attention_mask"}
        inputs = dict(tree_map(_contiguous, others))
        inputs["attention_mask"] = _contiguous(mask) if form.batched else mask
        states = _contiguous(states)
        columns = _contiguous(place.columns)

        # 2. the program
        constants = [leaf for leaf in tree_leaves(inputs) if not isinstance(leaf, Tensor)]
        key = (kind, form, tuple(sorted(inputs)), tuple(constants))
        if key not in self.programs:
            program = self._new_program(run, form)
            _compile(program, form, layer, states, inputs, columns, place.storage)
            self.programs[key] = program
        return self.programs[key](layer, states, inputs, columns, place.storage)

    def _new_program(self, run: Run, form: Form) -> Callable[..., Any]:
        def layer_program(
            layer: nn.Module, states: Tensor, options: Options, columns: Tensor, storage: Tensor
        ) -> Any:
            mask = options["attention_mask"]
            cache = _OneLayer(SlotCache([storage], columns, mask.shape[3]))
            return run(layer, states, options, cache)

        settings: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        if self._coordinate_descent and not form.is_tree:
            settings["coordinate_descent_tuning"] = True
        unique = with_unique_code(layer_program)
        return torch.compile(unique, backend=self._backend, options=settings)


class _OneLayer(Cache):
    """A cache of one layer, whatever the layer's index."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__(layers=cache.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[0].update(key_states, value_states)
        return keys, values


def _run_layer(layer: nn.Module, states: Tensor, options: Options, cache: Cache) -> Any:
    """Run a transformers layer by its class, since its own `forward` is the program."""
    return type(layer).forward(layer, states, past_key_values=cache, **options)


def _run_slots(layer: Any, states: Tensor, options: Options, cache: Cache) -> Any:
    return type(layer).run_slots(
        layer, states, options["positions"], options["attention_mask"], cache
    )


def kind_of(layer: nn.Module) -> Any:
    """Return all that a program of this layer takes for constant: classes, numbers and switches of the
    layer and its parts, and the shapes of their weights, but not the layer's index.
    """
    parts = []
    for path, module in layer.named_modules():
        scalars = []
        for name, value in vars(module).items():
            is_public = not name.startswith("_") and name != "layer_idx"
            if is_public and isinstance(value, _SCALARS):
                scalars.append((name, value))
        shapes = []
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            shape = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            shapes.append((name, shape))
        config = getattr(module, "config", None)
        attention = getattr(config, "_attn_implementation", None)
        parts.append((path, type(module), tuple(scalars), tuple(shapes), attention))
    return tuple(parts)


def _contiguous(leaf: Any) -> Any:
    """Return a tensor with the strides of its shape; a contiguous one may have others where a size
    is 1, with which torch.compile would compile again.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    strides = [1] * leaf.dim()
    for dim in reversed(range(leaf.dim() - 1)):
        strides[dim] = strides[dim + 1] * leaf.shape[dim + 1]
    return leaf.contiguous().as_strided(leaf.shape, strides)


def _compile(
    program: Callable[..., Any],
    form: Form,
    layer: nn.Module,
    states: Tensor,
    options: Options,
    columns: Tensor,
    storage: Tensor,
) -> None:
    """Compile a program with inputs like these, but of sizes that all differ, and with the dimensions
    marked that vary between passes.
    """
    from torch._dynamo import mark_dynamic  # takes a second to import

    rows = 1
    memory_rows = 1
    mask_width = 2 * BLOCK
    if form.batched:
        rows = _ROWS
        memory_rows = _MEMORY_ROWS
        mask_width = BLOCK
    nodes = 1
    if form.is_tree:
        nodes = _NODES

    def mark(tensor: Tensor, rows_dim: int | None = None, nodes_dim: int | None = None) -> None:
        """Mark the dimensions of rows and of nodes, where these vary between passes."""
        if rows_dim is not None and form.batched:
            mark_dynamic(tensor, rows_dim)
        if nodes_dim is not None and form.is_tree:
            mark_dynamic(tensor, nodes_dim)

    def like(leaf: Any) -> Any:
        """Return zeros [B, q, ...] or [q] in place of a tensor."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 1:  # [q]
            zeros = leaf.new_zeros(nodes)
            mark(zeros, nodes_dim=0)
        elif len(leaf) == 1:  # shared by all rows, such as angles of a single row
            zeros = leaf.new_zeros(1, nodes, *leaf.shape[2:])
            mark(zeros, nodes_dim=1)
        else:
            zeros = leaf.new_zeros(rows, nodes, *leaf.shape[2:])
            mark(zeros, rows_dim=0, nodes_dim=1)
        return zeros

    # 1. states, angles and positions
    new_options = tree_map(like, {**options, "attention_mask": None})
    new_states = like(states)
    # 2. the mask [B, 1, q, S]; a single row's is a slice of a larger one, or its strides would be
    # constants
    mask = states.new_zeros(rows, 1, nodes, mask_width)[..., :BLOCK]
    mark(mask, rows_dim=0, nodes_dim=2)
    mark_dynamic(mask, 3)
    new_options["attention_mask"] = mask
    # 3. columns, [q] or [B, q]
    new_columns = torch.arange(1, 1 + nodes, device=columns.device)
    if columns.dim() == 1:
        mark(new_columns, nodes_dim=0)
    else:
        new_columns = new_columns.repeat(rows, 1)
        mark(new_columns, rows_dim=0, nodes_dim=1)
    # 4. memory [2, B, H_kv, S, d] of more rows and columns than are read
    heads = storage.shape[2]
    size = storage.shape[4]
    new_storage = storage.new_zeros(2, memory_rows, heads, compiled_capacity(2 * BLOCK), size)
    mark(new_storage, rows_dim=1)
    mark_dynamic(new_storage, 3)
    program(layer, new_states, new_options, new_columns, new_storage)
