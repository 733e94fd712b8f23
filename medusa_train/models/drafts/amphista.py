"""Amphista: K heads that read the last token and attend to each other, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from medusa_train.data.batch import shift_labels
from medusa_train.models.drafts.base import DraftStep, Proposal, read_prompts
from medusa_train.models.drafts.draft_layer import DraftLayer
from medusa_train.models.drafts.lm_heads import LMHeadsDraft
from medusa_train.models.drafts.markov import propose_by_rank
from medusa_train.models.drafts.stacked import Stack, StackedDraft
from medusa_train.models.hf_config import head_dim
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, TokenRows
from medusa_train.trees.transformers_adapters import PromptCache


class AmphistaDraft(StackedDraft, LMHeadsDraft):
    """Medusa's heads, but they read the last token and attend to each other (Amphista, Methodology;
    arXiv 2406.13170).

    Two decoder layers compute the inputs of the heads: the first K/2 heads (rounded down) read the
    first layer, the other heads read the second. Before their output matrices, the heads attend to
    each other.

        h1 = Layer1(fc1[h ; e])    h2 = Layer2(fc2[h1 ; e])      Eq. 1; h: the target model's
                                                                 state at t, e: the embedding of
                                                                 x_{t+1}
        v_k = h_i + SiLU(W1_k h_i + b1_k)                        Eq. 2; h_i: h1 or h2
        [u_1 .. u_K] = AutoEmbedding([v_1 .. v_K])               Eq. 3 to 5
        p_k = softmax(W2_k u_k)                                  Eq. 6; predicts x_{t+k+1}

    In decoding, x_{t+1} is the last token, the root of the tree; in training, it is the data's
    token. No head reads a later token, so one pass computes all positions in training and all K
    heads in decoding.

    Choices that the paper does not specify:

    - The MLP is the residual block of Medusa.
    - `AutoEmbedding` has a norm and a residual.
    - Embeddings are scaled to a root mean square of 1, unless `normalize_embeddings` is False: they
      are several times smaller than the states that they are concatenated with.
    - Initially fc = [I, 0], layers and blocks add 0, and W2 is a copy of lm_head, so untrained
      heads give exactly the target model's next-token logits.

    Args:
        target_model: the model whose layer class, embeddings and lm_head are used; it is neither
            kept nor changed.
        num_heads: K.
        auto_blocks: number of attention blocks among the heads; 2 is the paper's alpha variant; 0
            also omits the positions.
        position_encoding: False omits only the positions.
        adaptation_layers: number of decoder layers. With 1, all heads read h1. With 0, they read
            fc[h ; e].
        sampled_token: False omits e and fc: the layers read h and h1.
        normalize_embeddings: False does not scale e.
        vocab_size: N, size of a reduced vocabulary; by default all tokens.
        token_map: token ids of the reduced vocabulary, long [N].
        dtype: dtype of the parameters; by default the target model's.
    """

    setting_names = (
        "num_heads",
        "auto_blocks",
        "position_encoding",
        "adaptation_layers",
        "sampled_token",
        "normalize_embeddings",
    )

    def __init__(
        self,
        target_model: TargetModel,
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
        self.max_depth = self.num_heads = num_heads
        self.auto_blocks = auto_blocks
        self.position_encoding = position_encoding
        self.adaptation_layers = adaptation_layers
        self.sampled_token = sampled_token
        self.normalize_embeddings = normalize_embeddings
        dtype = dtype or target_model.dtype
        size = target_model.hidden_size  # d
        self.embedding = target_model.embedding()
        # fc and the adaptation layers
        num_fc = max(adaptation_layers, 1) if sampled_token else 0
        self.fc = nn.ModuleList(
            nn.Linear(2 * size, size, bias=False, dtype=dtype) for _ in range(num_fc)
        )
        self.layers = nn.ModuleList(
            DraftLayer(target_model, final_norm=False, dtype=dtype)
            for _ in range(adaptation_layers)
        )
        # the heads: W1, the block between them, W2
        self.mlps = nn.ModuleList(nn.Linear(size, size, dtype=dtype) for _ in range(num_heads))
        self.auto: AutoEmbedding | None = None
        if auto_blocks:
            config = target_model.config
            self.auto = AutoEmbedding(
                auto_blocks, num_heads, size, config.num_attention_heads, head_dim(config), dtype
            )
            if not position_encoding:
                self.auto.positions = None
        self.lm_heads = self.new_lm_heads(target_model, num_heads, vocab_size, token_map, dtype)
        self.stack_heads()
        self._init_identity()
        self.to(target_model.device)

    @torch.no_grad()
    def _init_identity(self) -> None:
        """Initialize so that all heads' states equal the target model's state."""
        for fc in self.fc:
            assert isinstance(fc, nn.Linear)
            nn.init.eye_(fc.weight)  # [I, 0]
        for name, parameter in self.layers.named_parameters():
            if name.removesuffix(".weight").removesuffix(".bias").endswith(OUTPUT_PROJECTIONS):
                nn.init.zeros_(parameter)
        for parameter in self.mlps.parameters():
            nn.init.zeros_(parameter)

    # Training

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..K the states [B, T, d] that `lm_head(k)` reads."""
        # 1. x_{t+1}. The last position of a document has no such token, but no target either, so
        # any token will do
        following = shift_labels(batch.tokens, 0, batch.segments).clamp(min=0)  # [B, T]

        # 2. h1 and h2 of all positions
        def run_layer(i: int, x: Tensor) -> Tensor:
            out: Tensor = self.layers[i](x, batch.positions, batch.segments)
            return out

        stages = self.stages(hidden_states.final, following, run_layer)  # [B, T, d] each

        # 3. the heads
        vectors = self._head_vectors(stages)  # [B, T, K, d]
        yield from self._mix(vectors).unbind(-2)

    # Decoding. The layers read a position only after the next token is known, so the last accepted
    # position waits for the last token.

    @property
    def num_caches(self) -> int:
        """One cache for each adaptation layer."""
        return self.adaptation_layers

    def prefill(
        self, hidden_states: HiddenStates, tokens: Tensor, caches: Sequence[PromptCache]
    ) -> None:
        """Run the adaptation layers over the prompts. The next token of a prompt's last position is
        not known yet; `extend` computes this position again.
        """
        following = tokens.roll(-1, dims=1)  # [B, T]

        def run_layer(i: int, x: Tensor) -> Tensor:
            layer: Any = self.layers[i]
            return read_prompts(layer, x, caches[i])

        self.stages(hidden_states.final, following, run_layer)

    def extend(self, step: DraftStep) -> list[Tensor]:
        """Run the adaptation layers over the accepted path; return h1 and h2 [B, d] of its last
        nodes, whose next tokens are the last tokens.
        """
        accepted = step.accepted
        hidden = accepted.along_path(accepted.hidden_states.final)  # [B, P, d]
        following = accepted.following(step.last_tokens)  # [B, P]

        def run_layer(i: int, x: Tensor) -> Tensor:
            layer: Any = self.layers[i]
            return step.caches[i].read_path(layer, x, accepted.starts)

        stages = self.stages(hidden, following, run_layer)  # [B, P, d] each
        return [accepted.last(stage) for stage in stages]

    def propose(self, step: DraftStep, states: list[Tensor]) -> Proposal:
        """Fill the tree by rank with the best tokens of each head."""
        # logits of the first heads, one for each level of the tree
        logits = self._head_logits(states, step.tree.max_depth)  # [max_depth, B, V]
        return propose_by_rank(step, logits, self.lm_head(1))

    def parallel_linears(self) -> list[list[Any]]:
        """Return W1 and W2 of all heads."""
        return [list(self.mlps), list(self.lm_heads)]

    # The layers of the formulas above

    def stages(
        self, hidden: Tensor, following: Tensor, run_layer: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """Return h1 and h2 (Eq. 1), [B, T, d] each; only h1 if there is no second layer.

        Args:
            hidden: the target model's states, [B, T, d].
            following: the token after each position, long [B, T].
            run_layer: runs adaptation layer i, counted from 0, over [B, T, d].
        """
        dtype = self.lm_heads.get_parameter("0.weight").dtype
        x = hidden.to(dtype)
        # 1. e
        if self.sampled_token:
            e = self.embedding(following).to(dtype)  # [B, T, d]
            if self.normalize_embeddings:
                e = rms_norm(e, e.shape[-1:], eps=1e-12)
        # 2. each stage reads the previous stage, and e again
        stages: list[Tensor] = []
        for i in range(max(self.adaptation_layers, len(self.fc))):
            if self.sampled_token:
                both = torch.cat([x, e], dim=-1)  # [B, T, 2 d]
                x = self.fc[i](both).to(dtype)  # [B, T, d]
            if self.adaptation_layers:
                x = run_layer(i, x)  # [B, T, d]
            stages.append(x)
        return stages or [x]

    def _stage_of_heads(self, stages: Sequence[Tensor]) -> list[Tensor]:
        """Return the input of each head: h1 or h2."""
        half = self.num_heads // 2
        return [stages[0]] * half + [stages[-1]] * (self.num_heads - half)

    def _head_vectors(self, stages: Sequence[Tensor]) -> Tensor:
        """Compute v_1 .. v_K (Eq. 2), [..., K, d], from stages [..., d]."""
        vectors = []
        for x, mlp in zip(self._stage_of_heads(stages), self.mlps, strict=True):
            vectors.append(x + silu(mlp(x)))
        return torch.stack(vectors, dim=-2)

    def _stacked_head_vectors(self, stages: Sequence[Tensor], stack: Stack) -> Tensor:
        """Compute `_head_vectors` in one matrix product, [B, K, d] from stages [B, d]."""
        weights, biases = stack  # [K, d, d], [K, d]
        assert biases is not None
        x = torch.stack(self._stage_of_heads(stages))  # [K, B, d]
        branch = torch.baddbmm(biases[:, None], x, weights.transpose(1, 2))  # [K, B, d]
        vectors = x + silu(branch)
        return vectors.transpose(0, 1)

    def _mix(self, vectors: Tensor) -> Tensor:
        """Compute u_1 .. u_K (Eq. 3 to 5), [..., K, d] -> [..., K, d]."""
        if self.auto is None:
            return vectors
        mixed: Tensor = self.auto(vectors)
        return mixed

    def _head_logits(self, stages: Sequence[Tensor], count: int) -> Tensor:
        """Compute the logits of heads 1..count (Eq. 6) from stages [B, d], [count, B, V].

        Soft cap and scale are left out, since they keep the order. Even the first heads need the
        states of all heads, because heads attend to each other.
        """
        stacks = self.stacked()
        if stacks is None:
            states = self._mix(self._head_vectors(stages)).unbind(-2)  # K times [B, d]
            return torch.stack([self.lm_heads[k](states[k]) for k in range(count)])
        mlps, lm_heads = stacks
        mixed = self._mix(self._stacked_head_vectors(stages, mlps)).transpose(0, 1)  # [K, B, d]
        weights, biases = lm_heads  # [K, V, d], [K, V]
        logits = torch.bmm(mixed[:count], weights[:count].transpose(1, 2))  # [count, B, V]
        if biases is not None:
            logits = logits + biases[:count, None]
        return logits


#: Output projections of attention and MLP in a decoder layer. Initialized to 0, so that a new
#: layer adds nothing.
OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "output_linear", "c_proj")


