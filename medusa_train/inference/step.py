"""One decoding step of one or several rows: what happens between two tokens.

    host                          device
    ----                          ------
    roots, accepted paths  --->   1. compact: accepted nodes move behind the committed positions
                                  2. draft:   it reads them, and guesses a tree below the roots
                                  3. verify:  one pass of the backbone over all nodes
                                  4. keep:    states and tokens of the nodes, for the next step
    accepted path, next root <--  5. accept:  by the backbone's logits at the nodes

A row, by the columns of its keys and values (`trees.kv_slots`), = being committed ones. R was the
last root, and a, b, c the nodes below it; of these b was accepted, and N is the backbone's token
after b:

    before      = = = R a b c        root R in column 3, path 0 2
    1. compact  = = = R b            R and b are committed
    2. draft                         b is read; x, y, z are guessed
    3. verify   = = = R b N x y z    the next root N, and the nodes below it
    5. accept                        a path from N down, and the backbone's token after it

Plain decoding is the empty tree. `inference.runners` says with which sizes a step runs: *exact*
ones, for which the host tells the device what it knows of the rows (`_HostView`), or *fixed* ones,
which `inference.cuda_graphs` replays: the device gets the same work whatever the rows hold.

Letters: B rows of a pass, n nodes of the tree below its root, D its deepest node; d the width of
states, V tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.inference.accept import Accepted, Rule, accept, accept_matching, next_tokens_of
from medusa_train.inference.cuda_graphs import weight_addresses
from medusa_train.inference.runners import (
    FixedShapeRunner,
    Replayable,
    choose_runner,
    power_of_two,
)
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import (
    AcceptedPath,
    DraftCache,
    DraftStep,
    Limits,
    Proposal,
    Proposer,
    at_positions,
)
from medusa_train.models.features import FINAL_STATES, Features
from medusa_train.trees.kv_slots import Slots, compact
from medusa_train.trees.lookahead_branch import TreeAndBranch
from medusa_train.trees.masks import NodeMasks
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.transformers_adapters import NodeSlots, prompt_cache
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
        root: position of the root of its last tree.
        path: the nodes of that tree that were accepted, in order, the root (0) first.
        notes: what the draft keeps, see `Proposer.new_row`.
    """

    root: int
    path: list[int]
    notes: Any

    @property
    def next_root(self) -> int:
        """Position of the next root: right behind the accepted nodes."""
        return self.root + len(self.path)

    @property
    def has_gaps(self) -> bool:
        """Whether an accepted node stands elsewhere than right behind the one before."""
        return self.path[-1] != len(self.path) - 1


@dataclass(frozen=True)
class _HostView:
    """What the host tells the device of a step of exact sizes.

    Attributes:
        roots: the next token of each row, for drafts that look up texts.
        next_root: position of the next root of the longest row.
        has_gaps: whether a row has nodes to be moved, see `_Row.has_gaps`.
        roots_only: whether no draft tokens are verified.
    """

    roots: Sequence[int]
    next_root: int
    has_gaps: bool
    roots_only: bool


#: Columns of the packed inputs of a step, its only upload: the next root, the position of the last
#: one, the number of accepted nodes, and these nodes.
_ROOT = 0
_START = 1
_COUNT = 2
_PATH = 3


@dataclass(frozen=True)
class _Inputs:
    """What the device gets in a step of B rows.

    Attributes:
        roots: the next token of each row, long [B].
        starts: position of the last root, long [B].
        counts: how many nodes of the last tree were accepted, long [B].
        path: these nodes, long [B, D + 1], padded at the end.
        lengths: position of the next root, long [B].
        storage: keys and values of the backbone, [layers, 2, rows, kv_heads, columns, head_dim].
        room: columns for the rows and their new trees.
        host: None in steps of fixed shape.
    """

    roots: Tensor
    starts: Tensor
    counts: Tensor
    path: Tensor
    lengths: Tensor
    storage: Tensor
    room: int
    host: _HostView | None


@dataclass(frozen=True)
class _Verified:
    """The nodes of B rows after their pass.

    Attributes:
        proposal: what was verified.
        feats: states of the nodes, [B, n + 1, d].
        logits: of the nodes, [B, n + 1, V].
        branch: logits at the outputs of its branch tokens, [B, outputs, V]; None without a branch.
    """

    proposal: Proposal
    feats: Features
    logits: Tensor
    branch: Tensor | None = None


