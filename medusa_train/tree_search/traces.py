"""Trace the heads' guesses along greedy answers of the backbone, and keep the traces."""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_train.checkpoint.load_model import added_stop_tokens
from medusa_train.checkpoint.resolve import ModelPaths, find_heads
from medusa_train.data.dataset import EncodedDataset
from medusa_train.inference.batch import REFILL_FRACTION, BatchDecoder, PendingRequest
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.io import parse_json, replace_file
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.models.features import Rows
from medusa_train.models.hf_config import cache_elements_per_position
from medusa_train.models.loading import model_directory
from medusa_train.tree_search.fit import MAX_RANK, Trace

MAX_ROWS = 16  # answers that are generated at once
MAX_CACHE_BYTES = 2**31  # of their keys and values

#: Blocks read from each file of weights, spread over it: reading a whole backbone takes minutes on
# a slow disk.
BLOCKS, BLOCK_BYTES = 64, 1 << 16

#: The prompts of one conversation, one per turn of the assistant, as token ids.
Prompts = list[list[int]]


@dataclass(frozen=True)
class TracedAnswers:
    """Traced answers by conversation, and the prompt after which steps are timed: the median one by
    length.
    """

    conversations: Sequence[Sequence[Trace]]
    prompt: list[int]

    @property
    def traces(self) -> list[Trace]:
        """The traces of all conversations."""
        return [trace for conversation in self.conversations for trace in conversation]

    @property
    def tokens(self) -> int:
        """Number of traced tokens."""
        return sum(len(trace.ranks) for trace in self.traces)


def prompts_by_conversation(data: EncodedDataset, token_budget: int, seed: int) -> list[Prompts]:
    """Return the tokens before assistant turns as prompts, by conversation, in random order.

    Earlier turns keep the data's answers as history; only the next answer is generated. The prompts
    suffice for `token_budget` tokens even if the backbone's answers are a quarter as long as the
    data's.
    """
    conversations: dict[str, Prompts] = {}
    remaining = 4 * token_budget
    for example in random.Random(seed).sample(list(data), len(data)):
        # a long conversation has several rows
        conversations.setdefault(example.key, []).extend(example.prompts())
        remaining -= int(example.supervised.sum())
        if remaining <= 0:
            break
    return list(conversations.values())


