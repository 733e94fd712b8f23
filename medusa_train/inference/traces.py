"""At which rank the heads guess what the backbone goes on to say; knows no tree search and no timing."""

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

MAX_RANK = 10  # guesses past the tenth are never worth a node (reference trees end at rank 9)


@dataclass(frozen=True)
class Trace:
    """One greedy answer of the backbone as the heads saw it coming.

    Attributes:
        ranks: per position p of the answer, and per head k, the rank of token p + k among head k's guesses made
            where token p is the root; -1 where it is past `MAX_RANK` or past the answer's end. [tokens][K].
        targets: per position how many heads have a target at all, [tokens].
    """

    ranks: list[list[int]]
    targets: list[int]

    def path(self, start: int) -> Ranks:
        """The ranks of what came next, down to the first miss: the path that a full tree would accept."""
        return self._paths[start]

    @cached_property
    def _paths(self) -> list[Ranks]:
        """`path` of every position: a search for a tree asks for them hundreds of times."""
        return [tuple(ranks[: ranks.index(-1)] if -1 in ranks else ranks) for ranks in self.ranks]

    def simulate(self, tree: Tree | AcceptedLength) -> list[int]:
        """Decode with `tree` on paper: the positions at which its steps start."""
        reach = AcceptedLength(tree) if isinstance(tree, Tree) else tree
        paths, end = self._paths, len(self.ranks) - 1
        starts, place = [], 0
        while place < end:
            starts.append(place)
            place += reach[paths[place]] + 1
        return starts


class AcceptedLength(dict[Ranks, int]):
    """How many tokens of a path a tree accepts, looked up once for each path that occurs."""

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
    """Acceleration rate that `tree` would have had on `traces` (the first token comes from the prefill)."""
    reach = AcceptedLength(tree)
    steps = sum(len(trace.simulate(reach)) for trace in traces)
    return sum(len(trace.ranks) - 1 for trace in traces) / steps if steps else 1.0


def head_accuracy(traces: Sequence[Trace]) -> list[list[float]]:
    """Top-1 .. top-10 accuracy of every head over all positions that have a target, [K][10]."""
    heads = len(traces[0].ranks[0]) if traces else 0
    table = []
    for k in range(heads):
        column = [
            row[k] for trace in traces for row, known in zip(trace.ranks, trace.targets, strict=True) if known > k
        ]
        table.append([sum(0 <= rank < top for rank in column) / max(len(column), 1) for top in range(1, MAX_RANK + 1)])
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
    """Let the backbone answer `prompts` greedily, until `token_budget` tokens are written, and rank them.

    The tree has to fit what the backbone itself says, not the text of a data set (SPEC 1, sparse tree search).

    Args:
        prompts: token ids, each ending where an answer starts. on_answer: told the length of each answer.
    """
    decoder = Decoder(backbone)
    traces: list[Trace] = []
    written = 0
    for prompt in prompts:
        room = min(max_new_tokens, backbone.max_context - len(prompt))
        if room < 1:
            continue
        answer = decoder.generate(prompt, room).tokens
        written += len(answer)
        if len(answer) > 1:
            traces.append(trace_answer(backbone, draft, prompt, answer))
        if on_answer is not None:
            on_answer(len(answer))
        if written >= token_budget:
            break
    return traces


@torch.inference_mode()
def trace_answer(backbone: Backbone, draft: Draft, prompt: list[int], answer: list[int]) -> Trace:
    """Rank `answer` under the heads by one forward pass over prompt and answer, each head given the true tokens."""
    tokens = torch.tensor([prompt + answer], device=backbone.device)
    read = tokens[:, :-1]
    feats = backbone.run(read, need=draft.needs)
    first = len(prompt) - 1  # where answer[0] is the root
    count, heads = len(answer), draft.num_heads
    ranks = torch.full((count, heads), -1, dtype=torch.long)
    for k, states in zip(
        range(1, min(heads, count - 1) + 1), draft.teacher_forced_states(feats, Rows.of(read)), strict=False
    ):
        head = draft.lm_head(k)
        logits = head.logits(states[0, first : first + count - k])
        ranks[: count - k, k - 1] = rank_of(logits, head.places(tokens[0, len(prompt) + k :])).cpu()
    return Trace(ranks.tolist(), [min(heads, count - 1 - place) for place in range(count)])


def rank_of(logits: Tensor, targets: Tensor) -> Tensor:
    """At which place of its row's best guesses [N, V] each target [N] stands, long [N]; -1 past `MAX_RANK`.

    A target is the number of its logit; -1, for a token that a reduced vocabulary lacks, is at no place.

    Asked by the same top-k that proposals are made with, so that equal logits (common in bfloat16) get the places
    that they have in decoding.
    """
    hit = logits.topk(min(MAX_RANK, logits.shape[1])).indices == targets[:, None]
    return torch.where(hit.any(1), hit.int().argmax(1), -1)
