"""The two modes that generate conversations, replay and self-talk, and the rules for dropping
answers.

A mode is a generator: it yields `ChatRequest`s, receives their `GeneratedAnswer`s by `send`, and
returns a `GeneratedChat`. So any number of conversations can be in progress at once, with any model
and in any order. An answer depends only on its request.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.conversation import Message, is_looping
from medusa_train.selfdistill.prompts import Prompt, stable_hash

#: Why an answer ended:
#: - stop: at an end token.
#: - length: at max_new_tokens.
#: - context: the context is full; there is no text if the prompt alone exceeds it.
#: - possibly cut: the server's response does not show whether the answer is complete.
#: - only reasoning: the server returned reasoning without an answer.
#: - refused: the chat template or the server rejected the request.
#: - failed: the server gave no usable answer within the time for retries.
AnswerFinishReason = Literal[
    "stop", "length", "context", "possibly cut", "only reasoning", "refused", "failed"
]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next message of a chat.

    Attributes:
        messages: the chat so far.
        seed: random seed for sampling.
        speaker: who speaks next; "user" only in self-talk.
        variables: as in `Conversation`.
    """

    messages: tuple[Message, ...]
    seed: int
    speaker: Literal["user", "assistant"] = "assistant"
    variables: str = ""


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """A generated message, without its end token. `parts` is set if the server parsed tool calls,
    see `Message`.
    """

    text: str
    finish_reason: AnswerFinishReason
    prompt_tokens: int
    completion_tokens: int  # number of generated tokens, the end token included
    token_ids: tuple[int, ...] | None = None  # set if `text` would be tokenized differently
    parts: Mapping[str, Any] = field(default_factory=dict, hash=False)


DropReason = AnswerFinishReason | Literal["empty", "looping", "repeated"]


def is_asked_again(reason: str, *, from_server: bool) -> bool:
    """Return whether the next run asks a prompt again that was dropped for `reason`.

    A local model would give the same answer again, and a chat template would reject the prompt
    again. But if a server refused the prompt or sent no answer, it may have been set up wrongly.
    """
    server_reasons = ("refused", "empty", "only reasoning")
    return reason == "failed" or (from_server and reason in server_reasons)


def drop_reason(answer: GeneratedAnswer, cfg: SelfDistillConfig) -> DropReason | None:
    """Return why `answer` is dropped, or None if it is kept.

    Refused, failed and blank answers, and answers with only reasoning, are always dropped: they
    contain nothing to train on.
    """
    if answer.finish_reason in ("refused", "failed", "only reasoning"):
        return answer.finish_reason
    # check before "length", because a loop often ends at max_new_tokens
    if cfg.drop_looping and is_looping(answer.text):
        return "looping"
    if answer.finish_reason != "stop" and cfg.drop_truncated:
        return answer.finish_reason
    if not (answer.text.strip() or answer.parts):
        return "context" if answer.finish_reason == "context" else "empty"
    return None


