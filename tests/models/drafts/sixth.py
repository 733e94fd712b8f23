"""A sixth draft, as somebody would add it: a decoder layer with a cache of its own, and heads whose
guesses depend on the path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from medusa_train.data.batch import IGNORE_INDEX, shift_labels
from medusa_train.models.drafts.base import DraftStep, Proposal, read_prompts
from medusa_train.models.drafts.draft_layer import DraftLayer
from medusa_train.models.drafts.lm_heads import LMHeadsDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, TokenRows
from medusa_train.trees.levels import levels_of
from medusa_train.trees.transformers_adapters import PromptCache


class SixthDraft(LMHeadsDraft):
    """K heads over a decoder layer; each adds the embedding of the token before its own.

        g = Layer(h)                        over all positions so far
        p_k = softmax(W2_k (g_t + P_k E(x_{t+k})))

    Args:
        target model: the model whose embeddings, lm_head and layer class are used.
        num_heads: K. vocab_size, token_map: for a reduced vocabulary. dtype: of the parameters.
    """

    setting_names = ("num_heads",)

    def __init__(
        self,
        target_model: TargetModel,
        num_heads: int = 3,
        *,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or target_model.dtype
        size = target_model.hidden_size
        self.max_depth = self.num_heads = num_heads
        self.embedding = target_model.embedding()
        self.layer = DraftLayer(target_model, dtype=dtype)
        self.paths = nn.ModuleList(
            nn.Linear(size, size, bias=False, dtype=dtype) for _ in range(num_heads)
        )
        self.lm_heads = self.new_lm_heads(target_model, num_heads, vocab_size, token_map, dtype)
        self.to(target_model.device)

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows) -> Iterator[Tensor]:
        """Yield the states [B, T, d] of each head, with the data's tokens as the path."""
        states = self.layer(hidden_states.final, batch.positions, batch.segments)
        for k, path in enumerate(self.paths, start=1):
            tokens = shift_labels(batch.tokens, k - 1, batch.segments)
            known = tokens.masked_fill(tokens == IGNORE_INDEX, 0)
            yield states + path(self.embedding(known).to(states.dtype))

    @property
    def num_caches(self) -> int:
        """One, of the layer."""
        return 1

    def prefill(
        self, hidden_states: HiddenStates, tokens: Tensor, caches: Sequence[PromptCache]
    ) -> None:
        """Run the layer over the prompts."""
        read_prompts(self.layer, hidden_states.final, caches[0])

    def extend(self, step: DraftStep) -> Tensor:
        """Run the layer over the accepted path; return the states [B, d] of its last nodes."""
        accepted = step.accepted
        states = accepted.along_path(accepted.hidden_states.final)  # [B, P, d]
        return accepted.last(step.caches[0].read_path(self.layer, states, accepted.starts))

    def propose(self, step: DraftStep, states: Tensor) -> Proposal:
        """Fill the tree level by level."""
        nodes = step.last_tokens[:, None]  # [B, 1]: tokens of the level
        tokens = [nodes]
        for k, level in enumerate(levels_of(step.tree).levels[:-1], start=1):
            if level.inner is not None:
                nodes = nodes[:, level.inner]  # [B, m]
            x = states[:, None] + self.paths[k - 1](self.embedding(nodes).to(states.dtype))
            best = self.lm_heads[k - 1](x).topk(level.width).indices.flatten(1)  # [B, m * width]
            nodes = self.lm_head(k).tokens_of(best[:, level.candidates])  # [B, next]
            tokens.append(nodes)
        return Proposal(torch.cat(tokens, dim=1), step.tree)
