"""Hydra heads: each reads the state and the path of guesses so far, level by level; knows no loss and no loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from medusa_train.data.targets import IGNORE_INDEX, shift_labels
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal, hidden_at_positions
from medusa_train.models.drafts.layers import DraftLayer, LayerCache, gather_paths
from medusa_train.models.features import Features, TokenRows
from medusa_train.models.lm_head import LMHead
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.tree import Tree, TreeLevels


class HydraState(NamedTuple):
    """What B rows of a decoding loop read.

    Attributes:
        hidden: [B, d], the state, behind the prefix layer where there is one, whose next token is the coming root.
        cache: the prefix layer's; None without one.
    """

    hidden: Tensor
    cache: LayerCache | None


class _First(nn.Module):
    """`P x + SiLU(W x)`, (k + 1) d -> d, with biases; the projection P starts as [I, 0, ..., 0], the rest as 0.

    P and W are one matrix [2 d, (k + 1) d], so that one product serves both.
    """

    def __init__(self, hidden_size: int, pieces: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(pieces * hidden_size, 2 * hidden_size, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        with torch.no_grad():
            self.linear.weight[hidden_size:].zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., (k + 1) d] -> [..., d]."""
        projected, branch = self.linear(x).chunk(2, dim=-1)
        return projected + self.dropout(silu(branch))


