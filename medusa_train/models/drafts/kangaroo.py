"""Kangaroo: the target model's first layers and a small adapter draft token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.models.drafts.base import Draft, DraftStep, Proposal, read_prompts
from medusa_train.models.drafts.draft_layer import DraftLayer, init_from_layer
from medusa_train.models.drafts.lm_heads import copy_lm_head
from medusa_train.models.layer_split import LayerRunner
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, TokenRows
from medusa_train.trees.kv_cache import compact
from medusa_train.trees.levels import Level, levels_of
from medusa_train.trees.transformers_adapters import PromptCache, node_cache


class KangarooDraft(Draft):
    """The target model drafts for itself: it exits after a few layers, and a small adapter replaces
    the remaining layers (Kangaroo, Early Exiting as Self-Drafting Model; arXiv 2404.18911).

        drafting        tokens -- layers 1 .. l -- adapter A -- lm_head -- draft tokens
                                       |
                                     aux, with keys and values in the target model's cache
                                       |
        verification                   `-- layers l + 1 .. -- norm -- lm_head -- the answer

    The adapter A is a norm, causal attention with a residual, and a final norm; lm_head is the
    target model's. The paper's other architectures are available as well (Kangaroo, The
    Architecture of the Adapter Module). A is initialized from layer l of the target model, and from
    its final norm. (The paper does not specify it; on a tiny target model, random weights need more
    than twice the training tokens.)

    *Training*: at position t the adapter predicts the token t + 1, as the target model does, so one
    adapter drafts to any depth, and one prediction per position trains it. In `Draft`, head k at
    position t predicts the token t + k + 1; here that is the adapter's output at position t + k.

    *Decoding* runs the first l layers once for every draft token and leaves their keys and values
    in the target model's cache; verification continues from these states (`Proposal.aux`).

    Drafting stops early at a level whose draft tokens have a total probability of at most eta under
    the draft (Kangaroo, Dynamic Drafting Steps with Early-Exiting). In a chain, as in the paper,
    this is the confidence of the last token. In a tree, the probability at each node is weighted by
    the probability of its path. The tokens of the last level are still verified. A batch stops at
    the first level whose tokens have at most this probability in every row, so its rows get trees
    of the same depth. So under sampling, the tokens drawn for a row depend on the other rows of its
    batch, but their distribution does not.

    Args:
        target_model: the model whose layers, rotary angles and lm_head are used; none of its
            parameters belongs to the draft.
        num_heads: gamma, the maximum number of draft tokens in a row: the depth of the deepest
            tree.
        exit_layer: l; in the paper 2 for a 7B model and 3 for 13B.
        threshold: eta, the confidence at or below which drafting stops; 0 to never stop.
        mlp_size: width of an MLP after the attention; 0 for no MLP, as in the paper.
        attention: False leaves out the attention; the adapter then reads each position separately.
        share_lm_head: False gives the draft its own trained lm_head, which starts as a copy of the
            target model's.
        dtype: dtype of the adapter; by default the target model's.

    Raises:
        TargetModelError: `exit_layer` is out of range, or layers of this architecture can't be run
            separately.
    """

    setting_names = (
        "num_heads",
        "exit_layer",
        "threshold",
        "mlp_size",
        "attention",
        "share_lm_head",
    )

    def __init__(
        self,
        target_model: TargetModel,
        *,
        num_heads: int = 6,
        exit_layer: int = 2,
        threshold: float = 0.6,
        mlp_size: int = 0,
        attention: bool = True,
        share_lm_head: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.exit_layer = exit_layer
        self.max_depth = self.num_heads = num_heads
        self.threshold = threshold
        self.mlp_size = mlp_size
        self.attention = attention
        self.share_lm_head = share_lm_head
        self.aux_layers = (exit_layer,)
        self.shared = target_model.lm_head()
        self.own_lm_head: nn.Linear | None = None
        if not share_lm_head:
            num_tokens, size = self.shared.weight.shape
            has_bias = self.shared.bias is not None
            dtype = dtype or target_model.dtype
            self.own_lm_head = nn.Linear(
                size, num_tokens, bias=has_bias, dtype=dtype, device=target_model.device
            )
            copy_lm_head([self.own_lm_head], self.shared)
        self.adapter = DraftLayer(target_model, mlp_size=mlp_size, attention=attention, dtype=dtype)
        self._target_model = target_model
        self.split = target_model.split_at(exit_layer)
        body: Any = self.adapter.body
        init_from_layer(body.layers[0], target_model.layer(exit_layer))
        init_from_layer(body.norm, target_model.body.norm)
        layer_types = getattr(body.config, "layer_types", None) or ["full_attention"]
        self.runner = LayerRunner(body, layer_types[:1])

    # Training

    @property
    def trained_heads(self) -> int:
        """One: the same weights predict all later tokens."""
        return 1

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows) -> Iterator[Tensor]:
        """Yield the adapter's states [B, T, d], shifted by one position."""
        yield self.states(hidden_states, batch).roll(-1, dims=1)

    def teacher_forced_states(
        self, hidden_states: HiddenStates, batch: TokenRows
    ) -> Iterator[Tensor]:
        """Yield for k = 1..max_depth the adapter's states [B, T, d], shifted by k positions."""
        states = self.states(hidden_states, batch)
        for k in range(1, self.max_depth + 1):
            yield states.roll(-k, dims=1)  # positions that wrap around have no target

    def states(self, hidden_states: HiddenStates, batch: TokenRows) -> Tensor:
        """Return the adapter's states [B, T, d]; position t predicts the token t + 1."""
        assert hidden_states.aux is not None
        return self.adapter(self.cast(hidden_states.aux), batch.positions, batch.segments)

    def lm_head(self, k: int) -> LMHead:
        """Return the target model's lm_head, or the draft's own."""
        own_head = self.own_lm_head
        if own_head is None:
            return self.shared
        return replace(self.shared, weight=own_head.weight, bias=own_head.bias)

    # Decoding. In each step, the adapter first reads the last accepted node, which `extend` leaves
    # for `propose`, together with the root.

    @property
    def num_caches(self) -> int:
        """One cache, for the adapter."""
        return 1

    def prefill(
        self, hidden_states: HiddenStates, tokens: Tensor, caches: Sequence[PromptCache]
    ) -> None:
        """Run the adapter over the prompts."""
        assert hidden_states.aux is not None
        read_prompts(self.adapter, self.cast(hidden_states.aux), caches[0])

    def extend(self, step: DraftStep) -> Tensor:
        """Move the adapter's keys and values of accepted inner nodes to the end of the accepted
        text. Return the auxiliary hidden states [B, 1, d] of the last accepted nodes, which the
        adapter reads when it drafts again.
        """
        accepted = step.accepted
        # 1. the adapter read all inner nodes while it drafted. Of their keys and values, those of
        # accepted nodes move right after the root's
        path = levels_of(step.tree).inner_index[accepted.path]  # [B, P], columns after the root's
        compact(step.caches[0].storage, accepted.starts, path)
        # 2. the states from which the next draft starts
        assert accepted.hidden_states.aux is not None
        aux = accepted.along_path(accepted.hidden_states.aux)  # [B, P, d]
        return accepted.last(aux)[:, None]  # [B, 1, d]

    def propose(self, step: DraftStep, states: Tensor) -> Proposal:
        """Fill the tree level by level: all nodes run through the first layers, and nodes with
        children also through the adapter.

        Args:
            step: inputs of the step.
            states: auxiliary hidden states of the last accepted nodes, [B, 1, d].
        """
        tree = step.tree
        levels = levels_of(tree)
        nodes = step.nodes
        assert nodes is not None
        cache = step.caches[0]
        threshold = self.threshold if step.may_stop else 0.0

        # 1. positions and masks: for the first layers, of all nodes; for the adapter, of the last
        # accepted node, the root, and the other nodes with children
        first_layers = self.split.inputs(nodes.positions, nodes.masks)
        inner_nodes = levels.inner_nodes
        starts = step.accepted.lengths[:, None] - 1  # [B, 1], columns of the last accepted nodes
        offsets = torch.arange(inner_nodes.size + 1, device=starts.device)
        columns = starts + offsets  # [B, 1 + inner]
        positions = (starts + inner_nodes.depths).clamp(max=cache.max_position)
        masks = levels.inner_masks(self.adapter.window, self._dtype)
        mask = masks.at(starts[:, 0], cache.key_length)  # [B, 1, 1 + inner, key_length]
        adapter = self.runner.inputs(positions, mask)

        tokens = [step.last_tokens[:, None]]  # one per level, [B, n]
        aux: list[Tensor] = []  # one per level, [B, n, d]
        mass = torch.ones(1, 1, device=step.last_tokens.device)  # probability of the root's path
        deepest = tree.max_depth
        for depth, level in enumerate(levels.levels):
            # 2. the first layers run over all n nodes of the level
            x = self.split.run_first(
                tokens[-1],
                first_layers.slice(level.first, level.last),
                nodes.cache(level.first, level.last),
            )  # [B, n, d]
            aux.append(x)
            if depth == deepest:
                break
            # 3. the adapter runs over the m nodes with children, and at the root's level first over
            # the last accepted node; first .. last - 1 are their indices in `columns`
            first = level.inner_first
            last = level.inner_last
            m = last - first
            if depth == 0:
                x = torch.cat([states, x], dim=1)  # [B, 2, d]
                first = 0
            else:
                x = level.at_inner(x)  # [B, m, d]
            kv_cache = node_cache(cache.storage, columns[:, first:last], cache.key_length)
            x = self.runner.run(self.cast(x), range(1), adapter.slice(first, last), kv_cache)
            x = x[:, -m:]  # [B, m, d]
            # 4. its best tokens are the nodes of the next level
            logits = self.logits(self.runner.body.norm(x))  # [B, m, V]
            guesses, mass, share = self._guess(logits, level, mass, threshold)
            tokens.append(guesses)
            # 5. stop if no row is confident. These tokens are still verified, so the first layers
            # must run over them
            if share is not None and bool((share <= threshold).all()):
                deepest = depth + 1
        return Proposal(torch.cat(tokens, dim=1), levels.truncate(deepest), torch.cat(aux, dim=1))

    def skip_proposal(self, step: DraftStep, states: Tensor) -> None:
        """Run the adapter over the last accepted nodes, because the next step expects that it has
        read them.
        """
        step.caches[0].read_path(self.adapter, self.cast(states), step.accepted.lengths - 1)

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits [..., V] from the adapter's states [..., d], in float32 or float64."""
        if self.own_lm_head is None:
            logits = self._target_model.logits(states.to(self._target_model.dtype))
        else:
            logits = self.shared.transform(self.own_lm_head(states))
        if logits.dtype != torch.float64:
            logits = logits.float()
        return logits

    def _guess(
        self, logits: Tensor, level: Level, mass: Tensor, threshold: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose the tokens of the next level by rank.

        Args:
            logits: logits at the m nodes of this level that have children, [B, m, V].
            level: this level.
            mass: probability of this level's paths under the draft, up to a factor, [B, nodes].
            threshold: if 0, probabilities are not needed.

        Returns:
            The tokens [B, next]; the probability of their paths [B, next]; and its sum [B], the
            share of the draft's probability that they have. With `threshold` 0: the tokens, `mass`,
            and None.
        """
        # 1. the best tokens at each node; of these, the ones that the tree has nodes for
        if level.width == 1:
            best, tokens = logits.max(-1, keepdim=True)  # [B, m, 1]
        else:
            best, tokens = logits.topk(level.width)  # [B, m, width]
        tokens = level.at_next(tokens)  # [B, next]
        if not threshold:
            return tokens, mass, None
        # 2. the probability of each token after its parent
        log_probs = best - logits.logsumexp(-1, keepdim=True)  # [B, m, width]
        p = level.at_next(log_probs.exp())  # [B, next]
        # 3. the probability of its path, relative to all paths that have a next token
        inner_mass = level.at_inner(mass)  # [B, m]
        parent_share = inner_mass / inner_mass.sum(1, keepdim=True)  # [B, m]
        next_mass = parent_share[:, level.parents] * p  # [B, next]
        return tokens, next_mass, next_mass.sum(1)

    @contextmanager
    def no_early_exit(self) -> Iterator[None]:
        """Within this context, drafting never stops early."""
        threshold = self.threshold
        self.threshold = 0.0
        try:
            yield
        finally:
            self.threshold = threshold

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.adapter.parameters()).dtype

    def cast(self, states: Tensor) -> Tensor:
        """Cast to the adapter's dtype, which may be more precise than the target model's."""
        return states.to(self._dtype)
