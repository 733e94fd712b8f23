"""Medusa heads: K residual blocks with an unembedding each, reading one hidden state; knows no loss and no loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from medusa_train.errors import BackboneError
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal, hidden_at_positions
from medusa_train.models.drafts.stacked import stack_in_place, stacked_view
from medusa_train.models.features import Features, TokenRows
from medusa_train.models.lm_head import LMHead
from medusa_train.models.prepack import PrepackedWeight, worth_prepacking
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.tree import Tree


class ResBlock(nn.Module):
    """`x + SiLU(W1 x + b1)` with W1 = 0 and b1 = 0 at the start, so that it begins as the identity."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return x + silu(self.linear(x))


class Stacked(NamedTuple):
    """The weights of all heads as one tensor each, on the parameters' own memory.

    Attributes:
        blocks: per layer W1 [K, d, d] and b1 [K, d]. unembedding: W2 [K, V, d] and its bias [K, V] or None; None
            where the heads share the backbone's.
    """

    blocks: list[tuple[Tensor, Tensor]]
    unembedding: tuple[Tensor, Tensor | None] | None


class Prepacked(NamedTuple):
    """The linear maps of all heads, [B, in] -> [B, out], with weights prepacked for a CPU.

    Attributes:
        first: those of the first layer as one, d -> K * d, since they read the same states; None without blocks.
        blocks: for each further layer one per head. lm_heads: one per head; empty where they share the backbone's.
    """

    first: Callable[[Tensor], Tensor] | None
    blocks: list[list[Callable[[Tensor], Tensor]]]
    lm_heads: list[Callable[[Tensor], Tensor]]


