"""Amphista: K heads over two adaptation layers and a bidirectional block, which draft in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from medusa_train.data.batch import shift_labels
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import DraftStep, Proposal
from medusa_train.models.drafts.draft_layer import DraftLayer, layer_to_copy
from medusa_train.models.drafts.lm_heads import LMHeadsDraft, StackedLinears, count_lm_head
from medusa_train.models.features import Features, TokenRows
from medusa_train.models.hf_config import head_dim
from medusa_train.trees.slots import PromptCache


class AmphistaDraft(LMHeadsDraft):
    """K heads over two adaptation layers and a bidirectional block (Amphista, Methodology; arXiv
    2406.13170).

        h1 = Layer1(fc1[h ; e])    h2 = Layer2(fc2[h1 ; e])      h: the backbone's state at t, e: of the token at t + 1
        heads 1 .. K/2 (rounded down): h1    the others: h2      Eq. 1
        v_k = h_i + SiLU(W1_k h_i + b1_k)                        Eq. 2
        [u_1 .. u_K] = AutoEmbedding([v_1 .. v_K])               Eq. 3 to 5
        p_k = softmax(W2_k u_k)                                  Eq. 6

    The token at t + 1 is the one that the backbone just chose: in decoding the root of the tree, in
    training the data's token. No head reads a later one, so all K heads draft in one pass.

    Choices that the paper does not specify:

    - The MLP is the residual block of Medusa.
    - `AutoEmbedding` has a norm and a residual.
    - Embeddings are scaled to a root mean square of 1, unless `normalize_embeddings` is False; they
      are several times smaller than the states next to them.
    - Initially fc = [I, 0], layers and blocks add 0, and W2 = a copy of lm_head, so that untrained
      heads give the backbone's next-token logits exactly.

    Args:
        backbone: the model whose layer class, embeddings and lm_head are used; it is neither kept
            nor changed.
        num_heads: K.
        auto_blocks: attention blocks among the heads; 2 is the paper's alpha variant; 0 also omits
            the positions.
        position_encoding: False omits the positions alone.
        adaptation_layers: 2; with 1 all heads read h1; with 0 there is no decoder layer, and they
            read fc[h ; e].
        sampled_token: False omits e and fc: the layers read h and h1.
        normalize_embeddings: False leaves e as it is. vocab_size, token_map: N, for heads over the
        tokens of `token_map` (long [N]); by default all tokens.
        dtype: dtype of the parameters; by default the backbone's.
    """

    setting_names = (
        "num_heads",
        "auto_blocks",
        "position_encoding",
        "adaptation_layers",
        "sampled_token",
        "normalize_embeddings",
    )
    lm_heads: StackedLinears

    def __init__(
        self,
        backbone: Backbone,
        num_heads: int = 4,
        *,
        auto_blocks: int = 1,
        position_encoding: bool = True,
        adaptation_layers: int = 2,
        sampled_token: bool = True,
        normalize_embeddings: bool = True,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.auto_blocks = auto_blocks
        self.position_encoding = position_encoding
        self.adaptation_layers = adaptation_layers
        self.sampled_token = sampled_token
        self.normalize_embeddings = normalize_embeddings
        dtype = dtype or backbone.dtype
        self.embedding = backbone.embedding()
        size = backbone.hidden_size
        stages = max(adaptation_layers, 1) if sampled_token else 0
        self.fc = nn.ModuleList(
            nn.Linear(2 * size, size, bias=False, dtype=dtype) for _ in range(stages)
        )
        self.layers = nn.ModuleList(
            DraftLayer(backbone, final_norm=False, dtype=dtype) for _ in range(adaptation_layers)
        )
        self.mlps = StackedLinears(nn.Linear(size, size, dtype=dtype) for _ in range(num_heads))
        self.auto: AutoEmbedding | None = None
        if auto_blocks:
            heads = backbone.config.num_attention_heads
            self.auto = AutoEmbedding(
                auto_blocks, num_heads, size, heads, head_dim(backbone.config), dtype
            )
            if not position_encoding:
                self.auto.positions = None
        self.lm_heads = StackedLinears(
            self.new_lm_heads(backbone, num_heads, vocab_size, token_map, dtype)
        )
        self._init_identity()
        self.to(backbone.device)

    @torch.no_grad()
    def _init_identity(self) -> None:
        """Initialise so that the heads' states are the backbone's."""
        for fc in self.fc:
            assert isinstance(fc, nn.Linear)
            nn.init.eye_(fc.weight)  # [I, 0]
        for name, parameter in self.layers.named_parameters():
            if name.removesuffix(".weight").removesuffix(".bias").endswith(OUTPUT_PROJECTIONS):
                nn.init.zeros_(parameter)
        for parameter in self.mlps.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def count_parameters(
        cls,
        model: Any,
        *,
        num_heads: int,
        auto_blocks: int,
        position_encoding: bool = True,
        adaptation_layers: int,
        sampled_token: bool,
        vocab_size: int | None = None,
        **without_weights: Any,
    ) -> int:
        """Per head `d x d` and its lm_head, per stage a decoder layer and its fc, and the blocks'
        attention.
        """
        d = model.get_output_embeddings().weight.shape[1]
        heads = num_heads * (d * d + d + count_lm_head(model, vocab_size))
        layer = (
            sum(p.numel() for p in layer_to_copy(model).parameters()) if adaptation_layers else 0
        )
        fcs = max(adaptation_layers, 1) * 2 * d * d if sampled_token else 0
        config = model.config.get_text_config()
        attention = 4 * d * config.num_attention_heads * head_dim(config)
        positions = num_heads * d if auto_blocks and position_encoding else 0
        return heads + adaptation_layers * layer + fcs + positions + auto_blocks * (attention + d)

    # Training

    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..K the states [B, T, d] that `lm_head(k)` reads."""
        # a document's last position has no next token, but no target either, so any token will do
        # there
        following = shift_labels(batch.tokens, 0, batch.segments).clamp(min=0)
        stages = self.stages(
            feats.hidden, following, lambda i, x: self._layer(i)(x, batch.positions, batch.segments)
        )
        yield from self._mix(self._head_vectors(stages)).unbind(-2)

    # Decoding. The layers read a position only once the token after it is known, so the last one
    # waits for the root.

    @property
    def num_caches(self) -> int:
        """One for each adaptation layer."""
        return self.adaptation_layers

    def prefill(self, feats: Features, tokens: Tensor, caches: Sequence[PromptCache]) -> None:
        """Run the adaptation layers over the prompts, the last positions with any token after them."""
        following = tokens.roll(-1, dims=1)

        def extend(i: int, x: Tensor) -> Tensor:
            return self._layer(i).extend(x, caches[i])

        self.stages(feats.hidden, following, extend)

    def read(self, step: DraftStep) -> list[Tensor]:
        """Run the adaptation layers over the accepted path, followed by the roots; return h1 and h2
        [B, d] of its last nodes.
        """
        accepted = step.accepted

        def read_path(i: int, x: Tensor) -> Tensor:
            return step.caches[i].read_path(self._layer(i), x, accepted.starts)

        hidden = accepted.along_path(accepted.feats.hidden)  # [B, D + 1, d]
        stages = self.stages(hidden, accepted.following(step.roots), read_path)
        return [accepted.last(stage) for stage in stages]

    def guess(self, step: DraftStep, states: list[Tensor]) -> Proposal:
        """Place the top draft tokens of every head in the tree by rank."""
        tree = step.tree
        logits = self._head_logits(states, self.stacked(), tree.max_depth)  # [max_depth, B, V]
        best = logits.topk(tree.width).indices.transpose(0, 1).flatten(1)  # [B, max_depth * width]
        guesses = self.lm_head(1).tokens_of(best[:, tree.candidate_index])  # [B, n]
        return Proposal(torch.cat([step.roots[:, None], guesses], dim=1), tree)

    def stacked(self) -> Stacked | None:
        """Return the weights of all heads as one tensor each; None if they are not stacked."""
        mlp, lm_head = self.mlps.stacked(), self.lm_heads.stacked()
        return None if mlp is None or lm_head is None else Stacked(mlp, lm_head)

    # The layers of the formulas above

    def stages(
        self, hidden: Tensor, following: Tensor, layer: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """Return h1 and h2 (Eq. 1), [B, T, d] each; a single one where there is no second layer.

        Args:
            hidden: [B, T, d]. following: long [B, T], the token after each position.
            layer: runs adaptation layer i, from 0, over [B, T, d].
        """
        dtype = self.lm_heads.get_parameter("0.weight").dtype
        x, stages = hidden.to(dtype), []
        if self.sampled_token:
            e = self.embedding(following).to(dtype)
            e = rms_norm(e, e.shape[-1:], eps=1e-12) if self.normalize_embeddings else e
        for i in range(max(self.adaptation_layers, len(self.fc))):
            if self.sampled_token:
                x = self.fc[i](torch.cat([x, e], dim=-1)).to(dtype)
            if self.adaptation_layers:
                x = layer(i, x)
            stages.append(x)
        return stages or [x]

    def _layer(self, i: int) -> Any:
        return self.layers[i]

    def _stage_of_heads(self, stages: Sequence[Tensor]) -> list[Tensor]:
        """What each head reads: h1 or h2."""
        half = self.num_heads // 2
        return [stages[0]] * half + [stages[-1]] * (self.num_heads - half)

    def _head_vectors(self, stages: Sequence[Tensor]) -> Tensor:
        """v_1 .. v_K (Eq. 2), [..., K, d], of stages [..., d]."""
        heads = zip(self._stage_of_heads(stages), self.mlps, strict=True)
        return torch.stack([x + silu(mlp(x)) for x, mlp in heads], dim=-2)

    def _stacked_head_vectors(self, stages: Sequence[Tensor], stacked: Stacked) -> Tensor:
        """The same in one product, [B, K, d] of stages [B, d]."""
        weights, biases = stacked.mlp
        assert biases is not None
        x = torch.stack(self._stage_of_heads(stages))
        return (x + silu(torch.baddbmm(biases[:, None], x, weights.transpose(1, 2)))).transpose(
            0, 1
        )

    def _mix(self, vectors: Tensor) -> Tensor:
        """u_1 .. u_K (Eq. 3 to 5), [..., K, d] -> [..., K, d]."""
        return vectors if self.auto is None else self.auto(vectors)

    def _head_logits(self, stages: Sequence[Tensor], stacked: Stacked | None, count: int) -> Tensor:
        """Logits of heads 1..count without soft cap and scale, which keep their order: [count, B,
        V] of [B, d].
        """
        if stacked is None:
            heads = self._mix(self._head_vectors(stages)).unbind(-2)
            return torch.stack([self.lm_heads[k](heads[k]) for k in range(count)])
        states = self._mix(self._stacked_head_vectors(stages, stacked)).transpose(0, 1)  # [K, B, d]
        weights, biases = stacked.lm_heads
        logits = torch.bmm(states[:count], weights[:count].transpose(1, 2))
        return logits if biases is None else logits + biases[:count, None]


#: Output projections of attention and MLP in a decoder layer. Initialised to 0, so that a new
# layer adds nothing.
OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "output_linear", "c_proj")


