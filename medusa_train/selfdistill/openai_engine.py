"""The engine that sends concurrent requests to OpenAI-compatible servers."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_train.data.conversation import REASONING_TAGS, Message, ReasoningTags, join_reasoning
from medusa_train.data.turns import reasoning_part
from medusa_train.errors import ServerError
from medusa_train.hide_secrets import excerpt
from medusa_train.selfdistill.answers import Answer, AnswerFinishReason, Request
from medusa_train.servers.client import OpenAIClient
from medusa_train.servers.rejections import RequestRejected

_MAX_REJECTIONS = 50  # in a row; more are not due to single chats
_SHOWN_REASONS = 5  # of refused requests, in the statistics

_Outcome = Answer | BaseException

#: Finish reasons of servers. `eos_token` and `stop_sequence` are TGI's.
_REASONS: dict[str, AnswerFinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "content_filter": "refused",
    "tool_calls": "refused",
    "function_call": "refused",
}


@dataclass(frozen=True)
class ServerSampling:
    """Parameters of every request; the last two, which not every server supports, are sent if set."""

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
            "top_p": self.top_p,
            "max_tokens": self.max_new_tokens,
            "seed": request.seed % 2**31,
        }
        if self.top_k is not None:
            body["top_k"] = self.top_k
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return body


class OpenAIEngine:
    """Generates answers with servers that have `/chat/completions`, in the order in which they
    respond.

    `reasoning_tags` join reasoning and content where the server returns them apart. `next` raises
    ServerError if the server rejects all requests, or does not respond within the retry time.
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
        self._finished: queue.SimpleQueue[tuple[int, _Outcome]] = queue.SimpleQueue()
        self._open = 0  # requests submitted and not returned yet
        self._refusals = _Refusals()

    @property
    def capacity(self) -> int:
        """Maximum number of requests to all servers."""
        return self.server.capacity

    def submit(self, request_id: int, request: Request) -> None:
        """Send a request in a thread of its own."""
        self._open += 1
        # a daemon: an interrupted run does not wait for responses
        threading.Thread(target=self._ask, args=(request_id, request), daemon=True).start()

    def next(self) -> tuple[int, Answer]:
        """Return the next answer; a refusal counts as one, unless the server refuses every request."""
        answer = self._next_answer()
        self._open -= 1
        return answer

    def _next_answer(self) -> tuple[int, Answer]:
        refusals = self._refusals
        while not refusals.can_return:
            # 1. does the server refuse everything?
            if refusals.in_a_row >= _MAX_REJECTIONS:
                raise self._refuses_all()
            if refusals.num_held > 0 and refusals.num_held == self._open:
                # no other request is under way
                self._greet()
                continue
            # 2. what became of the next request
            request_id, outcome = self._finished.get()
            if isinstance(outcome, RequestRejected):
                if outcome.too_long:
                    return request_id, Answer("", "context", 0, 0)
                refusals.hold(request_id, outcome)
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            # 3. an answer
            refusals.clear()
            return request_id, outcome
        return refusals.take()

    def _greet(self) -> None:
        """Find out by a greeting whether the server refuses every request."""
        try:
            greeting = self.sampling.body(self.model, Request((Message("user", "Hello"),), 0))
            short = min(16, self.sampling.max_new_tokens)
            content = self.server.complete({**greeting, "max_tokens": short})
            parse_answer(content, self.reasoning_tags, short)
        except RequestRejected:
            raise self._refuses_all() from None
        self._refusals.some_answered = True

    def _refuses_all(self) -> ServerError:
        refusals = self._refusals
        count = f"refused {refusals.in_a_row} requests and answered none in between"
        return ServerError(f"{self.server.name}: {count}; last: {refusals.last_reason}")

    def stats(self) -> Mapping[str, str]:
        """Return the number of requests that were sent again, and why requests were refused."""
        stats = {}
        if self.server.retries:
            stats["requests repeated"] = f"{self.server.retries:,}"
        for reason, count in self._refusals.reasons.most_common(_SHOWN_REASONS):
            stats[reason] = f"{count:,}"
        return stats

    def close(self) -> None:
        """Close the connections."""
        self.server.close()

    def _ask(self, request_id: int, request: Request) -> None:
        outcome: _Outcome
        try:
            content = self.server.complete(self.sampling.body(self.model, request))
            outcome = parse_answer(content, self.reasoning_tags, self.sampling.max_new_tokens)
        except BaseException as error:  # `next` raises it in the main thread
            outcome = error
        self._finished.put((request_id, outcome))


