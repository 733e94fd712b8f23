"""Run a transformers causal language model up to its hidden states, with explicit masks, positions
and KV cache.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from medusa_train.errors import TargetModelError
from medusa_train.models.architecture import tree_unsupported_reason
from medusa_train.models.attention import use_folded_heads
from medusa_train.models.compiled import CompiledPass, Form, has_compiler, needed_forms
from medusa_train.models.document_attention import (
    document_bounds,
    document_mask,
    separates_documents,
    use_attention,
)
from medusa_train.models.hf_config import (
    check_exit_layer,
    context_length,
    decoder_of,
    has_experts,
    layer_types,
    logit_scale,
    rope_switch,
)
from medusa_train.models.layer_split import LayerRunner, LayerSplit
from medusa_train.models.lm_head import Embedding, LMHead, low_rank_of, transform_logits
from medusa_train.models.partitioned import full_shape
from medusa_train.models.precision import exact_buffers, parse_dtype
from medusa_train.models.prepack import copies_fit
from medusa_train.models.stop_tokens import (
    GENERATION_CONFIG,
    StopTokens,
    chat_encoder_or_none,
    find_stop_tokens,
)
from medusa_train.models.target_states import (
    HiddenStates,
    capture_inputs,
    capture_outputs,
)
from medusa_train.trees.kv_cache import KEY_BLOCK, ROWS, KVCache
from medusa_train.trees.lookahead_branch import AnyTree
from medusa_train.trees.masks import NodeMasks, apply_sliding_window
from medusa_train.trees.transformers_adapters import NodeInputs, PromptCache
from medusa_train.trees.tree import Tree


class TargetModel:
    """The language model whose next tokens are drafted and verified.

    The transformers model is used unchanged, except for its attention function
    (`models.attention`): its forward gets a 4-D additive mask, explicit position ids and a cache
    that writes to `KVCache`. Logits are computed here from the hidden states, so that drafts can
    apply the same transforms. `loading.load_target_model` builds a target model from a directory or
    the hub and checks that it is supported.

    Args:
        model: a transformers causal language model, frozen and in eval mode.
        tokenizer: its tokenizer.
        name: directory or hub name, for messages.

    Attributes:
        max_context: number of positions that the model was trained for.
        stop_tokens: tokens at which an answer ends, with their sources; see `end_answers_by`.
        eos_ids: ids of the stop tokens, at which all decoders stop.
        tree_unsupported_reason: why token trees cannot be verified with this model, see
            `architecture.tree_unsupported_reason`; None if they can.
        rope_switch: position from which a longrope model uses its long factors, or None.
        attention: transformers' name of the attention implementation that takes masks.

    The remaining attributes change how passes run, not what they compute. They are set at most
    once, after loading:

        varlen: whether packed documents are separated by their bounds, in training; by
            `use_varlen`.
        step_runner: replays decoding steps; by `inference.cuda_graphs.use_cuda_graphs`. None: they
            run eagerly, with exact sizes.
        decoding_aux_layers: layers whose hidden states compiled passes return; set it before
            `compile_passes`.
        compiled: the compiled decoding passes; by `compile_passes`. None: passes are not compiled.

    Raises:
        TargetModelError: the model has no lm_head.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str = "") -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.body = decoder_of(model)
        self.config = model.config.get_text_config()
        head = model.get_output_embeddings()
        if head is None:
            raise TargetModelError(
                f"{type(model).__name__} has no lm_head: not a causal language model"
            )
        self.device: torch.device = head.weight.device
        self.dtype: torch.dtype = head.weight.dtype
        self.vocab_size, self.hidden_size = full_shape(head.weight)
        self.num_layers: int = self.config.num_hidden_layers
        self.max_context: int = context_length(self.config)
        generation_config = getattr(model, "generation_config", None)
        self.stop_tokens: StopTokens = find_stop_tokens(
            generation_config, tokenizer, self.vocab_size
        )
        self.eos_ids = self.stop_tokens.ids
        self.layer_types = layer_types(self.config)
        self.tree_unsupported_reason = tree_unsupported_reason(model.config)
        self.window: int | None = getattr(self.config, "sliding_window", None)
        self.rope_switch = rope_switch(self.config)
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.scale = logit_scale(self.config)
        self.attention = use_folded_heads(model)
        self.varlen = False
        self._splits: dict[int, LayerSplit] = {}
        self.decoding_aux_layers: tuple[int, ...] = ()
        self.compiled: CompiledPass | None = None
        self.step_runner: Any = None

    def end_answers_by(
        self, chat_template: str | None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """End answers also at the token that the chat template writes after them.

        Args:
            chat_template: a name, a Jinja file, or None for the tokenizer's own template, if any.
            chat_template_kwargs: variables of the chat template.

        Raises:
            ConfigError: the template cannot be read.
        """
        chat = chat_encoder_or_none(self.tokenizer, chat_template, chat_template_kwargs)
        self.stop_tokens = find_stop_tokens(
            self.model.generation_config, self.tokenizer, self.vocab_size, chat
        )
        self.eos_ids = self.stop_tokens.ids

    def run(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cache: PromptCache | None = None,
        segments: Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> HiddenStates:
        """Run the decoder layers once, without computing logits. Used in training and for prompts.

        Args:
            tokens: token ids [B, T].
            positions: position ids [B, T]; by default they continue after the cache.
            cache: keys and values before `tokens`; the T new ones are added.
            segments: [B, T], index of the document in a packed row; -1: padding. Each document is
                computed as in a separate row, with `positions` that restart. Excludes `cache`. A
                model with a `tree_unsupported_reason` takes one document per row.
            aux_layers: layers whose outputs are returned as auxiliary hidden states.

        Returns:
            Hidden states after the final norm, and after the layers of `aux_layers`.
        """
        mask: Any = None  # causal
        bounds: dict[str, Any] = {}
        if segments is not None and self.tree_unsupported_reason is not None:
            positions = None  # rows are right-padded, and no layer reads later positions
        elif segments is not None and self.varlen:
            bounds = document_bounds(segments)
        elif segments is not None:
            mask = self._document_masks(segments, positions)
        with (
            nullcontext() if bounds else self.masked_attention(),
            self.capture_aux_states(aux_layers) as captured,
        ):
            out = self.body(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
                **bounds,
            )
        return HiddenStates(
            out.last_hidden_state, torch.cat(captured, dim=-1) if captured else None
        )

    def run_nodes(
        self,
        tokens: Tensor,
        nodes: NodeInputs,
        aux_layers: tuple[int, ...] = (),
        aux: Tensor | None = None,
    ) -> tuple[HiddenStates, Tensor]:
        """Run one pass over the nodes of a tree: the verification of a decoding step.

        Args:
            tokens: tokens of the nodes, long [B, n + 1].
            nodes: the other inputs of the pass.
            aux_layers: layers whose outputs are returned as auxiliary hidden states.
            aux: states [B, n + 1, d] after layer `aux_layers`, if the layers up to it have run and
                written their keys and values already. Only the remaining layers run.

        Returns:
            States [B, n + 1, d] and logits [B, n + 1, V].
        """
        # 1. the whole pass in a compiled program, if there is one for it
        compiled = self._compiled_pass(tokens, nodes, aux_layers, aux)
        if compiled is not None:
            return self._run_compiled(compiled, tokens, nodes)
        # 2. only the layers after those that the draft (Kangaroo) ran
        if aux is not None:
            split = self.split_at(*aux_layers)
            inputs = split.inputs(nodes.positions, nodes.masks)
            hidden_states = split.run_rest(aux, inputs, nodes.cache())
            return hidden_states, self.logits(hidden_states.final)
        # 3. all layers, with one mask or a mask for each layer type
        mask: Any = None
        if nodes.masks is not None:
            mask = dict(nodes.masks)
            if self._has_one_mask(nodes):
                mask = next(iter(nodes.masks.values()))
        with self.masked_attention(), self.capture_aux_states(aux_layers) as captured:
            out = self.body(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=nodes.positions,
                past_key_values=nodes.cache(),
                use_cache=True,
            )
        states = None
        if captured:
            states = torch.cat(captured, dim=-1)
        return HiddenStates(out.last_hidden_state, states), self.logits(out.last_hidden_state)

    def _has_one_mask(self, nodes: NodeInputs) -> bool:
        """Return whether all layers use the same mask, or no mask."""
        return nodes.masks is None or len(nodes.masks) == 1 or self.window is None

    def _compiled_pass(
        self, tokens: Tensor, nodes: NodeInputs, aux_layers: tuple[int, ...], aux: Tensor | None
    ) -> CompiledPass | None:
        """Return the compiled program that runs this pass of `run_nodes`; None if there is none."""
        # 1. programs take a single mask
        if nodes.masks is None or not self._has_one_mask(nodes):
            return None
        # 2. there must be a program for these auxiliary layers, rows and nodes
        compiled = self.compiled
        if compiled is None or not compiled.covers(*tokens.shape):
            return None
        if aux_layers and aux_layers != self.decoding_aux_layers:
            return None
        # 3. a program runs all layers, also those that the draft (Kangaroo) ran. On a CPU, that
        # costs less than running the remaining layers uncompiled. Replayed steps run only the
        # remaining ones
        if aux is not None and self.step_runner is not None:
            return None
        # 4. the program for a single row needs single-row memory, the others memory for several
        # rows
        has_single_row = len(tokens) == 1
        has_memory_of_one = nodes.storage.shape[ROWS] == 1
        if has_single_row != has_memory_of_one:
            return None
        return compiled

    @staticmethod
    def _run_compiled(
        compiled: CompiledPass, tokens: Tensor, nodes: NodeInputs
    ) -> tuple[HiddenStates, Tensor]:
        assert nodes.masks is not None
        mask = next(iter(nodes.masks.values()))
        columns = nodes.columns
        if len(tokens) == 1:
            columns = columns[0]
        else:
            mask = mask.contiguous()
        # a view of the packed inputs has strides that the program was not compiled for
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        return compiled(tokens, nodes.positions, mask, columns, nodes.storage)

    def node_masks(self, tree: AnyTree) -> dict[str, NodeMasks]:
        """Return the masks of a tree by layer type, see `NodeMasks`."""
        masks = {}
        for kind in sorted(set(self.layer_types)):
            window = self.window if kind == "sliding_attention" else None
            masks[kind] = NodeMasks(tree.ancestors, tree.depths, window, self.dtype)
        return masks

    def place_nodes(
        self,
        tree: AnyTree,
        masks: Mapping[str, NodeMasks],
        lengths: Tensor,
        storage: Tensor,
        key_length: int,
        first_column: int | None = None,
    ) -> NodeInputs:
        """Return the inputs of a pass over the nodes of a tree: node i of a row goes to column
        length + i.

        Args:
            tree: the tree, or one per row.
            masks: masks of the tree, from `node_masks`.
            lengths: positions of the roots, long [B].
            storage, key_length, first_column: see `NodeInputs`.
        """
        starts = lengths[:, None]  # [B, 1]
        positions = starts + torch.atleast_2d(tree.depths)  # [B, n + 1]
        columns = starts + torch.arange(positions.shape[1], device=lengths.device)  # [B, n + 1]
        # compiled passes and GPU kernels want masks with aligned rows; the slice for a known length
        # is not aligned
        length = first_column
        if self.compiled is not None or lengths.is_cuda:
            length = None
        node_masks: dict[str, Tensor] = {}  # [B, 1, n + 1, key_length] each
        for kind, mask in masks.items():
            if length is not None:
                node_masks[kind] = mask.after(length, key_length)
            else:
                node_masks[kind] = mask.at(lengths, key_length)
        return NodeInputs(
            # nodes past the context are never accepted, but their position ids must be in the
            # model's position table
            positions=positions.clamp(max=self.max_context - 1),
            masks=node_masks,
            columns=columns,
            first_column=first_column,
            storage=storage,
            key_length=key_length,
        )

    def place_tree(self, prefix: Tensor, tree: Tree) -> NodeInputs:
        """Return the inputs of a pass over a tree right after the tokens `prefix`, [1, T], which
        run first. For checks of a model.
        """
        tree = tree.to(self.device)
        length = prefix.shape[1]
        key_length = length + tree.size + 1
        kv_cache = self.new_kv_cache()
        self.run(prefix, cache=PromptCache(kv_cache, 0, 1))
        return self.place_nodes(
            tree,
            self.node_masks(tree),
            torch.tensor([length], device=self.device),
            kv_cache.storage(key_length),
            key_length,
        )

    def capture_aux_states(
        self, aux_layers: tuple[int, ...]
    ) -> AbstractContextManager[list[Tensor]]:
        """Within this context, a pass appends the states after the layers of `aux_layers` to the
        yielded list.
        """
        return capture_outputs([self.layer(count - 1) for count in aux_layers])

    def _document_masks(self, segments: Tensor, positions: Tensor | None) -> Any:
        """Return the mask of packed rows, see `document_mask`. It replaces the mask that the model
        builds itself, so sliding windows are applied here. Models with several layer types take a
        dict of masks.
        """
        mask = document_mask(segments, self.dtype)
        if mask is None or self.window is None:
            return mask
        assert positions is not None
        masks = dict.fromkeys(self.layer_types, mask)
        if "sliding_attention" in masks:
            masks["sliding_attention"] = apply_sliding_window(mask, positions, self.window)
        return masks if len(masks) > 1 else masks.popitem()[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the target model's next-token logits, [..., d] -> [..., V]."""
        return transform_logits(self.output_embeddings(hidden), self.scale, self.softcap)

    def lm_head(self) -> LMHead:
        """Return the weights of lm_head, with an active LoRA branch and the transforms of its
        logits.
        """
        head = self.output_embeddings
        return LMHead(
            head.weight, getattr(head, "bias", None), self.softcap, self.scale, low_rank_of(head)
        )

    @property
    def output_embeddings(self) -> Any:
        """The module that computes raw logits: lm_head, or the layer that PEFT replaced it with."""
        return self.model.get_output_embeddings()

    @torch.no_grad()
    def embedding(self) -> Embedding:
        """Return the input embedding, with the factor that some models apply before the first
        layer. The factor is measured on the first layer's input.

        Raises:
            TargetModelError: the model changes embeddings in another way.
        """
        table = self.model.get_input_embeddings()
        if self.device.type == "meta":
            return Embedding(table)
        probe = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        with capture_inputs(self.layer(0)) as captured:
            self.run(probe)
        inputs, vectors = captured[0].double(), table(probe).double()
        scale = float((inputs * vectors).sum() / vectors.square().sum().clamp(min=1e-30))
        if (inputs - vectors * scale).norm() > 1e-2 * inputs.norm():
            raise TargetModelError(
                f"{type(self.body).__name__} is not supported by this draft: the input of its first"
                " layer is not a scaled token embedding"
            )
        return Embedding(table, 1.0 if abs(scale - 1.0) < 1e-3 else scale)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers; raises TargetModelError if the architecture has no `layers`."""
        layers = getattr(self.body, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise TargetModelError(
                f"{type(self.body).__name__} has no list of decoder layers named `layers`,"
                " which torch_compile and all drafts but medusa need"
            )
        return layers

    def layer(self, index: int) -> nn.Module:
        """Return decoder layer `index`, from 0; raises TargetModelError if there is none."""
        layers = self.layers
        if not 0 <= index < len(layers):
            raise TargetModelError(
                f"no layer {index + 1}: {self.name or 'the target model'} has {len(layers)} layers"
            )
        return layers[index]

    def new_kv_cache(self, capacity: int = 0) -> KVCache:
        """Return an empty KV cache for rows of the model's context, or of `capacity` positions if
        that is more.
        """
        return KVCache(self.num_layers, max(capacity, self.max_context + KEY_BLOCK))

    @torch.no_grad()
    def cached_shape(self) -> tuple[int, int, int]:
        """Return the number of layers, the number of heads and the head size of the keys and values
        that a pass stores per position. Latent attention (DeepSeek-V3) stores compressed states
        instead of keys and values.
        """
        kv_cache = KVCache(self.num_layers, 1)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.run(token, cache=PromptCache(kv_cache, 0, 1))
        layers, _, _, heads, _, dim = kv_cache.storage(1).shape
        return layers, heads, dim

    def to_dtype(self, dtype: str | torch.dtype) -> TargetModel:
        """Convert the weights in place and return the model as a new target model."""
        with exact_buffers(self.model):
            self.model.to(parse_dtype(dtype, self.device))
        converted = TargetModel(self.model, self.tokenizer, self.name)
        converted.stop_tokens = self.stop_tokens
        converted.eos_ids = self.eos_ids
        return converted

    def spread_tokens(self, count: int) -> Tensor:
        """Return different tokens from all of the vocabulary to check a model with, [1, count]."""
        tokens = torch.arange(count, device=self.device)[None]
        return tokens * max(1, self.vocab_size // 8) % self.vocab_size

    def agrees(self, states: Tensor, expected: Tensor) -> bool:
        """Return whether two results of the same computation agree up to rounding.

        In half precision or with quantized weights, passes of different sizes round differently, so
        only a large difference counts. A mixture of experts then always agrees, because rounding
        may route a token to another expert.
        """
        if not self.is_exact and has_experts(self.config):
            return True
        distance = (states.double() - expected.double()).norm() / expected.double().norm().clamp(
            min=1e-12
        )
        return float(distance) < (1e-3 if self.is_exact else 0.25)

    @property
    def is_exact(self) -> bool:
        """Whether passes of different sizes give the same result up to float32 rounding errors."""
        return self.dtype in (torch.float32, torch.float64) and not getattr(
            self.model, "is_quantized", False
        )

    # Early exit

    def split_at(self, exit_layer: int) -> LayerSplit:
        """Split the decoder layers after the first `exit_layer` layers.

        Raises:
            TargetModelError: `exit_layer` is out of range, or the layers cannot run separately.
        """
        if exit_layer not in self._splits:
            check_exit_layer(exit_layer, self.num_layers, self.name or "the target model")
            runner = LayerRunner(self.body, self.layer_types)
            split = LayerSplit(runner, exit_layer, self.embedding(), self.masked_attention)
            if self.device.type != "meta":
                self._check_split(split)
            self._splits[exit_layer] = split
        return self._splits[exit_layer]

    @torch.no_grad()
    def _check_split(self, split: LayerSplit) -> None:
        """Run a small tree through both parts of the layers, the first part in two passes, and
        compare with the whole model.
        """
        tokens = self.spread_tokens(5)
        nodes = self.place_tree(tokens[:, :2], Tree.cartesian([2]))
        expected = self.run_nodes(tokens[:, 2:], nodes)[0].final
        name = f"base_model {self.name}: {type(self.model).__name__}"
        try:
            inputs = split.inputs(nodes.positions, nodes.masks)
            aux = [
                split.run_first(tokens[:, 2 + a : 2 + b], inputs.slice(a, b), nodes.cache(a, b))
                for a, b in ((0, 1), (1, 3))
            ]
            hidden = split.run_rest(torch.cat(aux, dim=1), inputs, nodes.cache()).final
        except (TypeError, AttributeError, LookupError, ValueError) as error:
            raise TargetModelError(f"{name} cannot run layer by layer: {error}") from error
        if not self.agrees(hidden, expected):
            raise TargetModelError(
                f"{name} cannot run layer by layer: hidden states differ from the whole model's"
            )

    # Packed documents

    def use_varlen(self, implementation: str) -> None:
        """Separate packed documents by their bounds, with attention that takes no mask.

        It stays set on the model between passes, because the backward pass may recompute
        activations. Passes without `segments` still use the implementation that takes masks.

        Raises:
            TargetModelError: documents attend to each other, because the model does not pass the
                bounds on. After this or any other error the model is unchanged.
        """
        self.model.set_attn_implementation(implementation)
        self.varlen = True
        separate = False
        try:
            tokens = torch.arange(10, device=self.device).view(2, 5) % self.vocab_size
            separate = separates_documents(
                lambda rows, positions, segments: (
                    self.run(rows, positions=positions, segments=segments).final
                ),
                tokens,
            )
        finally:
            if not separate:
                self.model.set_attn_implementation(self.attention)
                self.varlen = False
        if not separate:
            raise TargetModelError(
                f"{type(self.model).__name__} with {implementation} mixes packed documents"
            )

    def masked_attention(self) -> AbstractContextManager[None]:
        """Switch from varlen attention, if it is used, to the implementation that takes masks."""
        return use_attention(self.config, self.attention) if self.varlen else nullcontext()

    def save(self, directory: Path) -> None:
        """Save the model, its tokenizer and its generation config.

        All stop tokens are added to the generation config. It is written separately, because
        save_pretrained rejects some generation configs as invalid.
        """
        saved_config = self.model.generation_config
        self.model.generation_config = GenerationConfig()
        try:
            self.model.save_pretrained(directory, safe_serialization=True)
        finally:
            self.model.generation_config = saved_config
        saved = copy.deepcopy(saved_config)
        if self.stop_tokens.added:
            saved.eos_token_id = list(self.stop_tokens.ids)
        saved.to_json_file(directory / GENERATION_CONFIG)
        self.tokenizer.save_pretrained(directory)

    # Faster decoding

    @property
    def compile_unsupported_reason(self) -> str | None:
        """Why this model's passes can't be compiled; None if they can."""
        if set(self.layer_types) != {"full_attention"} and self.window is not None:
            return "has sliding windows"
        return None if self.rope_switch is None else "uses longrope"

    def compile_passes(self, rows: int = 1, *, trees: bool = True) -> None:
        """Decode with passes compiled by torch.compile, which takes up to a minute.

        Args:
            rows: number of rows decoded at a time; 1 compiles programs for a single row, more for
                several rows.
            trees: whether passes verify trees too.

        Raises:
            TargetModelError: the model has sliding windows or longrope, or torch.compile fails on
                this machine. If steps are CUDA graphs, which are fast without it, a model or
                machine that cannot compile is no error, and nothing is compiled.
        """
        if self.step_runner is not None and (
            self.compile_unsupported_reason is not None or not has_compiler(self.device)
        ):
            return
        if self.compile_unsupported_reason is not None:
            raise TargetModelError(
                f"compile: {self.name or 'this model'} {self.compile_unsupported_reason}; leave the"
                " key out"
            )
        on_cpu = self.device.type == "cpu"
        aux = [self.layer(count - 1) for count in self.decoding_aux_layers]
        compiled = CompiledPass(
            self.body, self.logits, on_cpu=on_cpu, forms=needed_forms(rows, trees), aux=aux
        )
        self._warm_up(compiled)
        self.compiled = compiled

    def can_compile_tree(self, nodes: int) -> bool:
        """Return whether `compile_tree` compiles anything: only if passes of single rows over trees
        are compiled, and not on a GPU, where this was not measured.
        """
        if self.compiled is None or self.device.type != "cpu":
            return False
        return self.compiled.covers(1, nodes + 1)

    def compile_tree(self, nodes: int) -> None:
        """Compile passes of a single row over the root and exactly `nodes` nodes. They are faster
        than passes over any number of nodes.

        Raises:
            TargetModelError: torch.compile fails, or the program would not fit into memory: it may
                hold a prepacked copy of the weights. Trees of this size then still use the program
                for any number of nodes.
        """
        if self.compiled is None or not self.can_compile_tree(nodes):
            return
        if not copies_fit(self.model.parameters()):
            raise TargetModelError(
                "compile: too little memory is free for a program for this size of tree, which may"
                " hold a copy of the weights"
            )
        self.compiled.add(Form(batched=False, tokens=nodes + 1))
        self._warm_up(self.compiled)

    def _warm_up(self, compiled: CompiledPass) -> None:
        compiled.warm_up(self.cached_shape(), self.device, self.dtype)
