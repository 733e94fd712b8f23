"""The decoding state of a Kangaroo draft: the adapter's cache, and accepted states that the adapter has not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_train.models.drafts.layers import gather_paths
from medusa_train.trees.kv_cache import BatchCache, TreeCache
from medusa_train.trees.masks import additive_mask
from medusa_train.trees.tree import Tree, TreeLevels


@dataclass
class KangarooState:
    """The decoding state of B rows.

    The adapter reads only nodes that have children, so it may lack the last node of an accepted path (in a chain: if
    every guess was accepted). Such states are kept in `unread` and are read together with the next root.

    Attributes:
        cache: the backbone's; the draft fills its first layers. adapter_cache: the adapter's.
        unread: [B, m, d], early states that the adapter has not read, the newest last; None if no row has any.
        unread_counts: how many of the m states belong to each row, counted from the newest; the others are padding.
    """

    cache: TreeCache
    adapter_cache: TreeCache
    unread_counts: list[int]
    device: torch.device
    unread: Tensor | None = None
    _levels: TreeLevels | None = None
    _masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, cache: TreeCache, rows: int, device: torch.device) -> KangarooState:
        """Return the state before the adapter reads the prompts of `rows` rows, which are committed in `cache`."""
        cache_class = BatchCache if isinstance(cache, BatchCache) else TreeCache
        # one more position than the backbone's cache, for padding where only other rows have unread states
        return cls(cache, cache_class(1, cache.capacity + 1), [0] * rows, device)

    @property
    def num_unread(self) -> int:
        """m, the width of `unread`."""
        return 0 if self.unread is None else self.unread.shape[1]

    def levels_of(self, tree: Tree) -> TreeLevels:
        """Return the levels of `tree`, computed once."""
        if self._levels is None or self._levels.tree is not tree:
            self._levels = TreeLevels(tree)
            self._masks.clear()
        return self._levels

    def is_single_chain(self, levels: TreeLevels) -> bool:
        """Return whether each part of a pass is a single position that attends to the whole cache."""
        return not isinstance(self.cache, BatchCache) and levels.tree.max_depth == levels.tree.size

    def node_mask(self, levels: TreeLevels, dtype: torch.dtype) -> Tensor:
        """Return the mask among the nodes of a tree, additive [n + 1, n + 1]."""
        if (-1, dtype) not in self._masks:
            self._masks[-1, dtype] = additive_mask(levels.tree.ancestors, dtype)
        return self._masks[-1, dtype]

    def adapter_mask(self, levels: TreeLevels, dtype: torch.dtype) -> Tensor:
        """Return the adapter's mask among unread states and inner nodes, additive [1 or B, q, q].

        m = 2, root, child    x          in rows whose first state is padding:   x
                              x x                                                x x
                              x x x                                              . x x
                              x x x x                                            . x x x
        """
        m = self.num_unread
        if (m, dtype) not in self._masks:
            n = len(levels.inner)
            visible = torch.ones(m + n, m + n, dtype=torch.bool, device=levels.inner.device).tril()
            visible[m:, m:] = levels.tree.ancestors[levels.inner][:, levels.inner]
            self._masks[m, dtype] = additive_mask(visible, dtype)[None]
        mask = self._masks[m, dtype]
        if all(count == m for count in self.unread_counts):
            return mask
        counts = torch.tensor(self.unread_counts, device=mask.device)[:, None]
        padding = torch.arange(m, device=mask.device) < m - counts  # [B, m]
        mask = mask.repeat(len(self.unread_counts), 1, 1)
        mask[:, m:, :m].masked_fill_(padding[:, None], float("-inf"))
        return mask

    def add_unread(self, early: Tensor) -> None:
        """Add one committed position per row that the adapter has not read, with early states [B, 1, d]."""
        self.unread = early if self.unread is None else torch.cat([self.unread, early], dim=1)
        self.unread_counts = [count + 1 for count in self.unread_counts]

    def commit_paths(self, early: Tensor, depth: int, paths: Sequence[Sequence[int]]) -> None:
        """Commit what the adapter read of the accepted `paths`; last nodes that it did not read become unread states.

        Args:
            early: [B, n + 1, d] of the verified tree. depth: of that tree, whose last level the adapter did not read.
        """
        assert self._levels is not None
        columns, m = self._levels.columns, self.num_unread
        kept, unread_counts = [], []
        for path, count in zip(paths, self.unread_counts, strict=True):
            complete = columns[path[-1]] is not None and len(path) <= depth
            nodes = path if complete else path[:-1]
            kept.append([*range(m - count, m), *(m + (columns[node] or 0) for node in nodes)])
            unread_counts.append(0 if complete else 1)
        self.adapter_cache.keep_rows(kept)
        self.unread_counts, self.unread = unread_counts, None
        if any(unread_counts):
            self.unread = gather_paths(early, [path[-1:] for path in paths])

    def select_rows(self, rows: Sequence[int]) -> KangarooState:
        """Keep `rows` only, in that order."""
        assert isinstance(self.adapter_cache, BatchCache)
        self.adapter_cache.select_rows(rows)
        self.unread_counts = [self.unread_counts[row] for row in rows]
        self.unread = self.unread[list(rows)] if self.unread is not None and any(self.unread_counts) else None
        return self
