"""Concurrency and health of one server, with times as numbers."""

from __future__ import annotations

import pytest

from medusa_train.servers import slots
from medusa_train.servers.slots import Slots


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots.random, "uniform", lambda low, high: high)


def test_the_limit_is_halved_once_per_round_and_grows_by_one_per_round() -> None:
    server = Slots(64)
    tickets = [server.take(0.0) for _ in range(64)]
    assert server.free(0.0) == 0
    for ticket in tickets[:20]:
        server.give_back(ticket)
        server.overloaded(ticket, 1.0, None)
    assert server.limit == 32  # 20 answers of one round halve it once
    later = server.take(2.0)
    server.give_back(later)
    server.overloaded(later, 2.0, None)
    assert server.limit == 16
    for _ in range(16):
        server.answered(accepted=True)
    assert 16.9 < server.limit <= 17
    server.answered(accepted=False)
    assert server.limit <= 17
    for _ in range(10_000):
        server.answered(accepted=True)
    assert server.limit == 64


def test_the_limit_stays_at_one_and_pauses_grow() -> None:
    server = Slots(2)
    pauses = []
    now = 0.0
    for _ in range(9):
        ticket = server.take(now)
        server.give_back(ticket)
        server.overloaded(ticket, now, None)
        pauses.append(server.resume_at - now)
        now = server.resume_at
    assert server.limit == 1
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    server.answered(accepted=True)
    server.overloaded(server.take(now), now, None)
    assert server.resume_at == now + 0.5


def test_retry_after_pauses_the_server_but_not_for_longer_than_the_run_waits() -> None:
    server = Slots(8, longest_pause=100.0)
    server.overloaded(server.take(0.0), 0.0, 7.0)
    assert server.free(6.9) == 0
    assert server.free(7.0) == 3
    server.overloaded(server.take(7.0), 7.0, 86_400.0)
    assert server.resume_at == 107.0


def test_an_unreachable_server_is_probed_with_one_request_at_a_time() -> None:
    server = Slots(8)
    tickets = [server.take(0.0) for _ in range(4)]
    for ticket in tickets:
        server.give_back(ticket)
        server.failed(ticket, 1.0, unreachable=True)
    assert server.down
    assert server.resume_at == 1.5  # 4 failures of one outage pause it once
    assert server.free(1.4) == 0
    assert server.free(1.5) == 1
    probe = server.take(1.5)
    assert server.free(1.6) == 0
    server.give_back(probe)
    server.failed(probe, 1.6, unreachable=True)
    assert server.resume_at == 2.6
    server.give_back(server.take(2.6))
    server.answered(accepted=True)
    assert not server.down
    assert server.free(2.6) == 8


def test_a_server_that_only_fails_counts_as_down_and_single_failures_do_not() -> None:
    server = Slots(8)
    for _ in range(2):
        server.failed(server.take(0.0), 1.0, unreachable=False)
    server.answered(accepted=True)
    for _ in range(2):
        server.failed(server.take(2.0), 2.0, unreachable=False)
    assert not server.down
    server.failed(server.take(2.0), 2.0, unreachable=False)
    assert server.down
