"""Amphista: K heads that read two stages of the state and hear each other, all in one pass; knows no loss, no loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from medusa_train.data.targets import shift_labels
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal
from medusa_train.models.drafts.layers import DraftLayer, LayerCache, gather_paths
from medusa_train.models.drafts.stacked import StackedLinears
from medusa_train.models.features import Features, TokenRows
from medusa_train.models.lm_head import LMHead
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.tree import Tree

#: The last linear maps of attention and MLP in a decoder layer, at 0 in the beginning: what they add, too, is then 0.
LAST_MAPS = ("o_proj", "down_proj")


class Stacked(NamedTuple):
    """The weights of all heads as one tensor each, on the parameters' own memory.

    Attributes:
        mlp: W1 [K, d, d] and b1 [K, d]. unembedding: W2 [K, V, d] and its bias [K, V] or None.
    """

    mlp: tuple[Tensor, Tensor | None]
    unembedding: tuple[Tensor, Tensor | None]


@dataclass
class AmphistaState:
    """What B rows of a decoding loop have committed since the draft looked last.

    Attributes:
        hidden: [B, m, d], the backbone's states; padding behind a row's own `counts`.
        following: long [B, m], the token after each of them; after a row's last one comes the root, not known yet.
        counts: how many of the m positions each row has.
        caches: keys and values of each adaptation layer up to there.
        stacked: the weights of all heads' MLPs and unembeddings, [K, ...] each; None where they lie apart.
        read: whether the layers have read them.
    """

    hidden: Tensor
    following: Tensor
    counts: list[int]
    caches: list[LayerCache]
    stacked: Stacked | None
    read: bool = False


class AmphistaDraft(Draft):
    """K heads over two adaptation layers and a bidirectional block (Amphista, section 3; arXiv 2406.13170).

        h1 = Layer1(fc1[h ; e])    h2 = Layer2(fc2[h1 ; e])      h: the backbone's state at t, e: of the token at t + 1
        heads 1 .. K/2: h1    the others: h2                     Eq. 1; rounded down
        v_k = h_i + SiLU(W1_k h_i + b1_k)                        Eq. 2
        [u_1 .. u_K] = AutoEmbedding([v_1 .. v_K])               Eq. 3 to 5
        p_k = softmax(W2_k u_k)                                  Eq. 6

    The token at t + 1 is the one that the backbone just chose: in decoding the root of the tree, in training the
    data's. No head sees a later one, so that all K draft in one pass.

    Not published, and ours: the residual block of Medusa for the MLP, the norm and residual of `AutoEmbedding`, the
    embeddings brought to a root mean square of 1 (they are several times smaller than the states beside them), and
    the start: fc = [I, 0], what layers and blocks add is 0, and W2 = a copy of lm_head. So untrained heads give the
    backbone's own next-token logits to the bit.

    Args:
        backbone: whose layers, embeddings and unembedding the draft is made like; it is neither kept nor changed.
        num_heads: K.
        auto_blocks: attention blocks among the heads; 2: the alpha variant (section A.2.3), 0: none, nor positions.
        adaptation_layers: 2; with 1 all heads read h1; with 0 there is no decoder layer, and they read fc[h ; e].
        sampled_token: without it neither e nor fc: the layers read h and h1 themselves.
        dtype: of the parameters; by default the backbone's.
    """

    def __init__(
        self,
        backbone: Backbone,
        num_heads: int = 4,
        *,
        auto_blocks: int = 1,
        adaptation_layers: int = 2,
        sampled_token: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.auto_blocks = auto_blocks
        self.adaptation_layers = adaptation_layers
        self.sampled_token = sampled_token
        dtype = dtype or backbone.dtype
        self.embedding = backbone.embedding()
        own, size = backbone.lm_head(), backbone.hidden_size
        self.softcap, self.scale = own.softcap, own.scale
        stages = max(adaptation_layers, 1) if sampled_token else 0
        self.fc = nn.ModuleList(nn.Linear(2 * size, size, bias=False, dtype=dtype) for _ in range(stages))
        self.layers = nn.ModuleList(
            DraftLayer(backbone, final_norm=False, dtype=dtype) for _ in range(adaptation_layers)
        )
        self.mlps = StackedLinears(nn.Linear(size, size, dtype=dtype) for _ in range(num_heads))
        self.auto: AutoEmbedding | None = None
        if auto_blocks:
            attention = attention_shape(backbone.config, size)
            self.auto = AutoEmbedding(auto_blocks, num_heads, size, *attention, dtype)
        self.lm_heads = StackedLinears(
            nn.Linear(size, backbone.vocab_size, bias=own.bias is not None, dtype=dtype) for _ in range(num_heads)
        )
        self._begin_as(own)
        self.to(backbone.device)

    @torch.no_grad()
    def _begin_as(self, own: LMHead) -> None:
        for fc in self.fc:
            assert isinstance(fc, nn.Linear)
            nn.init.eye_(fc.weight)  # [I, 0]
        for name, parameter in self.layers.named_parameters():
            if name.rpartition(".")[0].endswith(LAST_MAPS):
                nn.init.zeros_(parameter)
        for parameter in self.mlps.parameters():
            nn.init.zeros_(parameter)
        for head in self.lm_heads:
            assert isinstance(head, nn.Linear)
            head.weight.copy_(own.weight)
            if own.bias is not None:
                head.bias.copy_(own.bias)

    @classmethod
    def from_backbone(cls, backbone: Backbone, *, dtype: torch.dtype | None = None, **settings: Any) -> AmphistaDraft:
        """Untrained heads for `backbone`, on its device; `settings` as the property gives them."""
        return cls(backbone, dtype=dtype, **settings)

    @property
    def settings(self) -> dict[str, Any]:
        """What `from_backbone` has to be told to make such a draft."""
        return {
            "num_heads": self.num_heads,
            "auto_blocks": self.auto_blocks,
            "adaptation_layers": self.adaptation_layers,
            "sampled_token": self.sampled_token,
        }

    @classmethod
    def count_parameters(
        cls, model: Any, *, num_heads: int, auto_blocks: int, adaptation_layers: int, sampled_token: bool
    ) -> int:
        """Per head `d x d` and a copy of lm_head, per stage a decoder layer and its fc, and the blocks' attention."""
        head = model.get_output_embeddings()
        d = head.weight.shape[1]
        heads = num_heads * (d * d + d + sum(p.numel() for p in head.parameters()))
        layer = sum(p.numel() for p in model.base_model.layers[0].parameters())
        fcs = max(adaptation_layers, 1) * 2 * d * d if sampled_token else 0
        attention, head_dim = attention_shape(model.config.get_text_config(), d)
        auto = num_heads * d + auto_blocks * (4 * d * attention * head_dim + d) if auto_blocks else 0
        return heads + adaptation_layers * layer + fcs + auto

    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """For k = 1..K the state [B, T, d] that head k's unembedding reads."""
        following = shift_labels(batch.tokens, 0, batch.segments).clamp(min=0)  # a document's last has no target either
        stages = self._stages(feats.hidden, following, lambda i, x: self._layer(i)(x, batch.positions, batch.segments))
        yield from self._heard(self._vectors(stages)).unbind(-2)

    def lm_head(self, k: int) -> LMHead:
        """Head k's own matrix, with the backbone's logit transform."""
        head = self.lm_heads[k - 1]
        assert isinstance(head, nn.Linear)
        return LMHead(head.weight, head.bias, self.softcap, self.scale)

    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> AmphistaState:
        """All positions of the prompts wait to be read, with the tokens behind them."""
        caches = [LayerCache(len(lengths), cache.capacity) for _ in self.layers]
        mlp, unembedding = self.mlps.stacked(), self.lm_heads.stacked()
        stacked = None if mlp is None or unembedding is None else Stacked(mlp, unembedding)
        return self._waiting(feats, tokens, [range(length) for length in lengths], caches, stacked)

    def propose(self, state: AmphistaState, roots: Tensor, tree: Tree) -> Proposal:
        """The best `tree.width` tokens of every head that the tree reads, laid out by rank."""
        logits = self._orders(self._read(state, roots), state.stacked, tree.max_depth)
        best = logits.topk(tree.width).indices.transpose(0, 1).flatten(1)  # [B, max_depth * width]
        return Proposal(torch.cat([roots[:, None], best[:, tree.candidate_index]], dim=1), tree)

    def advance(
        self, state: AmphistaState, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]
    ) -> AmphistaState:
        """The accepted nodes wait to be read, with their states of this pass."""
        if not state.read:
            self._read(state, proposal.tokens[:, 0])
        return self._waiting(feats, proposal.tokens, paths, state.caches, state.stacked)

    def select_rows(self, state: AmphistaState, rows: Sequence[int]) -> AmphistaState:
        """The states of `rows`."""
        places = list(rows)
        return AmphistaState(
            state.hidden[places],
            state.following[places],
            [state.counts[row] for row in rows],
            [cache.select_rows(rows) for cache in state.caches],
            state.stacked,
        )

    def _waiting(
        self,
        feats: Features,
        tokens: Tensor,
        paths: Sequence[Sequence[int]],
        caches: list[LayerCache],
        stacked: Stacked | None,
    ) -> AmphistaState:
        """Each row's states at its own nodes of [B, n + 1, d], and the token of the next node as the one behind."""
        if not self.adaptation_layers:
            paths = [path[-1:] for path in paths]  # nothing looks at those before
        following = gather_paths(tokens, [[*path[1:], 0] for path in paths])  # 0 stands where the root will
        return AmphistaState(
            gather_paths(feats.hidden, paths), following, [len(path) for path in paths], caches, stacked
        )

    def _read(self, state: AmphistaState, roots: Tensor) -> list[Tensor]:
        """Let the layers read what waits, `roots` being the tokens behind the last; h1 and h2 of these, [B, d]."""
        rows = torch.arange(len(roots), device=roots.device)
        last = torch.tensor(state.counts, device=roots.device) - 1
        following = state.following.index_put((rows, last), roots)
        stages = self._stages(
            state.hidden, following, lambda i, x: state.caches[i].append(self._layer(i), x, state.counts)
        )
        state.read = True
        return [stage[rows, last] for stage in stages]

    def _stages(self, hidden: Tensor, following: Tensor, layer: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        """h1 and h2 (Eq. 1), [B, T, d] each; one alone where there is no second layer.

        Args:
            hidden: [B, T, d]. following: long [B, T], the token behind each.
            layer: runs adaptation layer i, from 0, over [B, T, d].
        """
        dtype = self.lm_heads.get_parameter("0.weight").dtype
        x, stages = hidden.to(dtype), []
        if self.sampled_token:
            e = self.embedding(following).to(dtype)
            e = rms_norm(e, e.shape[-1:], eps=1e-12)
        for i in range(max(self.adaptation_layers, len(self.fc))):
            if self.sampled_token:
                x = self.fc[i](torch.cat([x, e], dim=-1)).to(dtype)
            if self.adaptation_layers:
                x = layer(i, x)
            stages.append(x)
        return stages or [x]

    def _layer(self, i: int) -> DraftLayer:
        layer = self.layers[i]
        assert isinstance(layer, DraftLayer)
        return layer

    def _halves(self, stages: Sequence[Tensor]) -> list[Tensor]:
        """Which stage each head reads."""
        half = self.num_heads // 2
        return [stages[0]] * half + [stages[-1]] * (self.num_heads - half)

    def _vectors(self, stages: Sequence[Tensor]) -> Tensor:
        """v_1 .. v_K (Eq. 2), [..., K, d], of stages [..., d]."""
        heads = zip(self._halves(stages), self.mlps, strict=True)
        return torch.stack([x + silu(mlp(x)) for x, mlp in heads], dim=-2)

    def _vectors_at_once(self, stages: Sequence[Tensor], stacked: Stacked) -> Tensor:
        """The same [B, K, d] of stages [B, d] by one product."""
        weights, biases = stacked.mlp
        assert biases is not None
        x = torch.stack(self._halves(stages))
        return (x + silu(torch.baddbmm(biases[:, None], x, weights.transpose(1, 2)))).transpose(0, 1)

    def _heard(self, vectors: Tensor) -> Tensor:
        """u_1 .. u_K (Eq. 3 to 5), [..., K, d] of [..., K, d]."""
        return vectors if self.auto is None else self.auto(vectors)

    def _orders(self, stages: Sequence[Tensor], stacked: Stacked | None, count: int) -> Tensor:
        """Logits of heads 1..count, [count, B, V] of [B, d], but for soft cap and scale, which keep their order."""
        if stacked is None:
            heads = self._heard(self._vectors(stages)).unbind(-2)
            return torch.stack([self.lm_heads[k](heads[k]) for k in range(count)])
        states = self._heard(self._vectors_at_once(stages, stacked)).transpose(0, 1)  # [K, B, d]
        weights, biases = stacked.unembedding
        logits = torch.bmm(states[:count], weights[:count].transpose(1, 2))
        return logits if biases is None else logits + biases[:count, None]


def attention_shape(config: Any, hidden_size: int) -> tuple[int, int]:
    """How many attention heads the backbone's layers have, and of which size."""
    heads = config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or hidden_size // heads


#: Rows that one launch of a CUDA attention kernel takes: the limit of a grid's second and third side.
ROWS = 65_535


class HeadAttention(nn.Module):
    """`x + W_o Attention(RMSNorm(x))` over the K vectors of one position, every one seeing all (Amphista, Eq. 5).

    Norm and residual are not published and ours. W_o is 0 at the start, so that the block begins as the identity.

    Args:
        hidden_size: d. num_attention_heads, head_dim: of the backbone's layers.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        inner = num_attention_heads * head_dim
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6, dtype=dtype)
        self.qkv = nn.Linear(hidden_size, 3 * inner, bias=False, dtype=dtype)
        self.out = nn.Linear(inner, hidden_size, bias=False, dtype=dtype)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[N, K, d] -> [N, K, d]."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_attention_heads, -1))  # [N, K, 3, heads, head_dim]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return x + self.out(_attend(q, k, v).transpose(1, 2).flatten(2))


class AutoEmbedding(nn.Module):
    """A learned position per head and one or more blocks of `HeadAttention` (Amphista, section 3.2, Eq. 4 and 5).

    The positions are 0 at the start (ours): untrained, every vector passes as it is.

    Args:
        num_blocks: 1; the alpha variant has 2 (section A.2.3). num_heads: K. The others: see `HeadAttention`.
    """

    def __init__(
        self,
        num_blocks: int,
        num_heads: int,
        hidden_size: int,
        num_attention_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(num_heads, hidden_size, dtype=dtype))
        self.blocks = nn.ModuleList(
            HeadAttention(hidden_size, num_attention_heads, head_dim, dtype) for _ in range(num_blocks)
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """The vectors of all heads [..., K, d] -> what their unembeddings read, [..., K, d]."""
        x = (vectors + self.positions).flatten(0, -3)
        for block in self.blocks:
            x = block(x)
        return x.unflatten(0, vectors.shape[:-2])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [N, heads, K, head_dim], by pieces that a CUDA kernel takes."""
    if len(q) <= ROWS:
        return scaled_dot_product_attention(q, k, v)
    pieces = zip(q.split(ROWS), k.split(ROWS), v.split(ROWS), strict=True)
    return torch.cat([scaled_dot_product_attention(*piece) for piece in pieces])
