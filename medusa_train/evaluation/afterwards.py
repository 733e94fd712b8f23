"""What is looked up once the clocks have stopped: text token by token, and the heads' guesses. Times nothing."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_train.checkpoint.subject import Subject
from medusa_train.evaluation.memory import is_out_of_memory
from medusa_train.evaluation.pieces import token_pieces
from medusa_train.evaluation.records import TurnRecord
from medusa_train.inference.ranks import trace_answer


def look_closer(records: Sequence[TurnRecord], subject: Subject) -> None:
    """Fill in `pieces` and, with a draft, `trace` of every record.

    The trace takes one more pass over prompt and answer, with the logits of a whole answer in memory; where they do
    not fit, no answer is traced.
    """
    for record in records:
        record.pieces = token_pieces(subject.backbone.tokenizer, record.answer.tokens)
    if subject.draft is None:
        return
    try:
        for record in records:
            prompt, answer = list(record.prompt_ids), list(record.answer.tokens)
            record.trace = trace_answer(subject.backbone, subject.draft, prompt, answer)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        for record in records:
            record.trace = None
