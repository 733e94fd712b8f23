"""A bias on the logits of parallel heads that depends on the previous token
(`medusa_markov_rank`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_train.data.batch import shift_labels
from medusa_train.models.drafts.base import DraftStep, Proposal
from medusa_train.models.lm_head import CANDIDATES, LMHead, rank_candidates
from medusa_train.models.target_states import TokenRows
from medusa_train.trees.levels import levels_of
from medusa_train.trees.tree import Tree

#: Standard deviation of the random embeddings E. They must not be 0: R starts as 0, and its
#: gradients are proportional to E.
INITIAL_SPREAD = 0.02


class MarkovBias(nn.Module):
    """A bias on the logits of all heads, `R E[x]`, where x is the token before the predicted token.

        logits of head k = W2_k (..) + R E[x]       E: V x r, R: N x r, the same for all heads

    Parallel heads predict each token without knowing the other draft tokens. With this bias, a
    token depends on the token before it, as with the Markov head of DSpark
    (https://arxiv.org/abs/2607.05147). At position t, head k predicts the token t + k + 1, so x is
    the token t + k. In training it is the data's token. In decoding it is the root for head 1, and
    a draft token of head k - 1 for head k.

    Initially E is random and R is 0, so the untrained bias is 0.

    Args:
        vocab_size: V, number of tokens that x may be.
        draft_vocab_size: N, number of tokens that heads predict.
        rank: r.
        dtype: dtype of the parameters.
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
        """Append E[x_{t+k}] to head k's state at each t, [B, T, d] -> [B, T, d + r].

        Past the end of a document, where head k has no target, any token is used.
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
        the bias of the node's token.

        Args:
            scores: raw logits of each head's best tokens without the bias, the greatest first,
                [depth, B, c].
            candidates: indices of these logits, long [depth, B, c].
            last_tokens: long [B].
            tree: the tree to fill.
            token_map: token ids of a reduced vocabulary, long [N]; None: all tokens.

        Returns:
            Tokens in the tree's node order, long [B, n + 1].
        """
        nodes = last_tokens[:, None]  # [B, 1] tokens of a level
        tokens = [nodes]
        for k, level in enumerate(levels_of(tree).levels[:-1], start=1):
            # 1. the m nodes of this level that have children
            nodes = level.at_inner(nodes)
            # 2. head k's candidates, ranked with the bias of each node's token
            embedded = self.embedding(nodes)  # [B, m, r]
            best = rank_candidates(scores[k - 1], candidates[k - 1], self.output.weight, embedded)
            # 3. the best tokens are the nodes of the next level
            nodes = level.at_next(best[..., : level.width])  # [B, next]
            if token_map is not None:
                nodes = token_map[nodes]
            tokens.append(nodes)
        return torch.cat(tokens, dim=1)


def propose_by_rank(
    step: DraftStep, logits: Tensor, head: LMHead, markov: MarkovBias | None = None
) -> Proposal:
    """Fill the tree of a step with the best tokens of parallel heads.

    Args:
        step: inputs of the step.
        logits: raw logits, without the Markov bias, of the first heads, one for each level of the
            tree, [depth, B, N].
        head: maps the logits to token ids.
        markov: the Markov bias, if any.
    """
    tree = step.tree
    # 1. with a Markov bias, rank the best tokens again at each node
    if markov is not None:
        count = min(max(tree.width, CANDIDATES), logits.shape[-1])
        best = logits.topk(count)  # [depth, B, count]
        tokens = markov.fill_tree(best.values, best.indices, step.last_tokens, tree, head.token_map)
        return Proposal(tokens, tree)
    # 2. without it, a node of depth k gets the token of its rank among head k's best tokens
    table = logits.topk(tree.width).indices  # [depth, B, width]
    table = table.transpose(0, 1).flatten(1)  # [B, depth * width]
    ranked = table.index_select(1, tree.candidate_index)  # [B, n]
    tokens = torch.cat([step.last_tokens[:, None], head.tokens_of(ranked)], dim=1)  # [B, n + 1]
    return Proposal(tokens, tree)
