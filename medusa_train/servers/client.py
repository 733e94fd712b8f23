"""Client of one or several OpenAI-compatible chat servers that spreads requests over them and retries failed ones."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medusa_train.errors import ServerError
from medusa_train.servers.server import Fault, OpenAIServer, RequestRejected
from medusa_train.servers.slots import Backoff, Slots, Ticket

CONCURRENCY = 64  # requests to each server, as long as it is not overloaded


class OpenAIClient:
    """Sends chats to the server with the most free slots; thread-safe.

    Every server has a limit on concurrent requests that follows its answers (see `Slots`). A server that is down gets
    no requests but one probe at a time, until it answers again.

    Args:
        urls: base URL with the version, `http://HOST:PORT/v1`, or several of servers with the same model.
        key_variable: environment variable that holds the API key of all servers; may be unset.
        timeout: timeout of a request in seconds.
        retry_seconds: failed requests are retried for up to this many seconds.
        concurrency: maximum number of concurrent requests to each server.
        note: called with a line when a server stops answering, and when it answers again; by any thread.

    Attributes:
        name: the URLs, for messages.
        capacity: maximum number of concurrent requests to all servers.
        retries: number of retries of all requests so far.
        last_fault: why the last of them was necessary.

    Raises:
        ConfigError: a URL is not a web address, or contains a password.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        key_variable: str = "OPENAI_API_KEY",
        timeout: float,
        retry_seconds: float,
        concurrency: int = CONCURRENCY,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(dict.fromkeys(urls))
        self._servers = [
            OpenAIServer(url, key_variable=key_variable, timeout=timeout, connections=concurrency) for url in urls
        ]
        self._slots = [Slots(concurrency, retry_seconds) for _ in urls]
        self.name = ("server " if len(urls) == 1 else "servers ") + ", ".join(server.url for server in self._servers)
        self.capacity = concurrency * len(urls)
        self.retries = 0
        self._retry_seconds = retry_seconds
        self._note = note
        self._changed = threading.Condition()  # guards the slots and the fields below
        self._closed = threading.Event()
        self._failing_since: float | None = None  # first fault after the last answer of any server
        self.last_fault = ""

    @property
    def shortened(self) -> int:
        """Number of requests whose `max_tokens` was shortened after a rejection."""
        return sum(server.shortened for server in self._servers)

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request, again after faults, and return the response's JSON.

        `max_tokens` is shortened to what fits into the context beside the prompt. With `stream: true` the response also
        has `timing`, see `read_completion`.

        Raises:
            RequestRejected: status 400, 413 or 422; or this request failed for `retry_seconds`, while others did not.
            ServerError: wrong key or address, no answer of any server within `retry_seconds`, or `close` was called.
        """
        deadline = math.inf
        backoff = Backoff()
        while True:
            outcome = self._send(body, deadline)
            if isinstance(outcome, RequestRejected):
                raise outcome
            if not isinstance(outcome, Fault):
                return outcome
            now = time.monotonic()
            deadline = min(deadline, now + self._retry_seconds)
            if outcome.kind != "failed":
                continue  # the server's slots say when it gets requests again
            if now >= deadline and not self._gone(now):
                waited = f"{self._retry_seconds:g} s"
                raise RequestRejected(f"failed for {waited} while other requests were answered: {outcome.reason}")
            # this request alone may be at fault: the others do not wait
            self._closed.wait(min(backoff.next(), max(deadline - now, 0.0)))

    def close(self) -> None:
        """Close the connections; pending requests raise ServerError."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        for server in self._servers:
            server.close()

    def _send(self, body: Mapping[str, Any], deadline: float) -> dict[str, Any] | Fault | RequestRejected:
        """Send a request once, to the server with the most free slots."""
        index, ticket = self._take_slot(deadline)
        server, slots = self._servers[index], self._slots[index]
        outcome: dict[str, Any] | Fault | RequestRejected | None = None
        try:
            outcome = server.send(body)
        except RequestRejected as rejected:
            outcome = rejected
        finally:
            now = time.monotonic()
            with self._changed:
                was_down = slots.down
                slots.give_back(ticket)
                if isinstance(outcome, Fault):
                    self.retries += 1
                    self.last_fault = outcome.reason if len(self._servers) == 1 else f"{server.url}: {outcome.reason}"
                    self._failing_since = now if self._failing_since is None else self._failing_since
                    if outcome.kind == "overloaded":
                        slots.overloaded(ticket, now, outcome.retry_after)
                    else:
                        slots.failed(ticket, now, unreachable=outcome.kind == "unreachable")
                elif outcome is not None:
                    self._failing_since = None
                    slots.answered(accepted=not isinstance(outcome, RequestRejected))
                is_down = slots.down
                self._changed.notify_all()
        if is_down and not was_down and isinstance(outcome, Fault):
            self._note(f"server {server.url}: {outcome.reason}; retrying for up to {self._retry_seconds:g} s")
        elif was_down and not is_down:
            self._note(f"server {server.url}: answers again")
        return outcome

    def _take_slot(self, deadline: float) -> tuple[int, Ticket]:
        """Wait for a free slot of any server.

        Raises:
            ServerError: no server has answered for `retry_seconds`, and `deadline` is over or no request is under way.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                idle = not any(slots.in_flight for slots in self._slots)
                if self._closed.is_set() or (self._gone(now) and (idle or now >= deadline)):
                    waited = f"{self._retry_seconds:g} s"
                    raise ServerError(f"{self.name}: no answer within {waited}; last error: {self.last_fault}")
                index = max(range(len(self._slots)), key=lambda index: self._slots[index].free(now))
                if self._slots[index].free(now):
                    return index, self._slots[index].take(now)
                # without another request, only a pause can end, or the time to give up come
                moments = [deadline, *(slots.resume_at for slots in self._slots)]
                if self._failing_since is not None:
                    moments.append(self._failing_since + self._retry_seconds)
                self._changed.wait(min((moment - now for moment in moments if now < moment < math.inf), default=None))

    def _gone(self, now: float) -> bool:
        """Return whether no server has answered for `retry_seconds` after a fault."""
        since = self._failing_since
        return since is not None and now >= since + self._retry_seconds
