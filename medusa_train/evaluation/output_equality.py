"""Compare the tree's answers with those of plain decoding, token for token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.evaluation.turns import Turn, Verdict
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.models.target_model import TargetModel

#: Dtypes in which the answers are compared.
EQUALITY_DTYPES = ("float32", "bfloat16")

#: Two tokens are a tie if both logits are at most this far below the best logit: rounding in
#: float32 may swap them.
TIE_MARGIN = 1e-4

#: At least this many answers are compared.
LEAST_COMPARED = 8
#: All answers are compared if that is expected to take at most this many seconds.
ALL_WITHIN = 60.0


def compare_timed_answers(turns: Sequence[Turn], target_model: TargetModel, dtype: str) -> None:
    """Compare the answers that were timed in `dtype`; write the results to `turn.exact`."""
    for turn in turns:
        tree, plain = (answer.tokens for answer in turn.compared.values())
        turn.exact[dtype] = compare_answers(target_model, turn.prompt_ids, tree, plain, dtype)


def compare_regenerated_answers(
    turns: Sequence[Turn],
    model: LoadedModel,
    dtype: str,
    max_new_tokens: int,
    on_turn: Callable[[int], None],
    batch_size: int = 1,
    seconds: float | None = None,
) -> None:
    """Generate the answers again in `dtype`, with the tree and with the empty tree, and compare
    them; write the results to `turn.exact`.

    Args:
        on_turn: called after each turn with the number of tokens generated for it.
        seconds: time limit; None: compare all answers. The limit applies only if comparing all
            answers would take over `ALL_WITHIN` seconds. Then as many answers as fit into it are
            compared, at least `LEAST_COMPARED`, drawn at random.
    """
    if seconds is not None:
        turns = random.Random(0).sample(turns, len(turns))
    started = time.monotonic()
    tree_decoder = BatchDecoder(model.target_model, model.proposer, model.tree)
    plain_decoder = BatchDecoder(model.target_model)
    for start in range(0, len(turns), batch_size):
        elapsed = time.monotonic() - started
        spent = seconds is not None and start >= LEAST_COMPARED and elapsed >= seconds
        if spent and elapsed / start * len(turns) > ALL_WITHIN:
            break
        batch = turns[start : start + batch_size]
        prompts = [list(turn.prompt_ids) for turn in batch]
        trees = tree_decoder.generate_batch(prompts, max_new_tokens)
        plains = plain_decoder.generate_batch(prompts, max_new_tokens)
        for turn, tree, plain in zip(batch, trees, plains, strict=True):
            turn.exact[dtype] = compare_answers(
                model.target_model, turn.prompt_ids, tree.tokens, plain.tokens, dtype
            )
            on_turn(len(tree.tokens) + len(plain.tokens))


def compare_answers(
    target_model: TargetModel,
    prompt_ids: Sequence[int],
    tree: Sequence[int],
    plain: Sequence[int],
    dtype: str,
) -> Verdict:
    """Compare two answers to a prompt, as token ids.

    In float32 the verdict is TIE if, at the first position where the answers differ, both tokens'
    logits are within `TIE_MARGIN` of the best. Other dtypes have no ties, because their rounding
    also swaps tokens with larger gaps.
    """
    position = first_difference(tree, plain)
    if position is None:
        return Verdict.EQUAL
    if dtype != "float32" or position >= min(len(tree), len(plain)):
        return Verdict.DIFFERENT
    candidates = (tree[position], plain[position])
    gaps = logit_gaps(target_model, prompt_ids, plain[:position], candidates)
    return Verdict.TIE if max(gaps) <= TIE_MARGIN else Verdict.DIFFERENT


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the index of the first token in which two answers differ; None if they are equal.

    If one answer is a prefix of the other, the index is the length of the prefix.
    """
    pairs = enumerate(zip_longest(first, second))
    return next((index for index, (left, right) in pairs if left != right), None)


@torch.no_grad()
def logit_gaps(
    target_model: TargetModel,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    candidates: Sequence[int],
) -> list[float]:
    """Return for each candidate the best logit minus the candidate's logit, at the position after
    prompt and answer.
    """
    tokens = torch.tensor([[*prompt_ids, *answer]], device=target_model.device)  # [1, T]
    last = target_model.run(tokens).final[:, -1]  # [1, d]
    logits = target_model.logits(last).float()[0]  # [V]
    return [float(logits.max() - logits[candidate]) for candidate in candidates]
