"""DFlash: decoder layers predict a whole block of tokens in one pass, from hidden states of several
layers of the target model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    rotate_half,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from medusa_train.config.draft_sections import spread_layers
from medusa_train.data.batch import IGNORE_INDEX, Batch, shift_labels
from medusa_train.errors import TargetModelError
from medusa_train.models.drafts.base import Draft, DraftStep, Proposal, TreeSize
from medusa_train.models.drafts.dynamic_trees import grow_trees
from medusa_train.models.drafts.eagle3_layer import Angles, RotaryEmbedding, layer_config
from medusa_train.models.drafts.lm_heads import check_token_map
from medusa_train.models.drafts.markov import MarkovBias, propose_by_rank
from medusa_train.models.lm_head import LMHead
from medusa_train.models.precision import autocast_dtype
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, TokenRows
from medusa_train.trees.masks import NodeMasks, additive_mask, causal_mask
from medusa_train.trees.transformers_adapters import PromptCache, node_cache
from medusa_train.trees.tree import Tree

#: Number of blocks that training computes at a time. It limits memory: masks and scores of a block
#: have T columns.
BLOCKS = 32

#: Computes the attention of layer i, given i, the queries [B, heads, q, h], and the keys and values
#: of the block, [B, kv_heads, q, h] each. It adds the keys and values of the context.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class DFlashDraft(Draft):
    """L decoder layers over a block of K + 1 tokens (DFlash, arXiv 2602.06036).

        context   c_s = norm_c(fc [g_1 ; .. ; g_n]_s)     for each position s <= t
        block     E(x_{t+1})  E(mask)  E(mask)  ..        K + 1 slots, at positions t + 1, t + 2, ..
        layer     a slot attends to keys and values of c_0 .. c_t and of the block
        output    softmax(lm_head norm(slot k)) predicts x_{t+k+1}, k = 1 .. K

    g_1 .. g_n are the states of n layers of the target model. The same matrices compute keys and
    values of the context and of the block, so each layer computes only two matrix products per
    context position, once. x_{t+1} is the last token, which the target model has chosen but not
    read. The embedding E and lm_head are the target model's and are not trained.

    A slot does not know the tokens of the other slots, so the best tokens of the slots fill a tree
    by rank, as in Medusa. With a Markov bias, a token depends on its parent in the tree, see
    `MarkovBias`.

    With a window, the block is causal: a slot attends to the slots before it, and to no position
    outside the window. Then the first slots do not depend on later ones, so a tree of depth D needs
    only D + 1 slots. With a window of 0, all slots attend to each other and to the whole context,
    as in most published files.

    Shapes: B rows, T positions, N blocks of a row, S = K + 1 slots, width d, V tokens.

    Args:
        target_model: the model whose embedding and lm_head are used; they are neither saved nor
            trained.
        max_draft_tokens: K.
        num_layers: L.
        layers: the n layers of the target model whose outputs are read (`aux_layers`), numbered
            from 1; by default `spread_layers`.
        anchors: number of blocks of a row in training.
        window: number of positions that a slot attends to, itself included; 0: all positions and
            all slots.
        mask_token_id: the token whose embedding fills the slots; by default the last row of the
            target model's table, which is unused in many models.
        markov_rank: r of the Markov bias; 0: no bias.
        vocab_size: N, size of a reduced vocabulary; by default all tokens.
        token_map: token ids of the reduced vocabulary, long [N].
        layer: entries of config.json in which the layers differ from the target model's, for
            published drafts.
        dtype: dtype of the parameters; by default the target model's.

    Raises:
        TargetModelError: the target model has no token `mask_token_id`.
        ValueError: `token_map` does not have `vocab_size` tokens.

    """

    setting_names = (
        "max_draft_tokens",
        "num_layers",
        "anchors",
        "window",
        "mask_token_id",
    )
    token_map: Tensor | None

    # Construction

    def __init__(
        self,
        target_model: TargetModel,
        max_draft_tokens: int = 7,
        *,
        num_layers: int = 5,
        layers: Sequence[int] | None = None,
        anchors: int = 512,
        window: int = 2048,
        mask_token_id: int | None = None,
        markov_rank: int = 0,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
        layer: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_token_map(vocab_size, token_map)
        dtype = dtype or target_model.dtype
        self.max_depth = self.max_draft_tokens = max_draft_tokens
        self.num_layers = num_layers
        self.anchors = anchors
        self.window = window
        self.fixed_shape = window > 0  # with a window of 0, a block has K + 1 slots for any tree
        self.mask_token_id = target_model.vocab_size - 1 if mask_token_id is None else mask_token_id
        if self.mask_token_id >= target_model.vocab_size:
            raise TargetModelError(
                f"dflash.mask_token_id: {mask_token_id}: the target model has"
                f" {target_model.vocab_size:,} tokens"
            )
        self.aux_layers = tuple(layers or spread_layers(target_model.num_layers, num_layers))

        # 1. E and lm_head; neither is registered as a module
        self.embedding = target_model.embedding()
        self.register_buffer("token_map", None if token_map is None else token_map.long())
        self._full_lm_head = target_model.lm_head()
        self.restrict_lm_head()

        # 2. fc with its norm, the layers, and the norm before lm_head. The layers are Qwen3's for
        # any target model
        config = layer_config(target_model.config, layer)
        self._layer_overrides = dict(layer or {})
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(num_layers))
        self.norm = LlamaRMSNorm(size, eps)
        self.rotary_emb = RotaryEmbedding(config)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.markov: MarkovBias | None = None
        if markov_rank:
            self.markov = MarkovBias(
                target_model.vocab_size, vocab_size or target_model.vocab_size, markov_rank
            )
        self.to(device=target_model.device, dtype=dtype)

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments that recreate this draft, except `token_map`."""
        return {
            **super().settings,
            "layers": list(self.aux_layers),
            "markov_rank": self.markov.rank if self.markov is not None else 0,
            "vocab_size": self.draft_vocab_size,
            **({"layer": self._layer_overrides} if self._layer_overrides else {}),
        }

    def restrict_lm_head(self) -> None:
        """Use the target model's lm_head, or a copy of its rows for a reduced vocabulary."""
        self._lm_head = self._full_lm_head
        if self.token_map is not None:
            self._lm_head = self._lm_head.restrict_to(self.token_map)

    def lm_head(self, k: int) -> LMHead:
        """Return the target model's lm_head, with the Markov bias."""
        if self.markov is None:
            return self._lm_head
        return replace(self._lm_head, token_bias=self.markov.output.weight)

    @property
    def _attentions(self) -> list[DFlashAttention]:
        """The attention of each layer."""
        return [layer.self_attn for layer in self.layers]  # type: ignore[misc]

    def context(self, hidden_states: HiddenStates) -> Tensor:
        """Compute the context c of all positions, [B, T, d]."""
        assert hidden_states.aux is not None
        normed: Tensor = self.hidden_norm(self.fc(hidden_states.aux.to(self.fc.weight.dtype)))
        return normed

    # Training

    def loss_positions(self, batch: Batch) -> Tensor | None:
        """Return the positions t after which a block is trained, bool [B, T]; None: all positions.

        Each row draws `anchors` of the positions whose first predicted token x_{t+2} is a
        supervised target. The draw depends only on the batch (`Batch.draw`): the same targets can
        be counted before the states are computed, and a resumed run draws the same positions.
        """
        if batch.draw is None:
            return None
        can = shift_labels(batch.labels, 1, batch.segments) != IGNORE_INDEX  # [B, T]
        generator = torch.Generator().manual_seed(batch.draw)
        scores = torch.rand(can.shape, generator=generator).to(can.device)
        best = scores.masked_fill(~can, -1.0).topk(min(self.anchors, can.shape[1])).indices
        return torch.zeros_like(can).scatter(1, best, True) & can

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..K the states of slot k of the block after each position, [B, T, d], or
        [B, T, d + r] with a Markov bias. They are zero at positions without a block.
        """
        chosen = None
        if isinstance(batch, Batch):
            chosen = self.loss_positions(batch)
        return self._slots_behind(hidden_states, batch, chosen)

    def teacher_forced_states(
        self, hidden_states: HiddenStates, batch: TokenRows
    ) -> Iterator[Tensor]:
        """Yield the states of `head_states`, with a block after every position."""
        return self._slots_behind(hidden_states, batch, None)

    def _slots_behind(
        self, hidden_states: HiddenStates, batch: TokenRows, chosen: Tensor | None
    ) -> Iterator[Tensor]:
        if chosen is None:
            chosen = batch.segments >= 0
        rows = torch.arange(len(chosen), device=chosen.device)[:, None]
        # 1. the positions t of the blocks, [B, N]. Rows with fewer blocks repeat their first block
        counts = chosen.sum(1, keepdim=True)  # [B, 1]
        order = chosen.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        number = torch.arange(int(counts.max()), device=chosen.device)
        is_own = number < counts  # [B, N]
        places = torch.where(is_own, order[:, : len(number)], order[:, :1])
        # 2. their slots
        states = self._block_states(hidden_states, batch, places)  # [B, N, K, d]
        # 3. write the states of each block at its t. Repeated blocks, which would add to the
        # gradient of the first block, go to an extra column that is cut off
        size = chosen.shape[1]  # T
        columns = torch.where(is_own, places, size)  # [B, N]
        for k in range(1, self.max_depth + 1):
            out = states.new_zeros(len(chosen), size + 1, states.shape[-1])
            out = out.index_put((rows, columns), states[:, :, k - 1])[:, :size]
            if self.markov is not None:
                out = self.markov.append_to(out, batch, k)
            yield out

    def _block_states(
        self, hidden_states: HiddenStates, batch: TokenRows, places: Tensor
    ) -> Tensor:
        """Return the normed states of slots 1..K of the blocks after positions `places` [B, N], ->
        [B, N, K, d].
        """
        # 1. keys and values of the context, for each layer
        context = self.context(hidden_states)  # [B, T, d]
        angles = self.rotary_emb(context, batch.positions)
        context_keys_values: list[Tensor] = []
        for attention in self._attentions:
            context_keys_values += attention.keys_values(context, angles)
        # 2. x_{t+1}. After the last position of a document there is no target, so any token will do
        last_tokens = shift_labels(batch.tokens, 0, batch.segments).clamp(min=0)  # [B, T]
        # 3. a few blocks at a time; the backward pass recomputes their activations
        parts = []
        for part in places.split(BLOCKS, dim=1):
            arguments = (part, last_tokens, batch.positions, batch.segments, *context_keys_values)
            parts.append(checkpoint(self._run_blocks, *arguments, use_reentrant=False))
        return torch.cat(parts, dim=1)

    def _run_blocks(
        self,
        places: Tensor,
        last_tokens: Tensor,
        positions: Tensor,
        segments: Tensor,
        *context_keys_values: Tensor,
    ) -> Tensor:
        """Run the layers over N blocks at once, [B, N] -> [B, N, K, d]."""
        slots = self.max_depth + 1  # S
        # 1. tokens and positions of all slots, [B, N S]
        offsets = torch.arange(slots, device=places.device)
        slot_positions = positions.gather(1, places)[..., None] + 1 + offsets  # [B, N, S]
        states = self._embed(last_tokens.gather(1, places), slots).flatten(1, 2)  # [B, N S, d]
        # 2. a slot sees the context up to its t in the same document
        at = places.repeat_interleave(slots, 1)  # [B, N S] t of each slot
        columns = torch.arange(segments.shape[1], device=places.device)  # [T]
        same = segments.gather(1, at)[..., None] == segments[:, None]  # [B, N S, T]
        visible = same & (columns <= at[..., None])
        # 3. and its own block
        number = torch.arange(at.shape[1], device=places.device)  # [N S]
        block = number // slots
        same_block = block[:, None] == block  # [N S, N S]
        if self.window:
            same_block &= number <= number[:, None]
            slot = at + 1 + number % slots  # [B, N S] column of each slot
            visible &= columns > slot[..., None] - self.window
        visible = torch.cat([visible, same_block.expand(len(places), -1, -1)], dim=2)
        mask_dtype = autocast_dtype(states.device.type) or states.dtype
        mask = additive_mask(visible, mask_dtype)[:, None]  # [B, 1, N S, T + N S]

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys = torch.cat([context_keys_values[2 * i], key], dim=2)
            values = torch.cat([context_keys_values[2 * i + 1], value], dim=2)
            return scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

        states = self._run_layers(states, slot_positions.flatten(1), attend)
        return states.unflatten(1, (-1, slots))[:, :, 1:]

    def _embed(self, last_tokens: Tensor, slots: int) -> Tensor:
        """Embed the last token and the mask tokens of each block, [...] -> [..., slots, d]."""
        shape = (*last_tokens.shape, slots - 1)
        masks = torch.full(shape, self.mask_token_id, device=last_tokens.device)
        tokens = torch.cat([last_tokens[..., None], masks], dim=-1)  # [..., slots]
        return self.embedding(tokens).to(self.fc.weight.dtype)

    def _run_layers(self, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layers and the norm over q slots, [B, q, d] -> [B, q, d]."""
        angles = self.rotary_emb(states, positions)
        for i, layer in enumerate(self.layers):
            states = layer(states, angles, i, attend)
        normed: Tensor = self.norm(states)
        return normed

    # Decoding. Column s of each cache has the keys and values of c_s, so a position has the same
    # column as in the target model's cache. The block is written after the committed columns, and
    # the context of accepted positions overwrites it later.

    @property
    def num_caches(self) -> int:
        """One cache for each layer."""
        return self.num_layers

    def limits(self, tree: Tree) -> TreeSize:
        """Return the limits of proposals, large enough for the columns of the block."""
        limits = self.dynamic or TreeSize(tree.size, tree.max_depth)
        if limits.size == 0:
            return limits
        slots = limits.depth if self.window else self.max_depth
        return TreeSize(max(limits.size, slots), limits.depth)

    def prefill(
        self, hidden_states: HiddenStates, tokens: Tensor, caches: Sequence[PromptCache]
    ) -> None:
        """Write the keys and values of the prompts' context."""
        context = self.context(hidden_states)  # [B, T, d]
        angles = self.rotary_emb(context, caches[0].positions(context))
        for attention, cache in zip(self._attentions, caches, strict=True):
            cache.update(*attention.keys_values(context, angles), 0)

    def extend(self, step: DraftStep) -> None:
        """Write the keys and values of the accepted path's context."""
        accepted = step.accepted
        assert accepted.hidden_states.aux is not None
        aux = accepted.along_path(accepted.hidden_states.aux)  # [B, P, n d]
        context = self.context(HiddenStates(aux, aux))  # [B, P, d]
        columns = accepted.starts[:, None] + torch.arange(context.shape[1], device=context.device)
        angles = self.rotary_emb(context, columns.clamp(max=step.caches[0].max_position))
        for attention, cache in zip(self._attentions, step.caches, strict=True):
            path = node_cache(cache.storage, columns, cache.key_length)
            path.update(*attention.keys_values(context, angles), 0)

    def propose(self, step: DraftStep, states: None) -> Proposal:
        """Run one block for each last token; the best tokens of its slots fill the tree."""
        if self.dynamic is not None:
            return self._propose_dynamic(step, self.dynamic)
        # raw logits of the first slots, one for each level of the tree, [depth, B, N]
        slots = self._run_block(step, step.tree.max_depth).transpose(0, 1)
        logits = self._lm_head.raw_logits(slots)
        return propose_by_rank(step, logits, self._lm_head, self.markov)

    def _run_block(self, step: DraftStep, depth: int) -> Tensor:
        """Return the normed states of slots 1..depth after the last tokens, [B, depth, d]."""
        cache = step.caches[0]
        lengths = step.accepted.lengths  # [B]
        slots = 1 + (depth if self.window else self.max_depth)
        columns = lengths[:, None] + torch.arange(slots, device=lengths.device)  # [B, slots]
        embedded = self._embed(step.last_tokens, slots)  # [B, slots, d]
        if self.window:
            mask = causal_mask(columns, cache.key_length, self.window, embedded.dtype)
        else:
            all_slots = torch.ones(slots, slots, dtype=torch.bool, device=lengths.device)
            masks = NodeMasks(all_slots, None, None, embedded.dtype)
            mask = masks.at(lengths, cache.key_length)
        caches = [node_cache(each.storage, columns, each.key_length) for each in step.caches]

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = caches[i].update(key, value, 0)
            return scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

        out = self._run_layers(embedded, columns.clamp(max=cache.max_position), attend)
        return out[:, 1 : depth + 1]

    # Dynamic trees

    def _propose_dynamic(self, step: DraftStep, limits: TreeSize) -> Proposal:
        """Propose one tree per row, see `grow_trees`. All slots are computed once, so its levels
        run no layers.
        """
        slots = self._run_block(step, limits.depth)  # [B, depth, d]
        head = self.lm_head(1)

        def states_at(tokens: Tensor, depth: int) -> Tensor:
            """Return the states that predict the children of m nodes of this depth, [B, m, d or
            d + r].
            """
            states = slots[:, depth, None].expand(-1, tokens.shape[1], -1)
            if self.markov is None:
                return states
            return torch.cat([states, self.markov.embedding(tokens).to(states.dtype)], dim=-1)

        def guess_children(states: Tensor) -> tuple[Tensor, Tensor]:
            return head.logits(states), states

        def run_nodes(tokens: Tensor, parents: Tensor, depth: int, visible: Tensor) -> Tensor:
            return states_at(tokens, depth)

        root_states = states_at(step.last_tokens[:, None], 0)[:, 0]  # [B, d or d + r]
        return grow_trees(step.last_tokens, root_states, limits, head, guess_children, run_nodes)


