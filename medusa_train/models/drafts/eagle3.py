"""EAGLE-3: one decoder layer over states of three layers of the backbone, trained on its own
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from medusa_train.config.drafts import default_layers
from medusa_train.data.batch import IGNORE_INDEX, shift_labels
from medusa_train.errors import BackboneError, MedusaError
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import DraftStep, Limits, Proposal
from medusa_train.models.drafts.lm_heads import LMHeadsDraft, count_lm_head
from medusa_train.models.features import Features, FeatureSpec, TokenRows
from medusa_train.models.hf_config import head_dim, key_value_heads
from medusa_train.models.lm_head import LMHead
from medusa_train.models.partitioned import gathered
from medusa_train.models.precision import autocast_dtype, exact_buffers
from medusa_train.trees.masks import NodeMasks, additive_mask, causal_mask, document_mask
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.slots import PromptCache, SlotCache
from medusa_train.trees.tree import Tree

#: Layers whose states are read.
NUM_STATES = 3
#: Nodes of each level of a dynamic tree whose children are drafted, and how many children each of
# them gets.
EXPANDED = 10

Angles = tuple[Tensor, Tensor]  # cosines and sines of rotary positions
Attend = Callable[[LlamaAttention, Tensor, Angles], Tensor]
#: Positions of a block in `_StepAttention`.
_BLOCK = 256


class Eagle3Draft(LMHeadsDraft):
    """A decoder layer that drafts one token after the other (EAGLE-3, arXiv 2503.01840).

        a_1 = Layer(E(x_{t+1}), fc[g_low ; g_middle ; g_high]_t)        g: the backbone's states after three layers
        a_k = Layer(E(x_{t+k}), a_{k-1})                                x_{t+1}: the root, then the path of draft tokens
        p_k = softmax(W norm(a_k))                                      predicts x_{t+k+1}

    The layer attends to a_1's keys of all positions up to t and to those of a_2 .. a_k of its own
    path. Training runs `train_steps` such steps on the layer's own outputs, with the data's tokens
    ("training-time test"), so the layer learns from what it reads when it drafts. Layer, norm and
    fc are those of vLLM's and SGLang's `eagle3`: Llama's, whatever the backbone's family, with the
    norms of embedding and state before the attention, which reads both.

    Initially fc passes g_high on, the layer is a copy of the backbone's last one where shapes fit,
    and W a copy of lm_head; the paper does not specify it.

    Args:
        backbone: the model whose embeddings and lm_head are used; it is neither kept nor changed.
        num_heads: K, the depth of the deepest tree.
        train_steps: steps of the training-time test.
        layers: after how many of the backbone's layers the three states are read; by default
        `default_layers`. vocab_size, token_map: N, for draft tokens among the tokens of `token_map`
        (long [N]); by default all tokens.
        norm_before_residual: the layer's residual is its normalised state, as in some published
            drafts.
        norm_before_fc: one norm over the three states together, before fc.
        fc_norm: a norm of each of the three states, before fc.
        norm_output: the next step reads norm(a_k), as lm_head does, in place of a_k.
        own_embeddings: the draft has embeddings of its own, which are not trained; a layer that is
            narrower or wider than the backbone (`hidden_size` in `layer`) needs them.
        layer: entries of config.json in which the layer differs from the backbone's, for drafts of
            other trainers.
        dtype: dtype of the parameters; by default the backbone's.

    Attributes:
        dynamic: nodes and levels of dynamic trees; None: the trees that are given to `propose`.
    """

    setting_names = ("num_heads", "train_steps")
    dynamic: Limits | None = None
    embedding: Callable[[Tensor], Tensor]

    def __init__(
        self,
        backbone: Backbone,
        num_heads: int = 7,
        *,
        train_steps: int = 4,
        layers: Sequence[int] | None = None,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        own_embeddings: bool = False,
        layer: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or backbone.dtype
        self._layer = dict(layer or {})
        self.num_heads = num_heads
        self.train_steps = train_steps
        self.layers = tuple(layers or default_layers(backbone.num_layers))
        self.needs = FeatureSpec(early=self.layers)
        config = layer_config(backbone.config, layer)
        size = config.hidden_size  # d
        read = backbone.hidden_size  # width of the states that fc reads
        if size != read and not own_embeddings:
            raise ValueError(
                f"hidden_size {size} is not the backbone's, {read}: such a draft needs embeddings"
                " of its own"
            )
        self.norm_output = norm_output
        self.embed_tokens = OwnEmbedding(backbone.vocab_size, size) if own_embeddings else None
        self.embedding = (
            backbone.embedding() if self.embed_tokens is None else self.embed_tokens.look_up
        )
        config._attn_implementation = (
            backbone.attention if backbone.attention != "eager" else "sdpa"
        )
        eps = config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(NUM_STATES * read, eps=eps) if norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(read, eps=eps) for _ in range(NUM_STATES))
        self.fc = nn.Linear(NUM_STATES * read, size, bias=False)
        self.midlayer = Eagle3Layer(config, norm_before_residual)
        self.norm = LlamaRMSNorm(size, eps=eps)
        lm_heads = self.new_lm_heads(backbone, 1, vocab_size, token_map, dtype)
        if size == read:
            self.lm_heads = nn.ModuleList(lm_heads)
            self._init_from(backbone)
        else:  # nothing of the backbone has its width
            self.lm_heads = nn.ModuleList([nn.Linear(size, lm_heads[0].out_features, bias=False)])
        self.to(device=backbone.device, dtype=dtype)

    @torch.no_grad()
    def _init_from(self, backbone: Backbone) -> None:
        size = backbone.hidden_size
        if not hasattr(backbone.body, "norm"):
            raise BackboneError(
                f"an EAGLE-3 draft can't begin as {type(backbone.body).__name__}: it has no `norm`"
            )
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight[:, -size:])
        source = backbone.layer(backbone.num_layers - 1)
        with gathered([*source.parameters(), *backbone.body.norm.parameters()]):
            self.midlayer.init_from(source)
            _copy_norm(self.norm, backbone.body.norm)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Eagle3Draft:
        """Keep the rotary frequencies in float32 through `.to(dtype)`."""
        with exact_buffers(self.midlayer.rotary_emb):
            super()._apply(fn, recurse)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, with `layer` only where it differs from the backbone's."""
        return {
            **super().settings,
            "layers": list(self.layers),
            "norm_before_residual": self.midlayer.norm_before_residual,
            **{name: True for name, is_used in self._variants.items() if is_used},
            **({"layer": self._layer} if self._layer else {}),
        }

    @property
    def _variants(self) -> dict[str, bool]:
        """The settings of published variants, which most drafts don't have."""
        return {
            "norm_before_fc": self.input_norm is not None,
            "fc_norm": self.fc_norm is not None,
            "norm_output": self.norm_output,
            "own_embeddings": self.embed_tokens is not None,
        }

    @classmethod
    def count_parameters(
        cls,
        model: Any,
        *,
        vocab_size: int | None = None,
        layer: Mapping[str, Any] | None = None,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        **without_weights: Any,
    ) -> int:
        """fc, the attn over `2 d`, the MLP, four norms (and those before fc), and an lm_head."""
        text_config = model.config.get_text_config()
        config = layer_config(text_config, layer)
        read = NUM_STATES * text_config.hidden_size
        lm_head = count_lm_head(model, vocab_size)
        if config.hidden_size != text_config.hidden_size:  # it has no bias then
            rows = vocab_size or model.get_output_embeddings().weight.shape[0]
            lm_head = rows * config.hidden_size
        d, heads, size = config.hidden_size, config.num_attention_heads, head_dim(config)
        attn = 2 * d * size * (heads + 2 * key_value_heads(config)) + d * heads * size
        return (
            read * (d + norm_before_fc + fc_norm)
            + attn
            + 3 * d * config.intermediate_size
            + 4 * d
            + lm_head
        )

    @property
    def trained_heads(self) -> int:
        """The steps of the training-time test; more than are drafted in decoding are not trained."""
        return min(self.train_steps, self.num_heads)

    def lm_head(self, k: int) -> LMHead:
        """Return W, which is the same for all steps."""
        return super().lm_head(1)

    # Training

    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..trained_heads the states [B, T, d] that `lm_head` reads, given the
        data's tokens.
        """
        return self._steps(feats, batch, self.trained_heads)

    def teacher_forced_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..num_heads the states [B, T, d], also of steps that are not trained."""
        return self._steps(feats, batch, self.num_heads)

    def _steps(self, feats: Features, batch: TokenRows, steps: int) -> Iterator[Tensor]:
        states = self.inputs(feats)
        attention = _StepAttention(
            document_mask(batch.segments, autocast_dtype(states.device.type) or states.dtype)
        )
        for k in range(1, steps + 1):
            tokens = shift_labels(batch.tokens, k - 1, batch.segments)
            past_end = tokens == IGNORE_INDEX
            e = self.embedding(tokens.masked_fill(past_end, 0)).masked_fill(
                past_end[..., None], 0.0
            )
            states = self.midlayer(e.to(states.dtype), states, batch.positions + (k - 1), attention)
            states = self._carried(states)
            yield self._read_by_lm_head(states)

    def inputs(self, feats: Features) -> Tensor:
        """fc of the backbone's states, [B, T, 3 d] -> [B, T, d]."""
        assert feats.early is not None
        states = feats.early.to(self.fc.weight.dtype)  # [B, T, 3 d]
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(NUM_STATES, dim=-1)  # of [B, T, d]
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        combined: Tensor = self.fc(states)
        return combined

    def _carried(self, states: Tensor) -> Tensor:
        """The layer's output [B, q, d] as the next step reads it."""
        if not self.norm_output:
            return states
        normed: Tensor = self.norm(states)
        return normed

    def _read_by_lm_head(self, carried: Tensor) -> Tensor:
        """What lm_head reads of a carried state [B, q, d]; a norm is applied once."""
        if self.norm_output:
            return carried
        normed: Tensor = self.norm(carried)
        return normed

    # Decoding. The layer reads a position once the token after it is known, so the last one waits
    # for the root.

    @property
    def num_caches(self) -> int:
        """One, for the layer."""
        return 1

    @property
    def fixed_shape(self) -> bool:  # type: ignore[override]
        """Whether trees are given; dynamic ones have another shape in every step."""
        return self.dynamic is None

    def prefill(self, feats: Features, tokens: Tensor, caches: Sequence[PromptCache]) -> None:
        """Run the layer over the prompts, the last positions with any token after them."""
        following = tokens.roll(-1, dims=1)
        self.midlayer.extend(self.join(following, self.inputs(feats)), caches[0])

    def read(self, step: DraftStep) -> Tensor:
        """Run the layer over the accepted path, followed by the roots; return a_1 [B, d] of its
        last nodes.
        """
        accepted = step.accepted
        assert accepted.feats.early is not None
        early = accepted.along_path(accepted.feats.early)  # [B, D + 1, 3 d]
        states = self.inputs(Features(early, early))  # [B, D + 1, d]
        states = self.join(accepted.following(step.roots), states)  # [B, D + 1, 2 d]
        return accepted.last(step.caches[0].read_path(self.midlayer, states, accepted.starts))

    def guess(self, step: DraftStep, states: Tensor) -> Proposal:
        """Fill the tree level by level: the layer runs over all nodes of a level that have children
        at once.
        """
        if self.dynamic is not None:
            return self._guess_dynamic(step, states, self.dynamic)
        cache = step.caches[0]
        levels = step.tree.by_level
        lengths = step.accepted.lengths[:, None]  # [B, 1]
        # inner nodes without the position before the root and the root, which are committed
        depths = levels.inner_nodes.depths[2:] - 2
        mask = levels.inner_masks(2, None, states.dtype).at(lengths[:, 0], cache.key_length)
        slots = lengths + torch.arange(len(depths), device=lengths.device)  # [B, inner - 1]
        positions = lengths + depths

        x = self._carried(states[:, None])  # [B, 1, d], what each node's draft tokens come from
        nodes = step.roots[:, None]  # [B, 1]: tokens of the level
        tokens = [nodes]
        for depth, level in enumerate(levels.levels[:-1]):
            # 1. the layer reads the m nodes of this level that have children
            if depth:
                if level.inner is not None:
                    x = x[:, level.inner]
                    nodes = nodes[:, level.inner]
                own = slice(level.inner_first - 1, level.inner_last - 1)
                x = cache.run(
                    self.midlayer,
                    self.join(nodes, x),  # [B, m, 2 d]
                    slots[:, own],
                    positions[:, own],
                    mask[:, :, own],
                )
                x = self._carried(x)  # [B, m, d]
            # 2. its best guesses are the nodes of the next level; a soft cap would keep their order
            logits = self.lm_heads[0](self._read_by_lm_head(x))  # [B, m, N]
            best = logits.topk(level.width).indices.flatten(1)  # [B, m * width]
            nodes = self.lm_head(1).tokens_of(best[:, level.candidates])  # [B, next]
            x = x[:, level.parents]  # [B, next, d]
            tokens.append(nodes)
        return Proposal(torch.cat(tokens, dim=1), step.tree)

    def with_dynamic_trees(self, size: Limits) -> Eagle3Draft:
        """Return a draft with the same weights that chooses a tree of this size for each row and
        step.

        Raises:
            MedusaError: the trees are deeper than `num_heads`.
        """
        if size.depth > self.num_heads:
            raise MedusaError(
                f"the dynamic trees are {size.depth} deep, but the draft has {self.num_heads} heads"
            )
        draft = copy(self)
        draft.dynamic = size
        return draft

    def limits(self, tree: Tree) -> Limits:
        """Return the limits of proposals; a dynamic tree needs room for the nodes whose children
        are drafted.
        """
        if self.dynamic is None:
            return super().limits(tree)
        nodes, depth = self.dynamic
        return Limits(max(nodes, (depth - 1) * min(EXPANDED, nodes)), depth)

    def _guess_dynamic(self, step: DraftStep, states: Tensor, size: Limits) -> Proposal:
        """Propose one tree per row (EAGLE-2, Expansion Phase and Reranking Phase).

        A node's value is the product of the draft's probabilities along its path. The most valuable
        nodes of each level get their most probable children, and the most valuable of all nodes are
        proposed. No node is worth more than its parent, which comes first among equals, so these
        are a tree. It depends on the text alone, never on what is drawn in the same step, and has
        as many nodes in all rows. Its shape is read on the host: one synchronization.
        """
        roots = step.roots
        rows = len(roots)  # B
        row = torch.arange(rows, device=roots.device)[:, None]  # [B, 1]
        head = self.lm_head(1)

        # 1. the root is the only node of level 0; `nodes` are those whose children come next
        x = self._carried(states[:, None])  # [B, 1, d]
        nodes = roots[:, None]  # [B, 1]
        node_ids = torch.zeros_like(nodes)  # their numbers among all drafted nodes
        number = torch.promote_types(x.dtype, torch.float32)
        values = torch.zeros_like(nodes, dtype=number)  # [B, 1], logarithms
        visible = torch.zeros(rows, 1, 0, dtype=torch.bool, device=roots.device)
        all_tokens = [nodes]
        all_parents = [node_ids]
        all_values = [values]
        count = 1  # drafted nodes so far

        # 2. expand level by level
        for depth in range(size.depth):
            # the layer reads the expanded nodes
            if depth:
                x = self._run_level(step, self.join(nodes, x), depth, visible)
                x = self._carried(x)  # [B, m, d]
            raw = self.lm_heads[0](self._read_by_lm_head(x))
            logits = head.transform(raw).to(number)  # [B, m, N]
            best = logits.topk(min(EXPANDED, size.size, logits.shape[-1]))  # [B, m, k]
            k = best.indices.shape[2]
            log_probs = (best.values - logits.logsumexp(-1, keepdim=True)).clamp(max=0)
            tokens = head.tokens_of(best.indices.flatten(1))  # [B, m k]
            token_values = (values[..., None] + log_probs).flatten(1)  # [B, m k]
            all_tokens.append(tokens)
            all_parents.append(node_ids.repeat_interleave(k, 1))
            all_values.append(token_values)

            # the k most valuable of them are expanded next
            values, expanded = token_values.topk(k)  # [B, k]
            above = expanded // k  # [B, k], the node of this level that each hangs from
            nodes = tokens.gather(1, expanded)  # [B, k]
            node_ids = count + expanded
            count += tokens.shape[1]
            itself = torch.eye(k, dtype=torch.bool, device=roots.device).expand(rows, -1, -1)
            visible = torch.cat([visible[row, above], itself], dim=2)
            x = x[row, above]  # [B, k, d]

        # 3. propose the most valuable nodes and the root, in the order in which they were drafted
        tokens = torch.cat(all_tokens, dim=1)  # [B, count]
        parents = torch.cat(all_parents, dim=1)
        ranked = torch.cat(all_values, dim=1).sort(dim=1, descending=True, stable=True).indices
        chosen = ranked[:, : size.size + 1].sort(dim=1).values  # [B, n + 1]
        shape = torch.searchsorted(chosen, parents.gather(1, chosen)).tolist()
        trees = RowTrees([[-1, *parents_of_row[1:]] for parents_of_row in shape], roots.device)
        return Proposal(tokens.gather(1, chosen), trees)

    def _run_level(self, step: DraftStep, states: Tensor, depth: int, visible: Tensor) -> Tensor:
        """Run the layer over k nodes of a dynamic tree, [B, k, 2 d] -> [B, k, d].

        Args:
            visible: bool [B, k, p + k]: which of the p nodes of earlier levels, and of these, each
                attends to.
        """
        k, read = visible.shape[1:]
        cache = step.caches[0]
        lengths = step.accepted.lengths[:, None]  # [B, 1]
        columns = lengths + torch.arange(read - k, read, device=lengths.device)  # [B, k]
        positions = lengths.expand(-1, k) + (depth - 1)
        masks = NodeMasks(visible, lengths, None, states.dtype)
        mask = masks.at(lengths[:, 0], cache.key_length)
        return cache.run(self.midlayer, states, columns, positions, mask)

    def join(self, tokens: Tensor, states: Tensor) -> Tensor:
        """[E ; states], the layer's input, [B, q, 2 d]."""
        return torch.cat([self.embedding(tokens).to(states.dtype), states], dim=-1)


