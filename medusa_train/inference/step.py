"""One decoding step of one or several rows.

    host                          device
    ----                          ------
    last tokens, paths     --->   1. compact: move accepted nodes next to the committed positions
                                  2. draft:   extend by them, propose a tree below the last tokens
                                  3. verify:  one pass of the target model over all nodes
                                  4. keep:    states and tokens of the nodes, for the next step
    paths, last tokens     <---   5. accept:  by the target model's logits at the nodes

The columns of a row in the KV cache (`trees.kv_cache`); = is a committed position. L was the last
token, and a, b, c were the nodes below it. Of these, b was accepted, and N is the target model's
token after b. N is the new *last token*: accepted, but not verified yet. It is the root, node 0, of
the next tree:

    before      = = = L a b c        L in column 3, path 0 2
    1. compact  = = = L b            L and b are committed
    2. draft                         reads L and b; proposes x, y, z
    3. verify   = = = L b N x y z    the last token N, and the nodes below it
    5. accept                        a path from N down, and the target model's token after it

Plain decoding uses the empty tree. The column of the last token is also the number of positions
before it, the row's *length*.

The shape of a step (`StepShape`) follows from what the host knows about the rows, so the device
does no needless work. `inference.fixed_steps` has steps whose shape does not depend on the rows,
for CUDA graphs.

Shapes:
    B: rows of a pass.
    n: nodes of the tree below its root.
    m: branch tokens next to the tree (`trees.lookahead_branch`).
    D: depth of the deepest node.
    P: number of nodes to which all accepted paths of a pass are padded: the length of its longest
        path, or D + 1 in steps of fixed shape.
    d: width of hidden states.
    V: vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_train.inference.accept import AcceptanceRule, Accepted, Greedy, accept, sample_next
from medusa_train.models.compiled import round_up_to_block
from medusa_train.models.drafts.base import (
    AcceptedPath,
    DraftCache,
    DraftStep,
    Proposal,
    Proposer,
    TreeSize,
    at_positions,
)
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.kv_cache import KVCache, compact
from medusa_train.trees.levels import levels_of
from medusa_train.trees.lookahead_branch import AnyTree
from medusa_train.trees.transformers_adapters import NodeInputs, PromptCache
from medusa_train.trees.tree import Tree


def proposal_limits(draft: Proposer | None, tree: Tree) -> TreeSize:
    """Return the limits of what `draft` proposes for `tree`; (0, 0) without a draft."""
    return TreeSize(0, 0) if draft is None else draft.limits(tree)


@dataclass
class RowState:
    """What the host keeps about an active row between two steps.

    Attributes:
        start: position of the root of the last verified tree.
        path: accepted nodes of that tree in order, the root (0) first.
        request_state: the draft's request state, see `Proposer.new_request_state`.
    """

    start: int
    path: list[int]
    request_state: Any = None

    @property
    def length(self) -> int:
        """Position of the last token: right after the accepted nodes, once they are compacted."""
        return self.start + len(self.path)


class StepShape(NamedTuple):
    """What the host decides about a step before the device runs it. A CUDA graph fixes all of it.

    Attributes:
        rows: rows of the pass, B. Those after the active rows compute on dummy data.
        path_length: number of nodes that paths are padded to, P.
        num_columns: number of columns for the rows and the largest tree that may be proposed.
        has_gaps: whether an accepted node may not be right after the previous one.
        first_column: column of the last token of a single row that writes slices; else None.
        may_stop: whether a draft may stop early, which makes the host wait for the device.
    """

    rows: int
    path_length: int
    num_columns: int
    has_gaps: bool
    first_column: int | None
    may_stop: bool


class _Prefilled(NamedTuple):
    """Prompts that the target model has read but the draft has not, see `Steps.add_rows`."""

    hidden_states: HiddenStates
    tokens: Tensor
    prompts: Sequence[list[int]]
    num_cached: int


class Steps:
    """The steps of one or several rows with one tree, on memory that is kept between answers.

    The active rows are the first rows of all buffers. `prefill` adds rows, `select_rows` removes
    rows, `step` extends all rows.

    Args:
        target_model: verifies the nodes.
        draft: proposes the nodes; None for plain decoding.
        tree: tree that the draft fills, with its tensors on the target model's device.
        kv_cache: KV cache of the target model.

    Attributes:
        limits: largest size and depth of what the draft proposes.
    """

    def __init__(
        self, target_model: TargetModel, draft: Proposer | None, tree: Tree, kv_cache: KVCache
    ) -> None:
        self._target_model = target_model
        # 1. the draft and its tree; a draft that can propose nothing is not run
        self._empty_tree = Tree.empty().to(target_model.device)  # for plain decoding
        self.limits = proposal_limits(draft, tree)
        if self.limits.size == 0:
            draft, tree, self.limits = None, self._empty_tree, TreeSize(0, 0)
        self._draft = draft
        self._tree = tree
        self._aux_layers: tuple[int, ...] = () if draft is None else draft.aux_layers
        # 2. KV caches: one for all layers of the target model, and one for each layer of the draft
        num_caches = 0 if draft is None else draft.num_caches
        self.kv_cache = kv_cache
        self._draft_caches = [kv_cache.like(1) for _ in range(num_caches)]
        self._all_caches = [kv_cache, *self._draft_caches]
        self._resets = kv_cache.resets  # another owner may reset a shared cache, see `committed`
        # 3. compute here what copies from the host, because a CUDA graph can't do that
        levels_of(tree)  # the tree keeps them
        self._masks = target_model.node_masks(tree)
        # 4. the active rows, and what a step keeps on the device for the next step
        self._rows: list[RowState] = []
        self._prefilled: _Prefilled | None = None
        self._allocate(kv_cache.rows)

    def _allocate(self, rows: int) -> None:
        """Allocate for `rows` rows what a step keeps for the next step: hidden states, auxiliary
        hidden states and tokens of the nodes of the last tree.
        """
        target_model = self._target_model
        nodes = self.limits.size + 1  # n + 1
        width = target_model.hidden_size  # d
        device = target_model.device
        self._allocated_rows = rows
        self._tokens = torch.zeros(rows, nodes, dtype=torch.long, device=device)
        final = torch.zeros(rows, nodes, width, dtype=target_model.dtype, device=device)
        aux: Tensor | None = None
        if self._aux_layers:
            aux = final.new_zeros(rows, nodes, width * len(self._aux_layers))
        self._states = HiddenStates(final, aux)

    @property
    def _kept_tensors(self) -> list[Tensor]:
        """Tensors that a step reads from the step before; the first dimension is the row."""
        return [self._tokens, *self._states.tensors]

    # A step

    def step(
        self,
        last_tokens: Sequence[int],
        rule: AcceptanceRule = Greedy(),
        generators: Sequence[torch.Generator] | None = None,
        *,
        skip_draft: bool = False,
    ) -> list[Accepted]:
        """Verify a tree below the last token of each row, and accept a path of it.

        Args:
            last_tokens: last token of each row: the token that `prefill` returned, later the last
                of the accepted tokens.
            rule: acceptance rule, see `accept`.
            generators: one for each row, for rules that sample.
            skip_draft: verify no draft tokens. Steps of fixed shape ignore this.

        Returns:
            For each row, the accepted nodes, the root (0) first; and the tokens of these nodes,
            followed by the target model's next token, which is the new last token.
        """
        self._add_prefilled_rows()
        # on the host: the inputs
        shape = self._shape()
        packed = self._pack(last_tokens, shape)
        # on the device
        accepted = self._run(packed, shape, last_tokens, rule, generators, skip_draft)
        # on the host again: what the next step compacts and reads
        for row, (path, tokens) in zip(self._rows, accepted, strict=True):
            # the new tree's root is right after the old path, whose end is `row.length`
            row.start, row.path = row.length, path
            if self._draft is not None:
                self._draft.extend_request_state(row.request_state, tokens[:-1])
        return accepted

    def _device_step(
        self,
        packed: Tensor,
        shape: StepShape,
        last_token_list: Sequence[int] = (),
        *,
        skip_draft: bool = False,
    ) -> tuple[Proposal, Tensor]:
        """Run the stages 1 to 4: compact, draft, verify and keep.

        Args:
            packed: inputs, long [B, 3 + P], see `_pack`.
            shape: shape of the step.
            last_token_list: the last tokens on the host; not in steps of fixed shape.
            skip_draft: verify no draft tokens.

        Returns:
            The proposal, and the logits of its nodes, [B, n + 1, V].
        """
        last_tokens, starts, counts = packed[:, :3].unbind(1)  # [B] each
        path = packed[:, 3:]  # [B, P]
        lengths = starts + counts  # [B], positions of the last tokens
        storage = self.kv_cache.storage(shape.num_columns)
        draft = self._draft

        # 1. compact. Padded path entries are written after the accepted ones; this pass overwrites
        # them or masks them out. Draft caches need no compaction, because `extend` rewrites them
        if shape.has_gaps:
            compact(storage, starts, path)

        # 2. draft. A draft with a fixed tree may run the target model's first layers over its
        # nodes, so the nodes are placed before it runs. Other trees are placed once they are known
        nodes: NodeInputs | None = None  # not placed yet
        if draft is None:
            proposal = Proposal(last_tokens[:, None], self._empty_tree)  # tokens [B, 1]
        else:
            if draft.fixed_shape and not skip_draft:
                nodes = self._place_nodes(self._tree, lengths, storage, shape, shape.num_columns)
            step = self._draft_step(
                last_tokens, last_token_list, path, counts, starts, shape, nodes
            )
            states = draft.extend(step)
            if skip_draft:
                draft.skip_proposal(step, states)
                proposal = Proposal(last_tokens[:, None], self._empty_tree)
            else:
                proposal = draft.propose(step, states)

        # 3. verify, and 4. keep
        tokens, tree = proposal.pass_inputs()  # [B, n + 1], with branch tokens [B, n + 1 + m]
        if nodes is None:  # now the tree is known; it may be smaller than the largest one
            key_length = self._columns_for(tree.size)
            nodes = self._place_nodes(tree, lengths, storage, shape, key_length)
        elif tree.size < self._tree.size:  # the draft stopped early, at a level above the last
            nodes = nodes.first_nodes(tree.size + 1)
        return proposal, self._verify(proposal, tokens, nodes)

    def _draft_step(
        self,
        last_tokens: Tensor,
        last_token_list: Sequence[int],
        path: Tensor,
        counts: Tensor,
        starts: Tensor,
        shape: StepShape,
        nodes: NodeInputs | None,
    ) -> DraftStep:
        """Return the inputs of the draft, with the states and tokens that the last step kept; see
        `DraftStep` and `AcceptedPath`.
        """
        rows = len(path)  # B
        accepted = AcceptedPath(
            hidden_states=self._states.map(lambda states: states[:rows]),  # [B, n + 1, d]
            tokens=self._tokens[:rows],  # [B, n + 1]
            path=path,
            counts=counts,
            starts=starts,
        )
        columns = shape.num_columns
        last_position = self._target_model.max_context - 1
        return DraftStep(
            accepted=accepted,
            last_tokens=last_tokens,
            last_token_list=last_token_list,
            caches=[
                DraftCache(cache.storage(columns), columns, last_position)
                for cache in self._draft_caches
            ],
            request_states=self._request_states,
            tree=self._tree,
            nodes=nodes,
            may_stop=shape.may_stop,
        )

    def _verify(self, proposal: Proposal, tokens: Tensor, nodes: NodeInputs) -> Tensor:
        """Run the stages 3 and 4: run the target model over all tokens of the pass, and keep what
        the draft reads in the next step. Return the logits of the proposal's nodes, [B, n + 1, V].
        """
        hidden_states, logits = self._target_model.run_nodes(
            tokens, nodes, self._aux_layers, proposal.aux
        )
        if self._draft is None:
            return logits
        rows, count = proposal.tokens.shape
        if proposal.branch is not None:
            outputs = logits[:, -proposal.branch.layout.outputs :]  # [B, outputs, V]
            self._draft.observe(self._request_states, proposal, outputs)
            logits = logits[:, :count]
            hidden_states = hidden_states.map(lambda states: states[:, :count])
        # compiled passes may return auxiliary states that this draft does not read
        new = [proposal.tokens, *hidden_states.tensors]
        for kept, values in zip(self._kept_tensors, new, strict=False):
            kept[:rows, :count] = values
        return logits

    def _pack(self, last_tokens: Sequence[int], shape: StepShape) -> list[list[int]]:
        """Return the inputs of each row of a pass, [B][3 + P]: its last token, the position of the
        root of its last tree, the number of accepted nodes of that tree, and these nodes,
        right-padded. They are one upload.
        """
        packed: list[list[int]] = []
        for token, row in zip(last_tokens, self._rows, strict=True):
            padding = [0] * (shape.path_length - len(row.path))
            packed.append([token, row.start, len(row.path), *row.path, *padding])
        # inactive rows compute on dummy data in their own rows of the KV cache
        while len(packed) < shape.rows:
            packed.append([0, 0, 1] + [0] * shape.path_length)
        return packed

    def _columns_for(self, nodes: int) -> int:
        """Return how many columns attention reads for all rows with a tree of up to `nodes` nodes
        below the root.
        """
        longest = max(row.length for row in self._rows)
        return self._key_length(longest + nodes + 1)

    @property
    def _request_states(self) -> list[Any]:
        """The draft's request state of each active row; other rows of a pass have none."""
        return [row.request_state for row in self._rows]

    @property
    def _is_compiled(self) -> bool:
        return self._target_model.compiled is not None

    def _place_nodes(
        self,
        tree: AnyTree,
        lengths: Tensor,
        storage: Tensor,
        shape: StepShape,
        key_length: int,
    ) -> NodeInputs:
        """Return the inputs of a pass over the nodes of a tree, see `TargetModel.place_nodes`."""
        target_model = self._target_model
        first_column = shape.first_column
        # 1. a single row's root that sees all columns needs no mask
        in_window = target_model.window is None or key_length <= target_model.window
        if first_column is not None and tree.size == 0 and in_window and not self._is_compiled:
            column = lengths[:, None]  # [1, 1]; also its position, within the context
            return NodeInputs(column, None, column, first_column, storage, key_length)
        # 2. all other passes get the mask of their tree
        masks = self._masks if tree is self._tree else target_model.node_masks(tree)
        return target_model.place_nodes(tree, masks, lengths, storage, key_length, first_column)

    # What `FixedShapeSteps` overrides

    def _shape(self) -> StepShape:
        """Return the shape of the next step."""
        rows = len(self._rows)
        if self._is_compiled and (self._draft is None or self._draft.fixed_shape):
            # compiled programs run at least 2 rows, unless memory is allocated for one row
            rows = min(max(rows, 2), self._allocated_rows)
        # a single row in a single-row cache writes a slice, at a column that the host knows
        is_single = rows == 1 and self.kv_cache.rows == 1
        return StepShape(
            rows=rows,
            path_length=max(len(row.path) for row in self._rows),
            num_columns=self._columns_for(self.limits.size),
            # paths begin with 0 and increase: a path without gaps is 0, 1, ..., len - 1
            has_gaps=any(row.path[-1] != len(row.path) - 1 for row in self._rows),
            first_column=self._rows[0].length if is_single else None,
            may_stop=True,
        )

    def _key_length(self, positions: int) -> int:
        """Return how many columns attention reads if `positions` columns are needed. Compiled
        passes read whole blocks.
        """
        return round_up_to_block(positions) if self._is_compiled else positions

    def _run(
        self,
        packed: list[list[int]],
        shape: StepShape,
        last_tokens: Sequence[int],
        rule: AcceptanceRule,
        generators: Sequence[torch.Generator] | None,
        skip_draft: bool,
    ) -> list[Accepted]:
        """Run the stages 1 to 5 on packed inputs, [B][3 + P]; for other arguments see `step` and
        `_device_step`.
        """
        proposal, logits = self._device_step(
            torch.tensor(packed, device=self._target_model.device),
            shape,
            last_tokens,
            skip_draft=skip_draft,
        )
        active = len(self._rows)  # a compiled pass may have more rows
        return accept(rule, proposal.tokens[:active], logits[:active], proposal.tree, generators)

    # Rows join and leave

    def reset(self, num_cached: int = 0) -> None:
        """Drop all rows, and keep the memory.

        Args:
            num_cached: number of positions of the first row to keep for the next `prefill`, at most
                `committed`.
        """
        self._rows = []
        self._prefilled = None
        if num_cached:
            return
        for cache in self._all_caches:
            cache.reset()
        self._resets = self.kv_cache.resets

    def make_room(self, rows: int, positions: int) -> None:
        """Allocate memory for `rows` active rows of up to `positions` positions, and copy the
        present rows to it.
        """
        self._add_prefilled_rows()
        allocated = self._allocated_rows
        if self._rows and rows > allocated:
            rows = power_of_two(rows)  # rows that join one by one cause few copies
        for cache in self._all_caches:
            cache.make_room(rows, self._key_length(positions))
        if rows <= allocated:
            return
        before = self._kept_tensors
        self._allocate(rows)
        for new, old in zip(self._kept_tensors, before, strict=True):
            new[: len(old)] = old

    def prefill(
        self,
        prompts: Sequence[list[int]],
        rule: AcceptanceRule = Greedy(),
        generators: Sequence[torch.Generator] | None = None,
        num_cached: int = 0,
    ) -> list[int]:
        """Run the right-padded prompts of new rows in one causal pass, and return the first token
        of each answer.

        There must be room for the rows. The draft reads the prompts later, before the next step, so
        that the first token does not wait for it.

        Args:
            prompts: token ids of each row.
            rule: acceptance rule.
            generators: one for each row, for rules that sample.
            num_cached: number of positions that are already in the KV cache, for a single prompt.
        """
        assert num_cached == 0 or len(prompts) == 1
        self._add_prefilled_rows()
        # 1. the right-padded tokens
        longest = max(len(prompt) for prompt in prompts)
        padded = [[*prompt[num_cached:], *[0] * (longest - len(prompt))] for prompt in prompts]
        tokens = torch.tensor(padded, device=self._target_model.device)  # [B, T]
        # 2. one causal pass, which writes to the next free rows of the KV cache
        cache = PromptCache(self.kv_cache, len(self._rows), len(prompts), num_cached)
        hidden_states = self._target_model.run(tokens, cache=cache, aux_layers=self._aux_layers)
        self._prefilled = _Prefilled(hidden_states, tokens, prompts, num_cached)
        # 3. the token after each prompt
        last = [len(prompt) - num_cached - 1 for prompt in prompts]
        logits = self._target_model.logits(at_positions(hidden_states.final, last))  # [B, V]
        return sample_next(rule, logits, generators)

    def _add_prefilled_rows(self) -> None:
        """Add the rows of the last `prefill`, if they are not added yet."""
        if self._prefilled is not None:
            prefilled = self._prefilled
            self._prefilled = None
            self.add_rows(*prefilled)

    def add_rows(
        self,
        hidden_states: HiddenStates,
        tokens: Tensor,
        prompts: Sequence[list[int]],
        num_cached: int = 0,
    ) -> None:
        """Add rows whose prompts are in the KV cache, and let the draft read them.

        The last token of a prompt is treated as a verified empty tree whose root was accepted, so
        that the first step is like all others.

        Args:
            hidden_states: states of the prompts after their first `num_cached` positions, [B, T,
                d].
            tokens: tokens of the same positions, long [B, T], right-padded.
            prompts: token ids of each row.
            num_cached: number of positions that the caches held before the prefill.
        """
        first = len(self._rows)
        count = len(prompts)
        draft = self._draft
        if draft is not None:
            caches = [PromptCache(cache, first, count, num_cached) for cache in self._draft_caches]
            draft.prefill(hidden_states, tokens, caches)
        last = [len(prompt) - num_cached - 1 for prompt in prompts]
        rows = slice(first, first + count)
        new = [tokens, *hidden_states.tensors]
        for kept, values in zip(self._kept_tensors, new, strict=False):
            kept[rows, 0] = at_positions(values, last)
        for prompt in prompts:
            state = None if draft is None else draft.new_request_state(prompt)
            self._rows.append(RowState(len(prompt) - 1, [0], state))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows: row i becomes the former row `rows[i]`.

        `rows[i] >= i` must hold, so that no row is overwritten before it is copied.
        """
        self._add_prefilled_rows()
        for row, source in enumerate(rows):
            if source == row:
                continue
            for state in self._kept_tensors:
                state[row] = state[source]
            # copy all columns of the last tree, because its nodes are not compacted yet
            positions = self._rows[source].start + self.limits.size + 1
            for cache in self._all_caches:
                cache.copy_row(source, row, positions)
        self._rows = [self._rows[row] for row in rows]

    @property
    def committed(self) -> int:
        """Number of positions of the first row that are final in the KV caches of target model and
        draft: those before the root of its last tree, which the draft has not read yet. It is 0 if
        other steps have used the same KV cache since.
        """
        if not self._rows or self.kv_cache.resets != self._resets:
            return 0
        return self._rows[0].start


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
