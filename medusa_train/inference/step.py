"""One decoding step of one or several rows: what happens between two tokens.

    host                          device
    ----                          ------
    roots, accepted paths  --->   1. compact: accepted nodes move behind the committed positions
                                  2. draft:   it reads them, and guesses a tree below the roots
                                  3. verify:  one pass of the backbone over all nodes
                                  4. keep:    states and tokens of the nodes, for the next step
    accepted path, next root <--  5. accept:  by the backbone's logits at the nodes

Plain decoding is the empty tree. Keys and values stand in `trees.slots`; `inference.runners` says
with which sizes a step runs, and whether it is replayed as a CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.inference.accept import Accepted, Rule, accept, accept_matching, next_tokens_of
from medusa_train.inference.runners import EagerRunner, Replayable, StepRunner, power_of_two
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
from medusa_train.trees.lookahead_branch import TreeAndBranch
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.slot_caches import NodeSlots, prompt_cache
from medusa_train.trees.slots import Slots, compact
from medusa_train.trees.tree import Tree

_log = logging.getLogger(__name__)

#: Columns of the packed inputs before the path: the root, its position in the last tree, and the
#: length of the path.
_ROOT, _START, _COUNT, _PATH = 0, 1, 2, 3


def proposal_limits(draft: Proposer | None, tree: Tree) -> Limits:
    """Return the limits of what `draft` proposes for `tree`; of size 0 without a draft."""
    return Limits(0, 0) if draft is None else draft.limits(tree)


def effective_draft(draft: Proposer | None, tree: Tree) -> Proposer | None:
    """Return the draft; None where it has nothing to propose: plain decoding computes no head."""
    return draft if proposal_limits(draft, tree).size else None


def addresses(module: torch.nn.Module) -> list[int]:
    """Return where the parameters and buffers of a module lie."""
    found = []
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                found.append(tensor.data_ptr())
    return found


def runner_of(backbone: Backbone, draft: Proposer | None) -> EagerRunner | StepRunner:
    """Return what runs the steps with a draft; a log line names one whose steps cannot be replayed
    as CUDA graphs.
    """
    fixed_shape = draft is None or draft.fixed_shape
    runner: StepRunner | None = backbone.step_runner
    if runner is not None and fixed_shape:
        return runner
    if runner is not None:
        name = type(draft).__name__
        _log.info("%s chooses the shape of its trees: its steps run without CUDA graphs", name)
    return EagerRunner(backbone, fixed_shape=fixed_shape)


@dataclass(frozen=True)
class _Verified:
    """The nodes of B rows after their pass.

    Attributes:
        proposal: what was verified. feats: states of its nodes [B, n + 1, d].
        logits: of the nodes, [B, n + 1, V]. branch: at the outputs of its branch tokens.
    """

    proposal: Proposal
    feats: Features
    logits: Tensor
    branch: Tensor | None = None


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
        self.slots = slots
        self._backbone = backbone
        self._draft = effective_draft(draft, tree)
        self._tree = tree if self._draft is not None else Tree.empty().to(backbone.device)
        self.limits = proposal_limits(self._draft, self._tree)
        self._needs = FINAL_STATES if self._draft is None else self._draft.needs
        self._runner = runner_of(backbone, self._draft)
        self._graphs: dict[Hashable, Replayable] = {}
        num_caches = 0 if self._draft is None else self._draft.num_caches
        self._draft_slots = [slots.like(1) for _ in range(num_caches)]
        self._resets = slots.resets
        self._root = Tree.empty().to(backbone.device)
        # computed here: it copies from the host, which is not possible in a CUDA graph
        _ = self._tree.by_level
        # of the given tree, and of the root alone
        self._masks = backbone.node_masks(self._tree.ancestors, self._tree.depths)
        self._root_masks = backbone.node_masks(self._root.ancestors, self._root.depths)
        self._prompts: tuple[Features, Tensor, Sequence[list[int]], int] | None = None
        self._weights: list[int] = []  # addresses that the graphs read
        # of each active row: position of the root of its last tree, the nodes that were accepted,
        # and what the draft keeps of it on the host
        self._starts: list[int] = []
        self._paths: list[list[int]] = []
        self._rows: list[Any] = []
        self._allocate(slots.rows)

    def _allocate(self, rows: int) -> None:
        """Allocate what a step reads of the step before, for `rows` rows."""
        backbone = self._backbone
        device = backbone.device
        nodes = self.limits.size + 1
        self._hidden = torch.zeros(
            rows, nodes, backbone.hidden_size, dtype=backbone.dtype, device=device
        )
        self._early: Tensor | None = None
        if self._needs.early:
            self._early = self._hidden.repeat(1, 1, len(self._needs.early))
        # following tokens of the nodes and their own, see `accept_matching`
        self._choices = torch.zeros(rows, 2, nodes, dtype=torch.long, device=device)
        if not self._runner.is_fixed:
            return
        # of all nodes, for rules that read more than the argmax; allocated when one first does
        self._logits: Tensor | None = None
        # pinned, so that the copy to the device is asynchronous
        width = _PATH + self.limits.depth + 1
        pinned = device.type == "cuda"
        self._host = torch.zeros(rows, width, dtype=torch.long, pin_memory=pinned)
        self._inputs = torch.zeros_like(self._host, device=device)

    # Rows join and leave

    def reset(self, known: int = 0) -> None:
        """Drop all rows, and keep the memory.

        Args:
            known: positions of the first row, at most `committed`, that a `prefill` continues.
        """
        self._starts = []
        self._paths = []
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
        if self._starts and rows > allocated:
            # rows that join one by one move the others a few times only
            rows = power_of_two(rows)
        for slots in self._all_slots:
            slots.make_room(rows, self._key_length(positions))
        if rows > allocated:
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
        longest = max(map(len, prompts))
        padded = [prompt[known:] + [0] * (longest - len(prompt)) for prompt in prompts]
        tokens = torch.tensor(padded, device=device)  # [B, T]
        cache = prompt_cache(self.slots, len(self._starts), len(prompts), known)
        feats = self._backbone.run(tokens, cache=cache, need=self._needs)
        self._prompts = (feats, tokens, prompts, known)
        # accepting a tree without draft tokens gives the token after its root, here the prompt's
        # last token
        last = [len(prompt) - known - 1 for prompt in prompts]
        roots = at_positions(tokens, last)[:, None]  # [B, 1]
        logits = self._backbone.logits(at_positions(feats.hidden, last))[:, None]  # [B, 1, V]
        return [row.tokens[-1] for row in accept(rule, roots, logits, self._root, generators)]

    def start_draft(self) -> None:
        """Add the rows of the last `prefill`, and let the draft read their prompts."""
        assert self._prompts is not None
        self.add_rows(*self._prompts)
        self._prompts = None

    def add_rows(
        self, feats: Features, tokens: Tensor, prompts: Sequence[list[int]], known: int = 0
    ) -> None:
        """Add rows whose prompts are in the slots, and let the draft read them.

        The last token of a prompt counts as a verified tree without nodes, so that the first step
        is like all others.

        Args:
            feats: of the prompts behind their first `known` positions, [B, T, d]. tokens: the same,
                long [B, T], padded behind.
        """
        first = len(self._starts)
        count = len(prompts)
        if self._draft is not None:
            caches = [prompt_cache(slots, first, count, known) for slots in self._draft_slots]
            self._draft.prefill(feats, tokens, caches)
            self._rows += [self._draft.new_row(prompt) for prompt in prompts]
        rows = slice(first, first + count)
        last = [len(prompt) - known - 1 for prompt in prompts]
        self._hidden[rows, 0] = at_positions(feats.hidden, last)
        self._choices[rows, 1, 0] = at_positions(tokens, last)
        if self._early is not None and feats.early is not None:
            self._early[rows, 0] = at_positions(feats.early, last)
        self._starts += [len(prompt) - 1 for prompt in prompts]
        self._paths += [[0] for _ in prompts]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows only: row i becomes the former row `rows[i]` >= i."""
        for row, source in enumerate(rows):
            if source == row:
                continue
            for state in self._row_states:
                state[row] = state[source]
            for slots in self._all_slots:
                # the nodes of the last tree are not compacted yet
                slots.copy_row(source, row, self._starts[source] + self.limits.size + 1)
        self._starts = [self._starts[row] for row in rows]
        self._paths = [self._paths[row] for row in rows]
        if self._rows:
            self._rows = [self._rows[row] for row in rows]

    @property
    def committed(self) -> int:
        """Positions of the first row that its slots and the draft's hold for good; 0 after other
        steps used the same slots.
        """
        is_ours = self.slots.resets == self._resets
        return self._starts[0] if self._starts and is_ours else 0

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
            roots: the next token of each row. roots_only: verify no draft tokens.
        """
        runner = self._runner
        count = len(roots)
        rows = runner.num_rows(count, len(self._hidden))
        packed = self._pack(roots, rows)
        committed = [
            start + len(path) for start, path in zip(self._starts, self._paths, strict=True)
        ]
        room = self._key_length(max(committed) + self.limits.size + 1)
        moved = any(path[-1] != len(path) - 1 for path in self._paths)
        self._starts = committed

        if isinstance(runner, StepRunner):
            # 1.-4. on the device, from fixed buffers to fixed buffers
            logits = self._run_fixed(runner, packed, room, keep_logits=rule is not None)
            # 5. accept, on the host's copy or on the logits
            if logits is None:
                accepted = accept_matching(self._choices[:count], self._tree)
            else:
                tokens = self._choices[:count, 1]
                accepted = accept(rule, tokens, logits[:count], self._tree, generators)
        else:
            inputs = torch.tensor(packed, device=self._backbone.device)
            verified = self._device_step(inputs, room, roots, moved=moved, roots_only=roots_only)
            proposal = verified.proposal
            if verified.branch is not None and self._draft is not None:
                self._draft.observe(self._rows, proposal, verified.branch)
            tokens = proposal.tokens[:count]
            accepted = accept(rule, tokens, verified.logits[:count], proposal.tree, generators)

        self._paths = [row.path for row in accepted]
        if self._draft is not None:
            for row, (_, new_tokens) in zip(self._rows, accepted, strict=True):
                self._draft.extend_row(row, new_tokens[:-1])
        return accepted

    def _pack(self, roots: Sequence[int], rows: int) -> list[list[int]]:
        """Return root, start, number of accepted nodes and the padded path of each row of a pass."""
        longest = max(map(len, self._paths))
        width = self._runner.path_length(longest, self.limits.depth + 1)
        packed = []
        for root, start, path in zip(roots, self._starts, self._paths, strict=True):
            packed.append([root, start, len(path), *path, *[0] * (width - len(path))])
        unused = [0, 0, 1, *[0] * width]
        return packed + [unused] * (rows - len(packed))

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
            inputs: packed, long [B, 3 + D + 1]. room: columns for the rows and their trees.
            roots: on the host, for drafts that look up texts.
            moved: whether an accepted node stands elsewhere than right behind the one before.
        """
        root_tokens = inputs[:, _ROOT]  # [B]
        starts = inputs[:, _START]
        counts = inputs[:, _COUNT]
        path = inputs[:, _PATH:]  # [B, D + 1]
        lengths = starts + counts
        storage = self.slots.storage(room)

        # 1. compact
        if moved and path.shape[1] > 1:
            compact(storage, starts, path)

        # 2. draft
        proposal = Proposal(root_tokens[:, None], self._root)
        nodes: NodeSlots | None = None
        if self._draft is not None:
            if self._draft.fixed_shape and not roots_only:
                depths = self._tree.depths
                nodes = self._backbone.place_nodes(
                    depths, self._masks, lengths, storage, room, self._first_column(storage)
                )
            step = DraftStep(
                accepted=self._accepted(path, counts, starts),
                roots=root_tokens,
                root_list=roots,
                caches=self._draft_caches(room),
                rows=self._rows,
                tree=self._tree,
                nodes=nodes,
                may_stop=not self._runner.is_fixed,
            )
            states = self._draft.read(step)
            if roots_only:
                self._draft.skip_guess(step, states)
            else:
                proposal = self._draft.guess(step, states)

        # 3. verify
        tokens, tree = proposal.rows()
        if nodes is None:
            nodes = self._place(tree, lengths, storage, room)
        elif tree.size < self._tree.size:  # the draft stopped early
            nodes = nodes.first_nodes(tree.size + 1)
        feats, logits = self._backbone.run_nodes(tokens, nodes, self._needs, proposal.early)
        branch = None
        if proposal.branch is not None:
            count = proposal.tokens.shape[1]
            outputs = proposal.outputs(logits)  # [B, nodes, then outputs of the branch, V]
            feats = feats.first(count)
            logits = outputs[:, :count]
            branch = outputs[:, count:]

        # 4. keep what the draft reads next
        if self._draft is not None:
            rows, count = proposal.tokens.shape
            self._hidden[:rows, :count] = feats.hidden
            self._choices[:rows, 1, :count] = proposal.tokens
            if self._early is not None and feats.early is not None:
                self._early[:rows, :count] = feats.early
        return _Verified(proposal, feats, logits, branch)

    def _run_fixed(
        self, runner: StepRunner, packed: list[list[int]], room: int, *, keep_logits: bool
    ) -> Tensor | None:
        """Run 1. to 4. from fixed buffers to fixed buffers, and return that of the logits.

        Args:
            packed: inputs of all rows of the pass, see `_pack`.
            keep_logits: a greedy rule needs none: those of 16 rows of 64 nodes over 152,000 tokens
                are 311 MB, which each step would copy.
        """
        rows = len(packed)
        self._host[:rows].copy_(torch.tensor(packed))
        self._inputs[:rows].copy_(self._host[:rows], non_blocking=True)
        inputs = self._inputs[:rows]
        if keep_logits and self._logits is None:
            shape = (*self._hidden.shape[:2], self._backbone.vocab_size)
            self._logits = self._hidden.new_zeros(shape)
        logits = self._logits if keep_logits else None
        columns = [slots.storage(room).shape[4] for slots in self._draft_slots]
        key = (rows, room, self.slots.storage(room).shape[4], *columns, keep_logits)
        runner.run(self._graphs, key, lambda: self._fixed_step(inputs, room, logits))
        return logits

    def _fixed_step(self, inputs: Tensor, room: int, logits: Tensor | None) -> None:
        """Run a step that leaves its results in fixed buffers; `logits` of the nodes if given."""
        verified = self._device_step(inputs, room)
        rows = len(inputs)
        if logits is not None:
            logits[:rows] = verified.logits
        self._choices[:rows, 0] = next_tokens_of(verified.logits)
        self._choices[:rows, 1] = verified.proposal.tokens

    def _accepted(self, path: Tensor, counts: Tensor, starts: Tensor) -> AcceptedPath:
        rows = len(path)
        early = None if self._early is None else self._early[:rows]
        feats = Features(self._hidden[:rows], early)
        return AcceptedPath(feats, self._choices[:rows, 1], path, counts=counts, starts=starts)

    def _draft_caches(self, room: int) -> list[DraftCache]:
        last = self._backbone.max_context - 1
        return [DraftCache(slots.storage(room), room, last) for slots in self._draft_slots]

    def _place(
        self, tree: Tree | RowTrees | TreeAndBranch, lengths: Tensor, storage: Tensor, room: int
    ) -> NodeSlots:
        """Return where the nodes of a tree stand that is not the given one: of plain decoding, or
        one that the draft chose.
        """
        backbone = self._backbone
        size = tree.size + 1
        longest = max(self._starts)
        key_length = room if self._runner.is_fixed else self._key_length(longest + size)
        if size == 1 and self._sees_all(len(lengths), storage, longest, key_length):
            columns = lengths[:, None]
            positions = columns.clamp(max=backbone.max_context - 1)
            return NodeSlots(positions, None, columns, longest, storage, key_length)
        if tree is self._root:
            masks = self._root_masks
        else:
            masks = backbone.node_masks(tree.ancestors, tree.depths)
        first = self._first_column(storage)
        return backbone.place_nodes(tree.depths, masks, lengths, storage, key_length, first)

    def _first_column(self, storage: Tensor) -> int | None:
        """Return the column of a single row's root, whose nodes are written as a slice; None where
        columns are given by tensors.
        """
        single = len(self._starts) == 1 and storage.shape[2] == 1
        return self._starts[0] if single and not self._runner.is_fixed else None

    def _key_length(self, positions: int) -> int:
        """Return how many columns attention reads where `positions` are needed."""
        return self._runner.key_length(positions, self.slots.block)

    def _sees_all(self, rows: int, storage: Tensor, length: int, key_length: int) -> bool:
        """Return whether the root needs no mask: that of a single row, in exact sizes."""
        window = self._backbone.window
        single = rows == 1 and storage.shape[2] == 1
        exact = not self._runner.is_fixed and key_length == length + 1
        compiled = self._backbone.compiled is not None  # whose programs take a mask
        return single and exact and not compiled and (window is None or key_length <= window)

    # CUDA graphs

    def _drop_stale_graphs(self) -> None:
        """Forget what was captured if a weight has moved since: a replay would read freed memory.

        Weights move by `.to()`, by merging an adapter, and where others are assigned.
        """
        if not self._runner.is_fixed:
            return
        weights = addresses(self._backbone.model)
        if isinstance(self._draft, torch.nn.Module):
            weights += addresses(self._draft)
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
        if not isinstance(runner, StepRunner) or not all(
            slots.is_allocated for slots in self._all_slots
        ):
            return
        nodes = self._tree.size + 1
        end = min(self._key_length(positions), self.slots.capacity)
        for slots in self._all_slots:
            slots.settle(end)
        self._graphs.clear()  # of the other buffers
        counts = {min(1 << power, rows) for power in range(min(rows - 1, 1), rows.bit_length() + 1)}
        # the memory of a smaller step fits into a larger one's
        for count in sorted(counts, reverse=True):
            for key_length in reversed(
                range(self._key_length(nodes + 1), end + 1, self.slots.block)
            ):
                self._starts = [key_length - nodes - 1] * count
                self._paths = [[0]] * count
                packed = self._pack([0] * count, runner.num_rows(count, len(self._hidden)))
                self._run_fixed(runner, packed, key_length, keep_logits=keep_logits)
        self.reset()

    @property
    def is_replayed(self) -> bool:
        """Whether steps have fixed shapes, which CUDA graphs replay."""
        return self._runner.is_fixed

    @property
    def _all_slots(self) -> list[Slots]:
        return [self.slots, *self._draft_slots]

    @property
    def _row_states(self) -> list[Tensor]:
        """What a step reads of the step before, by row."""
        states = [self._hidden, self._choices]
        return states if self._early is None else [*states, self._early]
