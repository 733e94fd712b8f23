"""Dynamic trees: a draft chooses the shape of each row's tree itself while it drafts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medusa_train.models.drafts.base import Proposal, TreeSize
from medusa_train.models.lm_head import LMHead
from medusa_train.trees.row_trees import RowTrees

#: Number of nodes of each level whose children are drafted, and number of children of each (k).
EXPANDED = 10

#: Predicts the children of m nodes from the draft's outputs at these nodes, [B, m, d]. Returns the
#: logits of the children, [B, m, N], and the states of the m nodes that the draft reads when it
#: runs over their children, [B, m, d].
GuessChildren = Callable[[Tensor], tuple[Tensor, Tensor]]
#: Runs the draft over k nodes of one depth. Arguments: their tokens [B, k]; the states of their
#: parents, from `GuessChildren`, [B, k, d]; their depth; and which of all nodes run so far, these k
#: last, each node attends to, bool [B, k, run so far]. Returns the draft's outputs, [B, k, d].
RunNodes = Callable[[Tensor, Tensor, int, Tensor], Tensor]


def drafted_limits(size: TreeSize) -> TreeSize:
    """Return the largest number of nodes that drafting or verifying trees of this size puts into a
    KV cache.
    """
    expanded = (size.depth - 1) * min(EXPANDED, size.size)  # nodes of the last level are not run
    return TreeSize(max(size.size, expanded), size.depth)


def grow_trees(
    last_tokens: Tensor,
    states: Tensor,
    size: TreeSize,
    head: LMHead,
    guess_children: GuessChildren,
    run_nodes: RunNodes,
) -> Proposal:
    """Draft one tree for each row (EAGLE-2, Expansion Phase and Reranking Phase).

    A node's value is the product of the draft's probabilities along its path. It estimates the
    probability that the node is accepted.

        expand    level 1: the k best children of the root
                  level 2: the k best children of each of them; keep the k most valuable of these
                           k * k
                  level 3: the k best children of each of those k, ...
        rerank    of all drafted nodes, the `size.size` most valuable are proposed

    No node has a larger value than its parent, and a parent comes first in a tie, so the proposed
    nodes form a tree. It depends only on the text, never on tokens that are drawn in the same step,
    so sampling stays lossless. All rows have the same number of nodes. The host reads the shapes,
    which is one synchronization.

    Args:
        last_tokens: long [B].
        states: the draft's outputs at the last tokens, [B, d].
        size: size and depth of the trees.
        head: maps the logits of `guess_children` to token ids.
        guess_children: see `GuessChildren`.
        run_nodes: see `RunNodes`.
    """
    rows = len(last_tokens)  # B
    row = torch.arange(rows, device=last_tokens.device)[:, None]  # [B, 1], for indexing
    value_dtype = torch.promote_types(states.dtype, torch.float32)

    # 1. level 0 is the root. For the m nodes whose children come next:
    node_tokens = last_tokens[:, None]  # [B, m]
    node_ids = torch.zeros_like(node_tokens)  # [B, m] numbers in the order of drafting
    values = torch.zeros_like(node_tokens, dtype=value_dtype)  # [B, m] logarithms of their values
    outputs = states[:, None]  # [B, m, d] the draft's outputs
    # [B, m, nodes run so far] which nodes each of them attends to. The root is not included: the
    # draft has read it with the accepted path
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
        # rounding may make a logit larger than logsumexp
        log_probs = (best.values - logits.logsumexp(-1, keepdim=True)).clamp(max=0)
        tokens = head.tokens_of(best.indices.flatten(1))  # [B, m * k]
        token_values = (values[..., None] + log_probs).flatten(1)  # [B, m * k]
        drafted_tokens.append(tokens)
        drafted_parents.append(node_ids.repeat_interleave(k, 1))  # [B, m * k]
        drafted_values.append(token_values)
        if depth == size.depth:
            break

        # b. the k most valuable of these m * k children are expanded next
        values, chosen = token_values.topk(k)  # [B, k]; [B, k] indices into the m * k
        parent = chosen // k  # [B, k] indices into the m
        node_tokens = tokens.gather(1, chosen)  # [B, k]
        node_ids = count + chosen  # [B, k]
        count += tokens.shape[1]

        # c. the draft runs over them: a node attends to what its parent attends to, and to itself
        itself = torch.eye(k, dtype=torch.bool, device=last_tokens.device).expand(rows, -1, -1)
        visible = torch.cat([visible[row, parent], itself], dim=2)  # [B, k, run so far]
        outputs = run_nodes(node_tokens, carried[row, parent], depth, visible)  # [B, k, d]

    # 3. rerank: propose the root and the most valuable nodes, in the order of drafting
    all_tokens = torch.cat(drafted_tokens, dim=1)  # [B, all drafted nodes]
    all_parents = torch.cat(drafted_parents, dim=1)
    all_values = torch.cat(drafted_values, dim=1)
    ranked = all_values.sort(dim=1, descending=True, stable=True).indices
    proposed = ranked[:, : size.size + 1].sort(dim=1).values  # [B, n + 1] numbers of nodes

    # 4. the index of each parent among the proposed nodes, which are sorted by number
    parent_ids = all_parents.gather(1, proposed)  # [B, n + 1]
    parents = torch.searchsorted(proposed, parent_ids).tolist()
    trees = RowTrees([[-1, *row_parents[1:]] for row_parents in parents], last_tokens.device)
    return Proposal(all_tokens.gather(1, proposed), trees)
