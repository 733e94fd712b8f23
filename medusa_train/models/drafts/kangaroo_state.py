"""What a Kangaroo draft keeps between the rounds of decoding: caches, and states that wait. Knows no layer."""

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
    """B rows under way.

    The adapter reads only nodes that have children, so of an accepted path it may lack the last node (in a chain: where
    every guess was accepted). Such states wait in `behind`, and are read together with the next root.

    Attributes:
        cache: the backbone's, whose first layers the draft fills. own: the adapter's.
        behind: [B, m, d], the early states that wait, the newest last; None: no row waits for any.
        missing: how many of them are each row's own, counted from the newest; the others are fill.
    """

    cache: TreeCache
    own: TreeCache
    missing: list[int]
    device: torch.device
    behind: Tensor | None = None
    _levels: TreeLevels | None = None
    _blocks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, cache: TreeCache, rows: int, device: torch.device) -> KangarooState:
        """Before the prompts of `rows` rows, which are committed in `cache`."""
        kind = BatchCache if isinstance(cache, BatchCache) else TreeCache
        return cls(cache, kind(1, cache.capacity + 1), [0] * rows, device)  # one more for what waits in other rows

    def commit(self, lengths: Sequence[int]) -> None:
        """Keep the prompts, `lengths[b]` positions of each row, in the adapter's cache."""
        self.own.commit_rows(lengths)

    @property
    def lengths(self) -> int | Tensor:
        """Committed positions: of the only row, or long [B, 1]."""
        return self.cache.row_lengths(self.device)

    @property
    def behind_count(self) -> int:
        """m, of `behind`."""
        return 0 if self.behind is None else self.behind.shape[1]

    def levels_of(self, tree: Tree) -> TreeLevels:
        """The levels of `tree`, made once."""
        if self._levels is None or self._levels.tree is not tree:
            self._levels = TreeLevels(tree)
            self._blocks.clear()
        return self._levels

    def is_single_chain(self, levels: TreeLevels) -> bool:
        """Whether each part of a pass is one position that sees everything in the cache."""
        return not isinstance(self.cache, BatchCache) and levels.tree.max_depth == levels.tree.size

    def block(self, levels: TreeLevels, dtype: torch.dtype) -> Tensor:
        """What the nodes of a tree see of each other, additive [n + 1, n + 1]."""
        if (-1, dtype) not in self._blocks:
            self._blocks[-1, dtype] = additive_mask(levels.tree.ancestors, dtype)
        return self._blocks[-1, dtype]

    def own_block(self, levels: TreeLevels, dtype: torch.dtype) -> Tensor:
        """What waits, and the inner nodes, see of each other in the adapter, additive [1 or B, q, q].

        m = 2, root, child    x          rows whose first one is fill:   x
                              x x                                        x x
                              x x x                                      . x x
                              x x x x                                    . x x x
        """
        m = self.behind_count
        if (m, dtype) not in self._blocks:
            n = len(levels.inner)
            sees = torch.ones(m + n, m + n, dtype=torch.bool, device=levels.inner.device).tril()
            sees[m:, m:] = levels.tree.ancestors[levels.inner][:, levels.inner]
            self._blocks[m, dtype] = additive_mask(sees, dtype)[None]
        block = self._blocks[m, dtype]
        if all(own == m for own in self.missing):
            return block
        missing = torch.tensor(self.missing, device=block.device)[:, None]
        fill = torch.arange(m, device=block.device) < m - missing  # [B, m]
        block = block.repeat(len(self.missing), 1, 1)
        block[:, m:, :m].masked_fill_(fill[:, None], float("-inf"))
        return block

    def wait(self, early: Tensor) -> None:
        """Let one more position of each row wait, with early states [B, 1, d]; the adapter has read nothing."""
        self.behind = early if self.behind is None else torch.cat([self.behind, early], dim=1)
        self.missing = [own + 1 for own in self.missing]

    def keep(self, early: Tensor, depth: int, paths: Sequence[Sequence[int]]) -> None:
        """Keep what the adapter has read of the accepted `paths`; the last nodes that it has not read wait.

        Args:
            early: [B, n + 1, d] of the verified tree. depth: of that tree, whose last level was not read.
        """
        assert self._levels is not None
        columns, m = self._levels.columns, self.behind_count
        kept, missing = [], []
        for path, own in zip(paths, self.missing, strict=True):
            read = columns[path[-1]] is not None and len(path) <= depth
            nodes = path if read else path[:-1]
            kept.append([*range(m - own, m), *(m + (columns[node] or 0) for node in nodes)])
            missing.append(0 if read else 1)
        self.own.keep_rows(kept)
        self.missing, self.behind = missing, None
        if any(missing):
            self.behind = gather_paths(early, [path[-1:] for path in paths])

    def select_rows(self, rows: Sequence[int]) -> KangarooState:
        """Go on with `rows` alone."""
        assert isinstance(self.own, BatchCache)
        self.own.select_rows(rows)
        self.missing = [self.missing[row] for row in rows]
        self.behind = self.behind[list(rows)] if self.behind is not None and any(self.missing) else None
        return self
