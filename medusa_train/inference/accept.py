"""Decide which nodes of a verified tree are accepted; pure functions on tokens and logits.

There are three rules. *Greedy* gives the tokens of plain greedy decoding. *Rejection* (lossless
sampling) gives samples from the target model's distribution. *Typical* accepts tokens that the
target model finds plausible enough: paths are longer, but the tokens are not samples from the
target model's distribution.

Each rule evaluates all nodes of all rows at once on the device and needs one transfer to the host;
top-p needs another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_train.errors import ConfigError
from medusa_train.inference.sampling import Sampling, draw, uniforms
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.tree import Nodes, Tree


class Accepted(NamedTuple):
    """The accepted path of one row.

    Attributes:
        path: accepted nodes in order, the root (0) first.
        tokens: tokens of these nodes, then the target model's next token: the new last token.
    """

    path: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Greedy:
    """Greedy acceptance: the tokens are those of plain greedy decoding."""


@dataclass(frozen=True)
class Typical:
    """Typical acceptance: `p(x) > min(epsilon, delta * exp(-H(p)))` (Medusa, Typical Acceptance).

    Attributes:
        temperature: temperature of the distribution p, above 0. Top-p and top-k do not apply.
        epsilon, delta: thresholds; the defaults are the reference implementation's (the paper sets
            delta to the square root of epsilon).

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.7
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        problems = []
        for name in ("temperature", "epsilon", "delta"):
            value = getattr(self, name)
            if value <= 0:
                problems.append(f"{name} must be above 0 for typical acceptance, got {value}")
        if problems:
            raise ConfigError(problems)


AcceptanceRule = Greedy | Sampling | Typical

#: Indices into the second dimension of the `choices` of `accept_matching`: the token that follows a
#: node, and the node's own token.
TARGET_ARGMAX = 0
NODE_TOKEN = 1


def accept(
    rule: AcceptanceRule,
    node_tokens: Tensor,
    logits: Tensor,
    tree: Tree | RowTrees,
    generators: Sequence[torch.Generator] | None = None,
) -> list[Accepted]:
    """Accept a path of each of B verified trees by `rule`.

    Args:
        rule: acceptance rule.
        node_tokens: long [B, n + 1], the root first.
        logits: the target model's logits at every node, [B, n + 1, V].
        tree: one tree for all rows, or one per row.
        generators: one per row, for `Sampling`.

    Raises:
        ValueError: `Sampling` has no generator for every row.
    """
    if isinstance(rule, Greedy):
        return accept_greedy(node_tokens, logits, tree)
    if isinstance(rule, Typical):
        return accept_typical(node_tokens, logits, tree, rule)
    if generators is None or len(generators) != len(node_tokens):
        raise ValueError("sampling needs a generator for every row")
    return accept_sampling(node_tokens, logits, tree, rule, generators)


def sample_next(
    rule: AcceptanceRule, logits: Tensor, generators: Sequence[torch.Generator] | None = None
) -> list[int]:
    """Choose the next token of each of B rows by `rule`, from its logits [B, V].

    Arguments and errors are those of `accept`.
    """
    roots = torch.zeros(
        len(logits), 1, dtype=torch.long, device=logits.device
    )  # root tokens, which are not read
    accepted = accept(rule, roots, logits[:, None], Tree.empty(), generators)
    return [row.tokens[-1] for row in accepted]


def accept_greedy(node_tokens: Tensor, logits: Tensor, tree: Tree | RowTrees) -> list[Accepted]:
    """Accept the longest path on which every token is the target model's argmax at its parent.

    Siblings have different tokens, so at most one child can match, and descending from the root
    gives the longest path.
    """
    following = next_tokens_of(logits)  # [B, n + 1]
    return accept_matching(torch.stack([following, node_tokens], dim=1), tree)


