"""The engine that sends concurrent requests to an OpenAI-compatible server."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_train.errors import ServerError
from medusa_train.openai_client import OpenAIClient, RequestRejected
from medusa_train.selfdistill.engines import Answer, AnswerFinishReason, Request

_MAX_REJECTIONS = 50  # in a row; more of them cannot be due to single chats

_Outcome = Answer | BaseException


@dataclass(frozen=True)
class ServerSampling:
    """Sampling parameters; `top_p` 1 and `top_k` None are not sent, since not every server supports them."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None

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
        return body


class OpenAIEngine:
    """Generates answers with a server that has `/chat/completions`, in the order in which it responds.

    Args:
        server: the client.
        model: the model's name on the server.
        concurrency: maximum number of concurrent requests.

    `next` raises ServerError if the server rejects all requests, or does not respond within the retry time.
    """

    def __init__(self, server: OpenAIClient, model: str, sampling: ServerSampling, concurrency: int) -> None:
        self.server = server
        self.model = model
        self.sampling = sampling
        self.concurrency = concurrency
        self._todo: queue.SimpleQueue[tuple[int, Request]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[int, _Outcome]] = queue.SimpleQueue()
        self._open = 0  # requests submitted and not returned yet
        self._held: deque[int] = deque()  # request ids of refused requests that are not returned yet
        self._refusals: list[str] = []  # reasons since the last answer
        self._takes_some = False  # whether there was any answer
        self._threads: list[threading.Thread] = []

    @property
    def capacity(self) -> int:
        """One request per connection."""
        return self.concurrency

    def submit(self, request_id: int, request: Request) -> None:
        """Queue a request; the first ones start the worker threads."""
        self._open += 1
        self._todo.put((request_id, request))
        if len(self._threads) < self.concurrency:
            # daemons: an interrupted run does not wait for responses
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()

    def next(self) -> tuple[int, Answer]:
        """The next answer that comes in. A refusal counts as one, unless the server refuses whatever it is asked."""
        while not (self._held and self._takes_some):
            self._check_refusals()
            request_id, outcome = self._finished.get()
            if isinstance(outcome, RequestRejected) and not outcome.too_long:
                # Kept back until an answer shows that it is about this chat, and not about every one: a run whose
                # requests are all refused has to end without a seed being noted as done.
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
                f"server {self.server.url}: it refused {len(self._refusals)} requests and answered none in between, "
                f"the last: {self._refusals[-1]}"
            )

    def stats(self) -> Mapping[str, str]:
        """How often the server had to be asked again."""
        return {"requests repeated": f"{self.server.retries:,}"} if self.server.retries else {}

    def close(self) -> None:
        """Close the connections."""
        self.server.close()

    def _serve(self) -> None:
        while True:
            request_id, request = self._todo.get()
            self._finished.put((request_id, self._ask(request)))

    def _ask(self, request: Request) -> _Outcome:
        try:
            return _answer(self.server.complete(self.sampling.body(self.model, request)))
        except BaseException as error:  # `next` raises it in the main thread
            return error


def _answer(content: Mapping[str, Any]) -> Answer:
    """Convert a chat completion; without `usage` the token counts are 0."""
    choice = content["choices"][0]
    text = choice["message"].get("content") or ""
    # replace lone surrogates, which JSON can escape and UTF-8 cannot encode
    text = str(text).encode("utf-8", "replace").decode("utf-8")
    usage = content.get("usage") or {}
    return Answer(
        text,
        _reason(choice.get("finish_reason")),
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
    )


def _reason(finish: object) -> AnswerFinishReason:
    """Map OpenAI's finish reasons; others than an end or limit (content_filter, tool_calls) count as refused."""
    if finish in ("stop", "eos", None):
        return "stop"
    return "length" if finish == "length" else "refused"
