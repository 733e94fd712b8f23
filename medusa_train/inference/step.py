"""One decoding step of one or several rows: what happens between two tokens.

    host                          device
    ----                          ------
    root tokens, paths     --->   1. compact: accepted nodes move behind the committed positions
                                  2. draft:   it reads them, and guesses a tree below the roots
                                  3. verify:  one pass of the target model over all nodes
                                  4. keep:    states and tokens of the nodes, for the next step
    paths, root tokens     <---   5. accept:  by the target model's logits at the nodes

A row, by the columns of its keys and values (`trees.kv_cache`), = being committed ones. R was the
last root, and a, b, c the nodes below it; of these b was accepted, and N is the target model's token
after b:

    before      = = = R a b c        root R in column 3, path 0 2
    1. compact  = = = R b            R and b are committed
    2. draft                         R and b are read; x, y, z are guessed
    3. verify   = = = R b N x y z    the next root N, and the nodes below it
    5. accept                        a path from N down, and the target model's token after it

Plain decoding is the empty tree. `inference.runners` says with which sizes a step runs: *exact*
ones, for which the host tells the device what it knows of the rows (`_HostView`), or *fixed* ones,
which `inference.cuda_graphs` replays: the device gets the same work whatever the rows hold.

The root of a tree is its node 0. Its token, the *root token*, is the target model's own; the column that
it stands in is its *root position*, and also the number of positions before it, the row's *length*.
The *last root* is that of the tree which the step before verified, the *next root* that of the tree
which this step verifies.

Letters: B rows of a pass, n nodes of the tree below its root, m branch tokens beside it
(`trees.lookahead_branch`), D depth of the deepest node; P nodes that accepted paths are padded to,
the longest of them, and in steps of fixed shape D + 1; d the width of states, V tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
)
from medusa_train.inference.cuda_graphs import weight_addresses
from medusa_train.inference.runners import (
    FixedShapeRunner,
    Replayable,
    choose_runner,
    power_of_two,
)
from medusa_train.models.drafts.base import (
    AcceptedPath,
    DraftCache,
    DraftStep,
    Limits,
    Proposal,
    Proposer,
    at_positions,
)
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.kv_cache import COLUMNS, ROWS, KVCache, compact
from medusa_train.trees.lookahead_branch import TreeAndBranch
from medusa_train.trees.masks import NodeMasks
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.transformers_adapters import NodeInputs, prompt_cache
from medusa_train.trees.tree import Tree


def proposal_limits(draft: Proposer | None, tree: Tree) -> Limits:
    """Return the limits of what `draft` proposes for `tree`; of size 0 without a draft."""
    if draft is None:
        return Limits(0, 0)
    return draft.limits(tree)


@dataclass
class _Row:
    """What the host keeps of an active row between two steps.

    Attributes:
        root_position: of the last root.
        path: the nodes of that tree that were accepted, in order, the root (0) first.
        request_state: what the draft keeps, see `Proposer.new_request_state`.
    """

    root_position: int
    path: list[int]
    request_state: Any

    @property
    def next_root_position(self) -> int:
        """Of the next root: right behind the accepted nodes, once they are compacted."""
        return self.root_position + len(self.path)

    @property
    def has_gaps(self) -> bool:
        """Whether an accepted node stands elsewhere than right behind the one before.

        Paths begin with 0 and increase, so without a gap the last node is the number of those
        before it.
        """
        return self.path[-1] != len(self.path) - 1


@dataclass(frozen=True)
class _HostView:
    """What the host tells the device of a step of exact sizes.

    Attributes:
        last_tokens: of the next root of each row, for drafts that look up texts.
        longest: position of the next root of the longest row.
        has_gaps: whether a row has nodes to be moved, see `_Row.has_gaps`.
        skip_draft: whether no draft tokens are verified.
    """

    last_tokens: Sequence[int]
    longest: int
    has_gaps: bool
    skip_draft: bool


#: Columns of the packed inputs of a step, its only upload: the token of the next root, the position
#: of the last one, the number of accepted nodes, and these nodes.
_LAST_TOKEN = 0
_START = 1
_COUNT = 2
_PATH = 3


@dataclass(frozen=True)
class _Inputs:
    """What the device gets in a step of B rows.

    Attributes:
        last_tokens: of the next roots, long [B].
        starts: positions of the last roots, long [B].
        counts: how many nodes of the last tree were accepted, long [B].
        path: these nodes, long [B, P], padded at the end.
        lengths: positions of the next roots, `starts + counts`, long [B].
        storage: keys and values of the target model, [layers, 2, rows, kv_heads, columns, head_dim].
        num_columns: columns for the rows and the largest tree that may be proposed. What attention reads,
            the `key_length` of a pass, is `num_columns`, or less where a smaller tree was proposed.
        host: None in steps of fixed shape.
    """

    last_tokens: Tensor
    starts: Tensor
    counts: Tensor
    path: Tensor
    lengths: Tensor
    storage: Tensor
    num_columns: int
    host: _HostView | None


@dataclass(frozen=True)
class _Verified:
    """The nodes of B rows after their pass.

    Attributes:
        proposal: what was verified.
        hidden_states: states of the nodes, [B, n + 1, d].
        logits: of the nodes, [B, n + 1, V].
        branch: logits at the outputs of its branch tokens, [B, outputs, V]; None without a branch.
    """

    proposal: Proposal
    hidden_states: HiddenStates
    logits: Tensor
    branch: Tensor | None = None


@dataclass
class _Fixed:
    """What steps of fixed shape run with: buffers whose addresses stay the same.

    Attributes:
        runner: runs steps, or replays them.
        pinned: the packed inputs on the host, long [rows, 3 + D + 1]; pinned for a GPU, so that the
            upload is asynchronous.
        packed: the same on the device.
        choices: what a greedy rule reads, long [rows, 2, n + 1], see `accept_matching`.
        logits: what other rules read, [rows, n + 1, V]; None until there is such a rule.
    """

    runner: FixedShapeRunner
    pinned: Tensor
    packed: Tensor
    choices: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class _Prompts:
    """Prompts that the target model has read and the draft has not.

    Attributes: see `Steps.add_rows`.
    """

    hidden_states: HiddenStates
    tokens: Tensor
    prompts: Sequence[list[int]]
    num_cached: int


class Steps:
    """The steps of one or several rows with one tree, on memory that is kept between answers.

    The active rows are the first ones of all buffers. `prefill` and `start_draft` add rows,
    `select_rows` removes some, `step` extends all.

    Args:
        draft: proposes the nodes; None for plain decoding.
        tree: what the draft fills, with its tensors on the target model's device.
        kv_cache: for the keys and values of the target model.

    Attributes:
        limits: of what the draft proposes.
    """

    def __init__(
        self, target_model: TargetModel, draft: Proposer | None, tree: Tree, kv_cache: KVCache
    ) -> None:
        self._target_model = target_model
        self._root_only_tree = Tree.empty().to(target_model.device)  # of plain decoding

        # 1. the draft and its tree; without anything to propose no head is computed
        self.limits = proposal_limits(draft, tree)
        if self.limits.size == 0:
            draft = None
            tree = self._root_only_tree
            self.limits = Limits(0, 0)
        self._draft = draft
        self._tree = tree
        self._aux_layers: tuple[int, ...] = ()
        num_caches = 0
        if draft is not None:
            self._aux_layers = draft.aux_layers
            num_caches = draft.num_caches

        # 2. keys and values: of the target model's layers, and of each layer of the draft on its own
        self.kv_cache = kv_cache
        self._draft_caches = [kv_cache.like(1) for _ in range(num_caches)]
        self._all_caches = [kv_cache, *self._draft_caches]
        # others may share the KV cache and reset it, see `committed`
        self._resets = kv_cache.resets

        # 3. what copies from the host is computed here: in a CUDA graph it is not possible
        tree.prepare_levels()
        root_only = self._root_only_tree
        self._masks = target_model.node_masks(tree.ancestors, tree.depths)
        self._root_only_masks = target_model.node_masks(root_only.ancestors, root_only.depths)

        # 4. with which sizes steps run, and what was captured of them
        self._runner = choose_runner(target_model, draft)
        self._graphs: dict[Hashable, Replayable] = {}
        self._weights: list[int] = []  # addresses that the graphs read

        # 5. the active rows, and what a step leaves on the device for the next one
        self._rows: list[_Row] = []
        self._prompts: _Prompts | None = None
        self._allocate(kv_cache.rows)

    def _allocate(self, rows: int) -> None:
        """Allocate what a step reads of the step before, for `rows` rows, and what steps of fixed
        shape run with.
        """
        target_model = self._target_model
        nodes = self.limits.size + 1  # n + 1
        self._allocated_rows = rows

        # 1. of the nodes of the last tree: states [rows, n + 1, d], the same of auxiliary layers, and
        # tokens [rows, n + 1]
        hidden_size = target_model.hidden_size
        self._hidden = torch.zeros(
            rows, nodes, hidden_size, dtype=target_model.dtype, device=target_model.device
        )
        self._aux: Tensor | None = None
        if self._aux_layers:
            aux_size = hidden_size * len(self._aux_layers)
            self._aux = self._hidden.new_zeros(rows, nodes, aux_size)
        self._tokens = torch.zeros(rows, nodes, dtype=torch.long, device=target_model.device)

        # 2. the buffers of steps of fixed shape
        self._fixed: _Fixed | None = None
        if isinstance(self._runner, FixedShapeRunner):
            self._fixed = self._allocate_fixed(self._runner, rows)

    def _allocate_fixed(self, runner: FixedShapeRunner, rows: int) -> _Fixed:
        """Return the buffers of steps of fixed shape, for `rows` rows."""
        device = self._target_model.device
        width = _PATH + self.limits.depth + 1
        nodes = self.limits.size + 1  # n + 1
        on_gpu = device.type == "cuda"
        pinned = torch.zeros(rows, width, dtype=torch.long, pin_memory=on_gpu)
        packed = torch.zeros_like(pinned, device=device)
        choices = torch.zeros(rows, 2, nodes, dtype=torch.long, device=device)
        return _Fixed(runner, pinned, packed, choices)

    @property
    def _row_states(self) -> list[Tensor]:
        """What a step reads of the step before, by row."""
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
        """Verify a tree below the next root of each row, and accept a path of it.

        Args:
            last_tokens: of the next root of each row: what `prefill` returned, then the last token
                of what was accepted.
            rule: by which a path is accepted, see `accept`.
            generators: one for each row, for rules that sample.
            skip_draft: verify no draft tokens; steps of fixed shape verify their tree all the same.

        Returns:
            For each row the accepted nodes, the root (0) first, and the tokens: the root's, those of
            the accepted nodes below it, and the target model's own next one, which is the next root.
        """
        # 0. on the host: the inputs, and how many columns the rows and their trees need
        packed_rows = self._pack(last_tokens)
        longest = max(row.next_root_position for row in self._rows)
        num_columns = self._key_length(longest + self.limits.size + 1)

        # 1.-5.
        if self._fixed is not None:
            accepted = self._step_fixed(self._fixed, packed_rows, num_columns, rule, generators)
        else:
            has_gaps = any(row.has_gaps for row in self._rows)
            host = _HostView(last_tokens, longest, has_gaps=has_gaps, skip_draft=skip_draft)
            accepted = self._step_exact(host, packed_rows, num_columns, rule, generators)

        # 6. on the host: what the next step begins with
        for row, (path, path_tokens) in zip(self._rows, accepted, strict=True):
            row.root_position = row.next_root_position  # by the old path, so before it is replaced
            row.path = path
            if self._draft is not None:
                # without the last token, which is not verified yet
                self._draft.extend_request_state(row.request_state, path_tokens[:-1])
        return accepted

    def _step_exact(
        self,
        host: _HostView,
        packed_rows: list[list[int]],
        num_columns: int,
        rule: AcceptanceRule,
        generators: Sequence[torch.Generator] | None,
    ) -> list[Accepted]:
        """Run a step in exact sizes, and return the path that each active row accepts."""
        # 1.-4. on the device
        packed = torch.tensor(packed_rows, device=self._target_model.device)  # [B, 3 + P]
        verified = self._device_step(packed, num_columns, host)
        proposal = verified.proposal
        # a branch is always a draft's; only the type checker has to be told
        if verified.branch is not None and self._draft is not None:
            self._draft.observe(self._request_states, proposal, verified.branch)
        # 5. accept; the first rows are the active ones, a compiled pass may have others
        active = len(self._rows)
        tokens = proposal.tokens[:active]  # [active, n + 1]
        return accept(rule, tokens, verified.logits[:active], proposal.tree, generators)

    def _step_fixed(
        self,
        fixed: _Fixed,
        packed_rows: list[list[int]],
        num_columns: int,
        rule: AcceptanceRule,
        generators: Sequence[torch.Generator] | None,
    ) -> list[Accepted]:
        """Run a step of fixed shape, and return the path that each active row accepts."""
        # 1.-4. on the device, from fixed buffers to fixed buffers. A greedy rule needs no logits:
        # those of 16 rows of 64 nodes over 152,000 tokens are 311 MB, which each step would copy
        logits: Tensor | None = None
        if not isinstance(rule, Greedy):
            logits = self._logits_buffer(fixed)
        self._run_fixed(fixed, packed_rows, num_columns, logits)
        # 5. accept; the first rows are the active ones, a pass may have others
        active = len(self._rows)
        choices = fixed.choices[:active]  # [active, 2, n + 1]
        if logits is None:  # a greedy rule
            return accept_matching(choices, self._tree)
        return accept(rule, choices[:, NODE_TOKEN], logits[:active], self._tree, generators)

    def _device_step(self, packed: Tensor, num_columns: int, host: _HostView | None) -> _Verified:
        """Compact, draft, verify and keep.

        Args:
            packed: inputs, long [B, 3 + P], see `_pack`.
            num_columns: see `_Inputs`.
            host: None for a runner of fixed shape: no shape or address depends on lengths or paths.
        """
        inputs = self._unpack(packed, num_columns, host)

        # 1. compact. Padding of paths lands behind them, where the pass writes or the mask hides. A
        # draft's KV cache need it not: `extend` writes its accepted positions itself
        if self._may_have_gaps(inputs):
            compact(inputs.storage, inputs.starts, inputs.path)

        # 2. draft. Some drafts fill the tree that `Steps` was given, others choose one. The first are
        # told where its nodes stand: they may run the target model's first layers over them, which
        # write their keys and values. A given tree has no branch; a draft may stop at a level of it
        fixed_nodes = self._place_given_tree(inputs)
        proposal = self._draft_tree(inputs, fixed_nodes)

        # 3. verify
        tokens, tree = proposal.pass_inputs()  # [B, n + 1], with branch tokens [B, n + 1 + m]
        if fixed_nodes is None:  # the draft chose the tree, or there is none
            nodes = self._place_tree(tree, inputs)
        elif tree.size < self._tree.size:  # the draft stopped early, at some level
            nodes = fixed_nodes.first_nodes(tree.size + 1)
        else:
            nodes = fixed_nodes
        verified = self._verify(proposal, tokens, nodes)

        # 4. keep
        self._keep(verified)
        return verified

    # 0. The inputs of a step

    def _pack(self, last_tokens: Sequence[int]) -> list[list[int]]:
        """Return the inputs of each row of a pass, see `_Inputs`: [B][3 + P], the paths padded."""
        runner = self._runner
        rows = runner.num_rows(len(last_tokens), self._allocated_rows)  # of the pass
        longest_path = max(len(row.path) for row in self._rows)
        path_length = runner.path_length(longest_path, self.limits.depth + 1)  # P
        packed_rows: list[list[int]] = []
        for last_token, row in zip(last_tokens, self._rows, strict=True):
            padding = [0] * (path_length - len(row.path))
            packed_rows.append([last_token, row.root_position, len(row.path), *row.path, *padding])
        # rows that are not active: root token 0, the last root in column 0, and it alone accepted.
        # They read and write the first columns of their own memory, which holds nothing that counts
        while len(packed_rows) < rows:
            packed_rows.append([0, 0, 1] + [0] * path_length)
        return packed_rows

    def _unpack(self, packed: Tensor, num_columns: int, host: _HostView | None) -> _Inputs:
        """Return what the columns of the packed inputs [B, 3 + P] say."""
        starts = packed[:, _START]  # [B]
        counts = packed[:, _COUNT]  # [B]
        return _Inputs(
            last_tokens=packed[:, _LAST_TOKEN],
            starts=starts,
            counts=counts,
            path=packed[:, _PATH:],
            lengths=starts + counts,
            storage=self.kv_cache.storage(num_columns),
            num_columns=num_columns,
            host=host,
        )

    # 1. Compact

    def _may_have_gaps(self, inputs: _Inputs) -> bool:
        """Return whether there may be nodes to move; steps of fixed shape move them in any case."""
        if inputs.host is None:
            return inputs.path.shape[1] > 1
        return inputs.host.has_gaps

    # 2. Draft

    def _draft_tree(self, inputs: _Inputs, fixed_nodes: NodeInputs | None) -> Proposal:
        """Let the draft read the accepted paths, and guess a tree below the roots.

        Args:
            given: where the nodes of the given tree stand, see `_place_given_tree`.
        """
        draft = self._draft
        host = inputs.host
        if draft is None:
            return Proposal(inputs.last_tokens[:, None], self._root_only_tree)  # tokens [B, 1]
        last_token_list: Sequence[int] = ()
        if host is not None:
            last_token_list = host.last_tokens
        step = DraftStep(
            accepted=self._accepted_path(inputs),
            last_tokens=inputs.last_tokens,
            last_token_list=last_token_list,
            caches=self._step_caches(inputs.num_columns),
            request_states=self._request_states,
            tree=self._tree,
            nodes=fixed_nodes,
            may_stop=host is not None,
        )
        states = draft.extend(step)
        if host is not None and host.skip_draft:
            draft.skip_proposal(step, states)
            return Proposal(inputs.last_tokens[:, None], self._root_only_tree)
        return draft.propose(step, states)

    def _accepted_path(self, inputs: _Inputs) -> AcceptedPath:
        """Return the accepted nodes of B rows, with the states and tokens that were kept of them."""
        rows = len(inputs.path)
        aux = self._aux
        if aux is not None:
            aux = aux[:rows]  # [B, n + 1, d of auxiliary layers]
        return AcceptedPath(
            hidden_states=HiddenStates(self._hidden[:rows], aux),  # [B, n + 1, d]
            tokens=self._tokens[:rows],  # [B, n + 1]
            path=inputs.path,
            counts=inputs.counts,
            starts=inputs.starts,
        )

    def _step_caches(self, num_columns: int) -> list[DraftCache]:
        """Return the KV cache of the draft's own layers, of which `num_columns` columns are read."""
        last = self._target_model.max_context - 1
        return [
            DraftCache(kv_cache.storage(num_columns), num_columns, last)
            for kv_cache in self._draft_caches
        ]

    @property
    def _request_states(self) -> list[Any]:
        """What the draft keeps of each active row; a pass may have further rows, without a state."""
        return [row.request_state for row in self._rows]

    # 3. Verify

    def _verify(self, proposal: Proposal, tokens: Tensor, nodes: NodeInputs) -> _Verified:
        """Run one pass of the target model over the nodes, and over branch tokens where there are some.

        Args:
            tokens: of the pass, long [B, n + 1 + m]; m is 0 without a branch.
            nodes: where they stand.
        """
        # what a draft ran the first layers over is run through the others only
        hidden_states, logits = self._target_model.run_nodes(
            tokens, nodes, self._aux_layers, proposal.aux
        )
        if proposal.branch is None:
            return _Verified(proposal, hidden_states, logits)
        count = proposal.tokens.shape[1]  # n + 1
        logits_read = proposal.at_outputs(logits)  # [B, n + 1 + outputs, V]
        branch = logits_read[:, count:]  # [B, outputs, V]
        return _Verified(proposal, hidden_states.first(count), logits_read[:, :count], branch)

    def _place_given_tree(self, inputs: _Inputs) -> NodeInputs | None:
        """Return where the nodes of the tree stand that the draft is given to fill; None where it
        chooses one of its own, and where nothing is drafted.
        """
        host = inputs.host
        if self._draft is None or not self._draft.fixed_shape:
            return None
        if host is not None and host.skip_draft:
            return None
        return self._place_nodes(self._tree, self._masks, inputs, inputs.num_columns)

    def _place_tree(self, tree: Tree | RowTrees | TreeAndBranch, inputs: _Inputs) -> NodeInputs:
        """Return where the nodes of a tree stand that is not the given one: of plain decoding, or
        one that the draft chose.
        """
        host = inputs.host
        key_length = inputs.num_columns
        if (
            host is not None
        ):  # `num_columns` has columns for the largest tree, this one may be smaller
            key_length = self._key_length(host.longest + tree.size + 1)
        # 1. a root that sees all columns needs no mask
        if host is not None and tree.size == 0 and self._root_sees_all(inputs, key_length):
            columns = inputs.lengths[:, None]  # [1, 1]
            return NodeInputs(
                positions=columns,  # a root, so never past the context
                masks=None,
                columns=columns,
                first_column=host.longest,
                storage=inputs.storage,
                key_length=key_length,
            )
        # 2. others get the mask of their tree
        masks = self._root_only_masks
        if tree is not self._root_only_tree:
            masks = self._target_model.node_masks(tree.ancestors, tree.depths)
        return self._place_nodes(tree, masks, inputs, key_length)

    def _root_sees_all(self, inputs: _Inputs, key_length: int) -> bool:
        """Return whether the root, verified alone in exact sizes, sees all `key_length` columns: that
        of a single row, which are read up to the root, where all of them lie in the window.
        """
        target_model = self._target_model
        # compiled passes read whole blocks and take a mask
        if target_model.compiled is not None:
            return False
        is_in_window = target_model.window is None or key_length <= target_model.window
        return is_in_window and self._is_single(inputs)

    def _place_nodes(
        self,
        tree: Tree | RowTrees | TreeAndBranch,
        masks: Mapping[str, NodeMasks],
        inputs: _Inputs,
        key_length: int,
    ) -> NodeInputs:
        """Return where the nodes of a tree with these masks stand; see `TargetModel.place_nodes`."""
        # a single row writes slices, where the host may tell the device the column
        first_column: int | None = None
        if inputs.host is not None and self._is_single(inputs):
            first_column = inputs.host.longest
        return self._target_model.place_nodes(
            tree.depths, masks, inputs.lengths, inputs.storage, key_length, first_column
        )

    @staticmethod
    def _is_single(inputs: _Inputs) -> bool:
        """Return whether the pass is over a single row in memory for one."""
        return len(inputs.lengths) == 1 and inputs.storage.shape[ROWS] == 1

    def _key_length(self, positions: int) -> int:
        """Return how many columns attention reads where `positions` are needed."""
        return self._runner.key_length(positions, self.kv_cache.block)

    # 4. Keep

    def _keep(self, verified: _Verified) -> None:
        """Keep what the draft reads of these nodes in the next step."""
        if self._draft is None:
            return
        tokens = verified.proposal.tokens  # [B, n + 1]
        hidden_states = verified.hidden_states
        rows, count = tokens.shape
        self._tokens[:rows, :count] = tokens
        self._hidden[:rows, :count] = hidden_states.final
        if self._aux is not None and hidden_states.aux is not None:
            self._aux[:rows, :count] = hidden_states.aux

    # Steps of fixed shape

    def _logits_buffer(self, fixed: _Fixed) -> Tensor:
        """Return the buffer of the nodes' logits, [rows, n + 1, V]; the first call allocates it."""
        if fixed.logits is None:
            nodes = self.limits.size + 1
            shape = (self._allocated_rows, nodes, self._target_model.vocab_size)
            fixed.logits = self._hidden.new_zeros(shape)
        return fixed.logits

    def _run_fixed(
        self, fixed: _Fixed, packed_rows: list[list[int]], num_columns: int, logits: Tensor | None
    ) -> None:
        """Run 1. to 4. from fixed buffers to fixed buffers.

        Args:
            packed_rows: inputs of all B rows of the pass, see `_pack`.
            logits: where the nodes' logits are left, see `_logits_buffer`; None: nowhere.
        """
        count = len(packed_rows)  # B
        # 1. the upload, by way of a tensor that is not pinned. The last upload from the pinned one
        # is over, since accepting that step waited for the device
        fixed.pinned[:count].copy_(torch.tensor(packed_rows))
        packed = fixed.packed[:count]  # [B, 3 + D + 1]
        packed.copy_(fixed.pinned[:count], non_blocking=True)
        # 2. buffers of keys and values with enough columns, now: a step must not enlarge them
        buffers = [kv_cache.storage(num_columns) for kv_cache in self._all_caches]
        # 3. the step; a graph stands for addresses, which change with the columns of a buffer
        columns = [buffer.shape[COLUMNS] for buffer in buffers]
        key = (count, num_columns, *columns, logits is not None)
        fixed.runner.run(
            self._graphs, key, lambda: self._fixed_step(packed, num_columns, fixed.choices, logits)
        )

    def _fixed_step(
        self, packed: Tensor, num_columns: int, choices: Tensor, logits: Tensor | None
    ) -> None:
        """Run 1. to 4. on the device, and leave the results in the first B rows of `choices` and,
        if given, `logits`; `packed` [B, 3 + D + 1].
        """
        verified = self._device_step(packed, num_columns, host=None)
        count = len(packed)  # B
        if logits is not None:
            logits[:count] = verified.logits
        choices[:count, TARGET_ARGMAX] = next_tokens_of(verified.logits)
        choices[:count, NODE_TOKEN] = verified.proposal.tokens

    # Rows join and leave

    def reset(self, num_cached: int = 0) -> None:
        """Drop all rows, and keep the memory.

        Args:
            num_cached: positions of the first row, at most `committed`, that a `prefill` continues.
        """
        self._rows = []
        self._prompts = None
        if num_cached:
            return
        for kv_cache in self._all_caches:
            kv_cache.reset()
        self._resets = self.kv_cache.resets

    def make_room(self, rows: int, positions: int) -> None:
        """Allocate memory for `rows` active rows of up to `positions` positions, and move what
        there is.
        """
        allocated = self._allocated_rows
        if self._rows and rows > allocated:
            # rows that join one by one move the others a few times only
            rows = power_of_two(rows)
        for kv_cache in self._all_caches:
            kv_cache.make_room(rows, self._key_length(positions))
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
        """Run the prompts of further rows in one causal pass, padded behind, and return the first
        token of each answer.

        There must be room for them. `start_draft` follows, apart from this, so that the first token
        does not wait for it; no step in between, which could write over these rows.

        Args:
            num_cached: positions of a single prompt that the KV cache holds already.
        """
        assert num_cached == 0 or len(prompts) == 1
        self._drop_stale_graphs()
        device = self._target_model.device
        # 1. the tokens, padded behind
        longest = max(len(prompt) for prompt in prompts)
        padded: list[list[int]] = []
        for prompt in prompts:
            padding = [0] * (longest - len(prompt))
            padded.append([*prompt[num_cached:], *padding])
        tokens = torch.tensor(padded, device=device)  # [B, T]
        # 2. one causal pass, which writes to the KV cache of the next free rows
        cache = prompt_cache(self.kv_cache, len(self._rows), len(prompts), num_cached)
        hidden_states = self._target_model.run(tokens, cache=cache, aux_layers=self._aux_layers)
        self._prompts = _Prompts(hidden_states, tokens, prompts, num_cached)
        # 3. accepting a tree without draft tokens gives the token after its root, here the prompt's
        # last token
        last = _last_positions(prompts, num_cached)
        last_tokens = at_positions(tokens, last)[:, None]  # [B, 1]
        logits = self._target_model.logits(at_positions(hidden_states.final, last))[
            :, None
        ]  # [B, 1, V]
        accepted = accept(rule, last_tokens, logits, self._root_only_tree, generators)
        return [path.tokens[-1] for path in accepted]

    def start_draft(self) -> None:
        """Add the rows of the last `prefill`, and let the draft read their prompts."""
        waiting = self._prompts
        assert waiting is not None
        self._prompts = None
        self.add_rows(waiting.hidden_states, waiting.tokens, waiting.prompts, waiting.num_cached)

    def add_rows(
        self,
        hidden_states: HiddenStates,
        tokens: Tensor,
        prompts: Sequence[list[int]],
        num_cached: int = 0,
    ) -> None:
        """Add rows whose prompts are in the KV cache, and let the draft read them.

        The last token of a prompt counts as a verified tree without nodes, so that the first step
        is like all others.

        Args:
            hidden_states: of the prompts behind their first `num_cached` positions, [B, T, d].
            tokens: the same, long [B, T], padded behind.
        """
        first = len(self._rows)
        count = len(prompts)
        # 1. the draft
        if self._draft is not None:
            caches = [
                prompt_cache(kv_cache, first, count, num_cached) for kv_cache in self._draft_caches
            ]
            self._draft.prefill(hidden_states, tokens, caches)
        # 2. the last tokens as roots of trees without nodes
        rows = slice(first, first + count)
        last = _last_positions(prompts, num_cached)
        self._hidden[rows, 0] = at_positions(hidden_states.final, last)
        self._tokens[rows, 0] = at_positions(tokens, last)
        if self._aux is not None and hidden_states.aux is not None:
            self._aux[rows, 0] = at_positions(hidden_states.aux, last)
        # 3. of which the root alone was accepted
        for prompt in prompts:
            state: Any = None
            if self._draft is not None:
                state = self._draft.new_request_state(prompt)
            self._rows.append(_Row(len(prompt) - 1, path=[0], request_state=state))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows only: row i becomes the former row `rows[i]` >= i, so that no row is
        overwritten before it is copied.
        """
        for row, source in enumerate(rows):
            if source == row:
                continue
            for state in self._row_states:
                state[row] = state[source]
            # the nodes of the last tree are not compacted yet, so all of its columns
            positions = self._rows[source].root_position + self.limits.size + 1
            for kv_cache in self._all_caches:
                kv_cache.copy_row(source, row, positions)
        self._rows = [self._rows[row] for row in rows]

    @property
    def committed(self) -> int:
        """Positions of the first row that its KV cache and the draft's hold permanently: up to its last
        root, which the draft has not read; 0 after other steps used the same KV cache.
        """
        if not self._rows or self.kv_cache.resets != self._resets:
            return 0
        return self._rows[0].root_position

    # CUDA graphs

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether steps have fixed shapes, which CUDA graphs replay."""
        return self._runner.is_fixed

    def _drop_stale_graphs(self) -> None:
        """Forget what was captured if a weight has moved since: a replay would read freed memory.

        Weights move by `.to()`, by merging an adapter, and where others are assigned.
        """
        if not self._runner.is_fixed:
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

        Drops all rows. Does nothing before a first answer, which allocates the memory, nor for
        steps that are not replayed.

        Args:
            keep_logits: for a rule that reads them; the greedy one does not.
        """
        fixed = self._fixed
        if fixed is None:
            return
        if not all(kv_cache.is_allocated for kv_cache in self._all_caches):
            return
        # 1. one buffer for all lengths; graphs of other buffers are of no use
        end = min(self._key_length(positions), self.kv_cache.capacity)
        for kv_cache in self._all_caches:
            kv_cache.settle(end)
        self._graphs.clear()
        # 2. numbers of rows and columns, the largest first, since a smaller step fits into the
        # memory of a larger one
        row_counts = {fixed.runner.num_rows(active, rows) for active in range(1, rows + 1)}
        nodes = self._tree.size + 1
        key_lengths = range(self._key_length(nodes + 1), end + 1, self.kv_cache.block)
        # 3. a step of each size, the trees at the end of the columns
        logits: Tensor | None = None
        if keep_logits:
            logits = self._logits_buffer(fixed)
        for count in sorted(row_counts, reverse=True):
            for key_length in reversed(key_lengths):
                last_root_position = key_length - nodes - 1
                self._rows = [
                    _Row(last_root_position, path=[0], request_state=None) for _ in range(count)
                ]
                packed_rows = self._pack([0] * count)
                self._run_fixed(fixed, packed_rows, key_length, logits)
        self.reset()


def _last_positions(prompts: Sequence[list[int]], num_cached: int) -> list[int]:
    """Return where each prompt ends, counted from the position `num_cached` on."""
    return [len(prompt) - num_cached - 1 for prompt in prompts]