class Stacked(NamedTuple):
    """The weights of all heads on the parameters' memory: W1 [K, d, d] with b1 [K, d], W2 [K, V, d]
    with [K, V].
    """

    mlp: tuple[Tensor, Tensor | None]
    lm_heads: tuple[Tensor, Tensor | None]


class AutoEmbedding(nn.Module):
    """A learned position per head and blocks of attention among the heads (Amphista,
    Auto-embedding, Eq. 4 and 5).

    Positions are initially 0, so that vectors pass unchanged; the paper does not specify their
    initialisation.
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
        self.positions: nn.Parameter | None = nn.Parameter(
            torch.zeros(num_heads, hidden_size, dtype=dtype)
        )
        self.blocks = nn.ModuleList(
            HeadAttention(hidden_size, num_attention_heads, head_dim, dtype)
            for _ in range(num_blocks)
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """[..., K, d] -> [..., K, d]."""
        x = (vectors if self.positions is None else vectors + self.positions).flatten(0, -3)
        for block in self.blocks:
            x = block(x)
        return x.unflatten(0, vectors.shape[:-2])


class HeadAttention(nn.Module):
    """`x + W_o Attention(RMSNorm(x))` over the K vectors of one position, without a mask (Amphista,
    Eq. 5).

    Initially the identity, with W_o = 0. The paper has neither the norm nor the residual. Heads
    have the number and size of the backbone's.
    """

    def __init__(
        self, hidden_size: int, num_attention_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        inner = num_attention_heads * head_dim
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6, dtype=dtype)
        self.qkv = nn.Linear(hidden_size, 3 * inner, bias=False, dtype=dtype)
        self.out = nn.Linear(inner, hidden_size, bias=False, dtype=dtype)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[N, K, d] -> [N, K, d]."""
        # [N, K, 3, heads, head_dim]
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_attention_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return x + self.out(_attention(q, k, v).transpose(1, 2).flatten(2))


#: Largest batch of a CUDA attention kernel: the limit of the second and third dimension of a CUDA
# grid.
MAX_CUDA_BATCH = 65_535


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [N, heads, K, head_dim], in chunks that CUDA kernels accept."""
    if len(q) <= MAX_CUDA_BATCH:
        return scaled_dot_product_attention(q, k, v)
    chunks = zip(
        q.split(MAX_CUDA_BATCH), k.split(MAX_CUDA_BATCH), v.split(MAX_CUDA_BATCH), strict=True
    )
    return torch.cat([scaled_dot_product_attention(*chunk) for chunk in chunks])
