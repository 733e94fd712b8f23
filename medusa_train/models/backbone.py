"""A stock transformers causal LM, run to hidden states; knows no draft, no loss and no tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.errors import BackboneError
from medusa_train.models.attention import document_bounds, use_grouped_query_attention
from medusa_train.models.compatibility import check_model
from medusa_train.models.compiled import BLOCK, CompiledPass, capacity_for
from medusa_train.models.features import PLAIN, Features, FeatureSpec
from medusa_train.models.hf_config import context_length, eos_ids, layer_types, logit_scale, rope_switch
from medusa_train.models.hooks import inputs_of, outputs_of
from medusa_train.models.layer_split import Split
from medusa_train.models.lm_head import Embedding, LMHead
from medusa_train.models.loading import dtype_of, load_model
from medusa_train.models.lora import low_rank_of
from medusa_train.models.prepack import prepack_linears
from medusa_train.models.quantization import Quantization
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.masks import packing_mask, windowed


class Backbone:
    """The language model whose tokens are predicted and verified.

    It is used as it comes: a 4-D additive mask, explicit position ids and our own cache are handed to the stock
    forward; logits are made here from the hidden states, so that heads can share every transform.

    Attributes:
        name: as the user gave it. device, dtype, hidden_size (d), vocab_size (V), num_layers: plain facts.
        max_context: positions the model was made for. rope_switch: where a longrope model changes its angles, or None.
        eos_ids: tokens that end an answer.
        varlen: whether packed documents are kept apart by their bounds, see `use_varlen`.
        compiled: decoding passes of single rows as one program, after `compile_passes`.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str = "") -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.body = model.base_model
        self.config = model.config.get_text_config()
        head = model.get_output_embeddings()
        if head is None:
            raise BackboneError(f"{type(model).__name__} has no lm_head: not a causal language model")
        self.device: torch.device = head.weight.device
        self.dtype: torch.dtype = head.weight.dtype
        self.vocab_size, self.hidden_size = head.weight.shape
        self.num_layers: int = self.config.num_hidden_layers
        self.max_context: int = context_length(self.config)
        self.eos_ids = eos_ids(model, tokenizer)
        self.layer_types = layer_types(self.config)
        self.window: int | None = getattr(self.config, "sliding_window", None)
        self.rope_switch = rope_switch(self.config)
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.scale = logit_scale(self.config)
        self.attention: str = self.config._attn_implementation
        self.varlen = False
        self._splits: dict[int, Split] = {}
        self.compiled: CompiledPass | None = None
        model.eval().requires_grad_(False)
        check_model(self)

    @property
    def head(self) -> Any:
        """The module that makes logits: lm_head, or what an adapter put in its place."""
        return self.model.get_output_embeddings()

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        quantization: Quantization | None = None,
        trust_remote_code: bool = False,
    ) -> Backbone:
        """Load a backbone and its tokenizer from a directory or the hub, frozen and in eval mode.

        Args:
            dtype: of the weights; of the products, where `quantization` keeps the weights in 4 or 8 bits.

        Raises:
            BackboneError: it can't be found, read, or is of a kind that can't be verified by a tree.
        """
        model, tokenizer = load_model(
            name,
            dtype=dtype_of(dtype),
            device=device,
            quantization=quantization,
            trust_remote_code=trust_remote_code,
        )
        return cls(model, tokenizer, name)

    def to_dtype(self, dtype: str | torch.dtype) -> Backbone:
        """This model converted in place to another dtype, as a backbone that knows its new one."""
        return Backbone(self.model.to(dtype_of(dtype)), self.tokenizer, self.name)

    def run(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: TreeCache | None = None,
        segments: Tensor | None = None,
        need: FeatureSpec = PLAIN,
        early: Tensor | None = None,
    ) -> Features:
        """One forward pass through the decoder layers, no logits.

        Args:
            tokens: [B, T] token ids.
            positions: [B, T] position ids; by default they go on from the cache.
            mask: additive mask [1 or B, 1, T, S] over the S = cache.length + T keys, 0 or -inf, of the model's
                dtype; by default causal. Sliding windows are laid over it here.
            cache: keys and values before `tokens`; the T new ones stay pending in it.
            segments: [B, T], the document that a position of a packed row belongs to, -1: padding. Each document is
                then computed as in a row of its own; its positions begin anew. In place of `mask` and `cache`.
            need: which states to return.
            early: [B, T, d], what the first `need.early` layers made of `tokens` before (`Split.first`), with positions
                and mask as given here; their keys and values are pending in `cache`. Only the others are run.
        """
        if early is not None:
            if positions is None or cache is None:
                raise ValueError("early states need position ids and the cache that they are pending in")
            split = self.split(need.early or 0)
            return split.rest(early, split.places(positions, mask, cache.length), cache)
        tapped = None if need.early is None else self.layer(need.early - 1)
        bounds: dict[str, Any] = {}
        if segments is not None and self.varlen:
            bounds = document_bounds(segments)
        elif segments is not None:
            mask = packing_mask(segments, self.dtype)
        attention_mask: Any = mask
        if mask is not None:
            if positions is None:
                raise ValueError("a mask of one's own needs position ids")
            attention_mask = self.windowed(mask, positions, 0 if cache is None else cache.length)
        with self.masks_allowed(not bounds), outputs_of(tapped) as seen:
            out = self.body(
                input_ids=tokens,
                attention_mask=attention_mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
                **bounds,
            )
        return Features(out.last_hidden_state, *seen)

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, from 0.

        Raises:
            BackboneError: there are not so many, or the architecture keeps them under another name.
        """
        layers = getattr(self.body, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise BackboneError(f"the layers of {type(self.body).__name__} can't be told apart here")
        if not 0 <= index < len(layers):
            raise BackboneError(f"{self.name or 'the backbone'} has {len(layers)} layers, no {index + 1}th one")
        return layers[index]

    def split(self, layers: int) -> Split:
        """The decoder layers in two parts, the first `layers` and the others.

        Raises:
            BackboneError: there are not more than `layers`, or this architecture can't be run in parts.
        """
        if layers not in self._splits:
            self._splits[layers] = Split(self, layers)
        return self._splits[layers]

    def use_varlen(self, implementation: str) -> None:
        """From now on tell an attention implementation where packed documents end, instead of masking them.

        It stays the model's own between passes, since activations may be recomputed in a backward pass; passes
        without `segments` still run in the one that takes masks.

        Raises:
            BackboneError: documents are not kept apart: the model does not hand the bounds on. It is as it was.
        """
        self.model.set_attn_implementation(implementation)
        self.varlen = True
        if not self._keeps_documents_apart():
            self.model.set_attn_implementation(self.attention)
            self.varlen = False
            raise BackboneError(f"{type(self.model).__name__} lets packed documents see each other with it")

    @contextmanager
    def masks_allowed(self, allowed: bool) -> Iterator[None]:
        """Within, if `allowed`: the attention that the model was loaded with."""
        varlen = self.config._attn_implementation
        if not (allowed and self.varlen):
            yield
            return
        self.model.set_attn_implementation(self.attention)
        try:
            yield
        finally:
            self.model.set_attn_implementation(varlen)

    @torch.no_grad()
    def _keeps_documents_apart(self) -> bool:
        """Whether the second document of a row stays as it is, to the bit, when the first one changes."""
        segments = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]], device=self.device)
        positions = torch.tensor([[0, 1, 2, 0, 1]], device=self.device).expand(2, -1)
        tokens = torch.arange(10, device=self.device).view(2, 5) % self.vocab_size
        changed = torch.where(segments == 0, (tokens + 1) % self.vocab_size, tokens)
        states, others = (
            self.run(row, positions=positions, segments=segments).hidden[segments == 1] for row in (tokens, changed)
        )
        return torch.equal(states, others)

    @torch.no_grad()
    def embedding(self) -> Embedding:
        """The input embedding as the body feeds it to its first layer.

        Some bodies scale it on the way, so what arrives there is compared with the table's own vectors.

        Raises:
            BackboneError: it is changed on the way in another manner.
        """
        table = self.model.get_input_embeddings()
        probe = torch.arange(min(4, self.vocab_size), device=self.device)[None]
        with inputs_of(self.layer(0)) as seen:
            self.run(probe)
        fed, own = seen[0].double(), table(probe).double()
        scale = float((fed * own).sum() / own.square().sum().clamp(min=1e-30))
        if (fed - own * scale).norm() > 1e-2 * fed.norm():
            raise BackboneError(f"{type(self.body).__name__} feeds its first layer more than scaled token embeddings")
        return Embedding(table, 1.0 if abs(scale - 1.0) < 1e-3 else scale)

    def pack(self) -> bool:
        """Make passes over few tokens faster on a CPU, where that is measured; says whether weights were laid out.

        Sums are then rounded in another order. Attention of few rows changes its form too (`models.few_rows`).
        """
        self._attend_few_rows()
        return prepack_linears(self.model)

    def _attend_few_rows(self) -> None:
        if use_grouped_query_attention(self.model):
            self.attention = self.config._attn_implementation

    def compile_passes(self) -> None:
        """From now on decode single rows with passes compiled by torch.compile; takes up to a minute.

        Raises:
            BackboneError: masks or angles of this model depend on what a compiled pass can't see, or this machine
                can't compile.
        """
        if self.layer_types != {"full_attention"} and self.window is not None:
            raise BackboneError(f"compile: {self.name or 'this model'} has sliding windows; leave the key out")
        if self.rope_switch is not None:
            raise BackboneError(
                f"compile: {self.name or 'this model'} changes its angles on the way; leave the key out"
            )
        self._attend_few_rows()
        compiled = CompiledPass(self.body, self.logits, on_cpu=self.device.type == "cpu")
        compiled.warm_up(TreeCache(self.num_layers, capacity_for(2 * BLOCK)), self.device, self.dtype)
        self.compiled = compiled

    def unembedding(self) -> LMHead:
        """lm_head with every transform that the model puts on its logits."""
        head = self.head
        low_rank = low_rank_of(head)
        return LMHead(head.weight, getattr(head, "bias", None), self.softcap, self.scale, low_rank)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> the backbone's own next-token logits [..., V]."""
        if self.softcap is None and self.scale == 1.0:
            return self.head(hidden)
        return self.unembedding().transform(self.head(hidden))

    def new_cache(self, capacity: int) -> TreeCache:
        """An empty cache for `capacity` positions, or some more where passes are compiled."""
        return TreeCache(self.num_layers, capacity if self.compiled is None else capacity_for(capacity))

    def windowed(self, mask: Tensor, positions: Tensor, prefix: int) -> Any:
        """AND a 4-D mask with the model's sliding windows, per mask type where layers differ.

        A 4-D mask replaces the model's own one, windows included, so they have to be put back.
        """
        if self.layer_types == {"full_attention"} or self.window is None:
            return mask
        sliding = windowed(mask, positions, prefix, self.window)
        if self.layer_types == {"sliding_attention"}:
            return sliding
        return {"full_attention": mask, "sliding_attention": sliding}