class _Refusals:
    """Refused requests, held back until another one is answered.

    An answer shows that the server does not refuse every request. A run whose requests are all
    refused must end without recording prompts as done.

    Attributes:
        some_answered: whether the server has answered any request.
        in_a_row: number of refusals since the last answer.
        last_reason: of the last refusal.
        reasons: number of refusals by reason.
    """

    def __init__(self) -> None:
        self.some_answered = False
        self.in_a_row = 0
        self.last_reason = ""
        self.reasons: Counter[str] = Counter()
        self._held: deque[tuple[int, Answer]] = deque()

    @property
    def num_held(self) -> int:
        """Number of refused requests that are not returned yet."""
        return len(self._held)

    @property
    def can_return(self) -> bool:
        """Whether a refused request may be returned."""
        return self.some_answered and self.num_held > 0

    def hold(self, request_id: int, rejected: RequestRejected) -> None:
        """Hold a refused request."""
        reason: AnswerFinishReason = "refused"
        if rejected.failed:
            reason = "failed"
        self._held.append((request_id, Answer("", reason, 0, 0)))
        self.in_a_row += 1
        self.last_reason = str(rejected)
        self.reasons[self.last_reason] += 1

    def clear(self) -> None:
        """Note an answer: set the count of refusals to 0, and let held requests be returned."""
        self.some_answered = True
        self.in_a_row = 0

    def take(self) -> tuple[int, Answer]:
        """Return the refused request that is held longest."""
        return self._held.popleft()


def parse_answer(
    content: Mapping[str, Any], reasoning_tags: ReasoningTags, max_new_tokens: int
) -> Answer:
    """Convert a chat completion; without `usage` the token counts are 0.

    An answer that was cut before `max_new_tokens` reached the end of the context. One that is said
    to be whole was possibly cut if it has as many tokens as were allowed, or ends within its
    reasoning.

    Raises:
        RequestRejected: the finish reason is unknown, so nobody can say whether it is whole.
    """
    choice = content["choices"][0]
    message = choice["message"]
    # 1. its text; lone surrogates, which JSON can escape and UTF-8 cannot encode, are replaced
    content_part = str(message.get("content") or "")
    reasoning = reasoning_part(message)
    text = join_reasoning(reasoning, content_part, reasoning_tags)
    text = text.encode("utf-8", "replace").decode("utf-8")
    # 2. why it ends
    length = _token_count(content, "completion_tokens")
    reason = _reason(choice.get("finish_reason"))
    if reason == "length" and 0 < length < max_new_tokens:
        reason = "context"
    # 3. whether it is whole
    if reason == "stop":
        allowed = content.get("max_tokens", max_new_tokens)
        opening, closing = reasoning_tags
        is_within_reasoning = text.lstrip().startswith(opening) and closing not in text
        if length >= allowed or is_within_reasoning:
            reason = "possibly cut"
        elif reasoning and not text:
            reason = "only reasoning"
    return Answer(text, reason, _token_count(content, "prompt_tokens"), length)


def _token_count(content: Mapping[str, Any], name: str) -> int:
    """Return a count of `usage`; 0 if the server names none."""
    usage = content.get("usage")
    if not isinstance(usage, Mapping):
        return 0
    count = usage.get(name)
    if not isinstance(count, int):
        return 0
    return count


def _reason(finish: object) -> AnswerFinishReason:
    """Map the finish reasons of OpenAI, vLLM, SGLang, llama.cpp and TGI.

    Raises:
        RequestRejected: an unknown one.
    """
    if finish is None or finish == "":
        return "possibly cut"
    if isinstance(finish, str) and finish in _REASONS:
        return _REASONS[finish]
    known = ", ".join(_REASONS)
    raise RequestRejected(
        f"unknown finish_reason {excerpt(str(finish), 60)!r} (known: {known})", failed=True
    )
