"""Medusa: K heads that read the same hidden state; each predicts one token further ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from medusa_train.models.drafts.base import DraftStep, Proposal
from medusa_train.models.drafts.lm_heads import LMHeadsDraft, check_token_map, copy_lm_head
from medusa_train.models.drafts.markov import MarkovBias, propose_by_rank
from medusa_train.models.drafts.stacked import Stack, StackedDraft
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, TokenRows


class MedusaDraft(StackedDraft, LMHeadsDraft):
    """K Medusa heads (Medusa, Medusa Heads, Eq. 1; arXiv 2401.10774).

    Each head is a residual block and an output matrix on the target model's hidden state. The
    target model predicts the token at t + 1, and head k the token at t + 1 + k; heads do not read
    each other:

        h_t -- lm_head -------------------- x_{t+1}, the root of the tree
         |---- block 1 -- W2_1 ------------ x_{t+2}
         |---- block 2 -- W2_2 ------------ x_{t+3}
         `---- block K -- W2_K ------------ x_{t+K+1}

        p_k = softmax(W2_k (SiLU(W1_k h_t + b1_k) + h_t))

    In training, the heads run one after the other over all positions of a batch. In decoding, they
    run together over the last accepted positions, with one matrix product for W1 and one for W2.
    The best tokens of each head fill a level of the tree, by rank.

    Initially W1 = 0, b1 = 0 and W2 is a copy of lm_head (the paper's text swaps W1 and W2), so an
    untrained head gives exactly the target model's next-token logits. No weights are shared between
    heads or blocks.

    Args:
        hidden_size: d of the target model.
        vocab_size: V of the target model.
        num_heads: K.
        num_layers: number of residual blocks per head.
        bias: whether the output matrices have a bias, as the target model's lm_head may.
        softcap, scale: the target model's logit transform, see `LMHead`.
        shared: the target model's lm_head, for heads without their own output matrices (about 11 %
            of the parameters at the size of a 7B model). The heads read it, but neither train nor
            save it.
        token_map: token ids of a reduced vocabulary, long [N]: logit i belongs to the token
            token_map[i], and other tokens are never drafted. With `shared`, these rows of lm_head
            are copied once.
        markov_rank: r of a bias that depends on the previous token, see `MarkovBias`; 0: no bias.
        dtype: dtype of the parameters.
    """

    independent_heads = True

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        shared: LMHead | None = None,
        token_map: Tensor | None = None,
        markov_rank: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.max_depth = self.num_heads = num_heads
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.scale = scale
        self.register_buffer("token_map", None if token_map is None else token_map.long())
        self._full_shared = shared
        self.restrict_lm_head()
        self.blocks = nn.ModuleList()
        for _ in range(num_heads):
            layers = [ResBlock(hidden_size, dtype) for _ in range(num_layers)]
            self.blocks.append(nn.Sequential(*layers))
        num_tokens = self.draft_vocab_size or vocab_size  # N or V
        num_lm_heads = 0 if shared else num_heads
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, num_tokens, bias=bias, dtype=dtype) for _ in range(num_lm_heads)
        )
        self.markov: MarkovBias | None = None
        if markov_rank:
            self.markov = MarkovBias(vocab_size, num_tokens, markov_rank, dtype)
        self.stack_heads()

    # Construction

    @classmethod
    def from_target_model(
        cls,
        target_model: TargetModel,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        share_lm_head: bool = False,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
        markov_rank: int = 0,
        dtype: torch.dtype | None = None,
    ) -> MedusaDraft:
        """Create untrained heads, whose logits equal the next-token logits of `target_model`, on
        its device.

        Args:
            target_model: the model to draft for.
            num_heads, num_layers, markov_rank: see `MedusaDraft`.
            share_lm_head: use the target model's lm_head instead of own output matrices.
            vocab_size: N, size of a reduced vocabulary; by default all tokens.
            token_map: token ids of the reduced vocabulary, long [N]. Output matrices start as these
                rows of lm_head.
            dtype: dtype of the parameters; by default the target model's.
        """
        check_token_map(vocab_size, token_map)
        lm_head = target_model.lm_head()
        draft = cls(
            target_model.hidden_size,
            target_model.vocab_size,
            num_heads,
            num_layers,
            bias=lm_head.bias is not None,
            softcap=lm_head.softcap,
            scale=lm_head.scale,
            shared=lm_head if share_lm_head else None,
            token_map=token_map,
            markov_rank=markov_rank,
            dtype=dtype or target_model.dtype,
        ).to(target_model.device)
        if token_map is not None and draft.lm_heads:
            lm_head = lm_head.restrict_to(token_map)
        copy_lm_head(draft.lm_heads, lm_head)
        return draft

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `from_target_model` that recreate these heads, except
        `token_map`.
        """
        return {
            "num_heads": self.num_heads,
            "num_layers": self.num_layers,
            "share_lm_head": self.shared is not None,
            "vocab_size": self.draft_vocab_size,
            "markov_rank": self.markov.rank if self.markov is not None else 0,
        }

    def restrict_lm_head(self) -> None:
        """Set the shared lm_head, if there is one: the target model's, or a copy of its rows for a
        reduced vocabulary.
        """
        self.shared = self._full_shared
        if self.shared is not None and self.token_map is not None:
            self.shared = self.shared.restrict_to(self.token_map)

    # Training

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..K the states that `lm_head(k)` reads, [B, T, d]; with a Markov bias [B,
        T, d + r].
        """
        for k in range(1, self.num_heads + 1):
            states = self.head_state(hidden_states.final, k)  # [B, T, d]
            if self.markov is not None:
                states = self.markov.append_to(states, batch, k)  # [B, T, d + r]
            yield states

    def head_state(self, states: Tensor, k: int) -> Tensor:
        """Compute head k's states [..., d] from the target model's states [..., d], k = 1..K."""
        return self.blocks[k - 1](states)

    def lm_head(self, k: int) -> LMHead:
        """Return head k's W2, or the shared one, with the target model's logit transform and the
        Markov bias.
        """
        head = self._lm_head(k)
        if self.markov is not None:
            head = replace(head, token_bias=self.markov.output.weight)
        return head

    def _lm_head(self, k: int) -> LMHead:
        """Return head k's lm_head without the Markov bias."""
        if self.shared is not None:
            return self.shared
        return super().lm_head(k)

    # Decoding

    def extend(self, step: DraftStep) -> Tensor:
        """Return the states [B, d] at the last accepted nodes."""
        accepted = step.accepted
        return accepted.last(accepted.along_path(accepted.hidden_states.final))

    def propose(self, step: DraftStep, states: Tensor) -> Proposal:
        """Fill the tree by rank with the best tokens of each head. With a Markov bias, the tokens
        of a level depend on the level before.
        """
        # logits of the first heads, one for each level of the tree
        logits = self._raw_logits(states, step.tree.max_depth)  # [max_depth, B, V]
        return propose_by_rank(step, logits, self._lm_head(1), self.markov)

    # Decoding with all heads in one matrix product. The logits here are without soft cap and scale,
    # which keep their order.

    def _raw_logits(self, hidden: Tensor, count: int) -> Tensor:
        """Compute raw logits of heads 1..count from states [B, d], [count, B, V]."""
        stacks = self.stacked()
        if stacks is not None:
            return self._stacked_logits(hidden, stacks, count)
        # prepacked blocks, or parameters that ZeRO moved, are not stacked: one head after the other
        logits = []
        for k in range(1, count + 1):
            state = self.head_state(hidden, k)  # [B, d]
            if self.shared is None:
                logits.append(self.lm_heads[k - 1](state))
            else:
                logits.append(self.shared.raw_logits(state))
        return torch.stack(logits)

    def parallel_linears(self) -> list[list[Any]]:
        """Return a list with the linear layers of block 1 of all heads, then one for block 2, and
        so on; last one for W2, if heads have it.
        """
        blocks_of_heads: list[Any] = list(self.blocks)
        groups: list[list[Any]] = []
        for j in range(self.num_layers):
            groups.append([blocks[j].linear for blocks in blocks_of_heads])
        if self.lm_heads:
            groups.append(list(self.lm_heads))
        return groups

    def _stacked_logits(self, states: Tensor, stacks: list[Stack], count: int) -> Tensor:
        """Compute `_raw_logits` with one matrix product per layer."""
        # 1. the residual blocks
        x = states.expand(count, *states.shape)  # [count, B, d]
        for j, (weights, biases) in enumerate(stacks[: self.num_layers]):  # [K, d, d], [K, d]
            assert biases is not None
            weight = weights[:count]
            bias = biases[:count]
            if j == 0:
                # all heads read the same states, so their first blocks form one matrix
                branch = linear(states, weight.flatten(0, 1), bias.flatten())  # [B, count * d]
                branch = branch.unflatten(1, (count, -1)).transpose(0, 1)  # [count, B, d]
            else:
                branch = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))  # [count, B, d]
            x = x + silu(branch)
        # 2. the output matrices
        if self.shared is not None:
            return self.shared.raw_logits(x)
        weights, head_biases = stacks[-1]  # [K, V, d], [K, V]
        logits = torch.bmm(x, weights[:count].transpose(1, 2))  # [count, B, V]
        if head_biases is not None:
            logits = logits + head_biases[:count, None]
        return logits


class ResBlock(nn.Module):
    """`x + SiLU(W1 x + b1)`; initially the identity, with W1 = 0 and b1 = 0.

    Dropout acts on the SiLU branch.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return x + self.dropout(silu(self.linear(x)))
