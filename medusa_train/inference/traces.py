"""Trace the heads' guesses along greedy answers, and simulate decoding with any tree on these traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.models.features import Rows
from medusa_train.trees.tree import Ranks, Tree

MAX_RANK = 10  # lower-ranked guesses are never worth a node (published trees end at rank 9)


@dataclass(frozen=True)
class Trace:
    """The ranks of the heads' guesses along one greedy answer of the backbone.

    Attributes:
        ranks: [tokens][K]. For position p of the answer and head k, the rank of token p + k among the guesses of head k
            when token p is the root; -1 past `MAX_RANK` or past the end of the answer.
        targets: [tokens], for how many heads the answer has a token to compare with.
    """

    ranks: list[list[int]]
    targets: list[int]

    def path(self, start: int) -> Ranks:
        """The ranks of the following tokens up to the first miss: the path that an unlimited tree would accept."""
        return self._paths[start]

    @cached_property
    def _paths(self) -> list[Ranks]:
        """`path` of every position, cached because a tree search reads them hundreds of times."""
        return [tuple(ranks[: ranks.index(-1)] if -1 in ranks else ranks) for ranks in self.ranks]

    def simulate(self, tree: Tree | AcceptedLength) -> list[int]:
        """Simulate decoding with `tree`: return the positions at which its steps start."""
        accepted = AcceptedLength(tree) if isinstance(tree, Tree) else tree
        paths, end = self._paths, len(self.ranks) - 1
        starts, position = [], 0
        while position < end:
            starts.append(position)
            position += accepted[paths[position]] + 1
        return starts


class AcceptedLength(dict[Ranks, int]):
    """How many tokens of a rank path a tree accepts; computed once per path."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._nodes = set(tree.paths)

    def __missing__(self, path: Ranks) -> int:
        accepted = 0
        while accepted < len(path) and path[: accepted + 1] in self._nodes:
            accepted += 1
        self[path] = accepted
        return accepted


def tokens_per_step(traces: Sequence[Trace], tree: Tree) -> float:
    """Return the acceleration rate of `tree` on `traces`; the first token comes from the prefill and is not counted."""
    accepted = AcceptedLength(tree)
    steps = sum(len(trace.simulate(accepted)) for trace in traces)
    return sum(len(trace.ranks) - 1 for trace in traces) / steps if steps else 1.0


def head_accuracy(traces: Sequence[Trace]) -> list[list[float]]:
    """Return the top-1 .. top-10 accuracy of every head over all positions that have a target, [K][10]."""
    heads = len(traces[0].ranks[0]) if traces else 0
    table = []
    for k in range(heads):
        ranks = [
            row[k] for trace in traces for row, targets in zip(trace.ranks, trace.targets, strict=True) if targets > k
        ]
        table.append([sum(0 <= rank < top for rank in ranks) / max(len(ranks), 1) for top in range(1, MAX_RANK + 1)])
    return table


def trace_answers(
    backbone: Backbone,
    draft: Draft,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 256,
    token_budget: int = 6000,
    on_answer: Callable[[int], None] | None = None,
) -> list[Trace]:
    """Answer `prompts` greedily with the backbone until `token_budget` tokens are generated, and trace the answers.

    Trees have to fit the backbone's output, which differs from the text of a data set.

    Args:
        prompts: token ids, each ending where an answer starts. on_answer: called with the length of each answer.
    """
    decoder = Decoder(backbone)
    traces: list[Trace] = []
    generated = 0
    for prompt in prompts:
        limit = min(max_new_tokens, backbone.max_context - len(prompt))
        if limit < 1:
            continue
        answer = decoder.generate(prompt, limit).tokens
        generated += len(answer)
        if len(answer) > 1:
            traces.append(trace_answer(backbone, draft, prompt, answer))
        if on_answer is not None:
            on_answer(len(answer))
        if generated >= token_budget:
            break
    return traces


@torch.inference_mode()
def trace_answer(backbone: Backbone, draft: Draft, prompt: list[int], answer: list[int]) -> Trace:
    """Trace one answer with a single forward pass over prompt and answer (teacher forcing)."""
    tokens = torch.tensor([prompt + answer], device=backbone.device)
    inputs = tokens[:, :-1]
    feats = backbone.run(inputs, need=draft.needs)
    first = len(prompt) - 1  # the position from which heads guess when answer[0] is the root
    count, heads = len(answer), draft.num_heads
    ranks = torch.full((count, heads), -1, dtype=torch.long)
    all_states = draft.teacher_forced_states(feats, Rows.from_tokens(inputs))
    for k, states in zip(range(1, min(heads, count - 1) + 1), all_states, strict=False):
        head = draft.lm_head(k)
        logits = head.logits(states[0, first : first + count - k])
        ranks[: count - k, k - 1] = rank_of(logits, head.rows_of(tokens[0, len(prompt) + k :])).cpu()
    return Trace(ranks.tolist(), [min(heads, count - 1 - position) for position in range(count)])


def rank_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the rank of each target [N] in its row of logits [N, V], long [N]; -1 past `MAX_RANK`.

    Computed by the top-k that proposals use, so that equal logits (common in bfloat16) get the ranks that they have in
    decoding.

    Args:
        targets: columns of `logits`; -1 for a token that a reduced vocabulary lacks.
    """
    hit = logits.topk(min(MAX_RANK, logits.shape[1])).indices == targets[:, None]
    return torch.where(hit.any(1), hit.int().argmax(1), -1)
