"""A bias on the logits of parallel heads by the token before the guessed one
(`medusa_markov_rank`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_train.data.batch import shift_labels
from medusa_train.models.lm_head import CANDIDATES, LMHead, rank_candidates
from medusa_train.models.target_states import TokenRows
from medusa_train.trees.tree import Tree

#: Standard deviation of the random embeddings E: R, which begins as 0, grows from their products
#: with the loss's gradients.
INITIAL_SPREAD = 0.02


class MarkovBias(nn.Module):
    """A bias on the logits of all heads, `R E[x]`, that depends on the token x before the predicted
    one.

        logits of head k = W2_k (..) + R E[x]       E: V x r, R: N x r, the same for all heads

    Parallel heads guess each token without knowing the others. With this bias a guess depends on
    the token before it, as with the Markov head of DSpark (https://arxiv.org/abs/2607.05147). At
    position t head k predicts the token t + k + 1, so x is the token t + k: in training the data's,
    in decoding the root for head 1 and a guess of head k - 1 for head k.

    Initially E is random and R is 0, so the untrained bias is 0.

    Args:
        vocab_size: V, tokens that may come before.
        draft_vocab_size: N, tokens that heads predict.
        rank: r.
    """

    def __init__(
        self, vocab_size: int, draft_vocab_size: int, rank: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.rank = rank
        self.embedding = nn.Embedding(vocab_size, rank, dtype=dtype)  # E
        self.output = nn.Linear(rank, draft_vocab_size, bias=False, dtype=dtype)  # R
        nn.init.normal_(self.embedding.weight, std=INITIAL_SPREAD)
        nn.init.zeros_(self.output.weight)

    def append_to(self, states: Tensor, batch: TokenRows, k: int) -> Tensor:
        """Append E of the data's token t + k to head k's state at each t, [B, T, d] -> [B, T, d +
        r].

        Past the end of a document, where head k has no target, another token takes its place.
        """
        tokens = shift_labels(batch.tokens, k - 1, batch.segments).clamp(min=0)  # [B, T]
        embedded = self.embedding(tokens).to(states.dtype)  # [B, T, r]
        return torch.cat([states, embedded], dim=-1)

    def fill_tree(
        self,
        scores: Tensor,
        candidates: Tensor,
        last_tokens: Tensor,
        tree: Tree,
        token_map: Tensor | None,
    ) -> Tensor:
        """Fill a tree level by level: at each node, the candidates of the next head are ranked with
        its token's bias.

        Args:
            scores: [depth, B, c], raw logits of each head's best tokens without the bias, the
                greatest first.
            candidates: long [depth, B, c], which logits these are.
            last_tokens: long [B]. token_map: long [N], the token ids of R, for a reduced
                vocabulary.

        Returns:
            Tokens in the tree's node order, long [B, n + 1].
        """
        nodes = last_tokens[:, None]  # [B, 1] tokens of a level
        tokens = [nodes]
        for k, level in enumerate(tree.by_level.levels[:-1], start=1):
            # 1. the m nodes of this level that have children
            if level.inner is not None:
                nodes = nodes[:, level.inner]
            # 2. head k's candidates, ranked with the bias of each node's token
            embedded = self.embedding(nodes)  # [B, m, r]
            best = rank_candidates(scores[k - 1], candidates[k - 1], self.output.weight, embedded)
            # 3. the best are the nodes of the next level
            table = best[..., : level.width].flatten(1)  # [B, m * width]
            nodes = table[:, level.candidates]  # [B, next]
            if token_map is not None:
                nodes = token_map[nodes]
            tokens.append(nodes)
        return torch.cat(tokens, dim=1)


def fill_tree(
    logits: Tensor, last_tokens: Tensor, tree: Tree, head: LMHead, markov: MarkovBias | None
) -> Tensor:
    """Fill a tree with the best guesses of parallel heads.

    Args:
        logits: raw, of the heads that the tree has levels for, without the bias, [depth, B, N].
        last_tokens: long [B]. head: whose vocabulary the logits have.

    Returns:
        Tokens in the tree's node order, the root first, long [B, n + 1].
    """
    # 1. With a Markov bias, the best tokens are ranked again at each node.
    if markov is not None:
        count = min(max(tree.width, CANDIDATES), logits.shape[-1])
        best = logits.topk(count)  # [depth, B, count]
        return markov.fill_tree(best.values, best.indices, last_tokens, tree, head.token_map)
    # 2. Without, each node takes the token of its rank at its head.
    table = logits.topk(tree.width).indices  # [depth, B, width]
    table = table.transpose(0, 1).flatten(1)  # [B, depth * width]
    ranked = table.index_select(1, tree.candidate_index)  # [B, n]
    return torch.cat([last_tokens[:, None], head.tokens_of(ranked)], dim=1)
