"""Trace the heads' predictions along greedy answers of the target model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_train.data.examples import EncodedDataset
from medusa_train.inference.batch_decoder import REFILL_FRACTION, BatchDecoder, PendingRequest
from medusa_train.io import replace_file
from medusa_train.models.drafts.base import Draft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from medusa_train.rounding import ceil_div
from medusa_train.tree_search.fit import MAX_RANK, Trace

#: Most answers that are generated in one batch.
MAX_ROWS = 16
#: Most bytes of the batch's keys and values.
MAX_CACHE_BYTES = 2**31

#: The prompts of one conversation, one per turn of the assistant, as token ids.
Prompts = list[list[int]]


@dataclass(frozen=True)
class TracedAnswers:
    """Traced answers.

    Attributes:
        conversations: traces of each conversation's answers.
        prompt: the prompt of median length, after which steps are timed.
    """

    conversations: Sequence[Sequence[Trace]]
    prompt: list[int]

    @property
    def traces(self) -> list[Trace]:
        """The traces of all conversations."""
        return list(chain.from_iterable(self.conversations))

    @property
    def tokens(self) -> int:
        """Number of traced tokens."""
        return sum(len(trace.ranks) for trace in self.traces)

    def save(self, path: Path) -> None:
        """Write the ranks as a compressed NumPy archive, a few KB per 1,000 tokens of five heads.

        Its arrays are `ranks`, [tokens of all answers, K]; `tokens`, the number of tokens of each
        answer; `answers`, the number of answers of each conversation; and `prompt`.
        """
        traces = self.traces
        arrays: dict[str, Any] = {
            "prompt": np.array(self.prompt, np.int32),
            "answers": np.array([len(answers) for answers in self.conversations], np.int32),
            "tokens": np.array([len(trace.ranks) for trace in traces], np.int32),
            "ranks": np.concatenate([np.array(trace.ranks, np.int8) for trace in traces]),
        }

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez_compressed(file, **arrays)

        replace_file(path, write)


def prompts_by_conversation(data: EncodedDataset, token_budget: int, seed: int) -> list[Prompts]:
    """Return prompts, the tokens before each assistant turn, by conversation, in random order.
    Examples with the same first prompt are one conversation.

    A prompt contains the data's answers of earlier turns; only the next answer is generated. There
    are enough prompts for `token_budget` tokens, even if the target model's answers are only a
    quarter as long as the data's.
    """
    conversations: dict[str, Prompts] = {}
    remaining = 4 * token_budget
    shuffled = random.Random(seed).sample(list(data), len(data))
    for example in shuffled:
        # a conversation may have several rows, and a prompt several answers
        prompts = conversations.setdefault(example.prompt, [])
        new_prompts = [prompt for prompt in example.prompts() if prompt not in prompts]
        prompts += new_prompts
        if new_prompts:
            remaining -= int(example.supervised.sum())
        if remaining <= 0:
            break
    return list(conversations.values())


def trace_conversations(
    target_model: TargetModel,
    draft: Draft,
    conversations: Sequence[Prompts],
    *,
    max_new_tokens: int = 256,
    token_budget: int = 6000,
    on_answer: Callable[[int], None] | None = None,
) -> TracedAnswers:
    """Answer prompts greedily with the target model until `token_budget` tokens are generated, and
    trace the answers.

    Trees must be fitted to the target model's own output, which differs from the text of a data
    set.

    Args:
        target_model: the model that answers.
        draft: the draft whose predictions are traced.
        conversations: prompts by conversation.
        max_new_tokens, token_budget, on_answer: see `greedy_answers`.

    Returns:
        The conversations that have an answer of two tokens or more.
    """
    # 1. all prompts in one list, and the conversation of each
    prompts: list[list[int]] = []
    owners: list[int] = []
    for index, conversation in enumerate(conversations):
        prompts += conversation
        owners += [index] * len(conversation)
    # 2. answers to the first prompts, and the traces by conversation
    answers = greedy_answers(target_model, prompts, max_new_tokens, token_budget, on_answer)
    traced: dict[int, list[Trace]] = {}
    for i, answer in answers.items():
        if len(answer) > 1:
            trace = trace_answer(target_model, draft, prompts[i], answer)
            traced.setdefault(owners[i], []).append(trace)
    # 3. the median prompt
    prompts_by_length = sorted((prompts[i] for i in answers), key=len)
    median: list[int] = []
    if prompts_by_length:
        median = prompts_by_length[len(prompts_by_length) // 2]
    return TracedAnswers(list(traced.values()), median)


def greedy_answers(
    target_model: TargetModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    token_budget: int,
    on_answer: Callable[[int], None] | None = None,
) -> dict[int, list[int]]:
    """Answer as many of the first prompts greedily, in batches, as are needed for `token_budget`
    tokens.

    The answered prompts are the same as if they were answered one by one until the budget is
    reached. So a prompt joins the batch only if the budget cannot be reached without it, even if
    all unfinished answers get `max_new_tokens` tokens.

    Args:
        target_model: the model that answers.
        prompts: token ids, each ending where an answer starts. Prompts longer than the model's
            context are left out.
        max_new_tokens: maximum length of an answer.
        token_budget: number of tokens to generate.
        on_answer: called with the length of each answer.

    Returns:
        The answers by the index of their prompt, in the order of `prompts`.
    """
    # 1. the prompts that fit the context, and how many rows of the longest prompt fit into memory
    requests: list[PendingRequest] = []
    for i, prompt in enumerate(prompts):
        if len(prompt) <= target_model.max_context:
            requests.append(PendingRequest(i, prompt))
    longest = max((len(request.prompt) for request in requests), default=0)
    rows = _rows_in_memory(target_model, longest + max_new_tokens)
    # 2. refill the batch and step, until the budget is used up
    waiting = iter(requests)
    answers: dict[int, list[int]] = {}
    remaining = token_budget
    batch = BatchDecoder(target_model).begin(max_new_tokens)
    while True:
        # with fewer rows, even answers of full length would not reach the budget
        needed_rows = min(rows, ceil_div(remaining, max_new_tokens))
        free = needed_rows - len(batch.active)
        joining: list[PendingRequest] = []
        if free * REFILL_FRACTION >= needed_rows:
            joining = list(islice(waiting, free))
        if joining:
            batch.add_requests(joining)
        elif not batch.active:
            return dict(sorted(answers.items()))
        for index, out in batch.step():
            answers[index] = out.tokens
            remaining -= len(out.tokens)
            if on_answer is not None:
                on_answer(len(out.tokens))


def _rows_in_memory(target_model: TargetModel, positions: int) -> int:
    """Return how many rows of up to `positions` tokens to decode at once."""
    if not BatchDecoder(target_model).can_batch:
        return 1
    positions = min(positions, target_model.max_context)
    layers, heads, dim = target_model.cached_shape()
    row_bytes = positions * 2 * layers * heads * dim * target_model.dtype.itemsize
    return max(1, min(MAX_ROWS, MAX_CACHE_BYTES // row_bytes))


@torch.inference_mode()
def trace_answer(
    target_model: TargetModel, draft: Draft, prompt: list[int], answer: list[int]
) -> Trace:
    """Trace one answer with a single forward pass over prompt and answer (teacher forcing)."""
    # 1. states of all heads at all positions
    tokens = torch.tensor([prompt + answer], device=target_model.device)  # [1, T + 1]
    inputs = tokens[:, :-1]  # [1, T]
    hidden_states = target_model.run(inputs, aux_layers=draft.aux_layers)
    all_states = draft.teacher_forced_states(hidden_states, Rows.from_tokens(inputs))
    # 2. head by head, the ranks of the answer's tokens. At position `first_position` + p, where
    # answer[p] is the root, head k predicts answer[p + k]
    count = len(answer)
    first_position = len(prompt) - 1
    heads = min(draft.max_depth, count - 1)
    ranks = torch.full((count, draft.max_depth), -1, dtype=torch.long)
    confidence: list[float] = []
    for k, states in zip(range(1, heads + 1), all_states, strict=False):
        head = draft.lm_head(k)
        num_targets = count - k  # number of positions that have a target
        read_states = states[0, first_position : first_position + num_targets]  # [num_targets, d]
        logits = head.logits(read_states)  # [num_targets, V]
        if k == 1 and "threshold" in draft.setting_names:
            best = logits.float().softmax(-1).amax(-1)  # [num_targets]
            confidence = [round(p, 6) for p in best.tolist()]
        guesses = head.guesses(read_states, logits, MAX_RANK)  # [num_targets, MAX_RANK]
        targets = head.indices_of(tokens[0, len(prompt) + k :])  # [num_targets]
        ranks[:num_targets, k - 1] = rank_of(guesses, targets).cpu()
    return Trace(ranks.tolist(), confidence)


def rank_of(guesses: Tensor, targets: Tensor) -> Tensor:
    """Return the rank of each target in its row of `guesses`, long [N]; -1 if it is not in the row.

    Args:
        guesses: best logit indices, long [N, c], from `LMHead.guesses`, so that ties (common in
            bfloat16) are ranked as in decoding.
        targets: logit indices, long [N]; -1 for a token outside a reduced vocabulary.
    """
    hit = guesses == targets[:, None]  # [N, c]
    return torch.where(hit.any(1), hit.int().argmax(1), -1)
