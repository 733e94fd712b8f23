"""Hydra: heads that read the path of draft tokens before the token they predict, level by level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from medusa_train.data.batch import shift_labels
from medusa_train.models.drafts.base import DraftStep, Proposal, read_prompts
from medusa_train.models.drafts.draft_layer import DraftLayer
from medusa_train.models.drafts.lm_heads import LMHeadsDraft
from medusa_train.models.drafts.medusa import ResBlock
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, TokenRows
from medusa_train.trees.levels import levels_of
from medusa_train.trees.transformers_adapters import PromptCache


class HydraDraft(LMHeadsDraft):
    """K sequentially dependent heads (Hydra, Hydra Heads; arXiv 2402.05109).

    Each of Medusa's heads reads only the state. Here, head k also reads the tokens between the
    state and the token it predicts, so it knows which path it continues:

        head 1 reads   h_t  E(x_{t+1})                        predicts x_{t+2}
        head 2 reads   h_t  E(x_{t+1})  E(x_{t+2})            predicts x_{t+3}
        head k reads   h_t  E(x_{t+1})  ..  E(x_{t+k})        predicts x_{t+k+1}

        x_k = [h_t ; E(x_{t+1}) ; .. ; E(x_{t+k})]            width (k + 1) d
        v_k = Block_n(.. Block_2(P_k x_k + SiLU(W_k x_k)))    the blocks are Medusa's
        p_k = softmax(W2_k v_k)

    In decoding, x_{t+1} is the root and the other tokens are a path of draft tokens below it: head
    k runs at every node of depth k - 1 that has children. In training, they are the data's tokens,
    and all positions are computed at once.

    E is the target model's frozen input embedding, scaled to a root mean square of 1. With a prefix
    layer (Hydra++), a decoder layer of the target model's class, with a cache and a final norm,
    runs over h before the heads read it.

    Differences from the reference implementation:

    - E is scaled. Otherwise it is many times smaller than the state it is concatenated with, and
      the heads learn slowly from it (`normalize_embeddings=False`).
    - Initially P = [I, 0, ..., 0], W = 0, biases are 0 and W2 is a copy of lm_head, so without a
      prefix layer untrained heads give the target model's next-token logits. (The reference
      initializes P and all biases randomly, and uses one block object for layers 2 .. n.)
    - The prefix layer is initialized randomly as in the paper, but its final norm starts at the
      scale of the target model's states, so that the heads read something close to h from the first
      step on.
    - Dropout acts on the SiLU branch of each block.

    Args:
        target_model: the model whose embeddings, lm_head and layer class are used; its weights are
            not changed.
        num_heads: K.
        num_layers: number of blocks per head, including the first.
        prefix_layer: use a prefix layer (Hydra++).
        normalize_embeddings: scale E.
        dropout: dropout probability in training.
        vocab_size: N, size of a reduced vocabulary; by default all tokens.
        token_map: token ids of the reduced vocabulary, long [N].
        dtype: dtype of the parameters; by default the target model's.
    """

    setting_names = ("num_heads", "num_layers", "prefix_layer", "normalize_embeddings", "dropout")

    def __init__(
        self,
        target_model: TargetModel,
        num_heads: int = 4,
        num_layers: int = 4,
        *,
        prefix_layer: bool = True,
        normalize_embeddings: bool = True,
        dropout: float = 0.0,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or target_model.dtype
        size = target_model.hidden_size  # d
        self.max_depth = self.num_heads = num_heads
        self.num_layers = num_layers
        self.prefix_layer = prefix_layer
        self.normalize_embeddings = normalize_embeddings
        self.dropout = dropout
        self.embedding = target_model.embedding()
        self.prefix = DraftLayer(target_model, dtype=dtype) if prefix_layer else None
        self.blocks = nn.ModuleList()
        for k in range(1, num_heads + 1):
            first = _FirstBlock(size, k + 1, dropout, dtype)
            other_blocks = [ResBlock(size, dtype, dropout) for _ in range(num_layers - 1)]
            self.blocks.append(nn.Sequential(first, *other_blocks))
        self.lm_heads = self.new_lm_heads(target_model, num_heads, vocab_size, token_map, dtype)
        if self.prefix is not None and target_model.device.type != "meta":
            probe = torch.arange(min(64, target_model.vocab_size), device=target_model.device)[None]
            with torch.no_grad():
                self.prefix.match_rms(target_model.run(probe).final)
        self.to(target_model.device)

    # Training

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..K the states [B, T, d] that `lm_head(k)` reads, with the data's tokens
        as the path.
        """
        # 1. h
        x = hidden_states.final  # [B, T, d]
        if self.prefix is not None:
            x = self.prefix(x, batch.positions, batch.segments)
        for k, blocks in enumerate(self.blocks, start=1):
            # 2. E of the data's token x_{t+k} at each t. Past the end of a document there is no
            # target, so any token will do
            tokens = shift_labels(batch.tokens, k - 1, batch.segments).clamp(min=0)  # [B, T]
            e = self._embed(tokens)  # [B, T, d]
            # 3. head k reads the input of head k - 1, and e
            x = torch.cat([x, e.to(x.dtype)], dim=-1)  # [B, T, (k + 1) d]
            yield blocks(x)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, with a root mean square of 1 if `normalize_embeddings`, -> [..., d]."""
        e: Tensor = self.embedding(tokens)
        if self.normalize_embeddings:
            e = rms_norm(e, e.shape[-1:], eps=1e-12)
        return e

    # Decoding

    @property
    def num_caches(self) -> int:
        """One cache for the prefix layer, if there is one."""
        return int(self.prefix is not None)

    def prefill(
        self, hidden_states: HiddenStates, tokens: Tensor, caches: Sequence[PromptCache]
    ) -> None:
        """Run the prefix layer over the prompts."""
        if self.prefix is not None:
            read_prompts(self.prefix, hidden_states.final, caches[0])

    def extend(self, step: DraftStep) -> Tensor:
        """Run the prefix layer over the accepted path; return its last states [B, d]."""
        accepted = step.accepted
        states = accepted.along_path(accepted.hidden_states.final)  # [B, P, d]
        if self.prefix is not None:
            states = step.caches[0].read_path(self.prefix, states, accepted.starts)
        return accepted.last(states)

    def propose(self, step: DraftStep, states: Tensor) -> Proposal:
        """Fill the tree level by level: head k runs once over all nodes of depth k - 1 with
        children.

        The logits at a node give all its children. A node's input is its parent's input followed by
        one embedding, so inputs are gathered from the parents and grow by one embedding per level.
        """
        tree = step.tree
        x = states[:, None]  # [B, 1, d]: inputs of the nodes of a level
        nodes = step.last_tokens[:, None]  # [B, 1]: tokens of these nodes
        tokens = [nodes]
        for k, level in enumerate(levels_of(tree).levels[:-1], start=1):
            # 1. the m nodes of this level that have children
            x = level.at_inner(x)
            nodes = level.at_inner(nodes)
            # 2. head k reads the state and the tokens of the path so far. Soft cap and scale are
            # left out, because they keep the order of the logits
            e = self._embed(nodes).to(x.dtype)  # [B, m, d]
            x = torch.cat([x, e], dim=-1)  # [B, m, (k + 1) d]
            head_states = self.blocks[k - 1](x)  # [B, m, d]
            logits = self.lm_heads[k - 1](head_states)  # [B, m, V]
            # 3. its best tokens are the nodes of the next level
            best = logits.topk(level.width).indices  # [B, m, width]
            nodes = self.lm_head(k).tokens_of(level.at_next(best))  # [B, next]
            x = x[:, level.parents]  # [B, next, (k + 1) d]
            tokens.append(nodes)
        return Proposal(torch.cat(tokens, dim=1), tree)


class _FirstBlock(nn.Module):
    """`P x + SiLU(W x)`, (k + 1) d -> d, with biases; initially P = [I, 0, ..., 0], and W and the
    biases are 0.

    P and W are one matrix [2 d, (k + 1) d], for a single matrix product.
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
        """Compute the block, [..., (k + 1) d] -> [..., d]."""
        both = self.linear(x)  # [..., 2 d]
        projected, branch = both.chunk(2, dim=-1)  # P x, W x
        return projected + self.dropout(silu(branch))
