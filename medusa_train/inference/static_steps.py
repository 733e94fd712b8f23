"""Decoding steps in static buffers: compaction, drafting and verification as one CUDA graph, one transfer each way.

    host                       device, replayed
    ----                       ----------------
    root, accepted path  --->  compact the cache by the path; the draft reads the path and proposes a tree below the
                               root; the backbone verifies it; argmax
    tokens of all nodes  <---  and their successors

The acceptance rule runs on the host's copy (greedy), or on the logits, which stay in a static buffer. There is one
graph per tree and number of columns that attention reads (see `StaticCache`). Without a GPU the same steps run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from medusa_train.inference.accept import Accepted, Rule, accept, accept_matching, next_tokens_of
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Proposal, Proposer
from medusa_train.models.drafts.fixed_shape import AcceptedNodes, FixedShapeDraft, has_fixed_shape
from medusa_train.models.features import Features
from medusa_train.models.graphs import Replayable, StepRunner
from medusa_train.models.slot_pass import SlotPass, run_slots
from medusa_train.trees.masks import MaskTable
from medusa_train.trees.static_cache import StaticCache, move_columns
from medusa_train.trees.tree import Tree

_log = logging.getLogger(__name__)

#: Columns of the packed inputs before the path: the root, its position in the last tree, and the length of the path.
_ROOT, _START, _COUNT, _PATH = 0, 1, 2, 3


def supports_static_steps(backbone: Backbone, draft: Proposer | None) -> bool:
    """Return whether steps run in static buffers; a warning names a draft that does not support them."""
    if backbone.step_runner is None:
        return False
    if draft is None or has_fixed_shape(draft):
        return True
    name = type(draft).__name__
    _log.warning("compile: %s chooses the shape of its trees, so its steps run without CUDA graphs", name)
    return False


class StaticSteps:
    """The steps of a single row with one tree, with buffers and graphs that are reused from answer to answer.

    The last token of the prompt counts as a verified tree, so that the first step is like all others.

    Args:
        runner: runs or replays the steps. draft: for this tree and this cache; None for plain decoding.
        tree: with its tensors on the backbone's device; empty without a draft. cache: the backbone's.
    """

    def __init__(
        self, backbone: Backbone, runner: StepRunner, draft: FixedShapeDraft | None, tree: Tree, cache: StaticCache
    ) -> None:
        self.cache = cache
        self._backbone = backbone
        self._runner = runner
        self._draft = draft
        self._tree = tree
        self._graphs: dict[Hashable, Replayable] = {}
        self._masks = {
            kind: MaskTable(
                tree.ancestors, tree.depths, backbone.window if kind == "sliding_attention" else None, backbone.dtype
            )
            for kind in sorted(backbone.layer_types)
        }
        device, nodes = backbone.device, tree.size + 1
        # pinned, so that the copy to the device is asynchronous
        self._host = torch.zeros(1, _PATH + tree.max_depth + 1, dtype=torch.long, pin_memory=device.type == "cuda")
        self._inputs = torch.zeros_like(self._host, device=device)
        self._nodes = torch.arange(nodes, device=device)
        self._hidden = torch.zeros(1, nodes, backbone.hidden_size, dtype=backbone.dtype, device=device)
        reads_early = self._draft is not None and self._draft.exit_layer is not None
        self._early = torch.zeros_like(self._hidden) if reads_early else None
        self._logits = torch.zeros(1, nodes, backbone.vocab_size, dtype=backbone.dtype, device=device)
        self._choices = torch.zeros(1, 2, nodes, dtype=torch.long, device=device)  # see `accept_matching`
        self._start = 0
        self._path: list[int] = [0]

    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int]) -> None:
        """Begin an answer after the prefill, see `Proposer.start`."""
        if self._draft is not None:
            self._draft.start(feats, tokens)
        self._hidden[:, 0] = feats.hidden[:, -1]
        self._choices[:, 1, 0] = tokens[:, -1]
        if self._early is not None and feats.early is not None:
            self._early[:, 0] = feats.early[:, -1]
        self._start, self._path = lengths[0] - 1, [0]

    def step(self, roots: Sequence[int], rule: Rule, generators: Sequence[torch.Generator] | None) -> list[Accepted]:
        """Verify a tree below the root and accept a path by `rule`, see `accept`."""
        count = len(self._path)
        padding = [0] * (self._tree.max_depth + 1 - count)
        self._host.copy_(torch.tensor([[roots[0], self._start, count, *self._path, *padding]]))
        self._inputs.copy_(self._host, non_blocking=True)
        self._start += count
        key_length = self.cache.key_length(self._start + self._tree.size + 1)
        columns = [cache.storage(key_length).shape[4] for cache in self._caches]
        self._runner.run(self._graphs, (key_length, *columns), lambda: self._run(key_length))
        if rule is None:
            accepted = accept_matching(self._choices, self._tree)
        else:
            accepted = accept(rule, self._choices[:, 1], self._logits, self._tree, generators)
        self._path = accepted[0].path
        return accepted

    @property
    def _caches(self) -> list[StaticCache]:
        return [self.cache, *(() if self._draft is None else self._draft.caches)]

    def _run(self, key_length: int) -> None:
        """Run the part on the device, in which no shape or address depends on the length or on the path."""
        roots, starts, counts = self._inputs[:, _ROOT], self._inputs[:, _START], self._inputs[:, _COUNT]
        path, lengths = self._inputs[:, _PATH:], starts + counts
        storage = self.cache.storage(key_length)
        if self._tree.size:
            move_columns(storage, starts, path)
        nodes = SlotPass(
            # nodes past the context are never accepted, but the model's position table must cover their ids
            positions=(lengths[:, None] + self._tree.depths).clamp(max=self._backbone.max_context - 1),
            masks={kind: table.at(lengths, key_length) for kind, table in self._masks.items()},
            slots=lengths[:, None] + self._nodes,
            storage=storage,
            key_length=key_length,
        )
        proposal, exit_layer = Proposal(roots[:, None], self._tree), None
        if self._draft is not None:
            accepted = AcceptedNodes(
                Features(self._hidden, self._early), self._choices[:, 1], path, counts=counts, starts=starts
            )
            proposal, exit_layer = self._draft.propose(accepted, roots, nodes), self._draft.exit_layer
        feats, logits = run_slots(self._backbone, proposal.tokens, nodes, proposal.early, exit_layer)
        self._hidden.copy_(feats.hidden)
        if self._early is not None and feats.early is not None:
            self._early.copy_(feats.early)
        self._logits.copy_(logits)
        self._choices[:, 0] = next_tokens_of(logits)
        self._choices[:, 1] = proposal.tokens
