"""Which nodes of a verified tree are accepted: pure functions on tokens and logits; knows no model and no cache.

Three rules. *Greedy* gives plain greedy decoding's tokens. *Rejection* (lossless sampling) gives samples of the
backbone's own distribution. *Typical* gives tokens that the backbone finds plausible enough, in longer paths; they
follow no distribution that the backbone has.

Each rule judges all nodes of all rows at once on the device and needs one transfer to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_train.errors import ConfigError
from medusa_train.inference.sampling import Sampling, draw, uniforms
from medusa_train.trees.tree import Tree


class Accepted(NamedTuple):
    """What a verification pass decided for one row.

    Attributes:
        path: accepted nodes in order, the root (0) first.
        tokens: their tokens, then the token that stands after the last of them: the next root.
    """

    path: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Medusa, section 2.3.1): `p(x) > min(epsilon, delta * exp(-H(p)))`.

    Attributes:
        temperature: of the distribution p, which is not cut by top-p or top-k; above 0.
        epsilon, delta: the reference's defaults (the paper sets delta to the root of epsilon).

    Raises:
        ConfigError: a value outside its range.
    """

    temperature: float = 0.7
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        named = (("temperature", self.temperature), ("epsilon", self.epsilon), ("delta", self.delta))
        if problems := [
            f"{name} is {value}; typical acceptance needs it above 0" for name, value in named if value <= 0
        ]:
            raise ConfigError(problems)


Rule = Sampling | Typical | None


def accept(
    rule: Rule,
    node_tokens: Tensor,
    logits: Tensor,
    tree: Tree,
    generators: Sequence[torch.Generator] | None = None,
) -> list[Accepted]:
    """Judge B verified trees by `rule`: None for greedy, `Sampling` for rejection, or `Typical`.

    Args:
        node_tokens: long [B, n + 1], the root first. logits: [B, n + 1, V], the backbone's at every node.
        tree: where the nodes stand; the empty one where the root's own next token is all that is asked for.
        generators: one per row, for `Sampling`.
    """
    if rule is None:
        return accept_greedy(node_tokens, logits, tree)
    if isinstance(rule, Typical):
        return accept_typical(node_tokens, logits, tree, rule)
    if generators is None or len(generators) != len(node_tokens):
        raise ValueError("sampling needs a generator for every row")
    return accept_rejection(node_tokens, logits, tree, rule, generators)


def accept_greedy(node_tokens: Tensor, logits: Tensor, tree: Tree) -> list[Accepted]:
    """The longest path whose every token is the backbone's argmax at its parent (Medusa, section 2.3.1; SPEC 1).

    Siblings carry different tokens (the best guesses of one head), so at most one child can match and the walk
    down from the root is the longest path.
    """
    return _walk(_best(logits), node_tokens, tree)


def accept_rejection(
    node_tokens: Tensor, logits: Tensor, tree: Tree, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[Accepted]:
    """Lossless sampling: draw y from the backbone's p at a node; if a child is y descend, else y is the next root.

    What the tree is never changes what is drawn, so the tokens follow p whatever the draft. It is recursive rejection
    sampling (accept a child with probability min(1, p / q), else go on with what is left of p; SpecInfer, section
    4.3) for the draft that a tree of top-k guesses is: it was not drawn from the heads' softmax but is certain, q = 1
    at the child's token, so the first child passes with probability p(x1), the next with p(x2) / (1 - p(x1)), and what
    is left after all of them is p without them: the same law as one draw. With the heads' softmax as q the tokens would
    not follow p, and children that were drawn from the heads instead would only be fewer different ones.

    One draw is made for every node, although only those of the path are looked at: draws at different nodes are
    independent, and the host is told once.
    """
    u = uniforms(generators, node_tokens.shape[1], logits.device)
    return _walk(draw(sampling.warp(logits.float() if logits.dtype != torch.float64 else logits), u), node_tokens, tree)


def _best(logits: Tensor) -> Tensor:
    """The argmax over the last dimension; torch's own over bfloat16 takes five times as long on a CPU as float32's."""
    return (logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits).argmax(-1)


def _walk(wanted: Tensor, guessed: Tensor, tree: Tree) -> list[Accepted]:
    """From every row's root down to the children that carry the token wanted at their parent; both long [B, n + 1]."""
    decided = []
    for best, tokens in torch.stack([wanted, guessed], dim=1).tolist():  # one transfer from the device
        path, node = [0], 0
        while True:
            next_token = best[node]
            node = next((child for child in tree.children[node] if tokens[child] == next_token), 0)
            if node == 0:
                break
            path.append(node)
        decided.append(Accepted(path, [*(tokens[i] for i in path), next_token]))
    return decided


def accept_typical(node_tokens: Tensor, logits: Tensor, tree: Tree, rule: Typical) -> list[Accepted]:
    """The longest path of typical tokens, ties by the largest sum of log p over them (Medusa, section 2.3.1; SPEC 1).

    The token after the path is the backbone's argmax there, accepted without a test, so decoding always goes on and
    is deterministic.
    """
    log_p = (logits.double() / rule.temperature).log_softmax(-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    least = (rule.delta * (-entropy).exp()).clamp(max=rule.epsilon)  # [B, n + 1]
    parents = tree.parents.to(logits.device).clamp(min=0)  # the root stands in for its own parent
    own = log_p[:, parents].gather(-1, node_tokens[..., None])[..., 0]
    passed = own.exp() > least[:, parents]
    passed[:, 0] = True
    own[:, 0] = 0.0
    ancestors = tree.ancestors.to(logits.device)
    whole_path = (passed[:, None] | ~ancestors).all(-1)
    score = torch.where(ancestors, own[:, None], 0.0).sum(-1)  # a product would make NaN of a token that can't come
    sent = torch.stack([_best(logits).double(), node_tokens.double(), whole_path.double(), score], dim=1)
    return [_longest(best, tokens, passed, sums, tree) for best, tokens, passed, sums in sent.tolist()]


def _longest(best: list[float], tokens: list[float], passed: list[float], sums: list[float], tree: Tree) -> Accepted:
    nodes = (i for i, whole in enumerate(passed) if whole)
    node = max(nodes, key=lambda i: (len(tree.paths[i - 1]) if i else 0, sums[i]))
    path = tree.path_nodes(node)
    return Accepted(path, [*(int(tokens[i]) for i in path), int(best[node])])
