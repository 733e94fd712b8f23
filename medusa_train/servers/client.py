"""Requests to OpenAI-compatible servers of one model. Each server gets a limited number of requests
at a time, and failed requests are sent again.

The API key is read from the environment and sent in the Authorization header. `hide_secrets` keeps
it out of messages and files. `excerpt` masks and shortens the text of a server's response.
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
from medusa_train.hide_secrets import excerpt, remember
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
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts, doubled after each attempt
FAULTS = 3  # after this many faults in a row a server counts as down
_OVERLOADED = {429, 503}
# every 5xx status is retryable too; with 200 the response is an error page or a truncated body
_RETRYABLE = {200, 408, 409, 425, 429}
_REJECTED = {400, 413, 422}
#: Only these headers are sent. The openai package adds others from environment variables that are
#: meant for another server: OPENAI_API_KEY, OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS ...
_HEADERS = {
    *("host", "accept", "accept-encoding", "connection", "content-type", "content-length"),
    "x-stainless-raw-response",
}

T = TypeVar("T")


class Server:
    """One server: its connections, which are open within `async with`, and the parameters that it
    is known to accept.

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
        self.faults = 0  # number of faults in a row
        self._key_variable = key_variable
        self._key = read_key(key_variable)
        self._timeout = timeout
        self._note = note
        self._network = client_options(self.url)
        # what to send in place of a parameter that the server rejects; None: leave it out
        self._alternatives = {"max_tokens": "max_completion_tokens", **dict.fromkeys(optional)}
        self._replaced: dict[str, str | None] = {}  # the alternatives that this server needs
        self._contexts: dict[str, int | None] = {}  # context lengths by model name

    async def __aenter__(self) -> Server:
        http = openai.DefaultAsyncHttpxClient(
            timeout=openai.Timeout(self._timeout, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(),  # `Servers` limits the requests
            event_hooks={"request": [self._prepare]},
            follow_redirects=False,  # a redirect would send the key to another server
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
        """Send a chat once, and return the response's JSON; with `stream: true` also its `timing`
        (see `read_stream`).

        If the server rejects `max_tokens`, `max_completion_tokens` is sent in its place. If it
        rejects an optional parameter, the request is sent without it. Later requests use what the
        server accepts.

        vLLM and SGLang report their context length, and reject a `max_tokens` that does not fit
        into the context together with the prompt. Then the chat is sent without a limit, so that
        its answer ends at the end of the context. The returned `max_tokens` is the number of tokens
        that fit.

        Raises:
            Fault: the request may succeed when it is sent again.
            RequestRejected: status 400, 413 or 422.
            ServerError: wrong key or address, or the server does not stream.
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
        """Return the entries of the server's list of models by name; empty if it has no list.

        Raises:
            Fault: the server cannot be reached.
            ServerError: the server rejects the key.
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
        """Return the text of `/metrics` (next to `/v1`); None if the server has no such page."""
        try:
            return await self._openai.get(
                f"{self.url.removesuffix('/v1')}/metrics",
                cast_to=str,
                options={"timeout": CONNECT_SECONDS},
            )
        except openai.APIError:
            return None

    async def _read_context(self, model: str) -> int | None:
        """Return the length of the model's context, or None if the server does not report it. The
        server is asked only once.
        """
        if model not in self._contexts:
            models: dict[str, dict[str, Any]] = {}
            with suppress(ServerError):
                models = await self.list_models()
            served = models.get(model, {})
            if len(models) == 1:  # a server with one model serves it under any name
                (served,) = models.values()
            length = served.get("max_model_len")
            is_length = isinstance(length, int) and length > 1
            self._contexts[model] = length if is_length else None
        return self._contexts[model]

    async def _post_accepted(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat. While the server rejects a parameter by name, send it again with the
        parameter's alternative.
        """
        replaced = dict(self._replaced)
        while True:
            names = {name: replaced.get(name, name) for name in body}
            sent = {new: body[name] for name, new in names.items() if new is not None}
            try:
                answer = await self._post(sent)
                break
            except RequestRejected as rejected:
                rejected_names = [
                    name
                    for name, other in self._alternatives.items()
                    if name in sent and (rejected.names(name) or rejected.names(other or name))
                ]
                if not rejected_names:
                    raise
                replaced[rejected_names[0]] = self._alternatives[rejected_names[0]]
        for name in replaced.keys() - self._replaced.keys():
            other = replaced[name]
            instead = "it is left out" if other is None else f"{other} takes its place"
            self._note(f"server {self.url}: rejects {name}; {instead}")
            self._replaced[name] = other
        return answer

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat with unchanged parameters. Raises the same errors as `complete`."""
        # 1. return an answer
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
        # 2. raise an error if there is no answer
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
        try:  # limit the whole answer; the connection's own timeout is between two chunks
            answer = await asyncio.wait_for(read_stream(lines, started), self._timeout)
        except asyncio.TimeoutError:
            raise Fault(f"no complete answer within {self._timeout:g} s") from None
        await read_to_end(lines)
        return answer

    def _error(self, response: httpx2.Response) -> ServerError:
        """Return the error for a status that ends the run, with advice."""
        advice = ""
        if response.status_code in (401, 403):
            problem = "check the API key in" if self._key else "the server requires an API key; set"
            advice = f"\n({problem} the environment variable {self._key_variable})"
        elif response.status_code in (404, 405):
            advice = "\n(check the URL, which usually ends with /v1, and the model's name)"
        elif response.has_redirect_location:
            target = excerpt(response.headers["location"], 200)
            advice = f"\n(it redirects to {target}, and no key is sent there: give that address)"
        return ServerError(f"server {self.url}: {describe_response(response)}{advice}")


class Servers:
    """Servers of the same model, each with up to `concurrency` requests at a time.

    Connections are open within `async with`. The parameters that the servers accept are remembered
    after it ends.

    Args:
        urls: base URLs with the version, `http://HOST:PORT/v1`.
        key_variable: environment variable that holds the API key of all servers; may be unset.
        timeout: time limit of one request, in seconds.
        retry_seconds: a failed request is sent again for this many seconds.
        concurrency: most requests that one server gets at a time.
        optional: parameters that are left out for a server that rejects them.
        note: called with a line when a server stops answering, when it answers again, and when it
            rejects a parameter, which is then left out or replaced.

    Attributes:
        retries: how many times requests were sent again.
        last_fault: reason of the last fault.

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
        self._answered_at: float | None = None  # monotonic time of the last answer

    async def __aenter__(self) -> Servers:
        # free slots; a request takes the slot that has been free for longest
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
        """Send a chat; see `Server.complete`. After a fault send it again, for up to
        `retry_seconds` after the first fault.

        Raises:
            RequestRejected: a server rejects the chat, or all attempts failed while other requests
                were answered.
            ServerError: wrong key or address, or all attempts failed and no other request was
                answered either.
        """
        first_fault: float | None = None
        backoff = FIRST_PAUSE
        while True:
            server = await self._slots.get()
            try:
                answer = await server.complete(body)
                if server.faults >= FAULTS:
                    self._note(f"server {server.url}: answers again")
                server.faults = 0
                self._answered_at = time.monotonic()
                return answer
            except Fault as fault:
                now = time.monotonic()
                first_fault = now if first_fault is None else first_fault
                seconds_left = first_fault + self._retry_seconds - now
                self._count_fault(server, fault)
                if seconds_left <= 0:
                    raise self._give_up(first_fault) from None
                # the request keeps its slot during the pause, so the server gets fewer requests
                pause = fault.pause or backoff * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(pause, seconds_left))
                backoff = min(2 * backoff, LONGEST_PAUSE)
                self.retries += 1
            finally:
                self._slots.put_nowait(server)

    async def for_each(self, function: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
        """Call `function` with every item, with as many concurrent calls as the servers take
        requests.

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
        """Return the error for a request that failed for too long. If other requests were answered
        in this time, the request itself is at fault.
        """
        waited = f"{self._retry_seconds:g} s"
        if self._answered_at is not None and self._answered_at > since:
            reason = f"failed for {waited} while other requests were answered: {self.last_fault}"
            return RequestRejected(reason, failed=True)
        return ServerError(f"{self.name}: no answer within {waited}; last error: {self.last_fault}")

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
    """Return the API key in an environment variable; empty if it is not set. From now on the key is
    masked in messages and files.

    Raises:
        ConfigError: the key cannot be sent in a header. The message does not show the key.
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
