"""A low-rank bias on the heads' logits that depends on the token before the predicted one (`medusa_markov_rank`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_train.data.batch import shift_labels
from medusa_train.models.features import TokenRows
from medusa_train.models.lm_head import rank_candidates
from medusa_train.trees.tree import Tree

#: Standard deviation of the random embeddings E: the rows of R grow from their products with the loss's gradients.
INITIAL_SPREAD = 0.02


class MarkovBias(nn.Module):
    """Head k's logits get `R_k E_k[x]`, x being the token before the one that head k predicts.

    Parallel heads guess each token without knowing the others. With this bias a guess depends on the token before it,
    as with the Markov head of DSpark (https://arxiv.org/abs/2607.05147). At position t head k predicts the token
    t + k + 1, so x is the token t + k: in training the data's, in decoding the root for head 1 and a guess of head
    k - 1 for head k.

    Initially E is random and R is 0, so the untrained bias is 0.

    Args:
        vocab_size: V, tokens that may come before. draft_vocab_size: N, tokens that heads predict.
        rank: r. pairs: 1 pair of matrices for all heads, or one for each head.
    """

    def __init__(
        self, vocab_size: int, draft_vocab_size: int, rank: int, pairs: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.rank = rank
        self.embeddings = nn.ModuleList(nn.Embedding(vocab_size, rank, dtype=dtype) for _ in range(pairs))
        self.outputs = nn.ModuleList(nn.Linear(rank, draft_vocab_size, bias=False, dtype=dtype) for _ in range(pairs))
        for embedding, output in zip(self.embeddings, self.outputs, strict=True):
            nn.init.normal_(embedding.get_parameter("weight"), std=INITIAL_SPREAD)
            nn.init.zeros_(output.get_parameter("weight"))

    @property
    def shared(self) -> bool:
        """Whether all heads have the same bias."""
        return len(self.outputs) == 1

    def output(self, k: int) -> Tensor:
        """Return R of head k = 1..K, [N, r]."""
        return self.outputs[0 if self.shared else k - 1].get_parameter("weight")

    def embed(self, tokens: Tensor, k: int) -> Tensor:
        """Return E of head k for token ids, long [...] -> [..., r]."""
        vectors: Tensor = self.embeddings[0 if self.shared else k - 1](tokens)
        return vectors

    def append_to(self, states: Tensor, batch: TokenRows, k: int) -> Tensor:
        """Append E_k of the data's token t + k to head k's state at each t, [B, T, d] -> [B, T, d + r].

        Past the end of a document, where head k has no target, another token takes its place.
        """
        tokens = shift_labels(batch.tokens, k - 1, batch.segments).clamp(min=0)
        return torch.cat([states, self.embed(tokens, k).to(states.dtype)], dim=-1)

    def fill_tree(self, scores: Tensor, rows: Tensor, roots: Tensor, tree: Tree, token_map: Tensor | None) -> Tensor:
        """Fill a tree level by level: at each node, the candidates of the next head are ranked with its token's bias.

        Args:
            scores: [depth, B, c], raw logits of each head's best tokens without the bias, the greatest first.
            rows: long [depth, B, c], the rows of these tokens in R.
            roots: long [B]. token_map: long [N], token ids of R's rows, for a reduced vocabulary.

        Returns:
            Tokens in the tree's node order, long [B, n + 1].
        """
        nodes = roots[:, None]
        tokens = [nodes]
        for k, level in enumerate(tree.by_level.levels[:-1], start=1):
            if level.inner is not None:
                nodes = nodes[:, level.inner]
            best = rank_candidates(scores[k - 1], rows[k - 1], self.output(k), self.embed(nodes, k))
            nodes = best[..., : level.width].flatten(1)[:, level.candidates]
            if token_map is not None:
                nodes = token_map[nodes]
            tokens.append(nodes)
        return torch.cat(tokens, dim=1)


def count_markov_parameters(vocab_size: int, draft_vocab_size: int, rank: int, pairs: int) -> int:
    """Return the number of parameters of a `MarkovBias`."""
    return pairs * rank * (vocab_size + draft_vocab_size)
