"""Limit the requests to one server: fewer when it is overloaded, none while it is down."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MIN_BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds between attempts, doubled after each
_FAILURES = 3  # in a row, after which a server counts as down


class Backoff:
    """Pauses that double, with jitter, so that requests do not all retry at the same moment after an outage."""

    def __init__(self) -> None:
        self._seconds = MIN_BACKOFF

    def next(self) -> float:
        """Return the seconds to wait."""
        pause = self._seconds * random.uniform(0.5, 1.0)
        self._seconds = min(2 * self._seconds, MAX_BACKOFF)
        return pause


@dataclass(frozen=True, slots=True)
class Ticket:
    """A slot that was taken at the time `started`; `probe`: the request tests whether the server is up again."""

    started: float
    probe: bool


class Slots:
    """The concurrency limit and health of one server. Times are those of a monotonic clock; not thread-safe.

    The limit is halved when the server reports overload, and grows by one request per `limit` answers, up to `most`
    (additive increase, multiplicative decrease). Faults of requests that were sent before the last change count once.
    A server that is down is probed with one request at a time, after growing pauses.

    Args:
        most: the limit at the start, and its maximum.
        longest_pause: maximum number of seconds that the server can ask to wait.

    Attributes:
        limit: number of concurrent requests allowed.
        in_flight: number of requests under way.
        down: whether the server counts as down.
        resume_at: no request is sent before this time.
    """

    def __init__(self, most: int, longest_pause: float = math.inf) -> None:
        self.limit = float(most)
        self.in_flight = 0
        self.down = False
        self.resume_at = -math.inf
        self._most = most
        self._longest_pause = longest_pause
        self._probing = False
        self._changed_at = -math.inf
        self._backoff = Backoff()
        self._failures = 0

    def free(self, now: float) -> int:
        """Return how many more requests can be sent."""
        if now < self.resume_at:
            return 0
        if self.down:
            return 0 if self._probing else 1
        return max(int(self.limit) - self.in_flight, 0)

    def take(self, now: float) -> Ticket:
        """Take a free slot."""
        self.in_flight += 1
        self._probing = self._probing or self.down
        return Ticket(now, self.down)

    def give_back(self, ticket: Ticket) -> None:
        """Free the slot of a request, before its result is reported."""
        self.in_flight -= 1
        if ticket.probe:
            self._probing = False

    def answered(self, *, accepted: bool) -> None:
        """Report a response: the server is up. Only accepted requests raise the limit."""
        if self.down:
            self.down, self.resume_at = False, -math.inf
        self._backoff = Backoff()
        self._failures = 0
        if accepted:
            self.limit = min(self.limit + 1 / self.limit, float(self._most))

    def overloaded(self, ticket: Ticket, now: float, retry_after: float | None) -> None:
        """Report that the server is overloaded: halve the limit, and pause."""
        if retry_after is not None:
            self.resume_at = max(self.resume_at, now + min(retry_after, self._longest_pause))
        if ticket.started < self._changed_at:
            return
        self.limit = max(self.limit / 2, 1.0)
        self._pause(now, backoff=retry_after is None)

    def failed(self, ticket: Ticket, now: float, *, unreachable: bool) -> None:
        """Report a failed request. The server is down if it was unreachable, or after 3 failures in a row."""
        self._failures += 1
        if not unreachable and self._failures < _FAILURES:
            return
        if self.down and ticket.started < self._changed_at:
            return
        self.down = True
        self._pause(now, backoff=True)

    def _pause(self, now: float, *, backoff: bool) -> None:
        self._changed_at = now
        if backoff:
            self.resume_at = max(self.resume_at, now + self._backoff.next())
