"""Which nodes of a verified tree are accepted: pure functions on tokens and logits; knows no model and no cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa_train.trees.tree import Tree


class Accepted(NamedTuple):
    """What a verification pass decided.

    Attributes:
        path: accepted nodes in order, the root (0) first.
        tokens: their tokens, then the backbone's own token after the last of them: the next root.
    """

    path: list[int]
    tokens: list[int]


def accept_greedy(node_tokens: Tensor, logits: Tensor, tree: Tree) -> Accepted:
    """The longest path whose every token is the backbone's argmax at its parent (Medusa, section 2.3.1; SPEC 1).

    Args:
        node_tokens: long [n + 1], the root first. logits: [n + 1, V], the backbone's at every node.

    Siblings carry different tokens (the best guesses of one head), so at most one child can match and the walk
    down from the root is the longest path.
    """
    best, guessed = torch.stack([logits.argmax(-1), node_tokens]).tolist()  # one transfer from the device
    path = [0]
    node = 0
    while True:
        wanted = best[node]
        node = next((child for child in tree.children[node] if guessed[child] == wanted), 0)
        if node == 0:
            return Accepted(path, [*(guessed[i] for i in path), wanted])
        path.append(node)