def accept_sampling(
    node_tokens: Tensor,
    logits: Tensor,
    tree: Tree | RowTrees,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> list[Accepted]:
    """Draw y from the target model's p at a node; descend if a child has token y, else y is the new
    last token (lossless).

    The tree never changes what is drawn, so the tokens follow p with any draft. This equals
    recursive rejection sampling (accept a child with probability min(1, p / q), else continue with
    the residual distribution; SpecInfer, Multi-Step Speculative Sampling). The children are a
    head's top-k guesses or copied text and are not sampled, so q is 1 at each child's token. The
    first child is accepted with probability p(x1), the next with p(x2) / (1 - p(x1)), and the
    residual distribution is p without the children. Drawing y once from p gives the same
    probabilities. Using the heads' softmax as q for children that were not sampled from it would
    change the output distribution.

    A token is drawn at every node, although only the draws on the path are used. Draws at different
    nodes are independent, and this way the host synchronizes once.
    """
    # 1. one random number for each node, none for padding
    counts = [tree.row(row).size + 1 for row in range(len(node_tokens))]
    warped = sampling.warp(_at_least_float32(logits))  # [B, n + 1, V]
    u = uniforms(generators, counts, logits.device)  # [B, n + 1]
    # 2. a token after each node
    drawn = draw(warped, u)  # [B, n + 1]
    # 3. the path of nodes whose tokens were drawn
    return accept_matching(torch.stack([drawn, node_tokens], dim=1), tree)


def accept_typical(
    node_tokens: Tensor, logits: Tensor, tree: Tree | RowTrees, rule: Typical
) -> list[Accepted]:
    """Accept the longest path of typical tokens; ties go to the largest sum of log p (Medusa,
    Typical Acceptance).

    The token after the path is the target model's argmax. It is accepted without a test, so every
    step adds a token and the result is deterministic.
    """
    # 1. p at every node, and the threshold for the tokens of its children
    log_p = (_at_least_float32(logits) / rule.temperature).log_softmax(-1)  # [B, n + 1, V]
    entropy = torch.special.entr(log_p.exp()).sum(-1)  # [B, n + 1]
    threshold = (rule.delta * (-entropy).exp()).clamp(max=rule.epsilon)  # [B, n + 1]

    # 2. test each node with p and threshold of its parent. The root, its own parent here, passes
    parents = tree.parents.to(logits.device).clamp(min=0)  # [n + 1] or [B, n + 1]
    rows = torch.arange(len(node_tokens), device=logits.device)[:, None]  # [B, 1]
    token_log_p = log_p[rows, parents, node_tokens]  # [B, n + 1]
    typical = token_log_p.exp() > threshold[rows, parents]  # [B, n + 1]
    typical[:, 0] = True
    token_log_p[:, 0] = 0.0

    # 3. for the path to each node: whether all its tokens are typical, and its log p
    ancestors = tree.ancestors.to(logits.device).expand(len(node_tokens), -1, -1)
    path_typical = (typical[:, None] | ~ancestors).all(-1)  # [B, n + 1]
    # select instead of multiplying: 0 * -inf would be NaN for impossible tokens
    score = torch.where(ancestors, token_log_p[:, None], 0.0).sum(-1)  # [B, n + 1]

    # 4. one transfer from the device, [B, 4, n + 1]
    following = next_tokens_of(logits).double()
    packed = torch.stack([following, node_tokens.double(), path_typical.double(), score], dim=1)

    # 5. the deepest node with a typical path (of several, the most probable), and its next token
    accepted = []
    for row, (following_row, tokens, on_path, scores) in enumerate(packed.tolist()):
        nodes: Nodes = tree.row(row)
        # padding comes after the tree's nodes
        ranking = list(zip(nodes.depth_list, scores, strict=False))
        candidates = [node for node in range(nodes.size + 1) if on_path[node]]
        node = max(candidates, key=ranking.__getitem__)
        path = nodes.path_nodes(node)
        path_tokens = [int(tokens[i]) for i in path]
        accepted.append(Accepted(path, [*path_tokens, int(following_row[node])]))
    return accepted


def _at_least_float32(logits: Tensor) -> Tensor:
    if logits.dtype in (torch.bfloat16, torch.float16):
        return logits.float()
    return logits


def next_tokens_of(logits: Tensor) -> Tensor:
    """Return the argmax over the vocabulary, [..., V] -> [...].

    On a CPU, torch's argmax is five times slower in bfloat16 than in float32.
    """
    if logits.device.type == "cpu":
        logits = _at_least_float32(logits)
    return logits.argmax(-1)


def accept_matching(choices: Tensor, tree: Tree | RowTrees) -> list[Accepted]:
    """Accept the longest path on which every token is the one that follows its parent.

    Args:
        choices: long [B, 2, n + 1]: the token that follows each node (`TARGET_ARGMAX`), and the
            node's own token (`NODE_TOKEN`).
        tree: one tree for all rows, or one per row.
    """
    accepted = []
    for row, (following, tokens) in enumerate(choices.tolist()):  # one transfer from the device
        children = tree.row(row).children
        # descend from the root to the child that has the next token, until no child has it
        path = [0]
        while True:
            next_token = following[path[-1]]
            matching = [child for child in children[path[-1]] if tokens[child] == next_token]
            if not matching:
                break
            path.append(matching[0])
        path_tokens = [tokens[node] for node in path]
        accepted.append(Accepted(path, [*path_tokens, next_token]))
    return accepted
