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
before it, the row's *length*. Steps run in one of two ways:

- In exact sizes: sizes follow from what the host knows about the rows, so the device does no
  needless work. Compiled passes read whole blocks of columns.
- In fixed shapes, which `inference.cuda_graphs` replays: no size or address depends on the rows,
  and the host never waits for the device. Passes have 2, 4, 8, ... rows, paths of the tree's depth
  and whole blocks of columns, so that few graphs are captured.

Shapes:
    B: rows of a pass.
    n: nodes of the tree below its root.
    m: branch tokens next to the tree (`trees.lookahead_branch`).
    D: depth of the deepest node.
    P: nodes that accepted paths are padded to: the longest path, or D + 1 in fixed shapes.
    d: width of hidden states.
    V: vocabulary size.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_train.inference.accept import (
    NODE_TOKEN,
    TARGET_ARGMAX,
    AcceptanceRule,
    Accepted,
    Greedy,
    accept,
    accept_matching,
    next_tokens_of,
    sample_next,
)
from medusa_train.inference.cuda_graphs import FixedShapeRunner, Replayable, weight_addresses
from medusa_train.models.compiled import round_up_to_block
from medusa_train.models.drafts.base import (
    AcceptedPath,
    DraftCache,
    DraftStep,
    Limits,
    Proposal,
    Proposer,
    at_positions,
)
from medusa_train.models.rounding import ceil_div
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.kv_cache import COLUMNS, ROWS, KVCache, compact
from medusa_train.trees.lookahead_branch import TreeAndBranch
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.transformers_adapters import NodeInputs, PromptCache
from medusa_train.trees.tree import Tree

_log = logging.getLogger(__name__)


def proposal_limits(draft: Proposer | None, tree: Tree) -> Limits:
    """Return the limits of what `draft` proposes for `tree`; (0, 0) without a draft."""
    return Limits(0, 0) if draft is None else draft.limits(tree)


@dataclass
class _RowState:
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


class _Inputs(NamedTuple):
    """Inputs of the device in a step of B rows: one upload, [B, 3 + P].

    Attributes:
        last_tokens: last token of each row, long [B].
        starts: positions of the roots of the last trees, long [B].
        counts: number of accepted nodes of the last trees, long [B].
        path: the accepted nodes, long [B, P], right-padded.
    """

    last_tokens: Tensor
    starts: Tensor
    counts: Tensor
    path: Tensor