class DFlashLayer(nn.Module):
    """Qwen3's decoder layer over the slots of a block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DFlashAttention(config, layer_idx=0)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, states: Tensor, angles: Angles, i: int, attend: Attend) -> Tensor:
        """Run layer i, [B, q, d] -> [B, q, d]."""
        attention = self.self_attn
        normed = self.input_layernorm(states)
        query = attention.queries(normed, angles)
        attended = attend(i, query, *attention.keys_values(normed, angles))
        states = states + attention.o_proj(attended.transpose(1, 2).flatten(2))
        added: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return added


class DFlashAttention(Qwen3Attention):
    """The projections of Qwen3's attention. Keys and values are computed from the normed states of
    a block, and from the context without another norm.
    """

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """[B, q, d] -> [B, heads, q, head_dim]."""
        return _rotated(self.q_norm(self._heads(self.q_proj(x))), angles)

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[B, q, d] -> [B, kv_heads, q, head_dim] each."""
        key = _rotated(self.k_norm(self._heads(self.k_proj(x))), angles)
        return key, self._heads(self.v_proj(x)).transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, q, heads, head_dim]


def _rotated(x: Tensor, angles: Angles) -> Tensor:
    """Apply rotary embeddings, [B, q, heads, head_dim] -> [B, heads, q, head_dim]."""
    x = x.transpose(1, 2)
    cos, sin = angles  # [B, q, head_dim] each
    rotated: Tensor = x * cos[:, None] + rotate_half(x) * sin[:, None]
    return rotated
