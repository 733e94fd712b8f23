"""Ask questions and time every decoder on every turn, alone or in batches.

Every prompt, or batch of prompts, is decoded by all of them before the next one, in an order that
rotates, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError, DataError
from medusa_train.evaluation.measured_answers import SkippedTurn, TimedAnswer, TurnRecord
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.timed_decoders import (
    GENERATE,
    GREEDY,
    PLAIN,
    TREE,
    GenerateDecoder,
    LoopDecoder,
    TimedDecoder,
    reference_decoders,
)
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.inference.detokenize import answer_text
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.base import Proposer
from medusa_train.trees.kv_slots import KEY_BLOCK
from medusa_train.trees.tree import Tree

WARM_UP_TOKENS = 64

Turns = Sequence[TurnRecord | SkippedTurn]
T = TypeVar("T")


class _Asked(NamedTuple):
    """A turn that all decoders answer."""

    question: Question
    turn: int  # 1-based
    prompt: list[int]
    opened: str  # the beginning of a reasoning part that the template opened


class SpeedTest:
    """Asks questions and times every decoder on every turn.

    The decoders are the model's (with dynamic trees also fixed ones, with merged drafts also their
    parts), plain decoding, `generate` unless it is False, and the baselines `extra`, which do not
    decode in batches.
    """

    def __init__(
        self,
        model: LoadedModel,
        chat: ChatEncoder,
        max_new_tokens: int,
        extra: Mapping[str, TimedDecoder] | None = None,
        mode: DecodingMode = GREEDY,
        *,
        generate: bool = True,
    ) -> None:
        self._backbone = model.backbone
        self._chat = chat
        self._max_new_tokens = max_new_tokens
        self._batch_size = mode.batch_size
        self._shared = model.backbone.new_slots()
        if mode.batch_size > 1 and not BatchDecoder(model.backbone).can_batch:
            raise BackboneError("longrope models can't decode in batches; set batch_size: 1")
        self._decoders: dict[str, TimedDecoder] = {
            PLAIN: LoopDecoder(self._new_decoder(), mode, mode.baseline_rule)
        }
        if generate:
            self._decoders[GENERATE] = GenerateDecoder(model.backbone, mode)
        self._decoders.update(extra or {})
        for name, reference in reference_decoders(model).items():
            decoder = self._new_decoder(reference.proposer, reference.tree)
            self._decoders[name] = LoopDecoder(decoder, mode, mode.rule)
        if model.proposer is not None:
            decoder = self._new_decoder(model.proposer, model.tree)
            self._decoders[TREE] = LoopDecoder(decoder, mode, mode.rule)

    def _new_decoder(
        self, proposer: Proposer | None = None, tree: Tree | None = None
    ) -> Decoder | BatchDecoder:
        """Return a decoder; those of single rows share their memory, since they answer in turns."""
        if self._batch_size > 1:
            return BatchDecoder(self._backbone, proposer, tree)
        return Decoder(self._backbone, proposer, tree, self._shared)

    @property
    def names(self) -> list[str]:
        """Names of the decoders."""
        return sorted(self._decoders)

    def warm_up(
        self, questions: Sequence[Question], on_answer: Callable[[], None] = lambda: None
    ) -> None:
        """Answer the first turn of every question with every decoder, untimed; calls `on_answer`
        after each.
        """
        tokens = min(WARM_UP_TOKENS, self._max_new_tokens)
        for wave in _waves(questions, self._batch_size):
            prompts = [self._chat.prompt(question.opening) for question in wave]
            fitting = [prompt for prompt in prompts if self._fits(prompt)]
            if len(fitting) == 1 and self._batch_size > 1:
                fitting *= 2  # one alone would warm up the decoder of single rows
            for name in self.names:
                if fitting:
                    self._decoders[name].answer(fitting, tokens)
                for _ in wave:
                    on_answer()

    def capture(self, questions: Sequence[Question]) -> None:
        """After the warm-up, capture the CUDA graphs that the answers to `questions` replay: not
        while they are timed.

        Takes a moment for each multiple of `KEY_BLOCK` positions.
        """
        longest = 0
        for question in questions:
            messages = question.opening
            for turn in question.turns[1:]:
                messages += [Message("assistant", "."), Message("user", turn)]
            answers = len(question.turns) * self._max_new_tokens
            longest = max(longest, len(self._chat.prompt(messages)) + answers)
        longest += KEY_BLOCK  # an answer may have more tokens where it is part of the next prompt
        positions = min(longest, self._backbone.max_context)
        loops = [loop for loop in self._decoders.values() if isinstance(loop, LoopDecoder)]
        # the largest first, since they share memory
        for decoder in sorted(loops, key=lambda loop: -loop.tree_size):
            decoder.capture(self._batch_size, positions)

    def run(
        self,
        questions: Sequence[Question],
        on_turn: Callable[[TurnRecord | SkippedTurn], None],
        completed: Mapping[int | str, Turns] | None = None,
        on_answer: Callable[[TimedAnswer], None] = lambda answer: None,
    ) -> tuple[list[TurnRecord], list[SkippedTurn]]:
        """Time every decoder on every turn of every question.

        The plain answer becomes the history of later turns for all decoders, so that all get the
        same prompts. A turn whose prompt and longest answer do not fit the context is skipped, and
        so are the turns after it. In batches, the questions of a batch are asked their first turns
        together, then their second turns, and so on.

        Args:
            on_turn: called with each turn when it is done.
            completed: turns of questions that an interrupted evaluation has measured; these are not
                asked again.
            on_answer: called with each answer of each decoder, between two measurements.
        """
        measured: list[list[TurnRecord | SkippedTurn]] = [
            list((completed or {}).get(question.question_id, ())) for question in questions
        ]
        remaining = [index for index, turns in enumerate(measured) if not turns]
        rotation = sum(isinstance(turn, TurnRecord) for turns in measured for turn in turns)
        for wave in _waves(remaining, self._batch_size):
            # the conversation so far of each question of the batch that still fits
            histories = {index: questions[index].opening[:-1] for index in wave}
            last_turn = max(len(questions[index].turns) for index in wave)
            for turn in range(1, last_turn + 1):
                # 1. ask the next message of each; what no longer fits is skipped to its end
                asked: dict[int, _Asked] = {}
                for index, history in list(histories.items()):
                    question = questions[index]
                    if turn > len(question.turns):
                        continue
                    history.append(Message("user", question.turns[turn - 1]))
                    prompt = self._chat.prompt(history)
                    if self._fits(prompt):
                        opened = self._chat.opened_reasoning(history)
                        asked[index] = _Asked(question, turn, prompt, opened)
                        continue
                    del histories[index]
                    for later in range(turn, len(question.turns) + 1):
                        skipped_turn = SkippedTurn(question.question_id, later, len(prompt))
                        measured[index].append(skipped_turn)
                        on_turn(skipped_turn)
                if not asked:
                    continue
                # 2. every decoder answers all of them
                answered = self._measure(list(asked.values()), rotation, on_answer)
                # 3. the plain answer goes on the conversation
                for index, record in zip(asked, answered, strict=True):
                    measured[index].append(record)
                    on_turn(record)
                    histories[index].append(Message("assistant", record.history))
                rotation += 1
        records = [turn for turns in measured for turn in turns if isinstance(turn, TurnRecord)]
        skipped = [turn for turns in measured for turn in turns if isinstance(turn, SkippedTurn)]
        if not records:
            shortest = min(turn.prompt_tokens for turn in skipped)
            raise DataError(
                f"no question fits the context of {self._backbone.max_context} tokens:"
                f" {self._max_new_tokens} are reserved for the answer, and the shortest prompt has"
                f" {shortest}.\nSet --max-new-tokens lower, or use shorter questions."
            )
        return records, skipped

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self._max_new_tokens <= self._backbone.max_context

    def _measure(
        self, asked: Sequence[_Asked], rotation: int, on_answer: Callable[[TimedAnswer], None]
    ) -> list[TurnRecord]:
        """Let every decoder answer the same prompts, in an order that starts at `rotation`."""
        names = self.names
        first = rotation % len(names)
        prompts = [turn.prompt for turn in asked]
        timed: dict[str, list[TimedAnswer]] = {}
        for name in names[first:] + names[:first]:
            timed[name] = self._decoders[name].answer(prompts, self._max_new_tokens)
            for answer in timed[name]:
                on_answer(answer)
        return [
            self._record(turn, {name: answers[row] for name, answers in timed.items()})
            for row, turn in enumerate(asked)
        ]

    def _record(self, asked: _Asked, answers: dict[str, TimedAnswer]) -> TurnRecord:
        """Return the record of one turn from the answer of each decoder."""
        others = {
            name: answer for name, answer in answers.items() if name not in (TREE, PLAIN, GENERATE)
        }
        plain = answers[PLAIN]
        shown = answers.get(TREE, plain)
        return TurnRecord(
            question_id=asked.question.question_id,
            category=asked.question.category,
            turn=asked.turn,
            prompt_ids=tuple(asked.prompt),
            tree=answers.get(TREE),
            plain=plain,
            generate=answers.get(GENERATE),
            text=asked.opened + self._text(shown.tokens),
            history=self._text(plain.tokens),
            opened=asked.opened,
            others=others,
            asked=asked.question.turns[asked.turn - 1],
        )

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without the token that ended it."""
        if tokens and tokens[-1] in self._backbone.eos_ids:
            tokens = tokens[:-1]
        return answer_text(self._backbone.tokenizer, tokens).strip()


def _waves(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
