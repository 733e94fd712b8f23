"""Cross-entropy straight from hidden states, a chunk of logits at a time; knows no model, draft or recipe."""

from __future__ import annotations

from torch import Tensor

from medusa_train.losses.linear import LinearSums, linear_loss
from medusa_train.losses.matrix import UnembeddingLike


def linear_cross_entropy(
    hidden: Tensor, unembedding: UnembeddingLike, targets: Tensor, *, chunk: int | None = None
) -> LinearSums:
    """Sum of `cross_entropy(logits(hidden), targets)` without the [N, V] logits.

    Rows with target IGNORE are dropped before every product and cost nothing. Gradients flow to `hidden` and to the
    unembedding's tensors, each only if it requires one; the loss is float32 whatever the products' dtype.

    Args:
        hidden: [N, d]. unembedding: weight [V, d], bias [V] or None, softcap, scale, low_rank.
        targets: long [N], rows of the weight (token ids, unless it has a token_map) or IGNORE.
        chunk: rows per chunk; by default `chunk_rows`.

    Raises:
        IndexError: a target is neither IGNORE nor in [0, V).
    """
    return linear_loss(hidden, unembedding, targets, None, chunk)
