"""Client of one or several OpenAI-compatible chat servers that spreads requests over them and
retries failed ones.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from medusa_train.errors import ServerError
from medusa_train.servers.connection import Fault, ServerConnection
from medusa_train.servers.rejections import RequestRejected

CONCURRENCY = 64  # requests to each server, as long as it is not overloaded
MIN_BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds between attempts, doubled after each
FAILURES = 3  # in a row, after which a server counts as down
UP = "answers again"

#: What became of a request: the response's JSON, a fault, or that the server rejected it.
Outcome = dict[str, Any] | Fault | RequestRejected

T = TypeVar("T")
R = TypeVar("R")


class Backoff:
    """Pauses that double, with jitter, so that requests do not all retry at the same moment after
    an outage.
    """

    def __init__(self) -> None:
        self._seconds = MIN_BACKOFF

    def next(self) -> float:
        """Return the seconds to wait."""
        pause = self._seconds * random.uniform(0.5, 1.0)
        self._seconds = min(2 * self._seconds, MAX_BACKOFF)
        return pause


class Slots:
    """The health of one server that gets up to `most` requests at a time; not thread-safe.

    After an overload a server pauses, for growing times or as long as it asks (at most
    `longest_pause` seconds). Then it gets as many requests as it had not refused, and one more per
    `limit` answers. While it is down it gets a request after each pause, whatever is under way:
    requests to a machine that vanished hang until they time out.
    """

    def __init__(self, most: int, longest_pause: float = math.inf) -> None:
        self.limit = float(most)
        self.in_flight = 0
        self.down = False
        self.resume_at = -math.inf  # on a monotonic clock
        self._most = most
        self._longest_pause = longest_pause
        self._backoff = Backoff()
        self._failures = 0

    def free(self, now: float) -> int:
        """Return how many more requests can be sent."""
        if now < self.resume_at:
            return 0
        if self.down:
            return 1
        return max(int(self.limit) - self.in_flight, 0)

    def take(self, now: float) -> None:
        """Take a free slot."""
        self.in_flight += 1
        if self.down:
            self.resume_at = now + self._backoff.next()

    def answered(self) -> None:
        """Report a response: the server is up."""
        if self.down:
            self.down = False
            self.resume_at = -math.inf
        self.limit = min(self.limit + 1 / self.limit, self._most)
        self._backoff = Backoff()
        self._failures = 0

    def failed(self, now: float, fault: Fault) -> None:
        """Report a fault of a request that is not in flight any more.

        The server is down if it was unreachable, or after `FAILURES` failures in a row.
        """
        # 1. fewer requests, or none but single ones
        if fault.kind == "overloaded":
            self.limit = self.in_flight or self._most  # one that refuses all is still loading
        else:
            self._failures += 1
            if fault.kind == "failed" and self._failures < FAILURES:
                return
            self.down = True
        # 2. a pause: as long as the server asks, else longer each time
        if fault.retry_after:  # 0, or a date in the past, is no pause
            pause = min(fault.retry_after, self._longest_pause)
            self.resume_at = max(self.resume_at, now + pause)
        elif now >= self.resume_at:  # requests that fail at the same moment count once
            self.resume_at = now + self._backoff.next()


class OpenAIClient:
    """Sends chats to the server with the most free slots; thread-safe.

    A server that is overloaded or down pauses, see `Slots`.

    Args:
        urls: base URL with the version, `http://HOST:PORT/v1`, or several of servers with the same
            model.
        key_variable: environment variable that holds the API key of all servers; may be unset.
        timeout: of a request in seconds. retry_seconds: failed requests are retried for up to this
            long.
        concurrency: maximum number of concurrent requests to each server.
        optional: keys of requests that are left out for a server that rejects them.
        note: called with a line when a server stops answering, when it answers again, and when it
            rejects a key that can be sent otherwise; by any thread.

    Attributes:
        capacity: maximum number of concurrent requests to all servers. retries, last_fault: number
        of retries of all requests so far, and why the last was necessary.

    Raises:
        ConfigError: a URL is not a web address, or contains a password; the environment's proxy or
            certificates cannot be used.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        key_variable: str,
        timeout: float,
        retry_seconds: float,
        concurrency: int = CONCURRENCY,
        optional: Collection[str] = (),
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(dict.fromkeys(urls))
        servers = [
            ServerConnection(url, key_variable, timeout, concurrency, optional, note)
            for url in urls
        ]
        self._slots = {server: Slots(concurrency, retry_seconds) for server in servers}
        self.name = ("server " if len(urls) == 1 else "servers ") + ", ".join(
            server.url for server in self._slots
        )
        self.capacity = concurrency * len(urls)
        self.retries = 0
        self.last_fault = ""
        self._retry_seconds = retry_seconds
        self._note = note
        self._changed = threading.Condition()  # guards the slots and the counts
        self._closed = threading.Event()
        # `retry_seconds` after the first fault since the last answer of any server
        self._gives_up_at = math.inf

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request, again after faults, and return the response's JSON.

        An answer for which the context has no room for `max_tokens` ends with it. With `stream:
        true` the response also has `timing`, see `read_completion`.

        Raises:
            RequestRejected: status 400, 413 or 422; or this request failed for `retry_seconds`,
                while others did not.
            ServerError: wrong key or address, no answer of any server within `retry_seconds`, or
                `close` was called.
        """
        deadline = math.inf  # `retry_seconds` after the first fault of this request
        backoff = Backoff()
        while True:
            # 1. send it once
            outcome = self._send(body, deadline)
            if isinstance(outcome, RequestRejected):
                raise outcome
            if not isinstance(outcome, Fault):
                return outcome
            now = time.monotonic()
            deadline = min(deadline, now + self._retry_seconds)
            # 2. the server is at fault: its slots say when it gets requests again
            if outcome.kind != "failed":
                continue
            # 3. this request alone may be at fault: give it up, or pause while others go on
            if deadline <= now < self._gives_up_at:
                waited = f"{self._retry_seconds:g} s"
                reason = f"failed for {waited} while other requests were answered: {outcome.reason}"
                raise RequestRejected(reason, failed=True)
            self._closed.wait(min(backoff.next(), max(deadline - now, 0.0)))

    def close(self) -> None:
        """Close the connections; pending requests raise ServerError."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        for server in self._slots:
            server.close()

    def _send(self, body: Mapping[str, Any], deadline: float) -> Outcome:
        """Send a request once, to the server with the most free slots."""
        server = self._take_slot(deadline)
        outcome: Outcome | None = None
        try:
            outcome = server.send(body)
        except RequestRejected as rejected:
            outcome = rejected
        finally:
            line = self._report(server, outcome)
        if line is not None:
            self._note(f"server {server.url}: {line}")
        return outcome

    def _take_slot(self, deadline: float) -> ServerConnection:
        """Wait for a free slot; gives up after `retry_seconds`, if `deadline` is over or no request
        is under way.
        """
        with self._changed:
            while True:
                # 1. is it time to give up?
                now = time.monotonic()
                idle = not any(slots.in_flight for slots in self._slots.values())
                no_answer = now >= self._gives_up_at and (idle or now >= deadline)
                if no_answer or self._closed.is_set():
                    raise ServerError(
                        f"{self.name}: no answer within {self._retry_seconds:g} s; last error:"
                        f" {self.last_fault}"
                    )
                # 2. the server with the most free slots
                free = {server: slots.free(now) for server, slots in self._slots.items()}
                server = max(free, key=lambda server: free[server])
                if free[server]:
                    self._slots[server].take(now)
                    return server
                # 3. wait until another request ends, a pause does, or it is time to give up
                pauses = [slots.resume_at for slots in self._slots.values()]
                moments = [deadline, self._gives_up_at, *pauses]
                waits = [moment - now for moment in moments if now < moment < math.inf]
                self._changed.wait(min(waits, default=None))

    def _report(self, server: ServerConnection, outcome: Outcome | None) -> str | None:
        """Free the slot of a request and count its outcome (None: an error that ends the run).

        What becomes of a request after `close` says nothing about its server.

        Returns:
            A note where the server went down or came back.
        """
        now = time.monotonic()
        slots = self._slots[server]
        with self._changed:
            was_down = slots.down
            slots.in_flight -= 1
            if self._closed.is_set():
                return None
            if isinstance(outcome, Fault):
                self.retries += 1
                self.last_fault = outcome.reason
                if len(self._slots) > 1:
                    self.last_fault = f"{server.url}: {outcome.reason}"
                self._gives_up_at = min(self._gives_up_at, now + self._retry_seconds)
                slots.failed(now, outcome)
            elif outcome is not None:
                self._gives_up_at = math.inf
                slots.answered()
            self._changed.notify_all()
            if slots.down == was_down:
                return None
        if isinstance(outcome, Fault):
            return f"{outcome.reason}; retrying for up to {self._retry_seconds:g} s"
        return UP


def run_concurrently(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """Call `function` with every item in `workers` threads; yield the results in the order in which
    they come.

    The first exception is raised here, and no further calls are started. Threads are daemons, so
    that an interrupted command does not wait for calls under way.
    """
    todo = deque(items)
    count = len(todo)
    results: queue.SimpleQueue[R | BaseException] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                item = todo.popleft()
            except IndexError:
                return
            try:
                results.put(function(item))
            except BaseException as error:
                results.put(error)

    for _ in range(min(workers, count)):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in range(count):
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        todo.clear()
