"""Who answers: what an engine is asked and what it says. Knows no model, no server, no seeds and no files.

An engine keeps nothing between answers, so that a conversation comes out the same whenever it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from medusa_train.data.conversation import Message

AnswerFinishReason = Literal["stop", "length", "context", "refused"]


@dataclass(frozen=True, slots=True)
class Request:
    """A turn that is wanted.

    Attributes:
        messages: the chat so far. seed: decides everything that is drawn at random.
        speaker: whose turn it is. The user's own words are asked for in self-talk alone.
    """

    messages: tuple[Message, ...]
    seed: int
    speaker: Literal["user", "assistant"] = "assistant"


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of the model's.

    Attributes:
        text: without the token that ends it.
        reason: "stop" (the model ended it), "length" (max_new_tokens), "context" (the model's positions are used
            up; `text` is empty when not even the prompt fits) or "refused" (a server does not take the chat).
        prompt_tokens, completion_tokens: what it was made from and of, the end token included.
    """

    text: str
    finish_reason: AnswerFinishReason
    prompt_tokens: int
    completion_tokens: int


class Engine(Protocol):
    """Something that continues chats, several at a time."""

    @property
    def capacity(self) -> int:
        """How many requests it wants to have at hand, answered ones left out."""

    def submit(self, request_id: int, request: Request) -> None:
        """Take a request; returns at once."""

    def next(self) -> tuple[int, Answer]:
        """Wait for the answer to any request that was submitted, and say by `request_id` to which."""

    def stats(self) -> Mapping[str, str]:
        """What is worth telling at the end, by name."""

    def close(self) -> None:
        """Nothing more is asked; answers that are on their way are given up."""
