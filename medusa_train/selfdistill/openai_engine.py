"""The engine that sends concurrent requests to OpenAI-compatible servers."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_train.data.conversation import REASONING_TAGS, ReasoningTags, join_reasoning
from medusa_train.data.records import reasoning_part
from medusa_train.errors import ServerError
from medusa_train.selfdistill.modes import Answer, AnswerFinishReason, Request
from medusa_train.servers.client import OpenAIClient
from medusa_train.servers.server import RequestRejected

_MAX_REJECTIONS = 50  # in a row; more are not due to single chats

_Outcome = Answer | BaseException


@dataclass(frozen=True)
class ServerSampling:
    """Parameters of every request; those with these defaults are not sent, since not every server supports them."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def body(self, model: str, request: Request) -> dict[str, Any]:
        """Return the request body. The seed is reduced to 31 bits, which every server accepts."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [message.as_dict() for message in request.messages],
            "temperature": self.temperature,
            "max_tokens": self.max_new_tokens,
            "seed": request.seed % 2**31,
        }
        if self.top_p < 1:
            body["top_p"] = self.top_p
        if self.top_k is not None:
            body["top_k"] = self.top_k
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return body


class OpenAIEngine:
    """Generates answers with servers that have `/chat/completions`, in the order in which they respond.

    `reasoning_tags` join reasoning and content where the server returns them apart.
    `next` raises ServerError if the server rejects all requests, or does not respond within the retry time.
    """

    def __init__(
        self,
        server: OpenAIClient,
        model: str,
        sampling: ServerSampling,
        reasoning_tags: ReasoningTags = REASONING_TAGS,
    ) -> None:
        self.server = server
        self.model = model
        self.sampling = sampling
        self.reasoning_tags = reasoning_tags
        self._todo: queue.SimpleQueue[tuple[int, Request]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[int, _Outcome]] = queue.SimpleQueue()
        self._open = 0  # requests submitted and not returned yet
        self._held: deque[int] = deque()  # request ids of refused requests that are not returned yet
        self._refusals: list[str] = []  # reasons since the last answer
        self._takes_some = False  # whether there was any answer
        self._threads: list[threading.Thread] = []

    @property
    def capacity(self) -> int:
        """Maximum number of requests to all servers; those beyond the servers' current limits wait."""
        return self.server.capacity

    def submit(self, request_id: int, request: Request) -> None:
        """Queue a request; the first ones start the worker threads."""
        self._open += 1
        self._todo.put((request_id, request))
        if len(self._threads) < self.server.capacity:
            # daemons: an interrupted run does not wait for responses
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()

    def next(self) -> tuple[int, Answer]:
        """Return the next answer; a refusal counts as one, unless the server refuses every request."""
        while not (self._held and self._takes_some):
            self._check_refusals()
            request_id, outcome = self._finished.get()
            if isinstance(outcome, RequestRejected) and not outcome.too_long:
                # Held until another request is answered, which shows that the server does not refuse every request:
                # a run whose requests are all refused must end without recording prompts as done.
                self._held.append(request_id)
                self._refusals.append(str(outcome))
                continue
            if isinstance(outcome, BaseException) and not isinstance(outcome, RequestRejected):
                raise outcome
            self._open -= 1
            if isinstance(outcome, RequestRejected):
                return request_id, Answer("", "context", 0, 0)
            self._takes_some = True
            self._refusals.clear()
            return request_id, outcome
        self._open -= 1
        return self._held.popleft(), Answer("", "refused", 0, 0)

    def _check_refusals(self) -> None:
        nothing_else = not self._takes_some and len(self._held) == self._open
        if self._refusals and (nothing_else or len(self._refusals) >= _MAX_REJECTIONS):
            raise ServerError(
                f"{self.server.name}: refused {len(self._refusals)} requests and answered none in between; "
                f"last: {self._refusals[-1]}"
            )

    def stats(self) -> Mapping[str, str]:
        """Return the numbers of requests that were sent again."""
        counts = {"requests repeated": self.server.retries, "requests shortened to the context": self.server.shortened}
        return {name: f"{count:,}" for name, count in counts.items() if count}

    def close(self) -> None:
        """Close the connections."""
        self.server.close()

    def _serve(self) -> None:
        while True:
            request_id, request = self._todo.get()
            self._finished.put((request_id, self._ask(request)))

    def _ask(self, request: Request) -> _Outcome:
        try:
            content = self.server.complete(self.sampling.body(self.model, request))
            return parse_answer(content, self.reasoning_tags, self.sampling.max_new_tokens)
        except BaseException as error:  # `next` raises it in the main thread
            return error


def parse_answer(content: Mapping[str, Any], reasoning_tags: ReasoningTags, max_new_tokens: int) -> Answer:
    """Convert a chat completion; without `usage` the token counts are 0.

    An answer that was cut before `max_new_tokens` reached the end of the context.
    """
    choice = content["choices"][0]
    message = choice["message"]
    text = join_reasoning(reasoning_part(message), str(message.get("content") or ""), reasoning_tags)
    # replace lone surrogates, which JSON can escape and UTF-8 cannot encode
    text = text.encode("utf-8", "replace").decode("utf-8")
    length = _token_count(content, "completion_tokens")
    reason = _reason(choice.get("finish_reason"))
    if reason == "length" and 0 < length < max_new_tokens:
        reason = "context"
    return Answer(text, reason, _token_count(content, "prompt_tokens"), length)


def _token_count(content: Mapping[str, Any], name: str) -> int:
    """Return a count of `usage`; 0 if the server names none."""
    usage = content.get("usage")
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) else 0


def _reason(finish: object) -> AnswerFinishReason:
    """Map OpenAI's finish reasons; others than an end or limit (content_filter, tool_calls) count as refused."""
    if finish in ("stop", "eos", None):
        return "stop"
    return "length" if finish == "length" else "refused"
