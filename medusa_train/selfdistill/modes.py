"""What comes of a seed: the conversation so far, and when an answer is not kept. Knows no engine's inside, no file.

A mode (`replay`, `selftalk`) is a generator that yields `Request`s, is sent the `Answer`s and returns a
`GeneratedChat`: so any number of conversations can be under way, whoever answers and in whatever order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal

from medusa_train.data.conversation import Message, is_looping
from medusa_train.selfdistill.engines import Answer, AnswerFinishReason, Request
from medusa_train.selfdistill.prompts import Prompt

DropReason = Literal["length", "context", "refused", "empty", "looping", "repeated"]


@dataclass(frozen=True)
class DropRules:
    """Which answers are not kept: those that a limit cut off (`drop_truncated`), and looping ones (`drop_looping`).

    A blank answer is never kept: nothing is learnt from it, and chat formats refuse it.
    """

    drop_truncated: bool = True
    drop_looping: bool = False

    def why_dropped(self, answer: Answer) -> DropReason | None:
        """Why `answer` is dropped, with all later turns; None if it is kept."""
        if answer.finish_reason == "refused":
            return "refused"
        if answer.finish_reason != "stop" and self.drop_truncated:
            return answer.finish_reason
        if not answer.text.strip():
            return "context" if answer.finish_reason == "context" else "empty"
        if self.drop_looping and is_looping(answer.text):
            return "looping"
        return None


@dataclass
class GeneratedChat:
    """A conversation as far as the model came.

    Attributes:
        messages: system prompt, user and assistant in turn; no answer is missing at the end.
        reasons: why each answer ended. prompt_tokens, completion_tokens: per answer.
        looping: answers among them that loop.
        dropped: why an answer was dropped with all later turns, or None; dropped_turns: how many that were.
    """

    seed: Prompt
    messages: list[Message] = field(default_factory=list)
    finish_reasons: list[AnswerFinishReason] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    looping: int = 0
    dropped: DropReason | None = None
    dropped_turns: int = 0

    def __post_init__(self) -> None:
        if self.seed.system is not None and not self.messages:
            self.messages.append(Message("system", self.seed.system))

    @property
    def turns(self) -> int:
        """How many answers there are."""
        return len(self.finish_reasons)

    def add(self, asked: Message, answer: Answer) -> None:
        """Keep a question with its answer."""
        self.messages += [asked, Message("assistant", answer.text)]
        self.finish_reasons.append(answer.finish_reason)
        self.prompt_tokens.append(answer.prompt_tokens)
        self.completion_tokens.append(answer.completion_tokens)
        self.looping += is_looping(answer.text)

    def drop(self, why: DropReason, turns: int) -> None:
        """Note why it ends early, and how many turns that costs."""
        self.dropped, self.dropped_turns = why, turns


ChatSteps = Generator[Request, Answer, GeneratedChat]


def turn_seed(seed: int, conversation: str, turn: int | str) -> int:
    """The random seed of one turn: a hash of the run's seed, the conversation's id and the turn's number or name."""
    digest = hashlib.sha256(f"{seed}\x00{conversation}\x00{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: what torch's generators take


def replay(seed: Prompt, *, random_seed: int, rules: DropRules) -> ChatSteps:
    """Answer the turns of `seed` (SPEC 2, replay; the reference's defaults).

    An answer that `rules` drop ends the conversation: it goes with all later turns, and earlier turns stay.
    """
    talk = GeneratedChat(seed)
    for number, text in enumerate(seed.turns):
        asked = Message("user", text)
        answer = yield Request((*talk.messages, asked), turn_seed(random_seed, seed.id, number))
        why = rules.why_dropped(answer)
        if why is not None:
            talk.drop(why, len(seed.turns) - number)
            break
        talk.add(asked, answer)
    return talk


def selftalk(seed: Prompt, *, random_seed: int, rules: DropRules, rounds: int) -> ChatSteps:
    """Answer the first turn of `seed`, then ask on in the user's name (SPEC 2, self-talk).

    It ends after `rounds` answers, with an answer that `rules` drop, with a user's turn that is blank or cut off
    by a limit, or with a turn that its speaker has said before. A question that is left without an answer is
    removed.
    """
    talk = GeneratedChat(seed)
    asked = Message("user", seed.turns[0])
    while True:
        answer = yield Request((*talk.messages, asked), turn_seed(random_seed, seed.id, talk.turns))
        why = rules.why_dropped(answer) or _repeats(talk, "assistant", answer.text)
        if why is not None:
            talk.drop(why, 1)
            return talk
        talk.add(asked, answer)
        if talk.turns == rounds:
            return talk
        name = f"user {talk.turns}"
        said = yield Request(tuple(talk.messages), turn_seed(random_seed, seed.id, name), speaker="user")
        if said.finish_reason != "stop" or not said.text.strip() or _repeats(talk, "user", said.text):
            return talk  # nothing that was asked for is lost: the model has no more to say
        asked = Message("user", said.text)


def _repeats(talk: GeneratedChat, role: str, text: str) -> DropReason | None:
    """Whether `role` has said so before, white space and case apart."""
    earlier = {_plain(message.content) for message in talk.messages if message.role == role}
    return "repeated" if _plain(text) in earlier else None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
