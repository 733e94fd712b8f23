"""Compares the tree's answers with the plain ones, token for token. Times nothing and reads no bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from medusa_train.checkpoint.load import LoadedModel
from medusa_train.evaluation.metrics import first_difference
from medusa_train.evaluation.records import TurnRecord, Verdict
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone

#: In which the tree's answers are compared with plain ones.
EQUALITY_DTYPES = ("float32", "bfloat16")

#: Logits within this of the best one may change places with it by rounding alone, in float32.
TIE_MARGIN = 1e-4


def compare_timed_answers(records: Sequence[TurnRecord], backbone: Backbone, dtype: str) -> None:
    """Compare the answers that were timed in `dtype`; the verdicts go into `record.exact`."""
    for record in records:
        if record.tree is not None:
            record.exact[dtype] = compare_answers(
                backbone, record.prompt_ids, record.tree.tokens, record.plain.tokens, ties=dtype == "float32"
            )


def compare_regenerated_answers(
    records: Sequence[TurnRecord],
    subject: LoadedModel,
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
        record.exact[dtype] = compare_answers(
            subject.backbone, record.prompt_ids, tree.tokens, plain.tokens, ties=dtype == "float32"
        )
        on_turn(len(tree.tokens) + len(plain.tokens))


def compare_answers(
    backbone: Backbone, prompt_ids: Sequence[int], tree: Sequence[int], plain: Sequence[int], *, ties: bool
) -> Verdict:
    """Equal, different, or (with `ties`) first different where both tokens' logits nearly coincide with the best."""
    place = first_difference(tree, plain)
    if place is None:
        return Verdict.EQUAL
    if not ties or place >= min(len(tree), len(plain)):
        return Verdict.DIFFERENT
    behind = logit_gaps(backbone, prompt_ids, plain[:place], (tree[place], plain[place]))
    return Verdict.TIE if max(behind) <= TIE_MARGIN else Verdict.DIFFERENT


@torch.no_grad()
def logit_gaps(
    backbone: Backbone, prompt_ids: Sequence[int], answer: Sequence[int], candidates: Sequence[int]
) -> list[float]:
    """By how much the best logit after prompt and answer leads each candidate's; 0 for the best token itself."""
    tokens = torch.tensor([[*prompt_ids, *answer]], device=backbone.device)
    logits = backbone.logits(backbone.run(tokens).hidden[:, -1]).float()[0]
    return [float(logits.max() - logits[candidate]) for candidate in candidates]