def trace_conversations(
    backbone: Backbone,
    draft: Draft,
    conversations: Sequence[Prompts],
    *,
    max_new_tokens: int = 256,
    token_budget: int = 6000,
    on_answer: Callable[[int], None] | None = None,
) -> TracedAnswers:
    """Answer prompts greedily with the backbone until `token_budget` tokens are generated, and
    trace the answers.

    Trees have to fit the backbone's output, which differs from the text of a data set.

    Args:
        max_new_tokens, token_budget, on_answer: see `greedy_answers`.

    Returns:
        The conversations that have an answer of two tokens or more.
    """
    prompts = [prompt for one in conversations for prompt in one]
    owners = [index for index, one in enumerate(conversations) for _ in one]
    answers = greedy_answers(backbone, prompts, max_new_tokens, token_budget, on_answer)
    traced: dict[int, list[Trace]] = {}
    for i, answer in answers.items():
        if len(answer) > 1:
            traced.setdefault(owners[i], []).append(
                trace_answer(backbone, draft, prompts[i], answer)
            )
    by_length = sorted((prompts[i] for i in answers), key=len)
    return TracedAnswers(list(traced.values()), by_length[len(by_length) // 2] if by_length else [])


def greedy_answers(
    backbone: Backbone,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    token_budget: int,
    on_answer: Callable[[int], None] | None = None,
) -> dict[int, list[int]]:
    """Generate greedy answers in batches, to as many of the first prompts as it takes for
    `token_budget` tokens.

    The prompts are those that would be answered one by one until the budget is reached: one joins
    the batch only if the budget cannot be reached without it, even if all unfinished answers get
    `max_new_tokens` tokens.

    Args:
        prompts: token ids, each ending where an answer starts; those longer than the model's
            context are left out.
        on_answer: called with the length of each answer.

    Returns:
        The answers by the index of their prompt, in the order of `prompts`.
    """
    fitting = [
        PendingRequest(i, prompt)
        for i, prompt in enumerate(prompts)
        if len(prompt) <= backbone.max_context
    ]
    waiting, answers, remaining = iter(fitting), dict[int, list[int]](), token_budget
    rows = _rows_in_memory(
        backbone, max((len(one.prompt) for one in fitting), default=0) + max_new_tokens
    )
    batch = BatchDecoder(backbone).begin(max_new_tokens)
    while True:
        needed = min(rows, -(-remaining // max_new_tokens))
        free = needed - len(batch.active)
        joining = list(islice(waiting, free)) if free * REFILL_FRACTION >= needed else []
        if joining:
            batch.add_requests(joining)
        elif not batch.active:
            return dict(sorted(answers.items()))
        for index, out in batch.step():
            answers[index] = out.tokens
            remaining -= len(out.tokens)
            if on_answer is not None:
                on_answer(len(out.tokens))


def _rows_in_memory(backbone: Backbone, positions: int) -> int:
    """How many rows of up to `positions` tokens to decode at once."""
    if not BatchDecoder(backbone).can_batch:
        return 1
    row = (
        min(positions, backbone.max_context)
        * cache_elements_per_position(backbone.config)
        * backbone.dtype.itemsize
    )
    return max(1, min(MAX_ROWS, MAX_CACHE_BYTES // row))


@torch.inference_mode()
def trace_answer(backbone: Backbone, draft: Draft, prompt: list[int], answer: list[int]) -> Trace:
    """Trace one answer with a single forward pass over prompt and answer (teacher forcing)."""
    tokens = torch.tensor([prompt + answer], device=backbone.device)
    inputs = tokens[:, :-1]
    feats = backbone.run(inputs, need=draft.needs)
    first = len(prompt) - 1  # the position from which heads guess when answer[0] is the root
    count, heads = len(answer), draft.num_heads
    ranks, confidence = torch.full((count, heads), -1, dtype=torch.long), list[float]()
    all_states = draft.teacher_forced_states(feats, Rows.from_tokens(inputs))
    for k, states in zip(range(1, min(heads, count - 1) + 1), all_states, strict=False):
        head = draft.lm_head(k)
        read = states[0, first : first + count - k]
        logits = head.logits(read)
        if k == 1 and "threshold" in draft.setting_names:
            confidence = [round(p, 6) for p in logits.float().softmax(-1).amax(-1).tolist()]
        guesses = head.guesses(read, logits, MAX_RANK)
        ranks[: count - k, k - 1] = rank_of(
            guesses, head.indices_of(tokens[0, len(prompt) + k :])
        ).cpu()
    return Trace(
        ranks.tolist(), [min(heads, count - 1 - position) for position in range(count)], confidence
    )


def rank_of(guesses: Tensor, targets: Tensor) -> Tensor:
    """Return the rank of each target among its row of guesses, long [N]; -1 where it is none of
    them.

    Args:
        guesses: long [N, c], from `LMHead.guesses`, so that equal logits (common in bfloat16) have
            the ranks that they get in decoding.
        targets: long [N]; -1 for a token that a reduced vocabulary lacks.
    """
    hit = guesses == targets[:, None]
    return torch.where(hit.any(1), hit.int().argmax(1), -1)


# Traces beside tree.json, so that a tree for another device, dtype or compilation needs no answers
# again

Key = dict[str, Any]


def weights_key(paths: ModelPaths, settings: DecodingSettings) -> Key:
    """Return what traces depend on: heads, adapter and backbone by hash, the form of the backbone's
    weights, and where answers end.

    Its dtype and compilation change a guess's rank only where logits nearly tie.
    """
    backbone = model_directory(paths.base_model)
    adapter = () if paths.adapter is None else paths.adapter.glob("*")
    key: Key = {
        "heads": None if paths.heads is None else digest_files(find_heads(paths.heads).files),
        "adapter": digest_files(adapter),
        "backbone": digest_files(
            [
                *backbone.glob("config.json"),
                *backbone.glob("*.safetensors"),
                *backbone.glob("*.bin"),
            ]
        ),
        "quantization": settings.quantization,
        "merged": settings.merged,
    }
    if added := added_stop_tokens(paths):  # earlier versions did not stop there
        key["stop_tokens"] = list(added)
    return key


def digest_files(files: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and parts of files."""
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}{size}".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * size // BLOCKS)
                digest.update(file.read(min(BLOCK_BYTES, -(-size // BLOCKS))))
    return digest.hexdigest()


def save_traces(path: Path, traced: TracedAnswers, key: Key) -> None:
    """Write traces as a compressed NumPy archive, a few KB per 1,000 tokens of five heads."""
    traces = traced.traces
    arrays: dict[str, Any] = {
        "key": json.dumps(key),
        "prompt": np.array(traced.prompt, np.int32),
        "answers": np.array([len(conversation) for conversation in traced.conversations], np.int32),
        "tokens": np.array([len(trace.ranks) for trace in traces], np.int32),
        "ranks": np.concatenate([np.array(trace.ranks, np.int8) for trace in traces]),
    }

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    replace_file(path, write)


def load_traces(path: Path, key: Key) -> TracedAnswers | None:
    """Read the traces that were written with an equal key; None if there are none, or the file is
    damaged.
    """
    if not path.is_file():
        return None
    try:
        with np.load(path) as arrays:
            if parse_json(str(arrays["key"])) != key:
                return None
            ranks, tokens, answers = arrays["ranks"], arrays["tokens"], arrays["answers"]
            prompt = arrays["prompt"].tolist()
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        NotImplementedError,
        zlib.error,
        zipfile.BadZipFile,
    ):
        return None
    heads, traces = ranks.shape[1], []
    for start, end in pairwise([0, *np.cumsum(tokens).tolist()]):
        targets = [min(heads, end - 1 - position) for position in range(start, end)]
        traces.append(Trace(ranks[start:end].tolist(), targets))
    return TracedAnswers(
        [traces[start:end] for start, end in pairwise([0, *np.cumsum(answers).tolist()])], prompt
    )