@torch.no_grad()
def _prepack(linears: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """Prepack linear maps of the same input as one, their outputs concatenated."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return partial(PrepackedWeight(torch.cat([linear.weight for linear in linears])).linear, bias=bias)


def _each(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Apply map k to x[k]: [count, B, in] -> [count, B, out]; later maps are left out."""
    return torch.stack([product(row) for product, row in zip(products, x, strict=False)])


class MedusaState(NamedTuple):
    """What B rows of a decoding loop read.

    Attributes:
        hidden: [B, d], the state whose next token is the coming root. stacked: the weights; None where they lie apart.
    """

    hidden: Tensor
    stacked: Stacked | None


class MedusaDraft(Draft):
    """K Medusa heads, `p_k = softmax(W2_k (SiLU(W1_k h + b1_k) + h))` (Medusa, section 2.1.1, Eq. 1).

    W1 = 0, b1 = 0 and W2 = a copy of lm_head at the start (the paper's text swaps the two), so an untrained head
    gives the backbone's own next-token logits to the bit. Each head and each block has weights of its own.

    Args:
        hidden_size, vocab_size: d and V of the backbone. num_heads: K. num_layers: residual blocks per head.
        bias: whether the unembeddings carry a bias, as the backbone's lm_head does.
        softcap, scale: the backbone's logit transform, see `LMHead`.
        shared: the backbone's own unembedding, for heads without a matrix of their own ("version 2": about 11 % of
            the parameters at the shape of a 7B model); it is read, never trained or saved by the heads.
        token_map: long [N], for heads over a reduced vocabulary: logit i is that of the token token_map[i], and other
            tokens are never guessed. With `shared` its rows are copied once.
    """

    token_map: Tensor | None

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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.scale = scale
        self.register_buffer("token_map", None if token_map is None else token_map.long())
        self._whole = shared
        self.shared = self._known_part()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden_size, dtype) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, self.draft_vocab_size, bias=bias, dtype=dtype)
            for _ in range(0 if shared else num_heads)
        )
        self._packed: Prepacked | None = None
        self._stack_in_place()

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> MedusaDraft:
        """Keep the heads side by side through `.to()` and its like, which move parameters one by one."""
        self._packed = None  # it would hold the old weights
        super()._apply(fn, recurse)
        self._stack_in_place()
        return self

    def _known_part(self) -> LMHead | None:
        """What shared heads unembed with: the backbone's matrix, or a copy of the rows that they know."""
        if self._whole is None or self.token_map is None:
            return self._whole
        with torch.no_grad():
            return self._whole.restrict_to(self.token_map)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take back weights, and with them the vocabulary that they are for."""
        before = self.token_map
        known = None if before is None else before.clone()
        done = super().load_state_dict(state_dict, strict, assign)
        if known is not None and self.token_map is not None and not torch.equal(known, self.token_map):
            self.shared = self._known_part()
        return done

    @property
    def draft_vocab_size(self) -> int:
        """N, of a reduced vocabulary, or V."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    def prepack(self) -> bool:
        """Prepack the weights for decoding on a CPU where that is faster (`models.packed`); return whether it was."""
        blocks = self._blocks_by_layer()
        lm_heads: list[Any] = list(self.lm_heads)
        if worth_prepacking([linear.weight for linears in (*blocks, lm_heads) for linear in linears]):
            self._packed = Prepacked(
                first=_prepack(blocks[0]) if blocks else None,
                blocks=[[_prepack([linear]) for linear in linears] for linears in blocks[1:]],
                lm_heads=[_prepack([head]) for head in lm_heads],
            )
        return self._packed is not None

    def _blocks_by_layer(self) -> list[list[Any]]:
        """The residual blocks' linear maps, head by head, for each layer."""
        return [[block.get_submodule(f"{j}.linear") for block in self.blocks] for j in range(self.num_layers)]

    def _alike(self) -> Iterator[list[nn.Parameter]]:
        """The parameters that all heads have, head by head: per layer W1 and b1, then W2 and its bias."""
        groups = self._blocks_by_layer()
        if self.shared is None:
            groups.append(list(self.lm_heads))
        for linears in groups:
            yield [linear.weight for linear in linears]
            if linears[0].bias is not None:
                yield [linear.bias for linear in linears]

    def _stack_in_place(self) -> None:
        for parameters in self._alike():
            stack_in_place(parameters)

    def stacked(self) -> Stacked | None:
        """All heads' weights as one tensor each, without a copy; None where somebody else has laid them out."""
        tensors = [stacked_view(parameters) for parameters in self._alike()]
        found = [tensor for tensor in tensors if tensor is not None]
        if len(found) < len(tensors):
            return None
        blocks = [(found[2 * j], found[2 * j + 1]) for j in range(self.num_layers)]
        rest = found[2 * self.num_layers :]
        if not rest:
            return Stacked(blocks, None)
        return Stacked(blocks, (rest[0], rest[1] if len(rest) > 1 else None))

    @classmethod
    def from_backbone(
        cls,
        backbone: Backbone,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        share_lm_head: bool = False,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> MedusaDraft:
        """Untrained heads that predict what `backbone` predicts, on its device; dtype by default its own.

        Args:
            vocab_size: N, for heads over the `token_map` (long [N]) alone, which begin as these rows of lm_head.

        Raises:
            ValueError: one of the two does not fit the other.
        """
        if vocab_size != (None if token_map is None else len(token_map)):
            raise ValueError(f"heads over {vocab_size} tokens want a token_map of as many")
        own = backbone.lm_head()
        draft = cls(
            backbone.hidden_size,
            backbone.vocab_size,
            num_heads,
            num_layers,
            bias=own.bias is not None,
            softcap=own.softcap,
            scale=own.scale,
            shared=own if share_lm_head else None,
            token_map=token_map,
            dtype=dtype or backbone.dtype,
        ).to(backbone.device)
        if token_map is not None and draft.lm_heads:
            own = own.restrict_to(token_map)
        with torch.no_grad():
            for head in draft.lm_heads:
                assert isinstance(head, nn.Linear)
                head.weight.copy_(own.weight)
                if own.bias is not None:
                    head.bias.copy_(own.bias)
        return draft

    @property
    def settings(self) -> dict[str, Any]:
        """What `from_backbone` has to be told to make such heads."""
        return {
            "num_heads": self.num_heads,
            "num_layers": self.num_layers,
            "share_lm_head": self.shared is not None,
            "vocab_size": None if self.token_map is None else len(self.token_map),
        }

    @classmethod
    def count_parameters(
        cls, model: Any, *, num_heads: int, num_layers: int, share_lm_head: bool, vocab_size: int | None = None
    ) -> int:
        """`d x d` and a bias for each block, and a copy of lm_head, or of N rows of it, for each head."""
        head = model.get_output_embeddings()
        rows, hidden = head.weight.shape
        row = sum(p.numel() for p in head.parameters()) // rows
        own = 0 if share_lm_head else row * (vocab_size or rows)
        return num_heads * (num_layers * (hidden * hidden + hidden) + own)

    def check_fits(self, backbone: Backbone) -> None:
        """Raise BackboneError unless d and V are the backbone's."""
        if (self.hidden_size, self.vocab_size) != (backbone.hidden_size, backbone.vocab_size):
            raise BackboneError(
                f"these heads are for hidden size {self.hidden_size} and {self.vocab_size} tokens; "
                f"{backbone.name or 'the backbone'} has {backbone.hidden_size} and {backbone.vocab_size}"
            )

    def head_state(self, states: Tensor, k: int) -> Tensor:
        """Head k's state [..., d] from the backbone's [..., d], k = 1..K."""
        return self.blocks[k - 1](states)

    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """For k = 1..K the state [B, T, d] that head k's unembedding reads."""
        for k in range(1, self.num_heads + 1):
            yield self.head_state(feats.hidden, k)

    def lm_head(self, k: int) -> LMHead:
        """Head k's W2, or the shared one, with the backbone's logit transform."""
        if self.shared is not None:
            return self.shared
        head = self.lm_heads[k - 1]
        assert isinstance(head, nn.Linear)
        return LMHead(head.weight, head.bias, self.softcap, self.scale, token_map=self.token_map)

    def head_logits(self, states: Tensor, k: int) -> Tensor:
        """Head k's logits [..., V] (reduced: [..., N]) at the backbone's states [..., d]."""
        return self.lm_head(k).logits(self.head_state(states, k))

    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> MedusaState:
        """Heads look at the last position of each prompt only."""
        return MedusaState(hidden_at_positions(feats, [length - 1 for length in lengths]), self.stacked())

    def propose(self, state: MedusaState, roots: Tensor, tree: Tree) -> Proposal:
        """The best `tree.width` tokens of every head that the tree reads, laid out by rank."""
        if self._packed is not None:
            logits = self._packed_logits(state.hidden, self._packed, tree.max_depth)
        elif state.stacked is None:
            logits = torch.stack([self._order(state.hidden, k) for k in range(1, tree.max_depth + 1)])
        else:
            logits = self._all_orders(state.hidden, state.stacked, tree.max_depth)
        best = logits.topk(tree.width).indices.transpose(0, 1).flatten(1)  # [B, max_depth * width]
        if self.token_map is not None:
            best = self.token_map[best]
        guesses = best.index_select(1, tree.candidate_index)
        return Proposal(torch.cat([roots[:, None], guesses], dim=1), tree)

    def _order(self, states: Tensor, k: int) -> Tensor:
        """Head k's logits [B, V] at [B, d] but for soft cap and scale, which keep their order."""
        return self.lm_head(k).raw_logits(self.head_state(states, k))

    def _packed_logits(self, states: Tensor, packed: Prepacked, count: int) -> Tensor:
        """`_order` of heads 1..count, [count, B, V], with prepacked weights."""
        x = states.expand(count, *states.shape)
        if packed.first is not None:
            x = x + silu(packed.first(states).unflatten(1, (self.num_heads, -1))[:, :count].transpose(0, 1))
        for products in packed.blocks:
            x = x + silu(_each(products, x))
        return self.shared.raw_logits(x) if self.shared is not None else _each(packed.lm_heads, x)

    def _all_orders(self, states: Tensor, stacked: Stacked, count: int) -> Tensor:
        """`_order` of heads 1..count, [count, B, V]: a product for each layer of all of them.

        Every first block reads the same states, so theirs is one matrix of count * d rows.
        """
        x = states.expand(count, *states.shape)
        for j, (weights, biases) in enumerate(stacked.blocks):
            weight, bias = weights[:count], biases[:count]
            if j == 0:
                flat = linear(states, weight.flatten(0, 1), bias.flatten())
                grown = flat.unflatten(1, (count, -1)).transpose(0, 1)
            else:
                grown = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
            x = x + silu(grown)
        if stacked.unembedding is None:
            assert self.shared is not None
            return self.shared.raw_logits(x)
        weights, offsets = stacked.unembedding
        logits = torch.bmm(x, weights[:count].transpose(1, 2))
        return logits if offsets is None else logits + offsets[:count, None]

    def advance(
        self, state: MedusaState, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]
    ) -> MedusaState:
        """The states of the last accepted nodes."""
        return state._replace(hidden=hidden_at_positions(feats, [path[-1] for path in paths]))

    def select_rows(self, state: MedusaState, rows: Sequence[int]) -> MedusaState:
        """The states of `rows`."""
        return state._replace(hidden=state.hidden[list(rows)])