@dataclass
class GeneratedChat:
    """A conversation with generated answers."""

    prompt: Prompt  # the prompt that it was generated from
    # the system message, then each question and its answer; for a chat with tools, the recorded
    # messages and one answer
    messages: list[Message] = field(default_factory=list)
    answers: list[GeneratedAnswer] = field(default_factory=list)  # the kept answers
    dropped: DropReason | None = None  # why an answer, and all turns after it, were dropped
    dropped_turns: int = 0

    def __post_init__(self) -> None:
        if self.prompt.system is not None and not self.messages:
            self.messages.append(Message("system", self.prompt.system))

    @property
    def looping(self) -> int:
        """Number of looping answers, including a dropped one."""
        return sum(is_looping(one.text) for one in self.answers) + (self.dropped == "looping")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept: no answer was kept, or one failed. In the second case the next
        run tries the whole chat again.
        """
        return self.dropped == "failed" or not self.answers

    def add(self, question: Sequence[Message], answer: GeneratedAnswer) -> None:
        """Append the messages of a question and its answer. Answers inside the question are not
        trained on, because the model did not generate them.
        """
        for message in question:
            is_recorded = message.role == "assistant"
            self.messages.append(replace(message, is_target=False) if is_recorded else message)
        is_cut = answer.finish_reason != "stop"
        self.messages.append(
            Message("assistant", answer.text, answer.token_ids, is_cut, parts=answer.parts)
        )
        self.answers.append(answer)

    def drop(self, reason: DropReason, turns: int) -> GeneratedChat:
        """Record that `turns` turns were dropped, and return the conversation."""
        self.dropped = reason
        self.dropped_turns = turns
        return self


ChatSteps = Generator[ChatRequest, GeneratedAnswer, GeneratedChat]
#: The steps of a conversation that is written when it is complete.
RunningChat = Generator[ChatRequest, GeneratedAnswer, None]


def build_mode(cfg: SelfDistillConfig) -> Callable[[Prompt], ChatSteps]:
    """Return the generator function of the configured mode, with its settings applied."""
    return partial(selftalk if cfg.mode == "selftalk" else replay, cfg=cfg)


def replay(prompt: Prompt, cfg: SelfDistillConfig) -> ChatSteps:
    """Answer the user turns of `prompt` one after the other (Medusa, Self-Distillation). If the
    prompt has `messages`, generate only the answer after them.

    A dropped answer (see `drop_reason`) ends the conversation; earlier turns are kept.
    """
    chat = GeneratedChat(prompt)
    questions: list[tuple[Message, ...]] = [(Message("user", text),) for text in prompt.turns]
    if prompt.messages:
        questions = [prompt.messages]
    for number, question in enumerate(questions):
        answer = yield ChatRequest(
            (*chat.messages, *question),
            turn_seed(cfg.seed, prompt.id, number),
            variables=prompt.variables,
        )
        reason = drop_reason(answer, cfg)
        if reason is not None:
            return chat.drop(reason, len(questions) - number)
        chat.add(question, answer)
    return chat


def selftalk(prompt: Prompt, cfg: SelfDistillConfig) -> ChatSteps:
    """Answer the first turn of `prompt`, then let the model write the user's turns as well (Medusa,
    Self-Distillation).

    The conversation ends after `cfg.rounds` answers, at a dropped answer (see `drop_reason`), at a
    blank or truncated user turn, or when a speaker repeats one of its messages. A question without
    an answer is removed.
    """
    chat = GeneratedChat(prompt)
    question = Message("user", prompt.turns[0])
    while True:
        answer = yield ChatRequest(
            (*chat.messages, question), turn_seed(cfg.seed, prompt.id, len(chat.answers))
        )
        reason = drop_reason(answer, cfg) or _repeats(chat, "assistant", answer.text)
        if reason is not None:
            return chat.drop(reason, 1)
        chat.add([question], answer)
        if len(chat.answers) == cfg.rounds:
            return chat
        name = f"user {len(chat.answers)}"
        user_turn = yield ChatRequest(
            tuple(chat.messages), turn_seed(cfg.seed, prompt.id, name), speaker="user"
        )
        text = user_turn.text
        if user_turn.finish_reason != "stop" or not text.strip() or _repeats(chat, "user", text):
            return chat  # no dropped turn: the model has ended the conversation
        question = Message("user", text)


def turn_seed(seed: int, conversation: str, turn: int | str) -> int:
    """Return the random seed of one turn: 63 bits of a hash of the run's seed, conversation id and
    turn.
    """
    return stable_hash(seed, conversation, turn) >> 1


def _repeats(chat: GeneratedChat, role: str, text: str) -> DropReason | None:
    """Return "repeated" if an earlier message of `role` differs only in case and white space."""
    earlier = {_normalized(message.content) for message in chat.messages if message.role == role}
    return "repeated" if _normalized(text) in earlier else None


def _normalized(text: str) -> str:
    return " ".join(text.split()).casefold()
