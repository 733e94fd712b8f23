"""Answers of OpenAI-compatible servers: requests are spread over them, and sent again after faults."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import openai

from medusa_train.data.conversation import REASONING_TAGS, Message, ReasoningTags
from medusa_train.errors import ServerError
from medusa_train.hide_secrets import excerpt
from medusa_train.network import client_options
from medusa_train.selfdistill.replay import Answer, ChatSteps, GeneratedChat, Request
from medusa_train.selfdistill.server_answers import ServerSampling, parse_answer, token_count
from medusa_train.servers.connection import CONNECT_SECONDS, hint, normalize_url, read_key
from medusa_train.servers.rejections import RequestRejected, says_too_long
from medusa_train.servers.responses import error_message, parse_models, retry_after, usable_answer

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts, doubled after each
FAULTS = 3  # in a row, after which a server counts as down
GREETING_TOKENS = 16
SHOWN_REASONS = 5  # of refused requests, in the summary
_OVERLOADED = {429, 503}
_RETRYABLE = {200, 408, 409, 425, 429}  # and every 5xx; 200 is an error page, or a cut body
_REJECTED = {400, 413, 422}
#: Headers that are sent. openai adds others by environment variables that are meant for another
#: server: OPENAI_API_KEY, OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS ... It reads the last one itself.
_HEADERS = {
    *("host", "accept", "accept-encoding", "connection", "content-type", "content-length"),
    "x-stainless-raw-response",
}


@dataclass
class Fault(Exception):
    """A request that may succeed when it is sent again."""

    reason: str  # one line
    pause: float | None = None  # seconds that the server asked to wait
    overloaded: bool = False


class Server:
    """The connections to one server, and what it has shown to accept."""

    def __init__(
        self, url: str, key_variable: str, timeout: float, note: Callable[[str], None]
    ) -> None:
        self.url = normalize_url(url)
        self.faults = 0  # in a row
        self._key_variable = key_variable
        self._key = read_key(key_variable)
        self._note = note
        self._limit = "max_tokens"  # its name of this parameter
        self._context: asyncio.Task[int | None] | None = None
        http = openai.DefaultAsyncHttpxClient(
            timeout=openai.Timeout(timeout, connect=CONNECT_SECONDS),
            event_hooks={"request": [self._set_headers]},
            follow_redirects=False,  # they would get the key
            **client_options(self.url),
        )
        self._openai = openai.AsyncOpenAI(
            base_url=self.url, api_key="none", max_retries=0, http_client=http
        )

    async def _set_headers(self, request: Any) -> None:
        for name in set(request.headers) - _HEADERS:
            del request.headers[name]
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response's JSON to a chat with `max_tokens`.

        A server that rejects `max_tokens` gets `max_completion_tokens` from then on. vLLM and
        SGLang, which state their context, reject a limit that does not fit beside the prompt: the
        chat is sent without, so that its answer ends with the context.

        Raises:
            Fault: it may succeed when it is sent again.
            RequestRejected: status 400, 413 or 422.
            ServerError: wrong key or address.
        """
        context = await self._read_context(body["model"])
        unlimited = dict(body)
        limit = unlimited.pop("max_tokens")
        try:
            return await self._post({**unlimited, self._limit: limit})
        except RequestRejected as rejected:
            other = "max_completion_tokens"
            is_named = rejected.names("max_tokens") or rejected.names(other)
            if self._limit != other and is_named:
                with suppress(RequestRejected):
                    answer = await self._post({**unlimited, other: limit})
                    if self._limit != other:
                        self._note(
                            f"server {self.url}: rejects max_tokens; {other} takes its place"
                        )
                    self._limit = other
                    return answer
            if context is None:
                raise
        answer = await self._post(unlimited)
        return {**answer, "max_tokens": context - token_count(answer, "prompt_tokens")}

    async def _read_context(self, model: str) -> int | None:
        """Return the length of the model's context if the server states it; it is asked once."""
        if self._context is None:
            self._context = asyncio.create_task(self._ask_context(model))
        try:
            return await self._context
        except Fault:
            self._context = None
            raise

    async def _ask_context(self, model: str) -> int | None:
        try:
            raw = await self._openai.models.with_raw_response.list(timeout=CONNECT_SECONDS)
        except openai.APIStatusError:
            return None
        except openai.APIConnectionError as error:
            raise _connection_fault(error) from None
        models = parse_models(raw.http_response)
        if model not in models and len(models) == 1:  # it serves its only model under any name
            (model,) = models
        length = models.get(model, {}).get("max_model_len")
        return length if isinstance(length, int) and length > 1 else None

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat once; raises as `complete`."""
        # 1. an answer
        try:
            raw = await self._openai.chat.completions.with_raw_response.create(
                model=body["model"], messages=body["messages"], extra_body=body
            )
            response = raw.http_response
            answer = usable_answer(response)
            if answer is not None:
                return answer
        except openai.APIStatusError as error:
            response = error.response
        except openai.APIConnectionError as error:
            raise _connection_fault(error) from None
        # 2. why there is none
        status = response.status_code
        message = excerpt(error_message(response), 300)
        reason = f"{status} {excerpt(response.reason_phrase, 80)}: {message}"
        if status in _RETRYABLE or status >= 500:
            raise Fault(reason, retry_after(response), status in _OVERLOADED)
        if status in _REJECTED:
            too_long = status == 413 or says_too_long(response.text)
            raise RequestRejected(reason, too_long=too_long, text=response.text)
        advice = hint(status, self._key, self._key_variable)
        raise ServerError(f"server {self.url}: {reason}{advice}")

    async def close(self) -> None:
        """Close the connections."""
        await self._openai.close()


def _connection_fault(error: openai.APIConnectionError) -> Fault:
    cause = error.__cause__ or error
    return Fault(f"{type(cause).__name__}: {cause}")


class ServerClient:
    """Asks servers of the same model, each for up to `concurrency` answers at a time.

    Args:
        urls: base URLs with the version, `http://HOST:PORT/v1`.
        key_variable: environment variable that holds the API key of all servers; may be unset.
        timeout: of a request in seconds. retry_seconds: failed requests are sent again for so long.
        reasoning_tags: join reasoning and content where a server returns them apart.
        note: called with a line when a server stops answering, when it answers again, and when it
            wants another name of `max_tokens`.

    Raises:
        ConfigError: a URL is not a web address, or contains a password; the environment's proxy,
            certificates or key cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        sampling: ServerSampling,
        *,
        key_variable: str,
        timeout: float,
        retry_seconds: float,
        concurrency: int,
        reasoning_tags: ReasoningTags = REASONING_TAGS,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._servers = [Server(url, key_variable, timeout, note) for url in dict.fromkeys(urls)]
        names = ", ".join(server.url for server in self._servers)
        self.name = f"server{'s' if len(self._servers) > 1 else ''} {names}"
        self.retries = 0  # requests that were sent again
        self.refusals: Counter[str] = Counter()  # by reason
        self._model = model
        self._sampling = sampling
        self._retry_seconds = retry_seconds
        self._reasoning_tags = reasoning_tags
        self._note = note
        # Free slots: a request takes that of the server that waits longest.
        self._slots: asyncio.Queue[Server] = asyncio.Queue()
        for server in concurrency * self._servers:
            self._slots.put_nowait(server)
        self._answered_at: float | None = None  # on a monotonic clock, the last time
        self._greeting = asyncio.Lock()

    def generate(
        self,
        chats: Iterator[ChatSteps],
        on_answer: Callable[[Answer], None],
        on_chat: Callable[[GeneratedChat], None],
    ) -> None:
        """Generate all conversations, as many at a time as there are slots. See `AnswerSource`.

        Raises as `ask`.
        """
        asyncio.run(self._generate(chats, on_answer, on_chat))

    async def _generate(
        self,
        chats: Iterator[ChatSteps],
        on_answer: Callable[[Answer], None],
        on_chat: Callable[[GeneratedChat], None],
    ) -> None:
        async def work() -> None:
            for steps in chats:  # which all workers share
                request: Request | None = next(steps)
                while request is not None:
                    answer = await self.ask(request)
                    on_answer(answer)
                    try:
                        request = steps.send(answer)
                    except StopIteration as end:
                        on_chat(end.value)
                        request = None

        workers = [asyncio.create_task(work()) for _ in range(self._slots.qsize())]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for server in self._servers:
                await server.close()

    def stats(self) -> Mapping[str, str]:
        """Return the number of requests that were sent again, and why requests were refused."""
        stats = {"requests repeated": f"{self.retries:,}"} if self.retries else {}
        for reason, count in self.refusals.most_common(SHOWN_REASONS):
            stats[reason] = f"{count:,}"
        return stats

    async def ask(self, request: Request) -> Answer:
        """Return the answer to a request; one without text if it is refused, too long or failed.

        Raises:
            ServerError: the servers refuse everything or do not answer; wrong key or address.
        """
        try:
            return await self._ask(request, self._sampling)
        except RequestRejected as rejected:
            if rejected.too_long:
                return Answer("", "context", 0, 0)
            self.refusals[str(rejected)] += 1
            await self._greet()
            return Answer("", "failed" if rejected.failed else "refused", 0, 0)

    async def _greet(self) -> None:
        """Raise ServerError if the servers refuse a greeting as well, unless one has answered."""
        async with self._greeting:
            if self._answered_at is not None:
                return
            length = min(GREETING_TOKENS, self._sampling.max_new_tokens)
            greeting = Request((Message("user", "Hello"),), 0)
            try:
                await self._ask(greeting, replace(self._sampling, max_new_tokens=length))
            except RequestRejected as rejected:
                count = f"refused {self.refusals.total()} requests and answered none in between"
                raise ServerError(f"{self.name}: {count}; last: {rejected}") from None

    async def _ask(self, request: Request, sampling: ServerSampling) -> Answer:
        """Send a request, again after faults, for `retry_seconds` after the first."""
        body = sampling.body(self._model, request)
        first_fault: float | None = None
        backoff = FIRST_PAUSE
        while True:
            server = await self._slots.get()
            try:
                content = await server.complete(body)
                answer = parse_answer(content, self._reasoning_tags, sampling.max_new_tokens)
                self._count_answer(server)
                return answer
            except Fault as fault:
                now = time.monotonic()
                first_fault = now if first_fault is None else first_fault
                left = first_fault + self._retry_seconds - now
                self._count_fault(server, fault)
                if left <= 0:
                    raise self._give_up(server, fault, first_fault) from None
                # The server is left alone meanwhile: the request keeps its slot.
                pause = fault.pause or backoff * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(pause, left))
                backoff = min(2 * backoff, LONGEST_PAUSE)
                self.retries += 1
            finally:
                self._slots.put_nowait(server)

    def _give_up(self, server: Server, fault: Fault, since: float) -> Exception:
        """Return the error of a request that failed for too long: it is at fault itself, if others
        were answered meanwhile.
        """
        waited = f"{self._retry_seconds:g} s"
        if self._answered_at is not None and self._answered_at > since:
            reason = f"failed for {waited} while other requests were answered: {fault.reason}"
            return RequestRejected(reason, failed=True)
        place = f"{server.url}: " if len(self._servers) > 1 else ""
        return ServerError(
            f"{self.name}: no answer within {waited}; last error: {place}{fault.reason}"
        )

    def _count_answer(self, server: Server) -> None:
        if server.faults >= FAULTS:
            self._note(f"server {server.url}: answers again")
        server.faults = 0
        self._answered_at = time.monotonic()

    def _count_fault(self, server: Server, fault: Fault) -> None:
        if fault.overloaded:
            return
        server.faults += 1
        if server.faults == FAULTS:
            retrying = f"retrying for up to {self._retry_seconds:g} s"
            self._note(f"server {server.url}: {fault.reason}; {retrying}")