class OwnEmbedding(nn.Module):
    """Embeddings [V, d] that belong to a draft: saved with it and frozen, without the backbone's
    scale.
    """

    weight: Tensor

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(vocab_size, size))

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the vectors of token ids, long [...] -> [..., d]."""
        return embedding(tokens, self.weight)


def _copy_norm(norm: LlamaRMSNorm, source: nn.Module | None) -> None:
    """Copy the factors of an RMS norm, however they are stored (Gemma adds 1); a norm of another
    kind is left out.
    """
    if source is None or (weight := next(source.parameters(), None)) is None:
        return
    ones = torch.ones_like(weight)
    # 0 where a norm subtracts the mean, whatever its bias
    factors = (source(ones) - source(-ones)).float() / 2
    if bool((factors != 0).all()):
        norm.weight.copy_(factors)


class Eagle3Layer(nn.Module):
    """Llama's decoder layer, whose attention reads [norm(e) ; norm(x)]; its residual is x, or
    norm(x).
    """

    def __init__(self, config: LlamaConfig, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)  # of the embedding
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in _READS_BOTH:
            projection = getattr(self.self_attn, name)
            wider = nn.Linear(2 * size, projection.out_features, bias=projection.bias is not None)
            setattr(self.self_attn, name, wider)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.window: int | None = None  # as a `DraftLayer` without a sliding window
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def init_from(self, source: nn.Module) -> None:
        """Copy the weights of a layer of the backbone that have the same shape; the part that reads
        x, of both.
        """
        # neither integers nor FP8, whose scales are parameters of their own
        parameters = source.named_parameters()
        weights = {
            name: weight
            for name, weight in parameters
            if weight.is_floating_point() and weight.itemsize > 1
        }
        for name, parameter in self.named_parameters():
            if (weight := weights.get(name)) is None or "norm" in name:
                continue
            part = parameter[:, -weight.shape[-1] :] if parameter.dim() == 2 else parameter
            if part.shape == weight.shape:
                part.copy_(weight)
        # Gemma 2 and 3, OLMo 2, which has no others
        of_outputs = hasattr(source, "post_feedforward_layernorm")
        before_mlp = "pre_feedforward_layernorm" if of_outputs else "post_attention_layernorm"
        _copy_norm(self.hidden_norm, getattr(source, "input_layernorm", None))
        _copy_norm(self.post_attention_layernorm, getattr(source, before_mlp, None))

    def forward(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """[B, q, d] and [B, q, d] -> [B, q, d].

        Args:
            positions: [B, q]. attend: maps attention module, [B, q, 2 d] and rotary angles to [B,
                q, d].
        """
        normalised = self.hidden_norm(states)
        states = normalised if self.norm_before_residual else states
        x = torch.cat([self.input_layernorm(embeddings), normalised], dim=-1)
        states = states + attend(self.self_attn, x, self.rotary_emb(x, positions))
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out

    def extend(self, states: Tensor, cache: PromptCache) -> Tensor:
        """Decoding: read prompts, [B, q, 2 d] -> [B, q, d]; see `DraftLayer.extend`."""
        columns = torch.arange(states.shape[1], device=states.device) + cache.length
        columns = columns.expand(len(states), -1)  # [B, q]
        end = cache.length + states.shape[1]
        # without a mask attention is causal from the first key on
        mask = causal_mask(columns, end, None, states.dtype) if cache.length else None
        return self._run_cached(states, columns, mask, cache)

    def run_slots(
        self, states: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache
    ) -> Tensor:
        """Decoding: the same, with keys and values in slots of `cache`; see `DraftLayer.run_slots`."""
        return self._run_cached(states, positions, mask, cache)

    def _run_cached(
        self, states: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        def attend(attention: LlamaAttention, x: Tensor, angles: Angles) -> Tensor:
            out: Tensor = attention(
                x, position_embeddings=angles, attention_mask=mask, past_key_values=cache
            )[0]
            return out

        e, x = states.chunk(2, dim=-1)
        return self(e, x, positions, attend)


_READS_BOTH = ("q_proj", "k_proj", "v_proj")


class _StepAttention:
    """The attention of the training-time test: called once for each step, it keeps the keys and
    values of all.

        step 1     step 2  step 3
        x . .      x . .   x . .       T = 3: position t reads its predecessors in step 1, and itself in all
        x x .      . x .   . x .
        x x x      . . x   . . x

    In the later steps most keys are masked for most positions. The positions are therefore computed
    in blocks, with keys of step 1 up to the block's end, and of later steps of the block alone:
    about half of step 1's products. Blocks are computed again in the backward pass, since each
    would keep a copy of these keys.

    Args:
        mask: of step 1, additive [B, 1, T, T]; None: causal.
    """

    def __init__(self, mask: Tensor | None) -> None:
        self._mask = mask
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, attention: LlamaAttention, x: Tensor, angles: Angles) -> Tensor:
        """Attend in the next step, [B, T, 2 d] -> [B, T, d]."""
        groups = attention.num_key_value_groups
        query, key, value = (
            getattr(attention, name)(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for name in _READS_BOTH
        )
        query, key = apply_rotary_pos_emb(query, key, *angles)
        self._keys.append(repeat_kv(key, groups))
        self._values.append(repeat_kv(value, groups))
        if len(self._keys) == 1:
            out = self._products(attention, query, self._keys[0], self._values[0], self._mask)
        else:
            past = tuple(self._keys), tuple(self._values)
            blocks = [
                checkpoint(self._block, attention, part, start * _BLOCK, *past, use_reentrant=False)
                for start, part in enumerate(query.split(_BLOCK, dim=2))
            ]
            out = torch.cat(blocks, dim=2)
        attended: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return attended

    def _block(
        self,
        attention: LlamaAttention,
        query: Tensor,
        start: int,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
    ) -> Tensor:
        """Attend from the positions `start` .. of a block [B, heads, q, head_dim], in a step after
        the first.
        """
        size = query.shape[2]
        end = start + size
        key, value = (
            torch.cat([first[:, :, :end], *(later[:, :, start:end] for later in rest)], dim=2)
            for first, *rest in (keys, values)
        )
        if self._mask is None:
            ones = torch.ones(size, end, dtype=torch.bool, device=query.device)
            mask = additive_mask(ones.tril(start), query.dtype)[None, None]
        else:
            mask = self._mask[:, :, start:end, :end]
        own = additive_mask(torch.eye(size, dtype=torch.bool, device=query.device), query.dtype)
        own = own.repeat(1, len(keys) - 1).expand(len(mask), 1, -1, -1)
        return self._products(attention, query, key, value, torch.cat([mask, own], dim=3))

    @staticmethod
    def _products(
        attention: LlamaAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=attention.scaling
        )


def layer_config(config: Any, layer: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Return the configuration of a Llama layer with the sizes and rotary angles of a backbone's.

    Args:
        config: of the backbone's text model. layer: entries that replace these.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # some families have angles for each layer type
    rope = dict(rope.get("full_attention", rope) or {})
    if rope.pop("partial_rotary_factor", 1.0) != 1.0 and rope.get("rope_type") == "longrope":
        # its factors are for fewer dimensions
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    entries = {
        "vocab_size": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": (
            getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        ),  # experts may differ
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": key_value_heads(config),
        "head_dim": head_dim(config),
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope or None,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    return LlamaConfig(**{**entries, **(layer or {})})
