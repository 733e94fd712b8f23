"""Ask questions and let every decoder answer every turn, alone or in batches. `timed_decoders`
measures the times.

All decoders answer a prompt, or batch of prompts, before the next one is asked. Their order
rotates, so that a busy machine slows all of them equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.timed_decoders import LoopDecoder, TimedDecoder
from medusa_train.evaluation.turns import TimedAnswer, Turn
from medusa_train.inference.detokenize import answer_text
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.kv_cache import KEY_BLOCK

WARM_UP_TOKENS = 64


class SpeedTest:
    """Asks questions and times every decoder on every turn.

    Args:
        decoders: decoders by name, in the order of the report; see `build_decoders`.
        batch_size: number of questions that are answered in the same passes.
    """

    def __init__(
        self,
        target_model: TargetModel,
        chat: ChatEncoder,
        decoders: Mapping[str, TimedDecoder],
        max_new_tokens: int,
        batch_size: int = 1,
    ) -> None:
        self._target_model = target_model
        self._chat = chat
        self._decoders = decoders
        self._max_new_tokens = max_new_tokens
        self._batch_size = batch_size

    @property
    def names(self) -> list[str]:
        """Names of the decoders."""
        return sorted(self._decoders)

    def warm_up(self, questions: Sequence[Question]) -> None:
        """Answer the first turn of every question with every decoder, untimed."""
        for wave in self._waves(questions):
            prompts = [self._chat.prompt(question.opening, question.variables) for question in wave]
            fitting = [prompt for prompt in prompts if self._fits(prompt)]
            if len(fitting) == 1 and self._batch_size > 1:
                fitting *= 2  # a single prompt would not warm up batched decoding
            for name in self.names if fitting else ():
                self._decoders[name].answer(fitting, min(WARM_UP_TOKENS, self._max_new_tokens))

    def capture(self, questions: Sequence[Question]) -> None:
        """Capture the CUDA graphs that the answers to `questions` will replay. Call it after the
        warm-up, so that no graph is captured while answers are timed.

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
        longest += KEY_BLOCK  # an answer may have more tokens when it is part of the next prompt
        positions = min(longest, self._target_model.max_context)
        loops = [loop for loop in self._decoders.values() if isinstance(loop, LoopDecoder)]
        # capture the largest tree first, since the decoders share memory
        for decoder in sorted(loops, key=lambda loop: -loop.tree_size):
            decoder.capture(self._batch_size, positions)

    def run(
        self,
        questions: Sequence[Question],
        rotation: int = 0,
        on_answer: Callable[[TimedAnswer], None] = lambda answer: None,
    ) -> Iterator[Turn]:
        """Time every decoder on every turn of every question; yield each turn when it is done.

        The plain answer becomes the history of later turns for all decoders, so that all get the
        same prompts. A turn whose prompt and longest answer do not fit the context is skipped, and
        so are the turns after it. In batches, the first turns of all questions of the batch are
        asked together, then their second turns, and so on.

        Args:
            rotation: number of turns, or batches of turns, that were timed before.
            on_answer: called with each answer of each decoder, between two measurements.
        """
        for wave in self._waves(questions):
            # the conversation so far of each question that still fits
            chats: dict[int | str, list[Message]] = {one.question_id: [] for one in wave}
            for number in range(1, 1 + max(len(question.turns) for question in wave)):
                # 1. ask each question's next turn; the turns of a question that no longer fits are
                # skipped
                asked: list[Turn] = []
                for question in wave:
                    if number > len(question.turns) or question.question_id not in chats:
                        continue
                    chat = chats[question.question_id]
                    chat += question.asked(number)
                    turn = Turn(
                        question.question_id,
                        question.category,
                        number,
                        tuple(self._chat.prompt(chat, question.variables)),
                        asked=question.turns[number - 1],
                        opened=self._chat.opened_reasoning(chat, question.variables),
                        batch=wave[0].question_id,
                    )
                    if self._fits(turn.prompt_ids):
                        asked.append(turn)
                        continue
                    del chats[question.question_id]
                    for later, message in enumerate(question.turns[number - 1 :], start=number):
                        yield replace(turn, turn=later, asked=message)
                # 2. let every decoder answer all turns; the plain answer continues the conversation
                if asked:
                    self._measure(asked, rotation, on_answer)
                    rotation += 1
                for turn in asked:
                    chats[turn.question_id].append(Message("assistant", turn.history))
                    yield turn

    def _waves(self, questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
        size = self._batch_size
        return (questions[start : start + size] for start in range(0, len(questions), size))

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self._max_new_tokens <= self._target_model.max_context

    def _measure(
        self, asked: Sequence[Turn], rotation: int, on_answer: Callable[[TimedAnswer], None]
    ) -> None:
        """Let every decoder answer the same turns, in an order that starts at `rotation`."""
        names = self.names
        start = rotation % len(names)
        prompts = [turn.prompt_ids for turn in asked]
        timed: dict[str, list[TimedAnswer]] = {}
        for name in names[start:] + names[:start]:
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
