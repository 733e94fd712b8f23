"""Dynamic trees: a draft that guesses token by token chooses the shape of each row's tree itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medusa_train.models.drafts.base import Limits, Proposal
from medusa_train.models.lm_head import LMHead
from medusa_train.trees.row_trees import RowTrees

#: Nodes of each level whose children are drafted, and how many children each of them gets (k).
EXPANDED = 10

#: Guesses the children of m nodes from the draft's outputs there, [B, m, d]: their logits
#: [B, m, N], and what the draft reads of the m nodes when it runs over their children [B, m, d].
GuessChildren = Callable[[Tensor], tuple[Tensor, Tensor]]
#: Runs the draft over k nodes of one depth, given their tokens [B, k], what it reads of their
#: parents [B, k, d], their depth, and which of the nodes run so far each attends to, these k
#: included, bool [B, k, run so far]. Returns the draft's outputs there, [B, k, d].
RunNodes = Callable[[Tensor, Tensor, int, Tensor], Tensor]


def drafted_limits(size: Limits) -> Limits:
    """Return the most nodes that drafting or verifying trees of this size puts into the KV cache."""
    expanded = (size.depth - 1) * min(EXPANDED, size.size)  # of the last level none is expanded
    return Limits(max(size.size, expanded), size.depth)


def grow_trees(
    last_tokens: Tensor,
    states: Tensor,
    size: Limits,
    head: LMHead,
    guess_children: GuessChildren,
    run_nodes: RunNodes,
) -> Proposal:
    """Draft one tree for each row (EAGLE-2, Expansion Phase and Reranking Phase).

    A node's value is the product of the draft's probabilities along its path: how probable it is,
    as far as the draft knows, that the node is accepted.

        expand    level 1: the k best children of the root
                  level 2: the k best children of each of them; of these k * k the k most valuable
                  level 3: the k best children of each of those k, ...
        rerank    of all drafted nodes, the `size.size` most valuable are proposed

    No node is worth more than its parent, which comes first among equals, so the proposed nodes are
    a tree. It depends on the text alone, never on what is drawn in the same step, so sampling stays
    lossless. All rows have equally many nodes. The shapes are read on the host: one
    synchronization.

    Args:
        last_tokens: long [B].
        states: the draft's outputs from which the last tokens' children are guessed, [B, d].
        size: nodes and levels of the trees.
        head: whose vocabulary `guess_children` has.
    """
    rows = len(last_tokens)  # B
    row = torch.arange(rows, device=last_tokens.device)[:, None]  # [B, 1], for indexing
    value_dtype = torch.promote_types(states.dtype, torch.float32)

    # 1. level 0 is the root. Of the m nodes whose children come next:
    node_tokens = last_tokens[:, None]  # [B, m]
    node_ids = torch.zeros_like(node_tokens)  # [B, m] their numbers in the order of drafting
    values = torch.zeros_like(node_tokens, dtype=value_dtype)  # [B, m] logarithms
    outputs = states[:, None]  # [B, m, d] of the draft
    # [B, m, nodes run so far] which of them each attends to; the root is not among them: the draft
    # has read it with the accepted path
    visible = torch.zeros(rows, 1, 0, dtype=torch.bool, device=last_tokens.device)

    drafted_tokens = [node_tokens]
    drafted_parents = [node_ids]
    drafted_values = [values]
    count = 1  # nodes drafted so far

    # 2. expand, level by level
    for depth in range(1, size.depth + 1):
        # a. each of the m nodes gets its k most probable children
        logits, carried = guess_children(outputs)  # [B, m, N], [B, m, d]
        logits = logits.to(value_dtype)
        best = logits.topk(min(EXPANDED, size.size, logits.shape[-1]))  # [B, m, k]
        k = best.indices.shape[2]
        # rounding may make a logit larger than the sum over all
        log_probs = (best.values - logits.logsumexp(-1, keepdim=True)).clamp(max=0)
        tokens = head.tokens_of(best.indices.flatten(1))  # [B, m * k]
        token_values = (values[..., None] + log_probs).flatten(1)  # [B, m * k]
        drafted_tokens.append(tokens)
        drafted_parents.append(node_ids.repeat_interleave(k, 1))  # [B, m * k]
        drafted_values.append(token_values)
        if depth == size.depth:
            break

        # b. the k most valuable of these m * k children are expanded next
        values, chosen = token_values.topk(k)  # [B, k], [B, k] among the m * k
        parent = chosen // k  # [B, k] among the m
        node_tokens = tokens.gather(1, chosen)  # [B, k]
        node_ids = count + chosen  # [B, k]
        count += tokens.shape[1]

        # c. the draft runs over them: a node attends to what its parent attends to, and to itself
        itself = torch.eye(k, dtype=torch.bool, device=last_tokens.device).expand(rows, -1, -1)
        visible = torch.cat([visible[row, parent], itself], dim=2)  # [B, k, run so far]
        outputs = run_nodes(node_tokens, carried[row, parent], depth, visible)  # [B, k, d]

    # 3. rerank: the root and the most valuable nodes, in the order of drafting
    all_tokens = torch.cat(drafted_tokens, dim=1)  # [B, all drafted nodes]
    all_parents = torch.cat(drafted_parents, dim=1)
    all_values = torch.cat(drafted_values, dim=1)
    ranked = all_values.sort(dim=1, descending=True, stable=True).indices
    proposed = ranked[:, : size.size + 1].sort(dim=1).values  # [B, n + 1] numbers of nodes

    # 4. parents by their place among the proposed nodes, which are sorted by number
    parent_ids = all_parents.gather(1, proposed)  # [B, n + 1]
    parents = torch.searchsorted(proposed, parent_ids).tolist()
    trees = RowTrees([[-1, *row_parents[1:]] for row_parents in parents], last_tokens.device)
    return Proposal(all_tokens.gather(1, proposed), trees)