class AutoEmbedding(nn.Module):
    """A learned position per head and blocks of attention among the heads (Amphista,
    Auto-embedding, Eq. 4 and 5).

    Positions are initially 0, so that vectors pass through unchanged; the paper does not specify
    their initialization.
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
        x = vectors
        if self.positions is not None:
            x = x + self.positions  # one position per head, [K, d]
        x = x.flatten(0, -3)  # [N, K, d], N positions of text
        for block in self.blocks:
            x = block(x)
        return x.unflatten(0, vectors.shape[:-2])


class HeadAttention(nn.Module):
    """`x + W_o Attention(RMSNorm(x))` over the K vectors of one position, without a mask (Amphista,
    Eq. 5).

    It is initially the identity, with W_o = 0. The paper has neither the norm nor the residual.
    Number and size of the attention heads are the target model's.
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
        qkv = self.qkv(self.norm(x))  # [N, K, 3 * heads * head_dim]
        qkv = qkv.unflatten(-1, (3, self.num_attention_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [N, heads, K, head_dim] each
        attended = _attention(q, k, v).transpose(1, 2).flatten(2)  # [N, K, heads * head_dim]
        out: Tensor = x + self.out(attended)
        return out


#: Largest batch of a CUDA attention kernel: CUDA limits the second and third dimension of a grid to
#: this.
MAX_CUDA_BATCH = 65_535


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of [N, heads, K, head_dim], in chunks that CUDA kernels accept."""
    if len(q) <= MAX_CUDA_BATCH:
        return scaled_dot_product_attention(q, k, v)
    q_chunks = q.split(MAX_CUDA_BATCH)
    k_chunks = k.split(MAX_CUDA_BATCH)
    v_chunks = v.split(MAX_CUDA_BATCH)
    chunks = zip(q_chunks, k_chunks, v_chunks, strict=True)
    return torch.cat([scaled_dot_product_attention(*chunk) for chunk in chunks])
