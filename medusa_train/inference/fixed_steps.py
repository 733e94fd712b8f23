"""Decoding steps of fixed shape, which CUDA graphs replay.

A replay repeats the same kernels on the same addresses (`inference.cuda_graphs`), so nothing in
these steps depends on the rows, and the host never waits for the device:

    rows       2, 4, 8, ... in a pass; inactive rows compute on dummy data
    paths      padded to the depth of the tree plus 1, and always compacted
    columns    whole blocks of the KV cache
    tree       the draft always fills the whole tree
    inputs     uploaded to a fixed buffer before the step
    results    left in fixed buffers: the argmax at every node, and logits only for rules that read
               them

So few graphs are captured.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

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
from medusa_train.inference.cuda_graphs import FixedShapeRunner, Replayable, weight_addresses
from medusa_train.inference.step import (
    RowState,
    Steps,
    StepShape,
    power_of_two,
    proposal_limits,
)
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.rounding import round_up
from medusa_train.trees.kv_cache import COLUMNS, KVCache
from medusa_train.trees.tree import Tree

_log = logging.getLogger(__name__)


def new_steps(
    target_model: TargetModel, draft: Proposer | None, tree: Tree, kv_cache: KVCache
) -> Steps:
    """Return steps of fixed shape if the target model's steps are replayed and the draft fills the
    tree that it is given; otherwise plain `Steps`. Arguments as in `Steps`.
    """
    runner: FixedShapeRunner | None = target_model.step_runner
    if runner is None:
        return Steps(target_model, draft, tree, kv_cache)
    if draft is not None and not draft.fixed_shape and proposal_limits(draft, tree).size > 0:
        name = type(draft).__name__
        _log.info("%s chooses the shape of its trees: its steps run without CUDA graphs", name)
        return Steps(target_model, draft, tree, kv_cache)
    return FixedShapeSteps(target_model, draft, tree, kv_cache, runner)


class FixedShapeSteps(Steps):
    """`Steps` from fixed buffers to fixed buffers, which `runner` may replay.

    Buffers on the device have a row for each allocated row. Those for inputs are [rows, 3 + D + 1],
    see `Steps`; choices are [rows, 2, n + 1], see `accept_matching`; logits are [rows, n + 1, V].

    Args:
        target_model, draft, tree, kv_cache: see `Steps`; the draft must have a `fixed_shape`.
        runner: runs the steps.
    """

    def __init__(
        self,
        target_model: TargetModel,
        draft: Proposer | None,
        tree: Tree,
        kv_cache: KVCache,
        runner: FixedShapeRunner,
    ) -> None:
        self._runner = runner
        self._graphs: dict[Hashable, Replayable] = {}  # the captured steps
        self._weights: list[int] = []  # addresses that they read
        super().__init__(target_model, draft, tree, kv_cache)

    def _allocate(self, rows: int) -> None:
        self._graphs.clear()
        super()._allocate(rows)
        device = self._target_model.device
        shape = (rows, 3 + self.limits.depth + 1)
        # in pinned memory, so that the upload is asynchronous
        self._pinned = torch.zeros(shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self._packed = torch.zeros(shape, dtype=torch.long, device=device)
        self._choices = torch.zeros(rows, 2, self.limits.size + 1, dtype=torch.long, device=device)
        self._logits: Tensor | None = None  # allocated once a rule reads them

    def _shape(self) -> StepShape:
        # at least 2 rows, as in compiled passes, unless memory is allocated for one row
        rows = min(max(power_of_two(len(self._rows)), 2), self._allocated_rows)
        depth = self.limits.depth
        return StepShape(
            rows=rows,
            path_length=depth + 1,
            num_columns=self._columns_for(self.limits.size),
            has_gaps=depth > 0,  # some path may have
            first_column=None,  # the host would choose the column of the captured step
            may_stop=False,
        )

    def _key_length(self, positions: int) -> int:
        return round_up(positions, self.kv_cache.block)

    def _run(
        self,
        packed: list[list[int]],
        shape: StepShape,
        last_tokens: Sequence[int],
        rule: AcceptanceRule,
        generators: Sequence[torch.Generator] | None,
        skip_draft: bool,
    ) -> list[Accepted]:
        # 1.-4.
        self._replay(packed, shape, rule)
        # 5. accept; a pass may have more rows after the active ones
        active = len(self._rows)
        choices = self._choices[:active]  # [active, 2, n + 1]
        if self._logits is None or isinstance(rule, Greedy):
            return accept_matching(choices, self._tree)
        return accept(rule, choices[:, NODE_TOKEN], self._logits[:active], self._tree, generators)

    def _replay(self, packed_rows: list[list[int]], shape: StepShape, rule: AcceptanceRule) -> None:
        """Run the stages 1 to 4, by replaying them if they were captured, and leave the results in
        the first rows of the buffers for choices and logits.
        """
        count = shape.rows  # B
        # the greedy rule needs no logits. Copying them costs 311 MB per step for 16 rows of 64 nodes
        # and a vocabulary of 152,000 tokens
        keep_logits = not isinstance(rule, Greedy)
        if keep_logits and self._logits is None:
            self._logits = self._states.final.new_zeros(
                *self._tokens.shape, self._target_model.vocab_size
            )
        # 1. the upload, by way of pinned memory. The previous upload from it is complete, because
        # accepting that step waited for the device
        self._pinned[:count].copy_(torch.tensor(packed_rows))
        packed = self._packed[:count]  # [B, 3 + D + 1]
        packed.copy_(self._pinned[:count], non_blocking=True)
        # 2. give the KV caches enough columns now, because a captured step must not enlarge them
        buffers = [cache.storage(shape.num_columns) for cache in self._all_caches]

        # 3. the step. A graph is bound to addresses, which change with the columns of a buffer
        def step() -> None:
            proposal, logits = self._device_step(packed, shape)
            if keep_logits and self._logits is not None:
                self._logits[:count] = logits
            self._choices[:count, TARGET_ARGMAX] = next_tokens_of(logits)
            self._choices[:count, NODE_TOKEN] = proposal.tokens

        columns = [buffer.shape[COLUMNS] for buffer in buffers]
        key = (shape.rows, shape.num_columns, *columns, keep_logits)
        self._runner.run(self._graphs, key, step)

    # What was captured

    def prefill(
        self,
        prompts: Sequence[list[int]],
        rule: AcceptanceRule = Greedy(),
        generators: Sequence[torch.Generator] | None = None,
        num_cached: int = 0,
    ) -> list[int]:
        """See `Steps.prefill`. Drop the captured graphs if a weight has moved since: a replay would
        read freed memory.

        Weights move by `.to()`, by merging an adapter, or by assigning new ones.
        """
        weights = weight_addresses(self._target_model.model)
        if isinstance(self._draft, torch.nn.Module):
            weights += weight_addresses(self._draft)
        if weights != self._weights:
            self._graphs.clear()
        self._weights = weights
        return super().prefill(prompts, rule, generators, num_cached)

    def capture(self, rows: int, positions: int, rule: AcceptanceRule) -> None:
        """Capture the steps of up to `rows` rows of up to `positions` positions, so that no answer
        waits for it.

        Drops all rows. Does nothing before a first answer, which allocates the memory.

        Args:
            rows: largest number of rows.
            positions: largest number of positions of a row.
            rule: acceptance rule.
        """
        if not all(cache.is_allocated for cache in self._all_caches):
            return
        # 1. one buffer for all lengths; graphs that were captured for other buffers are useless
        end = min(self._key_length(positions), self.kv_cache.capacity)
        for cache in self._all_caches:
            cache.settle(end)
        self._graphs.clear()
        # 2. a step of each size, with the trees in the last columns. The largest comes first,
        # because a smaller step fits into the memory of a larger one
        nodes = self.limits.size + 1
        key_lengths = range(self._key_length(nodes + 1), end + 1, self.kv_cache.block)
        counts = {min(power_of_two(max(count, 2)), rows) for count in range(1, rows + 1)}
        for count in sorted(counts, reverse=True):
            for key_length in reversed(key_lengths):
                self._rows = [RowState(key_length - nodes - 1, [0]) for _ in range(count)]
                shape = self._shape()
                self._replay(self._pack([0] * count, shape), shape, rule)
        self.reset()
