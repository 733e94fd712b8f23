"""Requests to OpenAI-compatible servers of one model: each gets a number of them at a time, and
those that fail are sent again.

The API key is read from the environment and sent in the Authorization header; hide_secrets.py keeps it
out of messages and files. What a server says is shortened by `excerpt`, which masks first.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import httpx2
import openai

from medusa_train.errors import ConfigError, ServerError
from medusa_train.hide_secrets import remember
from medusa_train.network import client_options
from medusa_train.servers.responses import (
    Fault,
    RequestRejected,
    describe_response,
    parse_models,
    read_stream,
    read_to_end,
    retry_after,
    says_too_long,
    split_lines,
    token_count,
    usable_answer,
)

CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts, doubled after each
FAULTS = 3  # in a row, after which a server counts as down
_OVERLOADED = {429, 503}
_RETRYABLE = {200, 408, 409, 425, 429}  # and every 5xx; 200 is an error page, or a cut body
_REJECTED = {400, 413, 422}
#: Headers that are sent. openai adds others by environment variables that are meant for another
#: server: OPENAI_API_KEY, OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS ... It reads the last one itself.
_HEADERS = {
    *("host", "accept", "accept-encoding", "connection", "content-type", "content-length"),
    "x-stainless-raw-response",
}

T = TypeVar("T")


class Server:
    """One server: its connections, within `async with`, and what it has shown to accept.

    See `Servers` for the arguments.
    """

    def __init__(
        self,
        url: str,
        key_variable: str,
        timeout: float,
        optional: Collection[str] = (),
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self.faults = 0  # in a row
        self._key_variable = key_variable
        self._key = read_key(key_variable)
        self._timeout = timeout
        self._note = note
        self._network = client_options(self.url)
        # by the name of a parameter, the one to send in its place; None: it is left out
        self._alternatives = {"max_tokens": "max_completion_tokens", **dict.fromkeys(optional)}
        self._replaced: dict[str, str | None] = {}  # those that the server wants
        self._contexts: dict[str, int | None] = {}  # lengths by the model's name

    async def __aenter__(self) -> Server:
        http = openai.DefaultAsyncHttpxClient(
            timeout=openai.Timeout(self._timeout, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(),  # `Servers` limits the requests
            event_hooks={"request": [self._prepare]},
            follow_redirects=False,  # they would get the key
            **self._network,
        )
        self._openai = openai.AsyncOpenAI(
            base_url=self.url, api_key="none", max_retries=0, http_client=http
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._openai.close()

    async def _prepare(self, request: Any) -> None:
        for name in set(request.headers) - _HEADERS:
            del request.headers[name]
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        request.extensions["started"] = time.perf_counter()

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat once, and return the response's JSON; with `stream: true` its `timing`, too
        (`read_stream`).

        A server that rejects `max_tokens` gets `max_completion_tokens` in its place, one that
        rejects an optional parameter a request without it. What it accepts is sent from then on.
        vLLM and SGLang, which state their context, reject a limit that does not fit together with the
        prompt: the chat is sent without, so that its answer ends with the context. The response's
        `max_tokens` are those that it was allowed then.

        Raises:
            Fault: it may succeed when it is sent again.
            RequestRejected: status 400, 413 or 422.
            ServerError: wrong key or address, or no stream.
        """
        try:
            return await self._post_accepted(body)
        except RequestRejected:
            if "max_tokens" not in body:
                raise
            context = await self._read_context(body["model"])
            if context is None:
                raise
        unlimited = {name: value for name, value in body.items() if name != "max_tokens"}
        answer = await self._post_accepted(unlimited)
        return {**answer, "max_tokens": context - token_count(answer, "prompt_tokens")}

    async def list_models(self) -> dict[str, dict[str, Any]]:
        """Return the entries of the list of models by name; empty if the server has none.

        Raises:
            Fault: the server cannot be reached.
            ServerError: it requires another key.
        """
        try:
            raw = await self._openai.models.with_raw_response.list(timeout=CONNECT_SECONDS)
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._error(error.response) from None
            return {}
        except openai.APIConnectionError as error:
            raise _connection_fault(error) from None
        return parse_models(raw.http_response)

    async def read_metrics(self) -> str | None:
        """Return the text of `/metrics`, next to `/v1`; None if the server has none."""
        try:
            return await self._openai.get(
                f"{self.url.removesuffix('/v1')}/metrics",
                cast_to=str,
                options={"timeout": CONNECT_SECONDS},
            )
        except openai.APIError:
            return None

    async def _read_context(self, model: str) -> int | None:
        """Return the length of the model's context if the server states it; it is asked once."""
        if model not in self._contexts:
            models: dict[str, dict[str, Any]] = {}
            with suppress(ServerError):
                models = await self.list_models()
            served = models.get(model, {})
            if len(models) == 1:  # it serves its only model under any name
                (served,) = models.values()
            length = served.get("max_model_len")
            is_length = isinstance(length, int) and length > 1
            self._contexts[model] = length if is_length else None
        return self._contexts[model]

    async def _post_accepted(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat, again with other parameters while the server rejects them by name."""
        replaced = dict(self._replaced)
        while True:
            names = {name: replaced.get(name, name) for name in body}
            sent = {new: body[name] for name, new in names.items() if new is not None}
            try:
                answer = await self._post(sent)
                break
            except RequestRejected as rejected:
                named = [
                    name
                    for name, other in self._alternatives.items()
                    if name in sent and (rejected.names(name) or rejected.names(other or name))
                ]
                if not named:
                    raise
                replaced[named[0]] = self._alternatives[named[0]]
        for name in replaced.keys() - self._replaced.keys():
            other = replaced[name]
            instead = "it is left out" if other is None else f"{other} takes its place"
            self._note(f"server {self.url}: rejects {name}; {instead}")
            self._replaced[name] = other
        return answer

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat as it is; raises as `complete`."""
        # 1. an answer
        try:
            async with self._openai.chat.completions.with_streaming_response.create(
                model=body["model"], messages=body["messages"], extra_body=body
            ) as raw:
                response = raw.http_response
                is_json = "json" in response.headers.get("content-type", "")
                if body.get("stream") and not is_json:
                    return await self._read_stream(response)
                await response.aread()
        except openai.APIStatusError as error:
            response = error.response
        except (openai.APIConnectionError, httpx2.HTTPError) as error:
            raise _connection_fault(error) from None
        if response.status_code == 200 and (answer := usable_answer(response)) is not None:
            if body.get("stream"):
                raise ServerError(
                    f"server {self.url}: ignores `stream` and sends the whole answer at once, so"
                    " the time to its first token cannot be measured"
                )
            return answer
        # 2. why there is none
        status = response.status_code
        reason = describe_response(response)
        if status in _RETRYABLE or status >= 500:
            raise Fault(reason, retry_after(response), status in _OVERLOADED)
        if status in _REJECTED:
            too_long = status == 413 or says_too_long(response.text)
            raise RequestRejected(reason, too_long=too_long, text=response.text)
        raise self._error(response)

    async def _read_stream(self, response: httpx2.Response) -> dict[str, Any]:
        lines = split_lines(response.aiter_bytes())
        started = response.request.extensions["started"]
        try:  # the connection's own limit is one between two chunks
            answer = await asyncio.wait_for(read_stream(lines, started), self._timeout)
        except asyncio.TimeoutError:
            raise Fault(f"no complete answer within {self._timeout:g} s") from None
        await read_to_end(lines)
        return answer

    def _error(self, response: httpx2.Response) -> ServerError:
        """Return the error of a status that ends the run, with what to do about it."""
        advice = ""
        if response.status_code in (401, 403):
            problem = "check the API key in" if self._key else "the server requires an API key; set"
            advice = f"\n({problem} the environment variable {self._key_variable})"
        elif response.status_code in (404, 405):
            advice = "\n(check the URL, which usually ends with /v1, and the model's name)"
        return ServerError(f"server {self.url}: {describe_response(response)}{advice}")


class Servers:
    """Servers of the same model, each with up to `concurrency` requests at a time.

    Connections are open within `async with`. What the servers accept is remembered beyond it.

    Args:
        urls: base URLs with the version, `http://HOST:PORT/v1`.
        key_variable: environment variable that holds the API key of all servers; may be unset.
        timeout: of a request in seconds. retry_seconds: failed requests are sent again for so long.
        optional: parameters that are left out for a server that rejects them.
        note: called with a line when a server stops answering, when it answers again, and when it
            rejects a parameter that is left out or sent otherwise.

    Attributes:
        retries, last_fault: number of requests that were sent again, and why the last one was.

    Raises:
        ConfigError: the environment's proxy, certificates or key cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key_variable: str,
        timeout: float,
        retry_seconds: float,
        concurrency: int,
        optional: Collection[str] = (),
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.servers = [
            Server(url, key_variable, timeout, optional, note) for url in dict.fromkeys(urls)
        ]
        names = ", ".join(server.url for server in self.servers)
        self.name = f"server{'s' if len(self.servers) > 1 else ''} {names}"
        self._capacity = concurrency * len(self.servers)
        self.retries = 0
        self.last_fault = ""
        self._retry_seconds = retry_seconds
        self._note = note
        self._answered_at: float | None = None  # on a monotonic clock, the last time

    async def __aenter__(self) -> Servers:
        # Free slots: a request takes that of the server that waits longest.
        self._slots: asyncio.Queue[Server] = asyncio.Queue()
        for server in self.servers:
            await server.__aenter__()
        for number in range(self._capacity):
            self._slots.put_nowait(self.servers[number % len(self.servers)])
        return self

    async def __aexit__(self, *error: object) -> None:
        for server in self.servers:
            await server.__aexit__(*error)

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat, again after faults, for `retry_seconds` after the first; see
        `Server.complete`.

        Raises:
            RequestRejected: a server rejects it; or it failed, while others were answered.
            ServerError: wrong key or address, or no answer to any request meanwhile.
        """
        first_fault: float | None = None
        backoff = FIRST_PAUSE
        while True:
            server = await self._slots.get()
            try:
                answer = await server.complete(body)
                self._count_answer(server)
                return answer
            except Fault as fault:
                now = time.monotonic()
                first_fault = now if first_fault is None else first_fault
                left = first_fault + self._retry_seconds - now
                self._count_fault(server, fault)
                if left <= 0:
                    raise self._give_up(first_fault) from None
                # The server is left alone meanwhile: the request keeps its slot.
                pause = fault.pause or backoff * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(pause, left))
                backoff = min(2 * backoff, LONGEST_PAUSE)
                self.retries += 1
            finally:
                self._slots.put_nowait(server)

    async def for_each(self, function: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
        """Call `function` with every item, as many at a time as the servers get requests.

        The first exception cancels the other calls, and is raised.
        """
        waiting = iter(items)

        async def work() -> None:
            for item in waiting:
                await function(item)

        tasks = [asyncio.create_task(work()) for _ in range(self._capacity)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _give_up(self, since: float) -> Exception:
        """Return the error of a request that failed for too long: it is at fault itself, if others
        were answered meanwhile.
        """
        waited = f"{self._retry_seconds:g} s"
        if self._answered_at is not None and self._answered_at > since:
            reason = f"failed for {waited} while other requests were answered: {self.last_fault}"
            return RequestRejected(reason, failed=True)
        return ServerError(f"{self.name}: no answer within {waited}; last error: {self.last_fault}")

    def _count_answer(self, server: Server) -> None:
        if server.faults >= FAULTS:
            self._note(f"server {server.url}: answers again")
        server.faults = 0
        self._answered_at = time.monotonic()

    def _count_fault(self, server: Server, fault: Fault) -> None:
        place = f"{server.url}: " if len(self.servers) > 1 else ""
        self.last_fault = f"{place}{fault.reason}"
        if fault.overloaded:
            return
        server.faults += 1
        if server.faults == FAULTS:
            retrying = f"retrying for up to {self._retry_seconds:g} s"
            self._note(f"server {server.url}: {fault.reason}; {retrying}")


def _connection_fault(error: Exception) -> Fault:
    cause = error.__cause__ or error
    return Fault(f"{type(cause).__name__}: {cause}")


def read_key(variable: str) -> str:
    """Return the API key of an environment variable, masked from now on; empty if it is not set.

    Raises:
        ConfigError: it cannot be sent in a header; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    remember(key)
    if not key.isascii():
        problem = "a character that is not ASCII"
    elif len(key.split()) > 1 or not key.isprintable():
        problem = "white space or a control character"
    else:
        return key
    raise ConfigError(f"{variable}: the API key contains {problem}; copy it again")
