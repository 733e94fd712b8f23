"""One decoding step of one or several rows: what happens between two tokens.

    host                          device
    ----                          ------
    roots, accepted paths  --->   1. compact: accepted nodes move behind the committed positions
                                  2. draft:   it reads them, and guesses a tree below the roots
                                  3. verify:  one pass of the backbone over all nodes
                                  4. keep:    states and tokens of the nodes, for the next step
    accepted path, next root <--  5. accept:  by the backbone's logits at the nodes

Plain decoding is the empty tree. Keys and values stand in `trees.slots`; `inference.runners` says
with which sizes a step runs, and `inference.cuda_graphs` replays it.

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
from medusa_train.trees.hf_caches import NodeSlots, prompt_cache
from medusa_train.trees.lookahead_branch import TreeAndBranch
from medusa_train.trees.masks import NodeMasks
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.slots import Slots, compact
from medusa_train.trees.tree import Tree

#: Columns of the packed inputs before the path: the root, the position of the last tree's root, and
#: the number of accepted nodes.
_ROOT = 0
_START = 1
_COUNT = 2
_PATH = 3


def proposal_limits(draft: Proposer | None, tree: Tree) -> Limits:
    """Return the limits of what `draft` proposes for `tree`; of size 0 without a draft."""
    if draft is None:
        return Limits(0, 0)
    return draft.limits(tree)


@dataclass(frozen=True)
class _Verified:
    """The nodes of B rows after their pass.

    Attributes:
        proposal: what was verified.
        logits: of the nodes, [B, n + 1, V].
        branch: logits at the outputs of its branch tokens, [B, outputs, V]; None without a branch.
    """

    proposal: Proposal
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

        # 5. of each active row, on the host: position of the root of its last tree, the nodes of it
        # that were accepted, and what the draft keeps
        self._starts: list[int] = []
        self._paths: list[list[int]] = []
        self._draft_rows: list[Any] = []
        self._prompts: _Prompts | None = None
        self._allocate(slots.rows)

    def _allocate(self, rows: int) -> None:
        """Allocate what a step reads of the step before, for `rows` rows, and the fixed buffers of
        steps of fixed shape.
        """
        backbone = self._backbone
        device = backbone.device
        nodes = self.limits.size + 1  # n + 1

        # 1. states of the nodes of the last tree: [rows, n + 1, d], and the same of early layers
        self._hidden = torch.zeros(
            rows, nodes, backbone.hidden_size, dtype=backbone.dtype, device=device
        )
        self._early: Tensor | None = None
        if self._needs.early:
            self._early = self._hidden.repeat(1, 1, len(self._needs.early))
        # 2. [rows, 2, n + 1]: the tokens that follow the nodes, and the nodes' own
        self._choices = torch.zeros(rows, 2, nodes, dtype=torch.long, device=device)
        if not self._runner.is_fixed:
            return
        # 3. in steps of fixed shape also the logits, [rows, n + 1, V], once a rule reads more of them
        # than the argmax; and the packed inputs, [rows, 3 + D + 1], which are pinned on the host, so
        # that the upload is asynchronous
        self._logits: Tensor | None = None
        width = _PATH + self.limits.depth + 1
        pinned = device.type == "cuda"
        self._host_inputs = torch.zeros(rows, width, dtype=torch.long, pin_memory=pinned)
        self._inputs = torch.zeros_like(self._host_inputs, device=device)

    @property
    def _row_states(self) -> list[Tensor]:
        """What a step reads of the step before, by row."""
        states = [self._hidden, self._choices]
        if self._early is not None:
            states.append(self._early)
        return states

    # Rows join and leave

    def reset(self, known: int = 0) -> None:
        """Drop all rows, and keep the memory.

        Args:
            known: positions of the first row, at most `committed`, that a `prefill` continues.
        """
        self._starts = []
        self._paths = []
        self._draft_rows = []
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
        if self._starts and rows > allocated:
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
        cache = prompt_cache(self.slots, len(self._starts), len(prompts), known)
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
        first = len(self._starts)
        count = len(prompts)
        # 1. the draft
        if self._draft is not None:
            caches = [prompt_cache(slots, first, count, known) for slots in self._draft_slots]
            self._draft.prefill(feats, tokens, caches)
            for prompt in prompts:
                self._draft_rows.append(self._draft.new_row(prompt))
        # 2. the last tokens as roots of trees without nodes
        rows = slice(first, first + count)
        last = [len(prompt) - known - 1 for prompt in prompts]
        self._hidden[rows, 0] = at_positions(feats.hidden, last)
        self._choices[rows, 1, 0] = at_positions(tokens, last)
        if self._early is not None and feats.early is not None:
            self._early[rows, 0] = at_positions(feats.early, last)
        # 3. of which the root alone was accepted
        for prompt in prompts:
            self._starts.append(len(prompt) - 1)
            self._paths.append([0])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows only: row i becomes the former row `rows[i]` >= i."""
        for row, source in enumerate(rows):
            if source == row:
                continue
            for state in self._row_states:
                state[row] = state[source]
            # the nodes of the last tree are not compacted yet
            positions = self._starts[source] + self.limits.size + 1
            for slots in self._all_slots:
                slots.copy_row(source, row, positions)
        self._starts = [self._starts[row] for row in rows]
        self._paths = [self._paths[row] for row in rows]
        if self._draft_rows:
            self._draft_rows = [self._draft_rows[row] for row in rows]

    @property
    def committed(self) -> int:
        """Positions of the first row that its slots and the draft's hold for good: up to its last
        root, which the draft has not read; 0 after other steps used the same slots.
        """
        if not self._starts or self.slots.resets != self._resets:
            return 0
        return self._starts[0]

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
        rows = runner.num_rows(count, len(self._hidden))  # of the pass
        packed = self._pack(roots, rows)
        moved = any(path[-1] != len(path) - 1 for path in self._paths)
        for index, path in enumerate(self._paths):
            # from here on where the new root stands: `packed` still has that of the last one
            self._starts[index] += len(path)
        room = self._key_length(max(self._starts) + self.limits.size + 1)

        if isinstance(runner, FixedShapeRunner):
            # 1.-4. on the device, from fixed buffers to fixed buffers
            logits = self._run_fixed(runner, packed, room, keep_logits=rule is not None)
            # 5. accept, by the argmax or by the logits
            if logits is None:
                accepted = accept_matching(self._choices[:count], self._tree)
            else:
                tokens = self._choices[:count, 1]  # [count, n + 1]
                accepted = accept(rule, tokens, logits[:count], self._tree, generators)
        else:
            # 1.-4. on the device, in exact sizes
            inputs = torch.tensor(packed, device=self._backbone.device)  # [B, 3 + D + 1]
            verified = self._device_step(inputs, room, roots, moved=moved, roots_only=roots_only)
            proposal = verified.proposal
            if verified.branch is not None and self._draft is not None:
                self._draft.observe(self._draft_rows, proposal, verified.branch)
            # 5. accept
            tokens = proposal.tokens[:count]
            accepted = accept(rule, tokens, verified.logits[:count], proposal.tree, generators)

        self._paths = [row.path for row in accepted]
        if self._draft is not None:
            for draft_row, row in zip(self._draft_rows, accepted, strict=True):
                self._draft.extend_row(draft_row, row.tokens[:-1])  # without the next root
        return accepted

    def _pack(self, roots: Sequence[int], rows: int) -> list[list[int]]:
        """Return root, start, number of accepted nodes and the padded path of each row of a pass,
        [rows][3 + D + 1].
        """
        longest = max(len(path) for path in self._paths)
        width = self._runner.path_length(longest, self.limits.depth + 1)
        packed: list[list[int]] = []
        for root, start, path in zip(roots, self._starts, self._paths, strict=True):
            padding = [0] * (width - len(path))
            packed.append([root, start, len(path), *path, *padding])
        while len(packed) < rows:  # rows that are not active
            packed.append([0, 0, 1] + [0] * width)
        return packed

    def _device_step(
        self,
        inputs: Tensor,
        room: int,
        roots: Sequence[int] = (),
        *,
        moved: bool = True,
        roots_only: bool = False,
    ) -> _Verified:
        """Compact, draft, verify and keep. For a runner of fixed shape no shape or address depends
        on lengths or paths.

        Args:
            inputs: packed, long [B, 3 + D + 1].
            room: columns for the rows and their trees.
            roots: on the host, for drafts that look up texts.
            moved: whether an accepted node stands elsewhere than right behind the one before.
        """
        draft = self._draft
        root_tokens = inputs[:, _ROOT]  # [B]
        starts = inputs[:, _START]  # [B], of the last roots
        counts = inputs[:, _COUNT]  # [B]
        path = inputs[:, _PATH:]  # [B, D + 1]
        lengths = starts + counts  # [B], of what is committed: where the new roots stand
        storage = self.slots.storage(room)

        # 1. compact; a draft's slots need it not: `read` writes its accepted positions itself
        if moved and path.shape[1] > 1:
            compact(storage, starts, path)

        # 2. draft
        proposal = Proposal(root_tokens[:, None], self._root)
        nodes: NodeSlots | None = None
        if draft is not None:
            # its tree is known: a draft that runs the backbone's first layers at the nodes writes
            # their keys and values, and the pass begins above them with `proposal.early`
            if draft.fixed_shape and not roots_only:
                nodes = self._place_nodes(self._tree, self._masks, lengths, storage, room)
            step = DraftStep(
                accepted=self._accepted_path(path, counts, starts),
                roots=root_tokens,
                root_list=roots,
                caches=self._draft_caches(room),
                rows=self._draft_rows,
                tree=self._tree,
                nodes=nodes,
                may_stop=not self._runner.is_fixed,
            )
            states = draft.read(step)
            if roots_only:
                draft.skip_guess(step, states)
            else:
                proposal = draft.guess(step, states)

        # 3. verify
        tokens, tree = proposal.pass_inputs()  # [B, n + 1], with branch tokens [B, n + 1 + m]
        if nodes is None:
            nodes = self._place(tree, lengths, storage, room)
        elif tree.size < self._tree.size:  # the draft stopped early
            nodes = nodes.first_nodes(tree.size + 1)
        feats, logits = self._backbone.run_nodes(tokens, nodes, self._needs, proposal.early)
        branch: Tensor | None = None
        if proposal.branch is not None:
            count = proposal.tokens.shape[1]  # n + 1
            outputs = proposal.outputs(logits)  # [B, n + 1 + outputs, V]
            feats = feats.first(count)
            logits = outputs[:, :count]
            branch = outputs[:, count:]

        # 4. keep what the draft reads next
        if draft is not None:
            rows, count = proposal.tokens.shape  # B, n + 1
            self._hidden[:rows, :count] = feats.hidden
            self._choices[:rows, 1, :count] = proposal.tokens
            if self._early is not None and feats.early is not None:
                self._early[:rows, :count] = feats.early
        return _Verified(proposal, logits, branch)

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
        verified = self._device_step(inputs, room)
        rows = len(inputs)
        if logits is not None:
            logits[:rows] = verified.logits
        self._choices[:rows, 0] = next_tokens_of(verified.logits)
        self._choices[:rows, 1] = verified.proposal.tokens  # of plain decoding, too

    def _accepted_path(self, path: Tensor, counts: Tensor, starts: Tensor) -> AcceptedPath:
        """Return the accepted nodes of B rows, with the states that were kept of them."""
        rows = len(path)
        early = self._early
        if early is not None:
            early = early[:rows]
        feats = Features(self._hidden[:rows], early)
        return AcceptedPath(feats, self._choices[:rows, 1], path, counts=counts, starts=starts)

    def _draft_caches(self, room: int) -> list[DraftCache]:
        """Return the slots of the draft's own layers, of which `room` columns are read."""
        last = self._backbone.max_context - 1
        return [DraftCache(slots.storage(room), room, last) for slots in self._draft_slots]

    # Where nodes stand

    def _place(
        self, tree: Tree | RowTrees | TreeAndBranch, lengths: Tensor, storage: Tensor, room: int
    ) -> NodeSlots:
        """Return where the nodes of a tree stand that is not the given one: of plain decoding, or
        one that the draft chose.

        Args:
            lengths: position of the root, long [B].
        """
        backbone = self._backbone
        key_length = room
        longest = max(self._starts)
        if not self._runner.is_fixed:  # it may be smaller than the limit
            key_length = self._key_length(longest + tree.size + 1)
        # 1. the root of a single row in exact sizes sees all columns and needs no mask; compiled
        # programs take one
        is_single = len(lengths) == 1 and storage.shape[2] == 1
        is_exact = not self._runner.is_fixed and key_length == longest + 1
        is_in_window = backbone.window is None or key_length <= backbone.window
        if tree.size == 0 and is_single and is_exact and is_in_window and backbone.compiled is None:
            columns = lengths[:, None]  # [1, 1]
            positions = columns.clamp(max=backbone.max_context - 1)
            return NodeSlots(positions, None, columns, longest, storage, key_length)
        # 2. others get the mask of their tree
        masks = self._root_masks
        if tree is not self._root:
            masks = backbone.node_masks(tree.ancestors, tree.depths)
        return self._place_nodes(tree, masks, lengths, storage, key_length)

    def _place_nodes(
        self,
        tree: Tree | RowTrees | TreeAndBranch,
        masks: Mapping[str, NodeMasks],
        lengths: Tensor,
        storage: Tensor,
        key_length: int,
    ) -> NodeSlots:
        """Return where the nodes of a tree with these masks stand; see `Backbone.place_nodes`."""
        # a single row writes slices, where the host may tell the device the column
        first_column: int | None = None
        is_single = len(self._starts) == 1 and storage.shape[2] == 1
        if is_single and not self._runner.is_fixed:
            first_column = self._starts[0]
        return self._backbone.place_nodes(
            tree.depths, masks, lengths, storage, key_length, first_column
        )

    def _key_length(self, positions: int) -> int:
        """Return how many columns attention reads where `positions` are needed."""
        return self._runner.key_length(positions, self.slots.block)

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
                self._starts = [key_length - nodes - 1] * count
                self._paths = [[0]] * count
                packed = self._pack([0] * count, runner.num_rows(count, len(self._hidden)))
                self._run_fixed(runner, packed, key_length, keep_logits=keep_logits)
        self.reset()