@dataclass
class _FixedBuffers:
    """Tensors that steps of fixed shape read and write, at fixed addresses.

    Attributes:
        pinned: packed inputs on the host, long [rows, 3 + D + 1]; in pinned memory for a GPU, so
            that the upload is asynchronous.
        packed: packed inputs on the device.
        choices: what the greedy rule reads, long [rows, 2, n + 1], see `accept_matching`.
        logits: what other rules read, [rows, n + 1, V]; None until such a rule is used.
    """

    pinned: Tensor
    packed: Tensor
    choices: Tensor
    logits: Tensor | None = None


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
            draft, tree, self.limits = None, self._empty_tree, Limits(0, 0)
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
        tree.prepare_levels()
        self._masks = target_model.node_masks(tree.ancestors, tree.depths)
        # 4. whether steps have fixed shapes, and the captured steps
        self._has_fixed_tree = draft is None or draft.fixed_shape
        self._runner: FixedShapeRunner | None = target_model.step_runner
        if self._runner is not None and not self._has_fixed_tree:
            self._runner = None
            name = type(draft).__name__
            _log.info("%s chooses the shape of its trees: its steps run without CUDA graphs", name)
        self._graphs: dict[Hashable, Replayable] = {}
        self._weights: list[int] = []  # addresses that the graphs read
        # 5. the active rows, and what a step keeps on the device for the next step
        self._rows: list[_RowState] = []
        self._prefilled: _Prefilled | None = None
        self._allocate(kv_cache.rows)

    def _allocate(self, rows: int) -> None:
        """Allocate for `rows` rows: what a step keeps for the next step, and the buffers of steps
        of fixed shape.
        """
        target_model = self._target_model
        nodes = self.limits.size + 1  # n + 1
        new = partial(torch.zeros, device=target_model.device)
        self._allocated_rows = rows
        # 1. hidden states, auxiliary hidden states and tokens of the nodes of the last tree
        width = target_model.hidden_size
        self._hidden = new(rows, nodes, width, dtype=target_model.dtype)
        self._aux: Tensor | None = None
        if self._aux_layers:
            self._aux = self._hidden.new_zeros(rows, nodes, width * len(self._aux_layers))
        self._tokens = new(rows, nodes, dtype=torch.long)
        # 2. inputs and results of steps of fixed shape
        self._fixed: _FixedBuffers | None = None
        if self._runner is not None:
            on_gpu = target_model.device.type == "cuda"
            shape = (rows, 3 + self.limits.depth + 1)
            self._fixed = _FixedBuffers(
                pinned=torch.zeros(shape, dtype=torch.long, pin_memory=on_gpu),
                packed=new(shape, dtype=torch.long),
                choices=new(rows, 2, nodes, dtype=torch.long),
            )

    @property
    def _row_states(self) -> list[Tensor]:
        """Tensors that a step reads from the step before; the first dimension is the row."""
        states = [self._hidden, self._tokens]
        if self._aux is not None:
            states.append(self._aux)
        return states

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
        # 0. on the host: the inputs, and how many columns the rows and their trees need
        packed = self._pack(last_tokens)
        longest = max(row.length for row in self._rows)
        num_columns = self._key_length(longest + self.limits.size + 1)
        # 1.-5.
        if self._fixed is not None:
            accepted = self._step_fixed(self._fixed, packed, num_columns, rule, generators)
        else:
            proposal, logits = self._device_step(
                torch.tensor(packed, device=self._target_model.device),
                num_columns,
                last_tokens,
                skip_draft=skip_draft,
            )
            active = len(self._rows)  # a compiled pass may have more rows
            accepted = accept(
                rule, proposal.tokens[:active], logits[:active], proposal.tree, generators
            )
        # 6. on the host: prepare the next step
        for row, (path, tokens) in zip(self._rows, accepted, strict=True):
            row.start = row.length  # uses the old path, so do this before replacing it
            row.path = path
            if self._draft is not None:
                self._draft.extend_request_state(row.request_state, tokens[:-1])
        return accepted

    def _device_step(
        self,
        packed: Tensor,
        num_columns: int,
        last_token_list: Sequence[int] = (),
        *,
        skip_draft: bool = False,
    ) -> tuple[Proposal, Tensor]:
        """Compact, draft, verify and keep; in fixed shapes nothing here depends on the rows.

        Args:
            packed: inputs, long [B, 3 + P], see `_pack`.
            num_columns: number of columns for the rows and the largest tree that may be proposed.
            last_token_list: the last tokens on the host; only for exact sizes.
            skip_draft: verify no draft tokens.

        Returns:
            The proposal, and the logits of its nodes, [B, n + 1, V].
        """
        last_tokens, starts, counts = packed[:, :3].unbind(1)  # [B] each
        inputs = _Inputs(last_tokens, starts, counts, packed[:, 3:])
        lengths = starts + counts  # [B]
        storage = self.kv_cache.storage(num_columns)
        draft = self._draft

        # 1. compact. Padded path entries are written after the accepted ones; this pass overwrites
        # them or masks them out. Draft caches need no compaction, because `extend` rewrites them
        if self._may_have_gaps(inputs.path):
            compact(storage, starts, inputs.path)

        # 2. draft. A draft with a fixed tree may run the target model's first layers over its
        # nodes, so it gets their inputs
        nodes: NodeInputs | None = None
        if draft is not None:
            if draft.fixed_shape and not skip_draft:
                nodes = self._place_nodes(self._tree, lengths, storage, num_columns)
            step = self._draft_step(inputs, num_columns, last_token_list, nodes)
            states = draft.extend(step)
            if skip_draft:
                draft.skip_proposal(step, states)
        if draft is None or skip_draft:
            proposal = Proposal(last_tokens[:, None], self._empty_tree)  # tokens [B, 1]
        else:
            proposal = draft.propose(step, states)

        # 3. verify
        tokens, tree = proposal.pass_inputs()  # [B, n + 1], with branch tokens [B, n + 1 + m]
        if nodes is None:  # the draft chose the tree, or there is none
            key_length = num_columns
            if self._runner is None:  # the tree may be smaller than the largest one
                longest = max(row.length for row in self._rows)
                key_length = self._key_length(longest + tree.size + 1)
            nodes = self._place_nodes(tree, lengths, storage, key_length)
        elif tree.size < self._tree.size:  # the draft stopped early, at a level above the last
            nodes = nodes.first_nodes(tree.size + 1)
        hidden_states, logits = self._target_model.run_nodes(
            tokens, nodes, self._aux_layers, proposal.aux
        )

        # 4. keep
        if draft is None:
            return proposal, logits
        rows, count = proposal.tokens.shape
        if proposal.branch is not None:
            logits = proposal.at_outputs(logits)  # [B, n + 1 + outputs, V]
            draft.observe(self._request_states, proposal, logits[:, count:])
            logits = logits[:, :count]
            hidden_states = hidden_states.first(count)
        self._tokens[:rows, :count] = proposal.tokens
        self._hidden[:rows, :count] = hidden_states.final
        if self._aux is not None and hidden_states.aux is not None:
            self._aux[:rows, :count] = hidden_states.aux
        return proposal, logits

    def _pack(self, last_tokens: Sequence[int]) -> list[list[int]]:
        """Return the inputs of each row of a pass, [B][3 + P], see `_Inputs`."""
        count = len(self._rows)
        path_length = max(len(row.path) for row in self._rows)  # P
        if self._runner is not None:
            count = _power_of_two(count)
            path_length = self.limits.depth + 1
        # graphs and compiled programs run at least 2 rows, unless memory is allocated for one row
        if self._runner is not None or (self._is_compiled and self._has_fixed_tree):
            count = min(max(count, 2), self._allocated_rows)
        packed: list[list[int]] = []
        for token, row in zip(last_tokens, self._rows, strict=True):
            padding = [0] * (path_length - len(row.path))
            packed.append([token, row.start, len(row.path), *row.path, *padding])
        # inactive rows compute on dummy data in their own rows of the KV cache
        while len(packed) < count:
            packed.append([0, 0, 1] + [0] * path_length)
        return packed

    def _may_have_gaps(self, path: Tensor) -> bool:
        """Return whether an accepted node may not be right after the previous one."""
        if self._runner is not None:
            return path.shape[1] > 1
        # paths begin with 0 and increase: a path without gaps is 0, 1, ..., len - 1
        return any(row.path[-1] != len(row.path) - 1 for row in self._rows)

    def _draft_step(
        self,
        inputs: _Inputs,
        num_columns: int,
        last_token_list: Sequence[int],
        nodes: NodeInputs | None,
    ) -> DraftStep:
        """Return the draft's inputs: the accepted nodes of B rows with their states and tokens, the
        draft's caches, and the inputs of the `nodes` of a fixed tree.
        """
        rows = len(inputs.path)  # B
        aux = self._aux
        if aux is not None:
            aux = aux[:rows]  # [B, n + 1, d * number of auxiliary layers]
        accepted = AcceptedPath(
            hidden_states=HiddenStates(self._hidden[:rows], aux),  # [B, n + 1, d]
            tokens=self._tokens[:rows],  # [B, n + 1]
            path=inputs.path,
            counts=inputs.counts,
            starts=inputs.starts,
        )
        last = self._target_model.max_context - 1
        return DraftStep(
            accepted=accepted,
            last_tokens=inputs.last_tokens,
            last_token_list=last_token_list,
            caches=[
                DraftCache(cache.storage(num_columns), num_columns, last)
                for cache in self._draft_caches
            ],
            request_states=self._request_states,
            tree=self._tree,
            nodes=nodes,
            may_stop=self._runner is None,
        )

    @property
    def _request_states(self) -> list[Any]:
        """The draft's request state of each active row; other rows of a pass have none."""
        return [row.request_state for row in self._rows]

    def _place_nodes(
        self,
        tree: Tree | RowTrees | TreeAndBranch,
        lengths: Tensor,
        storage: Tensor,
        key_length: int,
    ) -> NodeInputs:
        """Return the inputs of a pass over the nodes of a tree, see `TargetModel.place_nodes`."""
        target_model = self._target_model
        # 1. a single row in a single-row cache writes a slice, at a column that the host knows. A
        # root that sees all columns needs no mask
        first_column: int | None = None
        if self._runner is None and len(lengths) == 1 and storage.shape[ROWS] == 1:
            first_column = self._rows[0].length
            in_window = target_model.window is None or key_length <= target_model.window
            if tree.size == 0 and in_window and not self._is_compiled:
                column = lengths[:, None]  # [1, 1]; also its position, within the context
                return NodeInputs(column, None, column, first_column, storage, key_length)
        # 2. all other passes get the mask of their tree
        masks = self._masks
        if tree is not self._tree:
            masks = target_model.node_masks(tree.ancestors, tree.depths)
        return target_model.place_nodes(
            tree.depths, masks, lengths, storage, key_length, first_column
        )

    @property
    def _is_compiled(self) -> bool:
        return self._target_model.compiled is not None

    def _key_length(self, positions: int) -> int:
        """Return how many columns attention reads if `positions` columns are needed."""
        if self._runner is not None:
            return ceil_div(positions, self.kv_cache.block) * self.kv_cache.block
        return round_up_to_block(positions) if self._is_compiled else positions

    # Steps of fixed shape

    def _step_fixed(
        self,
        fixed: _FixedBuffers,
        packed_rows: list[list[int]],
        num_columns: int,
        rule: AcceptanceRule,
        generators: Sequence[torch.Generator] | None,
    ) -> list[Accepted]:
        """Run a step from fixed buffers to fixed buffers, and return the accepted paths."""
        # 1.-4. The greedy rule needs no logits. Copying them costs 311 MB per step for 16 rows of
        # 64 nodes and a vocabulary of 152,000 tokens
        keep_logits = not isinstance(rule, Greedy)
        self._run_fixed(fixed, packed_rows, num_columns, keep_logits=keep_logits)
        # 5. accept; a pass may have more rows after the active ones
        active = len(self._rows)
        choices = fixed.choices[:active]  # [active, 2, n + 1]
        if fixed.logits is None or not keep_logits:
            return accept_matching(choices, self._tree)
        return accept(rule, choices[:, NODE_TOKEN], fixed.logits[:active], self._tree, generators)

    def _run_fixed(
        self,
        fixed: _FixedBuffers,
        packed_rows: list[list[int]],
        num_columns: int,
        *,
        keep_logits: bool,
    ) -> None:
        """Run stages 1 to 4, and leave the results in the first rows of `choices` and `logits`."""
        assert self._runner is not None
        count = len(packed_rows)  # B
        if keep_logits and fixed.logits is None:
            shape = (*self._tokens.shape, self._target_model.vocab_size)
            fixed.logits = self._hidden.new_zeros(shape)
        # 1. the upload, by way of pinned memory. The previous upload from it is complete, because
        # accepting that step waited for the device
        fixed.pinned[:count].copy_(torch.tensor(packed_rows))
        packed = fixed.packed[:count]  # [B, 3 + D + 1]
        packed.copy_(fixed.pinned[:count], non_blocking=True)
        # 2. give the KV caches enough columns now, because a captured step must not enlarge them
        buffers = [cache.storage(num_columns) for cache in self._all_caches]

        # 3. the step. A graph is bound to addresses, which change with the columns of a buffer
        def step() -> None:
            proposal, logits = self._device_step(packed, num_columns)
            if keep_logits and fixed.logits is not None:
                fixed.logits[:count] = logits
            fixed.choices[:count, TARGET_ARGMAX] = next_tokens_of(logits)
            fixed.choices[:count, NODE_TOKEN] = proposal.tokens

        columns = [buffer.shape[COLUMNS] for buffer in buffers]
        self._runner.run(self._graphs, (count, num_columns, *columns, keep_logits), step)

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
            rows = _power_of_two(rows)  # rows that join one by one cause few copies
        for cache in self._all_caches:
            cache.make_room(rows, self._key_length(positions))
        if rows <= allocated:
            return
        before = self._row_states
        self._graphs.clear()
        self._allocate(rows)
        for new, old in zip(self._row_states, before, strict=True):
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
        self._drop_stale_graphs()
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
        self._hidden[rows, 0] = at_positions(hidden_states.final, last)
        self._tokens[rows, 0] = at_positions(tokens, last)
        if self._aux is not None and hidden_states.aux is not None:
            self._aux[rows, 0] = at_positions(hidden_states.aux, last)
        for prompt in prompts:
            state = None if draft is None else draft.new_request_state(prompt)
            self._rows.append(_RowState(len(prompt) - 1, [0], state))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows: row i becomes the former row `rows[i]`.

        `rows[i] >= i` must hold, so that no row is overwritten before it is copied.
        """
        self._add_prefilled_rows()
        for row, source in enumerate(rows):
            if source == row:
                continue
            for state in self._row_states:
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

    # CUDA graphs

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether steps have fixed shapes, which CUDA graphs replay."""
        return self._runner is not None

    def _drop_stale_graphs(self) -> None:
        """Drop the captured graphs if a weight has moved since: a replay would read freed memory.

        Weights move by `.to()`, by merging an adapter, or by assigning new ones.
        """
        if self._runner is None:
            return
        weights = weight_addresses(self._target_model.model)
        if isinstance(self._draft, torch.nn.Module):
            weights += weight_addresses(self._draft)
        if weights != self._weights:
            self._graphs.clear()
        self._weights = weights

    def capture(self, rows: int, positions: int, *, keep_logits: bool = False) -> None:
        """Capture the steps of up to `rows` rows of up to `positions` positions, so that no answer
        waits for it.

        Drops all rows. Does nothing before a first answer, which allocates the memory, or if steps
        are not replayed.

        Args:
            rows: largest number of rows.
            positions: largest number of positions of a row.
            keep_logits: copy the logits out of the graph, for all rules except the greedy one.
        """
        fixed = self._fixed
        if fixed is None or not all(cache.is_allocated for cache in self._all_caches):
            return
        # 1. one buffer for all lengths; graphs that were captured for other buffers are useless
        end = min(self._key_length(positions), self.kv_cache.capacity)
        for cache in self._all_caches:
            cache.settle(end)
        self._graphs.clear()
        # 2. a step of each size, with the trees in the last columns. The largest comes first,
        # because a smaller step fits into the memory of a larger one
        nodes = self._tree.size + 1
        key_lengths = range(self._key_length(nodes + 1), end + 1, self.kv_cache.block)
        counts = {min(_power_of_two(max(count, 2)), rows) for count in range(1, rows + 1)}
        for count in sorted(counts, reverse=True):
            for key_length in reversed(key_lengths):
                self._rows = [_RowState(key_length - nodes - 1, [0]) for _ in range(count)]
                packed = self._pack([0] * count)
                self._run_fixed(fixed, packed, key_length, keep_logits=keep_logits)
        self.reset()


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
