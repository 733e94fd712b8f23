"""Count tokens per step of trees, of answers in batches: no clock has a part in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.data.conversation import Message, is_looping
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.evaluation.decoding_mode import DecodingMode
from medusa_train.evaluation.questions import Bench
from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.generate import Generation
from medusa_train.inference.traces import AcceptedLength, Trace, trace_answer
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree

ROWS = 16  # answers that are generated at once


class Counted(NamedTuple):
    """The steps of one answer.

    Attributes:
        answer: token ids. tokens: how many of them came from steps, that is all but the prefill's.
        accepted: guesses that each step accepted.
    """

    question_id: int | str
    answer: Sequence[int]
    tokens: int
    accepted: Sequence[int]


def count(answers: Sequence[Counted]) -> dict[str, Any]:
    """Count tokens and steps by question, in all answers and in those that do not loop, and CTAR."""
    totals: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}  # by whether the answer loops
    questions: dict[str, list[int]] = {}
    lengths: list[int] = []
    for one in answers:
        for sums in (questions.setdefault(str(one.question_id), [0, 0]), totals[is_looping(one.answer)]):
            sums[0] += one.tokens
            sums[1] += len(one.accepted)
        lengths += one.accepted
    (loop_tokens, loop_steps), (tokens, steps) = totals[True], totals[False]
    ctar = [
        sum(length >= w for length in lengths) / max(len(lengths), 1) for w in range(1, max(lengths, default=0) + 1)
    ]
    return {
        "rate": (tokens + loop_tokens) / max(steps + loop_steps, 1),
        "rate_without_loops": tokens / steps if steps else None,
        "ctar": ctar,
        "questions": questions,
    }


def simulate(question_id: int | str, answer: Sequence[int], trace: Trace, lengths: AcceptedLength) -> Counted:
    """Count the steps that a tree takes for a traced greedy answer."""
    accepted = [lengths[trace.path(start)] for start in trace.simulate(lengths)]
    return Counted(question_id, answer, len(trace.ranks) - 1, accepted)


def count_answers(
    model: LoadedModel,
    chat: ChatEncoder,
    bench: Bench,
    mode: DecodingMode,
    max_new_tokens: int,
    trees: Mapping[str, Tree],
    progress: RunProgress,
) -> dict[str, Any]:
    """Ask a bench turn by turn and count the steps of every tree, always filled.

    Greedy answers are those of plain decoding, along which trees are simulated; with sampling each tree decodes its
    own.

    Returns:
        `trees`: name to `count`; `answers` and `loops`: their number and that of looping ones, by tree.
    """
    assert model.draft is not None
    sampled = mode.rule is not None
    turns = sum(len(question.turns) for question in bench.questions)
    counted: dict[str, list[Counted]] = {name: [] for name in trees}
    with progress.phase("counting steps", turns * (len(trees) if sampled else 1), "answers", ticking=True) as phase:
        if sampled:
            for name, tree in trees.items():
                decoder = BatchDecoder(model.backbone, model.draft, tree)
                with model.draft.no_early_exit():
                    for question, _, out in _answers(decoder, chat, bench, mode, max_new_tokens):
                        counted[name].append(Counted(question, out.tokens, len(out.tokens) - 1, out.accepted))
                        phase.advance()
        else:
            lengths = {name: AcceptedLength(tree) for name, tree in trees.items()}
            for question, prompt, out in _answers(BatchDecoder(model.backbone), chat, bench, mode, max_new_tokens):
                trace = trace_answer(model.backbone, model.draft, prompt, out.tokens)
                for name, length in lengths.items():
                    counted[name].append(simulate(question, out.tokens, trace, length))
                phase.advance()
    return {
        "trees": {name: count(answers) for name, answers in counted.items()},
        "answers": {name: len(answers) for name, answers in counted.items()},
        "loops": {name: sum(is_looping(one.answer) for one in answers) for name, answers in counted.items()},
    }


def _answers(
    decoder: BatchDecoder, chat: ChatEncoder, bench: Bench, mode: DecodingMode, max_new_tokens: int
) -> Iterator[tuple[int | str, list[int], Generation]]:
    """Answer all turns; yields question id, prompt and answer. A conversation ends where it outgrows the context."""
    histories = {question.question_id: list[Message]() for question in bench.questions}
    for turn in range(max((len(question.turns) for question in bench.questions), default=0)):
        asked: list[tuple[int | str, list[int]]] = []
        for question in bench.questions:
            history = histories.get(question.question_id)
            if history is None or turn >= len(question.turns):
                continue
            history.append(Message("user", question.turns[turn]))
            prompt = chat.prompt(history)
            if len(prompt) + max_new_tokens <= decoder.backbone.max_context:
                asked.append((question.question_id, prompt))
            else:
                del histories[question.question_id]
        asked.sort(key=lambda one: len(one[1]))  # rows of similar length share passes
        for start in range(0, len(asked), ROWS):
            part = asked[start : start + ROWS]
            prompts = [prompt for _, prompt in part]
            generators = mode.generators(prompts, mode.rule)
            outputs = decoder.generate_batch(prompts, max_new_tokens, rule=mode.rule, generators=generators)
            for (question_id, prompt), out in zip(part, outputs, strict=True):
                text = decoder.backbone.tokenizer.decode(out.tokens, skip_special_tokens=True)
                histories[question_id].append(Message("assistant", text))
                yield question_id, prompt, out
