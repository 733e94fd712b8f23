"""Compares the tree's answers with the plain ones, token for token. Times nothing and reads no bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from medusa_train.evaluation.metrics import first_difference
from medusa_train.evaluation.records import TurnRecord, Verdict
from medusa_train.evaluation.subject import Subject
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone

#: Two best logits within this of each other may change places by rounding alone, in float32.
TIE_MARGIN = 1e-4


def judge_timed(records: Sequence[TurnRecord], backbone: Backbone, dtype: str) -> None:
    """Compare the answers that were timed in `dtype`; the verdicts go into `record.exact`."""
    for record in records:
        if record.tree is not None:
            record.exact[dtype] = verdict(
                backbone, record.prompt_ids, record.tree.tokens, record.plain.tokens, ties=dtype == "float32"
            )


def judge_again(
    records: Sequence[TurnRecord],
    subject: Subject,
    dtype: str,
    max_new_tokens: int,
    on_turn: Callable[[int], None],
) -> None:
    """Decode every prompt once more in `dtype`, with the tree and with the empty one, and compare.

    `subject` is loaded in that dtype and has a draft. The prompts are the timed run's own, history included.
    `on_turn` is told how many tokens each turn took.
    """
    with_tree = Decoder(subject.backbone, subject.draft, subject.tree)
    plainly = Decoder(subject.backbone)
    for record in records:
        tree = with_tree.generate(list(record.prompt_ids), max_new_tokens)
        plain = plainly.generate(list(record.prompt_ids), max_new_tokens)
        record.exact[dtype] = verdict(
            subject.backbone, record.prompt_ids, tree.tokens, plain.tokens, ties=dtype == "float32"
        )
        on_turn(len(tree.tokens) + len(plain.tokens))


def verdict(
    backbone: Backbone, prompt_ids: Sequence[int], tree: Sequence[int], plain: Sequence[int], *, ties: bool
) -> Verdict:
    """Equal, different, or (with `ties`) first different where the two best logits nearly coincide."""
    place = first_difference(tree, plain)
    if place is None:
        return Verdict.EQUAL
    if ties and place < min(len(tree), len(plain)) and margin_at(backbone, prompt_ids, plain, place) <= TIE_MARGIN:
        return Verdict.TIE
    return Verdict.DIFFERENT


@torch.no_grad()
def margin_at(backbone: Backbone, prompt_ids: Sequence[int], answer: Sequence[int], place: int) -> float:
    """By how much the best logit leads the second best where token `place` of the answer was chosen."""
    tokens = torch.tensor([[*prompt_ids, *answer[:place]]], device=backbone.device)
    hidden = backbone.run(tokens).hidden[:, -1]
    best = backbone.logits(hidden).float().topk(2, dim=-1).values[0]
    return float(best[0] - best[1])
