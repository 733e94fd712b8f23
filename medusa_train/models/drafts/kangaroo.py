"""Kangaroo: the backbone's first layers and a small adapter guess token after token; knows no loss and no loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal
from medusa_train.models.drafts.kangaroo_state import KangarooState
from medusa_train.models.drafts.layers import DraftLayer, init_from_layer
from medusa_train.models.features import Features, FeatureSpec, TokenRows
from medusa_train.models.layer_split import LayerInputs, LayerRunner
from medusa_train.models.lm_head import LMHead
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.masks import apply_sliding_window, mask_with_prefix
from medusa_train.trees.tree import Level, Tree, TreeLevels


class KangarooDraft(Draft):
    """The early exit `M_s = lm_head . A . M[:l]` of the backbone M itself (Kangaroo, section 3.1; SPEC 5).

    The adapter A is a norm, one causal attention with a residual, and a final norm: no MLP (but see `mlp_size`), and
    lm_head is the backbone's. It begins as layer l, which it stands in for, and as the backbone's own final norm (the
    paper does not say how; on the tiny backbone random weights take more than twice the tokens). At position t it
    predicts the token t + 1, as the backbone does, and reads that token before it goes on: so one head drafts to any
    depth, and as a head k of this project it is what it says at t + k.

    Drafting runs the first l layers, once for every token, and leaves their keys and values in the backbone's cache;
    verification goes on from their states (`Proposal.early`). It ends early (section 3.2, Eq. 4) where the guesses at
    hand carry no more than the share eta of the draft's own probability: in a chain the last token's confidence. That
    token is still verified. The paper drafts greedy chains. In a tree the share is that of all guesses of the level,
    each weighed by its path's probability; rows of a batch go on together until the last of them would stop, so that
    under sampling a row's draws depend on the others there (their distribution does not).

    Args:
        backbone: whose layers, angles and lm_head are used; none of its parameters is the draft's.
        num_heads: gamma, the tokens that are drafted at most, and so the depth of the deepest tree.
        exit_layer: l; 2 for a 7B model, 3 for 13B in the paper.
        threshold: eta, the confidence up to which drafting stops; 0: it never does.
        mlp_size: width of an MLP behind the attention, which the paper's adapter has not: 0.
        dtype: of the adapter; by default the backbone's.

    Raises:
        BackboneError: l is no layer, or this architecture can't be run in parts.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_heads: int = 6,
        exit_layer: int = 2,
        threshold: float = 0.6,
        mlp_size: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.exit_layer = exit_layer
        self.num_heads = num_heads
        self.threshold = threshold
        self.mlp_size = mlp_size
        self.needs = FeatureSpec(early=exit_layer)
        self.shared = backbone.lm_head()
        self.adapter = DraftLayer(backbone, mlp_size=mlp_size, dtype=dtype)
        self._backbone = backbone
        self._split = backbone.split_at(exit_layer)
        init_from_layer(self.adapter.body.layers[0], backbone.layer(exit_layer))
        init_from_layer(self.adapter.body.norm, backbone.body.norm)
        body: Any = self.adapter.body
        self._layers = LayerRunner(body, (getattr(body.config, "layer_types", None) or ["full_attention"])[:1])

    @classmethod
    def from_backbone(
        cls,
        backbone: Backbone,
        *,
        num_heads: int = 6,
        exit_layer: int = 2,
        threshold: float = 0.6,
        mlp_size: int = 0,
        dtype: torch.dtype | None = None,
    ) -> KangarooDraft:
        """An untrained draft of `backbone`, on its device; see the class."""
        return cls(
            backbone,
            num_heads=num_heads,
            exit_layer=exit_layer,
            threshold=threshold,
            mlp_size=mlp_size,
            dtype=dtype,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What `from_backbone` makes such a draft of."""
        return {
            "num_heads": self.num_heads,
            "exit_layer": self.exit_layer,
            "threshold": self.threshold,
            "mlp_size": self.mlp_size,
        }

    @classmethod
    def count_parameters(
        cls, model: Any, *, num_heads: int, exit_layer: int, threshold: float, mlp_size: int = 0
    ) -> int:
        """One layer's attention, and two norms; with an MLP its share of the layer's own, and a third."""
        layer, width = model.base_model.layers[0], model.get_output_embeddings().weight.shape[1]
        attention = sum(parameter.numel() for parameter in layer.self_attn.parameters()) + 2 * width
        if not mlp_size:
            return attention
        mlp = sum(parameter.numel() for parameter in layer.mlp.parameters())
        return attention + mlp * mlp_size // model.config.get_text_config().intermediate_size + width

    @property
    def trained_heads(self) -> int:
        """One: what it says at t + 1 trains the same weights as what it says at t + 2."""
        return 1

    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """The adapter's state [B, T, d] of one position further on."""
        yield self.states(feats, batch).roll(-1, dims=1)

    def teacher_forced_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """For k = 1..num_heads the adapter's state [B, T, d] of k positions further on."""
        states = self.states(feats, batch)
        for k in range(1, self.num_heads + 1):
            yield states.roll(-k, dims=1)  # what comes round the end has no target

    def states(self, feats: Features, batch: TokenRows) -> Tensor:
        """The adapter's states [B, T, d] over whole rows: position t predicts the token t + 1."""
        assert feats.early is not None
        return self.adapter(self._cast(feats.early), batch.positions, batch.segments)

    def lm_head(self, k: int) -> LMHead:
        """The backbone's own."""
        return self.shared

    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> KangarooState:
        """The adapter reads the prompts."""
        assert feats.early is not None
        state = KangarooState.empty(cache, len(lengths), tokens.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.adapter.extend(self._cast(feats.early), positions, state.own)
        state.commit(lengths)
        return state

    def propose(self, state: KangarooState, roots: Tensor, tree: Tree) -> Proposal:
        """Grow the tree level by level: each level through the first layers, its inner nodes through the adapter."""
        levels = state.levels_of(tree)
        shallow, adapting = self._inputs(state, levels)
        tokens, early = [roots[:, None]], []
        mass = torch.ones((), device=roots.device).expand(len(roots), 1)
        deepest = tree.max_depth
        for depth, level in enumerate(levels.levels):
            inputs = shallow.slice(level.first, level.last)
            early.append(self._split.run_first(tokens[-1], inputs, state.cache))
            if depth == deepest:
                break
            logits = self._logits(state, early[-1], level, adapting)
            guesses, mass, share = self._guess(logits, level, mass)
            tokens.append(guesses)
            if share is not None and bool((share <= self.threshold).all()):
                deepest = depth + 1  # the doubtful tokens themselves are still read and verified
        return Proposal(torch.cat(tokens, dim=1), levels.truncate(deepest), torch.cat(early, dim=1))

    def _inputs(self, state: KangarooState, levels: TreeLevels) -> tuple[LayerInputs, LayerInputs]:
        """Positions, angles and masks of all nodes for the first layers, and of what the adapter will read."""
        lengths, behind = state.lengths, state.behind_count
        limit = self._backbone.max_context - 1  # nodes past the context are never kept
        nodes = (levels.tree.depths[None] + lengths).clamp(max=limit)
        read = nodes[:, levels.inner]
        if behind:
            back = torch.arange(-behind, 0, device=nodes.device)[None] + lengths
            read = torch.cat([back, read], dim=1)
        backbone, window, alone = self._backbone, self.adapter.window, state.is_single_chain(levels)
        bare = alone and backbone.layer_types == {"full_attention"}
        mask = None if bare else mask_with_prefix(state.cache, state.block(levels, backbone.dtype))
        shallow = self._split.inputs(nodes, mask, state.cache.length)
        if alone and not behind and window is None:
            return shallow, self._layers.inputs(read, None)
        mask = mask_with_prefix(state.own, state.own_block(levels, self._dtype))
        return shallow, self._layers.inputs(read, apply_sliding_window(mask, read, state.own.length, window))

    def _logits(self, state: KangarooState, early: Tensor, level: Level, inputs: LayerInputs) -> Tensor:
        """The draft's logits [B, m, V] at a level's inner nodes; with the root the adapter reads what it missed."""
        backbone = self._backbone
        states = early if level.inner is None else early[:, level.inner]
        first, last = level.inner_first + state.behind_count, level.inner_last + state.behind_count
        if level.first == 0 and state.behind is not None:
            states, first = torch.cat([state.behind, states], dim=1), 0
        states = self._layers.run(self._cast(states), range(1), inputs.slice(first, last), state.own)
        states = self._layers.body.norm(states[:, level.inner_first - level.inner_last :])
        logits = backbone.logits(states.to(backbone.dtype))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _guess(self, logits: Tensor, level: Level, mass: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The next level's tokens [B, next] by rank, their paths' mass, and the share that the paths above pass on.

        Args:
            logits: [B, m, V] at the inner nodes.
            mass: [B, nodes] of the level's paths under the draft, up to a factor.
        """
        best, tokens = logits.max(-1, keepdim=True) if level.width == 1 else logits.topk(level.width)
        tokens = tokens.flatten(1)[:, level.candidates]
        if not self.threshold:
            return tokens, mass, None
        p = (best - logits.logsumexp(-1, keepdim=True)).exp().flatten(1)[:, level.candidates]
        above = mass if level.inner is None else mass[:, level.inner]
        below = (above / above.sum(1, keepdim=True))[:, level.parents] * p
        return tokens, below, below.sum(1)

    @contextmanager
    def no_early_exit(self) -> Iterator[None]:
        """Within: no early stop."""
        threshold, self.threshold = self.threshold, 0.0
        try:
            yield
        finally:
            self.threshold = threshold

    def advance(
        self, state: KangarooState, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]
    ) -> KangarooState:
        """Keep what the adapter read of the accepted paths; what it has not read waits for the next root."""
        if proposal.early is None:  # the loop asked for no guesses, so the adapter has read nothing at all
            assert feats.early is not None
            state.wait(feats.early)
        else:
            state.keep(proposal.early, proposal.tree.max_depth, paths)
        return state

    def select_rows(self, state: KangarooState, rows: Sequence[int]) -> KangarooState:
        """The state of `rows`."""
        return state.select_rows(rows)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.adapter.parameters()).dtype

    def _cast(self, states: Tensor) -> Tensor:
        """To the adapter's dtype, which in training may be finer than the backbone's."""
        return states.to(self._dtype)