class _Block(nn.Module):
    """`x + SiLU(W x + b)` with W = 0 and b = 0 at the start, so that it begins as the identity."""

    def __init__(self, hidden_size: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return x + self.dropout(silu(self.linear(x)))


class HydraDraft(Draft):
    """K sequentially dependent heads (Hydra, arXiv 2402.05109; SPEC 3).

        x_k = [h_t ; E(x_{t+1}) ; ... ; E(x_{t+k})]      x_{t+1}: the token that the backbone chose, then the path
        v_k = Block_n(... Block_2(P_k x_k + SiLU(W_k x_k)))
        p_k = softmax(W2_k v_k)

    E is the backbone's input embedding, frozen, brought to a root mean square of 1 (ours: it is many times smaller
    than the states beside it, and would be learnt from slowly). With a prefix layer (Hydra++) a decoder layer of the
    backbone's own kind runs over h before the heads read it, with a cache and a final norm of its own.

    P = [I, 0, ..., 0], W = 0 and W2 = a copy of lm_head at the start, biases 0: without a prefix layer untrained heads
    give the backbone's own next-token logits. (The reference starts P and all biases at random, and uses one block
    object for layers 2 .. n.) The prefix layer starts at random as in the paper, but for its norm: the weights start
    at the size of the backbone's states, so that what the heads read is near h from the first step; ours, as is where
    dropout acts: on what each SiLU branch adds.

    Args:
        backbone: whose embeddings, unembedding and layers the draft is made like; its weights are not changed.
        num_heads: K. num_layers: blocks per head, the first one included.
        prefix_layer: Hydra++. dropout: in training.
        dtype: of the parameters; by default the backbone's.
    """

    def __init__(
        self,
        backbone: Backbone,
        num_heads: int = 4,
        num_layers: int = 4,
        *,
        prefix_layer: bool = True,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or backbone.dtype
        own, size = backbone.lm_head(), backbone.hidden_size
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.dropout = dropout
        self.embedding = backbone.embedding()
        self.softcap, self.scale = own.softcap, own.scale
        self.prefix = DraftLayer(backbone, dtype=dtype) if prefix_layer else None
        self.blocks = nn.ModuleList(
            nn.Sequential(
                _First(size, k + 1, dropout, dtype), *(_Block(size, dropout, dtype) for _ in range(num_layers - 1))
            )
            for k in range(1, num_heads + 1)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(size, backbone.vocab_size, bias=own.bias is not None, dtype=dtype) for _ in range(num_heads)
        )
        self._levels: dict[int, TreeLevels] = {}  # by the tree's identity; each keeps its tree
        self._begin_as(backbone, own)
        self.to(backbone.device)

    @torch.no_grad()
    def _begin_as(self, backbone: Backbone, own: LMHead) -> None:
        for head in self.lm_heads:
            assert isinstance(head, nn.Linear)
            head.weight.copy_(own.weight)
            if own.bias is not None:
                head.bias.copy_(own.bias)
        if self.prefix is not None:
            probe = torch.arange(min(64, backbone.vocab_size), device=backbone.device)[None]
            self.prefix.match_rms(backbone.run(probe).hidden)

    @classmethod
    def from_backbone(cls, backbone: Backbone, *, dtype: torch.dtype | None = None, **settings: Any) -> HydraDraft:
        """Untrained heads for `backbone`, on its device; `settings` as the property gives them."""
        return cls(backbone, dtype=dtype, **settings)

    @property
    def settings(self) -> dict[str, Any]:
        """What `from_backbone` has to be told to make such a draft."""
        return {
            "num_heads": self.num_heads,
            "num_layers": self.num_layers,
            "prefix_layer": self.prefix is not None,
            "dropout": self.dropout,
        }

    @classmethod
    def count_parameters(
        cls, model: Any, *, num_heads: int, num_layers: int, prefix_layer: bool, dropout: float
    ) -> int:
        """Per head `2 d x (k + 1) d`, further `d x d` with biases, and a copy of lm_head; the layer and its norm."""
        head = model.get_output_embeddings()
        d = head.weight.shape[1]
        own = sum(p.numel() for p in head.parameters()) + (num_layers - 1) * (d * d + d)
        firsts = sum(2 * d * ((k + 1) * d + 1) for k in range(1, num_heads + 1))
        layer = sum(p.numel() for p in model.base_model.layers[0].parameters()) + d if prefix_layer else 0
        return num_heads * own + firsts + layer

    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """For k = 1..K the state [B, T, d] that head k's unembedding reads, given the data's tokens as the path."""
        x = feats.hidden
        if self.prefix is not None:
            x = self.prefix(x, batch.positions, batch.segments)
        for k, blocks in enumerate(self.blocks, start=1):
            x = torch.cat([x, self._ahead(batch, k).to(x.dtype)], dim=-1)
            yield blocks(x)

    def _ahead(self, batch: TokenRows, k: int) -> Tensor:
        """E(x_{t+k}) at each t, [B, T, d]; 0 where that lies in another document or nowhere."""
        tokens = shift_labels(batch.tokens, k - 1, batch.segments)
        beyond = tokens == IGNORE_INDEX
        return self._embed(tokens.masked_fill(beyond, 0)).masked_fill(beyond[..., None], 0.0)

    def _embed(self, tokens: Tensor) -> Tensor:
        """E at a root mean square of 1."""
        e = self.embedding(tokens)
        return rms_norm(e, e.shape[-1:], eps=1e-12)

    def lm_head(self, k: int) -> LMHead:
        """Head k's W2 with the backbone's logit transform."""
        head = self.lm_heads[k - 1]
        assert isinstance(head, nn.Linear)
        return LMHead(head.weight, head.bias, self.softcap, self.scale)

    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> HydraState:
        """The prefix layer reads the prompts; the heads look at the last position of each."""
        own = None if self.prefix is None else LayerCache(len(lengths), cache.capacity)
        return self._read(feats.hidden, lengths, own)

    def _read(self, states: Tensor, counts: Sequence[int], cache: LayerCache | None) -> HydraState:
        """The state behind the first `counts[b]` of each row's new positions [B, q, d]."""
        if self.prefix is not None and cache is not None:
            states = cache.append(self.prefix, states, counts)
        return HydraState(hidden_at_positions(Features(states), [count - 1 for count in counts]), cache)

    def propose(self, state: HydraState, roots: Tensor, tree: Tree) -> Proposal:
        """Level by level: head k at all nodes of depth k - 1 that have children, in one product each.

        A head is asked once for all children of a node. The input of a node continues its parent's, so it is gathered
        from there and grows by one embedding per level.
        """
        x, nodes = state.hidden[:, None], roots[:, None]
        found = [nodes]
        for k, level in enumerate(self._levels_of(tree).levels[:-1], start=1):
            if level.inner is not None:
                x, nodes = x[:, level.inner], nodes[:, level.inner]
            x = torch.cat([x, self._embed(nodes).to(x.dtype)], dim=-1)  # [B, m, (k + 1) d]
            logits = self.lm_heads[k - 1](self.blocks[k - 1](x))  # soft cap and scale would keep their order
            nodes = logits.topk(level.width).indices.flatten(1)[:, level.candidates]
            x = x[:, level.parents]
            found.append(nodes)
        return Proposal(torch.cat(found, dim=1), tree)

    def _levels_of(self, tree: Tree) -> TreeLevels:
        if id(tree) not in self._levels:
            self._levels[id(tree)] = TreeLevels(tree)
        return self._levels[id(tree)]

    def advance(
        self, state: HydraState, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]
    ) -> HydraState:
        """The prefix layer reads root and accepted nodes, nothing of the others (SPEC 3, cache rule)."""
        if self.prefix is None:
            return HydraState(hidden_at_positions(feats, [path[-1] for path in paths]), None)
        return self._read(gather_paths(feats.hidden, paths), [len(path) for path in paths], state.cache)

    def select_rows(self, state: HydraState, rows: Sequence[int]) -> HydraState:
        """The states of `rows`."""
        cache = None if state.cache is None else state.cache.select_rows(rows)
        return HydraState(state.hidden[list(rows)], cache)
