"""Ask questions and let every decoder answer every turn, alone or in batches; `timed_decoders` has the
clock.

Every prompt, or batch of prompts, is decoded by all of them before the next one, in an order that
rotates, so that a busy machine slows all of them equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError, TargetModelError
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.timed_decoders import (
    GREEDY,
    GenerateDecoder,
    LoopDecoder,
    TimedDecoder,
    reference_decoders,
)
from medusa_train.evaluation.turns import GENERATE, PLAIN, TREE, Answer, Turn
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.inference.detokenize import answer_text
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.base import Proposer
from medusa_train.trees.kv_cache import KEY_BLOCK
from medusa_train.trees.tree import Tree

WARM_UP_TOKENS = 64

T = TypeVar("T")


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
        self._target_model = model.target_model
        self._chat = chat
        self._max_new_tokens = max_new_tokens
        self._batch_size = mode.batch_size
        if mode.batch_size > 1 and not BatchDecoder(model.target_model).can_batch:
            raise TargetModelError("longrope models can't decode in batches; set batch_size: 1")
        shared = model.target_model.new_kv_cache()

        def loop(proposer: Proposer | None, tree: Tree | None) -> LoopDecoder:
            rule = mode.baseline_rule if proposer is None else mode.rule
            if mode.batch_size > 1:
                return LoopDecoder(BatchDecoder(model.target_model, proposer, tree), mode, rule)
            # single rows share their memory, since their decoders answer in turns
            return LoopDecoder(Decoder(model.target_model, proposer, tree, shared), mode, rule)

        # in the order of the report
        self._decoders: dict[str, TimedDecoder] = {}
        if model.proposer is not None:
            self._decoders[TREE] = loop(model.proposer, model.tree)
        self._decoders[PLAIN] = loop(None, None)
        if generate:
            self._decoders[GENERATE] = GenerateDecoder(model.target_model, mode)
        others = dict(extra or {})
        for name, reference in reference_decoders(model).items():
            others[name] = loop(reference.proposer, reference.tree)
        self._decoders.update(sorted(others.items()))

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
            prompts = [self._chat.prompt(question.opening, question.variables) for question in wave]
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
            prompt = self._chat.prompt(messages, question.variables)
            longest = max(longest, len(prompt) + answers)
        longest += KEY_BLOCK  # an answer may have more tokens as a part of the next prompt
        positions = min(longest, self._target_model.max_context)
        loops = [loop for loop in self._decoders.values() if isinstance(loop, LoopDecoder)]
        # the largest first, since they share memory
        for decoder in sorted(loops, key=lambda loop: -loop.tree_size):
            decoder.capture(self._batch_size, positions)

    def run(
        self,
        questions: Sequence[Question],
        on_turn: Callable[[Turn], None],
        completed: Mapping[int | str, Sequence[Turn]] | None = None,
        on_answer: Callable[[Answer], None] = lambda answer: None,
    ) -> list[Turn]:
        """Time every decoder on every turn of every question; return the turns by question.

        The plain answer becomes the history of later turns for all decoders, so that all get the
        same prompts. A turn whose prompt and longest answer do not fit the context is skipped, and
        so are the turns after it. In batches, the questions of a batch are asked their first turns
        together, then their second turns, and so on.

        Args:
            on_turn: called with each turn when it is done.
            completed: turns of questions that an interrupted evaluation has measured; these are not
                asked again.
            on_answer: called with each answer of each decoder, between two measurements.

        Raises:
            DataError: no question fits.
        """
        done: dict[int | str, list[Turn]] = {
            question.question_id: list((completed or {}).get(question.question_id, ()))
            for question in questions
        }
        rotation = sum(not turn.skipped for turns in done.values() for turn in turns)

        def finish(turn: Turn) -> None:
            done[turn.question_id].append(turn)
            on_turn(turn)

        left = [question for question in questions if not done[question.question_id]]
        for wave in _waves(left, self._batch_size):
            # the conversation so far of each question that still fits
            chats: dict[int | str, list[Message]] = {one.question_id: [] for one in wave}
            for number in range(1, 1 + max(len(question.turns) for question in wave)):
                # 1. ask the next message of each; a question that no longer fits is skipped
                asked: list[Turn] = []
                for question in wave:
                    if number > len(question.turns) or question.question_id not in chats:
                        continue
                    turn = self._ask(question, number, chats[question.question_id])
                    if self._fits(turn.prompt_ids):
                        asked.append(turn)
                        continue
                    del chats[question.question_id]
                    for later in range(number, 1 + len(question.turns)):
                        finish(replace(turn, turn=later, asked=question.turns[later - 1]))
                if not asked:
                    continue
                # 2. every decoder answers all of them
                self._measure(asked, rotation, on_answer)
                rotation += 1
                # 3. the plain answer continues the conversation
                for turn in asked:
                    finish(turn)
                    chats[turn.question_id].append(Message("assistant", turn.history))
        turns = [turn for question in questions for turn in done[question.question_id]]
        if all(turn.skipped for turn in turns):
            shortest = min(len(turn.prompt_ids) for turn in turns)
            raise DataError(
                f"no question fits the context of {self._target_model.max_context} tokens:"
                f" {self._max_new_tokens} are reserved for the answer, and the shortest prompt has"
                f" {shortest}.\nSet --max-new-tokens lower, or use shorter questions."
            )
        return turns

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self._max_new_tokens <= self._target_model.max_context

    def _ask(self, question: Question, number: int, chat: list[Message]) -> Turn:
        """Add what a turn asks to a conversation; return the turn, not answered yet."""
        chat += question.asked(number)
        return Turn(
            question.question_id,
            question.category,
            number,
            tuple(self._chat.prompt(chat, question.variables)),
            asked=question.turns[number - 1],
            opened=self._chat.opened_reasoning(chat, question.variables),
        )

    def _measure(
        self, asked: Sequence[Turn], rotation: int, on_answer: Callable[[Answer], None]
    ) -> None:
        """Let every decoder answer the same turns, in an order that starts at `rotation`."""
        names = self.names
        first = rotation % len(names)
        prompts = [turn.prompt_ids for turn in asked]
        timed: dict[str, list[Answer]] = {}
        for name in names[first:] + names[:first]:
            timed[name] = self._decoders[name].answer(prompts, self._max_new_tokens)
            for answer in timed[name]:
                on_answer(answer)
        for row, turn in enumerate(asked):
            turn.answers = {name: timed[name][row] for name in self._decoders}
            turn.text = turn.opened + self._text(turn.answer.tokens)
            turn.history = self._text(turn.plain.tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without the token that ended it."""
        if tokens and tokens[-1] in self._target_model.eos_ids:
            tokens = tokens[:-1]
        return answer_text(self._target_model.tokenizer, tokens).strip()


def _waves(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
