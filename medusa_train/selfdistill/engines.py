"""The interface of engines that generate answers.

Engines keep no state between requests: an answer depends on its request only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from medusa_train.data.conversation import Message

AnswerFinishReason = Literal["stop", "length", "context", "refused"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the next message of a chat.

    Attributes:
        messages: the chat so far.
        seed: random seed for sampling.
        speaker: who writes the message; "user" in self-talk only.
    """

    messages: tuple[Message, ...]
    seed: int
    speaker: Literal["user", "assistant"] = "assistant"


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated message.

    Attributes:
        text: without its end token.
        finish_reason: "stop" (end token), "length" (max_new_tokens), "context" (maximum context; `text` is empty if the
            prompt alone exceeds it) or "refused" (the template or server rejects the chat).
        prompt_tokens, completion_tokens: token counts, the end token included.
        token_ids: the tokens without the end token, if `text` tokenizes otherwise.
    """

    text: str
    finish_reason: AnswerFinishReason
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...] | None = None


class Engine(Protocol):
    """Generates answers to several requests at a time."""

    @property
    def capacity(self) -> int:
        """Number of unanswered requests to keep submitted."""

    def submit(self, request_id: int, request: Request) -> None:
        """Submit a request without waiting for its answer."""

    def next(self) -> tuple[int, Answer]:
        """Wait for the next answer, in any order; return its request id and the answer."""

    def stats(self) -> Mapping[str, str]:
        """Return statistics for the summary, by name."""

    def close(self) -> None:
        """Release resources; pending requests are cancelled."""
