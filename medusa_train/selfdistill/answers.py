"""What an engine is asked and what it answers, and the rules by which answers are dropped: cut,
looping, blank ones.

Engines keep no state between requests: an answer depends on its request only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from medusa_train.data.conversation import Message, is_looping

#: End token, max_new_tokens, context is full (no text if the prompt alone exceeds it), the server
#: does not say that the answer is whole, it returned reasoning without an answer, rejected by
#: template or server, no usable answer of the server within the time for retries.
AnswerFinishReason = Literal[
    "stop", "length", "context", "possibly cut", "only reasoning", "refused", "failed"
]


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the next message of the chat `messages`, by its `speaker`; "user" in self-talk
    only.
    """

    messages: tuple[Message, ...]
    seed: int
    speaker: Literal["user", "assistant"] = "assistant"


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated message, without its end token."""

    text: str
    finish_reason: AnswerFinishReason
    prompt_tokens: int
    completion_tokens: int  # the end token included
    token_ids: tuple[int, ...] | None = None  # if `text` tokenizes otherwise


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


DropReason = AnswerFinishReason | Literal["empty", "looping", "repeated"]


def is_asked_again(reason: str, *, from_server: bool) -> bool:
    """Return whether the next run asks a prompt again that was dropped for `reason`.

    A model answers it in the same way again, and a chat template rejects it again. A server that
    refused it, or sent no answer, may have been set up wrongly.
    """
    of_servers = ("refused", "empty", "only reasoning")
    return reason == "failed" or (from_server and reason in of_servers)


@dataclass(frozen=True)
class DropRules:
    """Which answers to drop: truncated (`drop_truncated`) and looping (`drop_looping`) ones.

    Refused, failed and blank answers are always dropped, also those that are only reasoning; there
    is nothing to train on.
    """

    drop_truncated: bool = True
    drop_looping: bool = True

    def drop_reason(self, answer: Answer) -> DropReason | None:
        """Return why `answer` is dropped, or None if it is kept."""
        if answer.finish_reason in ("refused", "failed", "only reasoning"):
            return answer.finish_reason
        # before "length": a loop often ends there
        if self.drop_looping and is_looping(answer.text):
            return "looping"
        if answer.finish_reason != "stop" and self.drop_truncated:
            return answer.finish_reason
        if not answer.text.strip():
            return "context" if answer.finish_reason == "context" else "empty"
        return None