@dataclass(frozen=True)
class _Prompts:
    """Prompts that the backbone has read and the draft has not.

    Attributes: see `Steps.add_rows`.
    """

    feats: Features
    tokens: Tensor
    prompts: Sequence[list[int]]
    known: int


class Steps:
    """The steps of one or several rows with one tree, on memory that is kept between answers.

    The active rows are the first ones of all buffers. `prefill` and `start_draft` add rows,
    `select_rows` removes some, `step` extends all.

    Args:
        draft: proposes the nodes; None for plain decoding.
        tree: what the draft fills, with its tensors on the backbone's device.
        slots: for the keys and values of the backbone.

    Attributes:
        limits: of what the draft proposes.
    """

    def __init__(
        self, backbone: Backbone, draft: Proposer | None, tree: Tree, slots: Slots
    ) -> None:
        self._backbone = backbone
        self._root = Tree.empty().to(backbone.device)  # the tree of plain decoding

        # 1. the draft and its tree; without anything to propose no head is computed
        if proposal_limits(draft, tree).size == 0:
            draft = None
            tree = self._root
        self._draft = draft
        self._tree = tree
        self.limits = proposal_limits(draft, tree)
        self._needs = FINAL_STATES
        num_caches = 0
        if draft is not None:
            self._needs = draft.needs
            num_caches = draft.num_caches

        # 2. keys and values
        self.slots = slots
        self._draft_slots = [slots.like(1) for _ in range(num_caches)]
        self._all_slots = [slots, *self._draft_slots]
        self._resets = slots.resets

        # 3. what copies from the host is computed here: in a CUDA graph it is not possible
        _ = tree.by_level
        self._masks = backbone.node_masks(tree.ancestors, tree.depths)
        self._root_masks = backbone.node_masks(self._root.ancestors, self._root.depths)

        # 4. with which sizes steps run, and what was captured of them
        self._runner = choose_runner(backbone, draft)
        self._graphs: dict[Hashable, Replayable] = {}
        self._weights: list[int] = []  # addresses that the graphs read

        # 5. the active rows, and what a step leaves on the device for the next one
        self._rows: list[_Row] = []
        self._prompts: _Prompts | None = None
        self._allocate(slots.rows)

    def _allocate(self, rows: int) -> None:
        """Allocate what a step reads of the step before, for `rows` rows, and the fixed buffers of
        steps of fixed shape.
        """
        backbone = self._backbone
        device = backbone.device
        nodes = self.limits.size + 1  # n + 1

        # 1. of the nodes of the last tree: states [rows, n + 1, d], the same of early layers, and
        # tokens [rows, n + 1]
        self._hidden = torch.zeros(
            rows, nodes, backbone.hidden_size, dtype=backbone.dtype, device=device
        )
        self._early: Tensor | None = None
        if self._needs.early:
            self._early = self._hidden.repeat(1, 1, len(self._needs.early))
        self._tokens = torch.zeros(rows, nodes, dtype=torch.long, device=device)
        if not self._runner.is_fixed:
            return
        # 2. in steps of fixed shape the packed inputs, [rows, 3 + D + 1], which are pinned on the
        # host, so that the upload is asynchronous
        width = _PATH + self.limits.depth + 1
        pinned = device.type == "cuda"
        self._host_inputs = torch.zeros(rows, width, dtype=torch.long, pin_memory=pinned)
        self._inputs = torch.zeros_like(self._host_inputs, device=device)
        # 3. and the results: what a greedy rule reads, [rows, 2, n + 1], the token that follows each
        # node and the node's own; for other rules the logits, [rows, n + 1, V], once there is one
        self._matches = torch.zeros(rows, 2, nodes, dtype=torch.long, device=device)
        self._logits: Tensor | None = None

    @property
    def _row_states(self) -> list[Tensor]:
        """What a step reads of the step before, by row."""
        states = [self._hidden, self._tokens]
        if self._early is not None:
            states.append(self._early)
        return states

    # A step

    def step(
        self,
        roots: Sequence[int],
        rule: Rule = None,
        generators: Sequence[torch.Generator] | None = None,
        *,
        roots_only: bool = False,
    ) -> list[Accepted]:
        """Verify a tree below the root of each row, and accept a path by `rule`, see `accept`.

        Args:
            roots: the next token of each row.
            roots_only: verify no draft tokens; steps of fixed shape verify their tree all the same.
        """
        runner = self._runner
        count = len(roots)
        # 0. on the host: the inputs, and how many columns the rows and their trees need
        packed = self._pack(roots)
        next_root = max(row.next_root for row in self._rows)
        room = self._key_length(next_root + self.limits.size + 1)

        if isinstance(runner, FixedShapeRunner):
            # 1.-4. on the device, from fixed buffers to fixed buffers
            logits = self._run_fixed(runner, packed, room, keep_logits=rule is not None)
            # 5. accept, by the argmax or by the logits
            if logits is None:
                accepted = accept_matching(self._matches[:count], self._tree)
            else:
                tokens = self._matches[:count, 1]  # [count, n + 1]
                accepted = accept(rule, tokens, logits[:count], self._tree, generators)
        else:
            # 1.-4. on the device, in exact sizes
            has_gaps = any(row.has_gaps for row in self._rows)
            host = _HostView(roots, next_root, has_gaps=has_gaps, roots_only=roots_only)
            inputs = torch.tensor(packed, device=self._backbone.device)  # [B, 3 + D + 1]
            verified = self._device_step(inputs, room, host)
            proposal = verified.proposal
            if verified.branch is not None and self._draft is not None:
                self._draft.observe(self._notes, proposal, verified.branch)
            # 5. accept
            tokens = proposal.tokens[:count]  # [count, n + 1]
            accepted = accept(rule, tokens, verified.logits[:count], proposal.tree, generators)

        for row, (path, path_tokens) in zip(self._rows, accepted, strict=True):
            row.root = row.next_root
            row.path = path
            if self._draft is not None:
                self._draft.extend_row(row.notes, path_tokens[:-1])  # without the next root
        return accepted

    def _device_step(self, packed: Tensor, room: int, host: _HostView | None) -> _Verified:
        """Compact, draft, verify and keep.

        Args:
            packed: inputs, long [B, 3 + D + 1].
            room: columns for the rows and their trees.
            host: None for a runner of fixed shape: no shape or address depends on lengths or paths.
        """
        inputs = self._unpack(packed, room, host)

        # 1. compact; a draft's slots need it not: `read` writes its accepted positions itself
        if self._may_have_gaps(inputs):
            compact(inputs.storage, inputs.starts, inputs.path)

        # 2. draft. A draft that fills the given tree is told where its nodes stand: it may run the
        # backbone's first layers over them, which write their keys and values
        given = self._place_given_tree(inputs)
        proposal = self._draft_tree(inputs, given)

        # 3. verify
        tokens, tree = proposal.pass_inputs()  # [B, n + 1], with branch tokens [B, n + 1 + m]
        if given is None:
            nodes = self._place_tree(tree, inputs)
        elif tree.size < self._tree.size:  # the draft stopped early
            nodes = given.first_nodes(tree.size + 1)
        else:
            nodes = given
        verified = self._verify(proposal, tokens, nodes)

        # 4. keep
        self._keep(verified)
        return verified

    # 0. The inputs of a step

    def _pack(self, roots: Sequence[int]) -> list[list[int]]:
        """Return the inputs of each row of a pass, see `_Inputs`: [B][3 + D + 1], the paths padded."""
        rows = self._runner.num_rows(len(roots), len(self._hidden))  # of the pass
        longest = max(len(row.path) for row in self._rows)
        width = self._runner.path_length(longest, self.limits.depth + 1)
        packed: list[list[int]] = []
        for root, row in zip(roots, self._rows, strict=True):
            padding = [0] * (width - len(row.path))
            packed.append([root, row.root, len(row.path), *row.path, *padding])
        while len(packed) < rows:  # rows that are not active
            packed.append([0, 0, 1] + [0] * width)
        return packed

    def _unpack(self, packed: Tensor, room: int, host: _HostView | None) -> _Inputs:
        """Return what the columns of the packed inputs [B, 3 + D + 1] say."""
        starts = packed[:, _START]  # [B]
        counts = packed[:, _COUNT]  # [B]
        return _Inputs(
            roots=packed[:, _ROOT],
            starts=starts,
            counts=counts,
            path=packed[:, _PATH:],
            lengths=starts + counts,
            storage=self.slots.storage(room),
            room=room,
            host=host,
        )

    # 1. Compact

    def _may_have_gaps(self, inputs: _Inputs) -> bool:
        """Return whether there may be nodes to move; steps of fixed shape move them in any case."""
        if inputs.host is None:
            return inputs.path.shape[1] > 1
        return inputs.host.has_gaps

    # 2. Draft

    def _draft_tree(self, inputs: _Inputs, given: NodeSlots | None) -> Proposal:
        """Let the draft read the accepted paths, and guess a tree below the roots.

        Args:
            given: where the nodes of the given tree stand, see `_place_given_tree`.
        """
        draft = self._draft
        host = inputs.host
        plain = Proposal(inputs.roots[:, None], self._root)  # tokens [B, 1]
        if draft is None:
            return plain
        step = DraftStep(
            accepted=self._accepted_path(inputs),
            roots=inputs.roots,
            root_list=host.roots if host is not None else (),
            caches=self._draft_caches(inputs.room),
            rows=self._notes,
            tree=self._tree,
            nodes=given,
            may_stop=host is not None,
        )
        states = draft.read(step)
        if host is not None and host.roots_only:
            draft.skip_guess(step, states)
            return plain
        return draft.guess(step, states)

    def _accepted_path(self, inputs: _Inputs) -> AcceptedPath:
        """Return the accepted nodes of B rows, with the states and tokens that were kept of them."""
        rows = len(inputs.path)
        early = self._early
        if early is not None:
            early = early[:rows]  # [B, n + 1, d of early layers]
        return AcceptedPath(
            feats=Features(self._hidden[:rows], early),  # [B, n + 1, d]
            tokens=self._tokens[:rows],  # [B, n + 1]
            path=inputs.path,
            counts=inputs.counts,
            starts=inputs.starts,
        )

    def _draft_caches(self, room: int) -> list[DraftCache]:
        """Return the slots of the draft's own layers, of which `room` columns are read."""
        last = self._backbone.max_context - 1
        return [DraftCache(slots.storage(room), room, last) for slots in self._draft_slots]

    @property
    def _notes(self) -> list[Any]:
        """What the draft keeps of each active row."""
        return [row.notes for row in self._rows]

    # 3. Verify

    def _verify(self, proposal: Proposal, tokens: Tensor, nodes: NodeSlots) -> _Verified:
        """Run one pass of the backbone over the nodes, and over branch tokens where there are some.

        Args:
            tokens: of the pass, long [B, n + 1 + m]; m is 0 without a branch.
            nodes: where they stand.
        """
        # what a draft ran the first layers over is run through the others only
        feats, logits = self._backbone.run_nodes(tokens, nodes, self._needs, proposal.early)
        if proposal.branch is None:
            return _Verified(proposal, feats, logits)
        count = proposal.tokens.shape[1]  # n + 1
        outputs = proposal.outputs(logits)  # [B, n + 1 + outputs, V]
        return _Verified(proposal, feats.first(count), outputs[:, :count], outputs[:, count:])

    def _place_given_tree(self, inputs: _Inputs) -> NodeSlots | None:
        """Return where the nodes of the tree stand that the draft is given to fill; None where it
        chooses one of its own, and where nothing is drafted.
        """
        host = inputs.host
        if self._draft is None or not self._draft.fixed_shape:
            return None
        if host is not None and host.roots_only:
            return None
        return self._place_nodes(self._tree, self._masks, inputs, inputs.room)

    def _place_tree(self, tree: Tree | RowTrees | TreeAndBranch, inputs: _Inputs) -> NodeSlots:
        """Return where the nodes of a tree stand that is not the given one: of plain decoding, or
        one that the draft chose.
        """
        backbone = self._backbone
        host = inputs.host
        key_length = inputs.room
        # 1. the root of a single row in exact sizes sees all columns and needs no mask; compiled
        # programs take one
        if host is not None:
            key_length = self._key_length(host.next_root + tree.size + 1)  # often below `room`
            is_exact = key_length == host.next_root + 1
            is_in_window = backbone.window is None or key_length <= backbone.window
            sees_all = tree.size == 0 and is_exact and is_in_window and self._is_single(inputs)
            if sees_all and backbone.compiled is None:
                columns = inputs.lengths[:, None]  # [1, 1], a root: never behind the context
                storage = inputs.storage
                return NodeSlots(columns, None, columns, host.next_root, storage, key_length)
        # 2. others get the mask of their tree
        masks = self._root_masks
        if tree is not self._root:
            masks = backbone.node_masks(tree.ancestors, tree.depths)
        return self._place_nodes(tree, masks, inputs, key_length)

    def _place_nodes(
        self,
        tree: Tree | RowTrees | TreeAndBranch,
        masks: Mapping[str, NodeMasks],
        inputs: _Inputs,
        key_length: int,
    ) -> NodeSlots:
        """Return where the nodes of a tree with these masks stand; see `Backbone.place_nodes`."""
        # a single row writes slices, where the host may tell the device the column
        first_column: int | None = None
        if inputs.host is not None and self._is_single(inputs):
            first_column = inputs.host.next_root
        return self._backbone.place_nodes(
            tree.depths, masks, inputs.lengths, inputs.storage, key_length, first_column
        )

    @staticmethod
    def _is_single(inputs: _Inputs) -> bool:
        """Return whether the pass is over a single row in memory for one."""
        return len(inputs.lengths) == 1 and inputs.storage.shape[2] == 1

    def _key_length(self, positions: int) -> int:
        """Return how many columns attention reads where `positions` are needed."""
        return self._runner.key_length(positions, self.slots.block)

    # 4. Keep

    def _keep(self, verified: _Verified) -> None:
        """Keep what the draft reads of these nodes in the next step."""
        if self._draft is None:
            return
        tokens = verified.proposal.tokens  # [B, n + 1]
        feats = verified.feats
        rows, count = tokens.shape
        self._tokens[:rows, :count] = tokens
        self._hidden[:rows, :count] = feats.hidden
        if self._early is not None and feats.early is not None:
            self._early[:rows, :count] = feats.early

    # Steps of fixed shape

    def _run_fixed(
        self, runner: FixedShapeRunner, packed: list[list[int]], room: int, *, keep_logits: bool
    ) -> Tensor | None:
        """Run 1. to 4. from fixed buffers to fixed buffers, and return that of the logits, [rows,
        n + 1, V]; None if they are not kept.

        Args:
            packed: inputs of all rows of the pass, see `_pack`.
            keep_logits: a greedy rule needs none: those of 16 rows of 64 nodes over 152,000 tokens
                are 311 MB, which each step would copy.
        """
        rows = len(packed)
        # free again: accepting the last step waited for the device
        self._host_inputs[:rows].copy_(torch.tensor(packed))
        self._inputs[:rows].copy_(self._host_inputs[:rows], non_blocking=True)
        inputs = self._inputs[:rows]  # [B, 3 + D + 1]
        logits: Tensor | None = None
        if keep_logits:
            if self._logits is None:
                shape = (*self._hidden.shape[:2], self._backbone.vocab_size)
                self._logits = self._hidden.new_zeros(shape)
            logits = self._logits
        # `storage` enlarges the buffers now if it must: a graph stands for addresses, which change
        # with the number of columns of a buffer
        columns = [slots.storage(room).shape[4] for slots in self._all_slots]
        key = (rows, room, *columns, keep_logits)
        runner.run(self._graphs, key, lambda: self._fixed_step(inputs, room, logits))
        return logits

    def _fixed_step(self, inputs: Tensor, room: int, logits: Tensor | None) -> None:
        """Run a step that leaves its results in fixed buffers; the nodes' logits in `logits`, if
        given.
        """
        verified = self._device_step(inputs, room, host=None)
        rows = len(inputs)
        if logits is not None:
            logits[:rows] = verified.logits
        self._matches[:rows, 0] = next_tokens_of(verified.logits)
        self._matches[:rows, 1] = verified.proposal.tokens

    # Rows join and leave

    def reset(self, known: int = 0) -> None:
        """Drop all rows, and keep the memory.

        Args:
            known: positions of the first row, at most `committed`, that a `prefill` continues.
        """
        self._rows = []
        self._prompts = None
        if known:
            return
        for slots in self._all_slots:
            slots.reset()
        self._resets = self.slots.resets

    def make_room(self, rows: int, positions: int) -> None:
        """Allocate memory for `rows` active rows of up to `positions` positions, and move what
        there is.
        """
        allocated = len(self._hidden)
        if self._rows and rows > allocated:
            # rows that join one by one move the others a few times only
            rows = power_of_two(rows)
        for slots in self._all_slots:
            slots.make_room(rows, self._key_length(positions))
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
        rule: Rule = None,
        generators: Sequence[torch.Generator] | None = None,
        known: int = 0,
    ) -> list[int]:
        """Run the prompts of further rows in one causal pass, padded behind, and return the first
        token of each answer.

        There must be room for them. `start_draft` follows, apart from this, so that the first token
        does not wait for it.

        Args:
            known: positions of a single prompt that the slots hold already.
        """
        self._drop_stale_graphs()
        device = self._backbone.device
        # 1. the tokens, padded behind
        longest = max(len(prompt) for prompt in prompts)
        padded: list[list[int]] = []
        for prompt in prompts:
            padded.append(prompt[known:] + [0] * (longest - len(prompt)))
        tokens = torch.tensor(padded, device=device)  # [B, T]
        # 2. one causal pass, which writes to the slots of the next free rows
        cache = prompt_cache(self.slots, len(self._rows), len(prompts), known)
        feats = self._backbone.run(tokens, cache=cache, need=self._needs)
        self._prompts = _Prompts(feats, tokens, prompts, known)
        # 3. accepting a tree without draft tokens gives the token after its root, here the prompt's
        # last token
        last = [len(prompt) - known - 1 for prompt in prompts]
        roots = at_positions(tokens, last)[:, None]  # [B, 1]
        logits = self._backbone.logits(at_positions(feats.hidden, last))[:, None]  # [B, 1, V]
        accepted = accept(rule, roots, logits, self._root, generators)
        return [row.tokens[-1] for row in accepted]

    def start_draft(self) -> None:
        """Add the rows of the last `prefill`, and let the draft read their prompts."""
        read = self._prompts
        assert read is not None
        self._prompts = None
        self.add_rows(read.feats, read.tokens, read.prompts, read.known)

    def add_rows(
        self, feats: Features, tokens: Tensor, prompts: Sequence[list[int]], known: int = 0
    ) -> None:
        """Add rows whose prompts are in the slots, and let the draft read them.

        The last token of a prompt counts as a verified tree without nodes, so that the first step
        is like all others.

        Args:
            feats: of the prompts behind their first `known` positions, [B, T, d].
            tokens: the same, long [B, T], padded behind.
        """
        first = len(self._rows)
        count = len(prompts)
        # 1. the draft
        if self._draft is not None:
            caches = [prompt_cache(slots, first, count, known) for slots in self._draft_slots]
            self._draft.prefill(feats, tokens, caches)
        # 2. the last tokens as roots of trees without nodes
        rows = slice(first, first + count)
        last = [len(prompt) - known - 1 for prompt in prompts]
        self._hidden[rows, 0] = at_positions(feats.hidden, last)
        self._tokens[rows, 0] = at_positions(tokens, last)
        if self._early is not None and feats.early is not None:
            self._early[rows, 0] = at_positions(feats.early, last)
        # 3. of which the root alone was accepted
        for prompt in prompts:
            notes: Any = None
            if self._draft is not None:
                notes = self._draft.new_row(prompt)
            self._rows.append(_Row(root=len(prompt) - 1, path=[0], notes=notes))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows only: row i becomes the former row `rows[i]` >= i."""
        for row, source in enumerate(rows):
            if source == row:
                continue
            for state in self._row_states:
                state[row] = state[source]
            # the nodes of the last tree are not compacted yet
            positions = self._rows[source].root + self.limits.size + 1
            for slots in self._all_slots:
                slots.copy_row(source, row, positions)
        self._rows = [self._rows[row] for row in rows]

    @property
    def committed(self) -> int:
        """Positions of the first row that its slots and the draft's hold for good: up to its last
        root, which the draft has not read; 0 after other steps used the same slots.
        """
        if not self._rows or self.slots.resets != self._resets:
            return 0
        return self._rows[0].root

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
        weights = weight_addresses(self._backbone.model)
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
            keep_logits: for a rule that reads them; None, the greedy one, does not.
        """
        runner = self._runner
        if not isinstance(runner, FixedShapeRunner):
            return
        if not all(slots.is_allocated for slots in self._all_slots):
            return
        # 1. one buffer for all lengths; graphs of other buffers are of no use
        end = min(self._key_length(positions), self.slots.capacity)
        for slots in self._all_slots:
            slots.settle(end)
        self._graphs.clear()
        # 2. numbers of rows and columns, the largest first, since a smaller step fits into the
        # memory of a larger one: 1, or 2, 4, 8, .. and `rows`; all whole blocks
        smallest_power = min(rows - 1, 1)
        powers = range(smallest_power, rows.bit_length() + 1)
        row_counts = {min(1 << power, rows) for power in powers}
        nodes = self._tree.size + 1
        key_lengths = range(self._key_length(nodes + 1), end + 1, self.slots.block)
        # 3. a step of each size, the trees at the end of the columns
        for count in sorted(row_counts, reverse=True):
            for key_length in reversed(key_lengths):
                last_root = key_length - nodes - 1
                self._rows = [_Row(last_root, path=[0], notes=None) for _ in range(count)]
                packed = self._pack([0] * count)
                self._run_fixed(runner, packed, key_length, keep_logits=keep_logits)
        self.reset()
