"""Output matrices of draft heads, stacked in memory, and a bias by the token before
(`medusa_markov_rank`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.data.batch import shift_labels
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.models.features import TokenRows
from medusa_train.models.lm_head import LMHead, rank_candidates
from medusa_train.trees.tree import Tree


class LMHeadsDraft(Draft):
    """A draft whose heads have an output matrix W2 each, which starts as a copy of the backbone's
    lm_head.

    Attributes:
        lm_heads: W2 of heads 1..K; the subclass sets it to modules from `new_lm_heads`.
        token_map: long [N], for heads over a reduced vocabulary: logit i belongs to the token
            token_map[i], and other tokens are never drafted. None: all tokens. softcap, scale: the
            backbone's logit transform, see `LMHead`.
    """

    lm_heads: nn.ModuleList
    token_map: Tensor | None
    softcap: float | None
    scale: float

    def new_lm_heads(
        self,
        backbone: Backbone,
        count: int,
        vocab_size: int | None,
        token_map: Tensor | None,
        dtype: torch.dtype,
    ) -> list[nn.Linear]:
        """Set the vocabulary and the logit transform; return `count` copies of lm_head, or of its
        part for the tokens of `token_map`.
        """
        check_token_map(vocab_size, token_map)
        lm_head = backbone.lm_head()
        self.softcap = lm_head.softcap
        self.scale = lm_head.scale
        if token_map is None:
            self.register_buffer("token_map", None)
        else:
            self.register_buffer("token_map", token_map.long())
            lm_head = lm_head.restrict_to(token_map)
        num_tokens, size = lm_head.weight.shape
        has_bias = lm_head.bias is not None
        linears = [nn.Linear(size, num_tokens, bias=has_bias, dtype=dtype) for _ in range(count)]
        copy_lm_head(linears, lm_head)
        return linears

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, with the size of a reduced vocabulary."""
        return {**super().settings, "vocab_size": self.draft_vocab_size}

    @property
    def draft_vocab_size(self) -> int | None:
        """N for a reduced vocabulary, else None."""
        return None if self.token_map is None else len(self.token_map)

    def lm_head(self, k: int) -> LMHead:
        """Return head k's W2 with the backbone's logit transform."""
        head = self.lm_heads[k - 1]
        assert isinstance(head, nn.Linear)
        return LMHead(head.weight, head.bias, self.softcap, self.scale, token_map=self.token_map)


def check_token_map(vocab_size: int | None, token_map: Tensor | None) -> None:
    """Raise ValueError unless `token_map` has `vocab_size` tokens, or both are None."""
    length = None if token_map is None else len(token_map)
    if vocab_size != length:
        raise ValueError(f"heads over {vocab_size} tokens need a token_map of that length")


@torch.no_grad()
def copy_lm_head(linears: Iterable[nn.Module], lm_head: LMHead) -> None:
    """Copy weight and bias of `lm_head` into linear layers of its shape."""
    for linear in linears:
        assert isinstance(linear, nn.Linear)
        linear.weight.copy_(lm_head.weight)
        if lm_head.bias is not None:
            linear.bias.copy_(lm_head.bias)


def count_lm_head(model: Any, vocab_size: int | None) -> int:
    """Count the parameters of a copy of a model's lm_head, or of its part for `vocab_size` tokens."""
    lm_head = model.get_output_embeddings()
    all_tokens: int = lm_head.weight.shape[0]
    per_token = sum(p.numel() for p in lm_head.parameters()) // all_tokens  # d, and 1 for a bias
    return per_token * (vocab_size or all_tokens)


class StackedLinears(nn.ModuleList):
    """K linear layers of one shape, all with a bias or none, stacked in memory; they stay so
    through `.to()`.
    """

    def __init__(self, linears: Iterable[nn.Linear]) -> None:
        super().__init__(linears)
        stack_linears(list(self))

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> StackedLinears:
        super()._apply(fn, recurse)  # moves parameters one by one
        stack_linears(list(self))
        return self

    def stacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Return all weights and biases, see `stacked_linears`."""
        return stacked_linears(list(self))


def stack_linears(linears: Sequence[nn.Module]) -> None:
    """Move the weights, and the biases, of linear layers of one shape into one storage each, see
    `stack_in_place`.
    """
    for name in ("weight", "bias"):
        parameters = [getattr(linear, name) for linear in linears]
        if parameters and parameters[0] is not None:
            stack_in_place(parameters)


def stacked_linears(linears: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """Return the weights [K, out, in] and biases [K, out] (or None) of K linear layers without a
    copy.

    None if they are not stacked in memory, or if a layer was replaced by one of another class, for
    example prepacked.
    """
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    weight = stacked_view([linear.get_parameter("weight") for linear in linears])
    if weight is None:
        return None
    if linears[0].bias is None:
        return weight, None
    bias = stacked_view([linear.get_parameter("bias") for linear in linears])
    if bias is None:
        return None
    return weight, bias


def stack_in_place(parameters: Sequence[nn.Parameter]) -> None:
    """Move K parameters of one shape and dtype into one storage [K, ...], in place.

    Values, identities, gradients and state dicts stay as they are, and optimizers continue to work;
    torch's recurrent layers do the same in `flatten_parameters`. Memory of twice their size is
    needed only while they are moved.
    """
    if not parameters or stacked_view(parameters) is not None:
        return
    with torch.no_grad():
        storage = parameters[0].new_empty((len(parameters), *parameters[0].shape))  # [K, ...]
        for target, parameter in zip(storage, parameters, strict=True):
            parameter.data = target.copy_(parameter)


def stacked_view(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return K parameters as one tensor [K, ...] on their memory; None if they are not adjacent.

    They stop being adjacent when they are moved, for example into ZeRO's flat buffers.
    """
    first = parameters[0]
    memory = first.untyped_storage().data_ptr()
    # 1. parameter i begins i times its size behind the first one, in the same memory
    for i, parameter in enumerate(parameters):
        adjacent = (
            parameter.untyped_storage().data_ptr() == memory
            and parameter.storage_offset() == first.storage_offset() + i * first.numel()
            and parameter.shape == first.shape
            and parameter.dtype == first.dtype
            and parameter.is_contiguous()
        )
        if not adjacent:
            return None
    # 2. one tensor over all of them
    shape = (len(parameters), *first.shape)
    strides = (first.numel(), *first.stride())
    return first.detach().as_strided(shape, strides, first.storage_offset())


#: Standard deviation of the random embeddings E: R, which begins as 0, grows from their products with
#: the loss's gradients.
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
        roots: Tensor,
        tree: Tree,
        token_map: Tensor | None,
    ) -> Tensor:
        """Fill a tree level by level: at each node, the candidates of the next head are ranked with
        its token's bias.

        Args:
            scores: [depth, B, c], raw logits of each head's best tokens without the bias, the
                greatest first.
            candidates: long [depth, B, c], which logits these are.
            roots: long [B]. token_map: long [N], the token ids of R, for a reduced vocabulary.

        Returns:
            Tokens in the tree's node order, long [B, n + 1].
        """
        nodes = roots[:, None]  # [B, 1] tokens of a level
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
