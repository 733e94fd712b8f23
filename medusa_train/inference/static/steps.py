"""Decoding steps in static buffers: compaction, drafting and verification as one CUDA graph, one
transfer each way.

    host                       device, replayed
    ----                       ----------------
    roots, accepted paths --->  compact the cache by the paths; the draft reads them and proposes trees below the roots;
                                the backbone verifies them; argmax
    tokens of all nodes  <---   and their successors

The acceptance rule runs on the host's copy (greedy), or on the logits, which stay in a static
buffer. There is one graph per tree, number of rows (1, or 2, 4, 8, ...) and number of columns that
attention reads (see `StaticCache`). Without a GPU the same steps run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from medusa_train.inference.accept import Accepted, Rule, accept, accept_matching, next_tokens_of
from medusa_train.inference.static.cache import SlotPass, StaticCache, move_columns
from medusa_train.inference.static.drafts import (
    AcceptedNodes,
    FixedShapeDraft,
    fixed_shape_draft,
    has_fixed_shape,
)
from medusa_train.inference.static.graphs import Replayable, StepRunner
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Proposal, Proposer, at_positions
from medusa_train.models.features import FINAL_STATES, Features, FeatureSpec
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.masks import MaskTable
from medusa_train.trees.tree import Tree

_log = logging.getLogger(__name__)

#: Columns of the packed inputs before the path: the root, its position in the last tree, and the
# length of the path.
_ROOT, _START, _COUNT, _PATH = 0, 1, 2, 3


def supports_static_steps(backbone: Backbone, draft: Proposer | None) -> bool:
    """Return whether steps run in static buffers; a log line names a draft that does not support
    them.
    """
    if backbone.step_runner is None:
        return False
    if draft is None or has_fixed_shape(draft):
        return True
    _log.info(
        "%s chooses the shape of its trees, so its steps run without CUDA graphs",
        type(draft).__name__,
    )
    return False


def new_static_steps(
    backbone: Backbone, draft: Proposer | None, tree: Tree, cache: StaticCache
) -> StaticSteps:
    """Return the steps of a draft that `supports_static_steps`; None: plain decoding."""
    fixed = None if draft is None else fixed_shape_draft(draft, backbone, tree, cache)
    return StaticSteps(backbone, backbone.step_runner or StepRunner(), fixed, tree, cache)


class StaticSteps:
    """The steps of one or several rows with one tree, with buffers and graphs that are kept between
    answers.

    The active rows are the first ones of all buffers. A step runs over 2, 4, 8, ... of the
    allocated rows, so that few graphs are captured; rows that are not active read their first
    position, and what they write is ignored. A pass over a single row needs memory for a single
    row, which the programs compiled for it expect.

    Args:
        runner: runs or replays the steps. draft: for this tree and this cache; None for plain
            decoding.
        tree: with its tensors on the backbone's device; empty without a draft. cache: the
            backbone's.
    """

    def __init__(
        self,
        backbone: Backbone,
        runner: StepRunner,
        draft: FixedShapeDraft | None,
        tree: Tree,
        cache: StaticCache,
    ) -> None:
        self.cache = cache
        self._backbone = backbone
        self._runner = runner
        self._draft = draft
        self._needs = FINAL_STATES if draft is None else draft.needs
        self._tree = tree
        self._graphs: dict[Hashable, Replayable] = {}
        self._masks = {
            kind: MaskTable(
                tree.ancestors,
                tree.depths,
                backbone.window if kind == "sliding_attention" else None,
                backbone.dtype,
            )
            for kind in sorted(set(backbone.layer_types))
        }
        self._nodes = torch.arange(tree.size + 1, device=backbone.device)
        self._starts: list[int] = []  # of each active row: position of the root of its last tree
        self._paths: list[list[int]] = []  # and its accepted nodes
        self._allocate(cache.rows)

    def _allocate(self, rows: int) -> None:
        backbone, nodes = self._backbone, self._tree.size + 1
        device, dtype = backbone.device, backbone.dtype
        # pinned, so that the copy to the device is asynchronous
        self._host = torch.zeros(
            rows,
            _PATH + self._tree.max_depth + 1,
            dtype=torch.long,
            pin_memory=device.type == "cuda",
        )
        self._inputs = torch.zeros_like(self._host, device=device)
        self._hidden = torch.zeros(rows, nodes, backbone.hidden_size, dtype=dtype, device=device)
        self._early = (
            self._hidden.repeat(1, 1, len(self._needs.early)) if self._needs.early else None
        )
        self._logits = torch.zeros(rows, nodes, backbone.vocab_size, dtype=dtype, device=device)
        # see `accept_matching`
        self._choices = torch.zeros(rows, 2, nodes, dtype=torch.long, device=device)

    def reset(self) -> None:
        """Drop all rows, and keep the memory."""
        self._starts, self._paths = [], []
        for cache in self._caches:
            cache.reset()

    def make_room(self, rows: int, positions: int) -> None:
        """Allocate memory for `rows` active rows of up to `positions` positions, and move what
        there is.
        """
        before = self._row_states
        if self._starts and rows > len(self._host):
            rows = _power_of_two(rows)  # rows that join one by one move the others a few times only
        for cache in self._caches:
            cache.make_room(rows, positions)
        if rows > len(self._host):
            self._graphs.clear()
            self._allocate(rows)
            for new, old in zip(self._row_states, before, strict=True):
                new[: len(old)] = old

    def prompt_cache(self, rows: int) -> TreeCache:
        """Return the cache for the prefill of further rows; `append_rows` follows.

        There must be room for them.
        """
        return self.cache.prompt_cache(len(self._starts), rows)

    def append_rows(self, feats: Features, tokens: Tensor, lengths: Sequence[int]) -> None:
        """Add the rows of `prompt_cache` after their prefill, see `Proposer.start`.

        The last token of a prompt counts as a verified tree, so that the first step is like all
        others.
        """
        first = len(self._starts)
        if self._draft is not None:
            self._draft.start(feats, tokens, first)
        rows, last = slice(first, first + len(lengths)), [length - 1 for length in lengths]
        self._hidden[rows, 0] = at_positions(feats.hidden, last)
        self._choices[rows, 1, 0] = at_positions(tokens, last)
        if self._early is not None and feats.early is not None:
            self._early[rows, 0] = at_positions(feats.early, last)
        self._starts += last
        self._paths += [[0] for _ in last]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows only, where row i becomes the former row `rows[i]` >= i, see
        `BatchCache.select_rows`.
        """
        for row, source in enumerate(rows):
            if source == row:
                continue
            for state in self._row_states:
                state[row] = state[source]
            for cache in self._caches:
                cache.copy_row(source, row, self._starts[source] + self._tree.size + 1)
        self._starts = [self._starts[row] for row in rows]
        self._paths = [self._paths[row] for row in rows]

    def step(
        self, roots: Sequence[int], rule: Rule, generators: Sequence[torch.Generator] | None
    ) -> list[Accepted]:
        """Verify a tree below the root of each row and accept a path by `rule`, see `accept`."""
        count = len(roots)
        rows = min(_power_of_two(max(count, 2)), len(self._host))
        unused = [[0, 0, 1, *[0] * (self._tree.max_depth + 1)]] * (rows - count)
        self._host[:rows].copy_(
            torch.tensor([*map(self._pack, roots, self._starts, self._paths), *unused])
        )
        self._inputs[:rows].copy_(self._host[:rows], non_blocking=True)
        self._starts = [
            start + len(path) for start, path in zip(self._starts, self._paths, strict=True)
        ]
        key_length = self.cache.key_length(max(self._starts) + self._tree.size + 1)
        columns = [cache.storage(key_length).shape[4] for cache in self._caches]
        self._runner.run(
            self._graphs, (rows, key_length, *columns), lambda: self._run(rows, key_length)
        )
        if rule is None:
            accepted = accept_matching(self._choices[:count], self._tree)
        else:
            accepted = accept(
                rule, self._choices[:count, 1], self._logits[:count], self._tree, generators
            )
        self._paths = [one.path for one in accepted]
        return accepted

    def capture(self, rows: int, positions: int) -> None:
        """Capture the steps of up to `rows` rows of up to `positions` positions, so that no answer
        waits for it.

        Drops all rows. Does nothing before a first answer, which allocates the memory.
        """
        if not all(cache.is_allocated for cache in self._caches):
            return
        nodes, end = self._tree.size + 1, min(self.cache.key_length(positions), self.cache.capacity)
        for cache in self._caches:
            cache.settle(end)
        self._graphs.clear()  # of the other buckets
        counts = {min(1 << power, rows) for power in range(min(rows - 1, 1), rows.bit_length() + 1)}
        # the memory of a smaller step fits into a larger one's
        for count in sorted(counts, reverse=True):
            for key_length in reversed(
                range(self.cache.key_length(nodes + 1), end + 1, self.cache.block)
            ):
                self._starts, self._paths = [key_length - nodes - 1] * count, [[0]] * count
                self.step([0] * count, None, None)
        self.reset()

    @property
    def _caches(self) -> list[StaticCache]:
        return [self.cache, *(() if self._draft is None else self._draft.caches)]

    @property
    def _row_states(self) -> list[Tensor]:
        """What a step reads of the step before, by row."""
        return [self._hidden, self._choices, *(() if self._early is None else (self._early,))]

    def _pack(self, root: int, start: int, path: list[int]) -> list[int]:
        return [root, start, len(path), *path, *[0] * (self._tree.max_depth + 1 - len(path))]

    def _run(self, rows: int, key_length: int) -> None:
        """Run the part on the device, in which no shape or address depends on the lengths or on the
        paths.
        """
        inputs, hidden, choices = self._inputs[:rows], self._hidden[:rows], self._choices[:rows]
        early = None if self._early is None else self._early[:rows]
        roots, starts, counts, path = (
            inputs[:, _ROOT],
            inputs[:, _START],
            inputs[:, _COUNT],
            inputs[:, _PATH:],
        )
        lengths = starts + counts
        storage = self.cache.storage(key_length)
        if self._tree.size:
            move_columns(storage, starts, path)
        nodes = SlotPass(
            # nodes past the context are never accepted, but the model's position table must cover
            # their ids
            positions=(lengths[:, None] + self._tree.depths).clamp(
                max=self._backbone.max_context - 1
            ),
            masks={kind: table.at(lengths, key_length) for kind, table in self._masks.items()},
            slots=lengths[:, None] + self._nodes,
            storage=storage,
            key_length=key_length,
        )
        proposal = Proposal(roots[:, None], self._tree)
        if self._draft is not None:
            accepted = AcceptedNodes(
                Features(hidden, early), choices[:, 1], path, counts=counts, starts=starts
            )
            proposal = self._draft.propose(accepted, roots, nodes)
        feats, logits = run_slots(
            self._backbone, proposal.tokens, nodes, self._needs, proposal.early
        )
        hidden.copy_(feats.hidden)
        if early is not None and feats.early is not None:
            early.copy_(feats.early)
        self._logits[:rows].copy_(logits)
        choices[:, 0] = next_tokens_of(logits)
        choices[:, 1] = proposal.tokens


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def run_slots(
    backbone: Backbone,
    tokens: Tensor,
    nodes: SlotPass,
    need: FeatureSpec = FINAL_STATES,
    early: Tensor | None = None,
) -> tuple[Features, Tensor]:
    """Return features and logits [B, n + 1, V] of `tokens`, long [B, n + 1], see `Backbone.run`.

    With `early`, [B, n + 1, d], keys and values of the layers of `need` are written already.
    """
    if early is not None:
        split = backbone.split_at(*need.early)
        feats = split.run_rest(early, split.with_masks(nodes.positions, nodes.masks), nodes.cache())
        return feats, backbone.logits(feats.hidden)
    same_everywhere = len(nodes.masks) == 1 or backbone.window is None
    mask = next(iter(nodes.masks.values()))
    compiled = backbone.compiled_for(need)
    if compiled is not None and same_everywhere and compiled.covers(*tokens.shape):
        slots, mask = (
            (nodes.slots[0], mask) if len(tokens) == 1 else (nodes.slots, mask.contiguous())
        )
        # a view of the inputs has strides that the program was not compiled for
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        return compiled(tokens, nodes.positions, mask, slots, nodes.storage)
    with backbone.masked_attention(enabled=True), backbone.early_states(need) as captured:
        out = backbone.body(
            input_ids=tokens,
            attention_mask=mask if same_everywhere else dict(nodes.masks),
            position_ids=nodes.positions,
            past_key_values=nodes.cache(),
            use_cache=True,
        )
    early = torch.cat(captured, dim=-1) if captured else None
    return Features(out.last_hidden_state, early), backbone.logits(out.last_hidden_state)
