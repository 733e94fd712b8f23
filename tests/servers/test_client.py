import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest

from medusa_train.errors import ConfigError, ServerError
from medusa_train.servers import client as module
from medusa_train.servers.client import OpenAIClient, Slots
from medusa_train.servers.connection import Fault
from medusa_train.servers.rejections import RequestRejected
from tests.fake_server import FakeServer, Reply, completion, error, serving

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BACKOFF", 0.01)
    monkeypatch.setattr(module, "MAX_BACKOFF", 0.05)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(server: FakeServer, retry_seconds: float = 20.0, timeout: float = 10.0) -> str:
    client = OpenAIClient(
        server.url, key_variable="OPENAI_API_KEY", timeout=timeout, retry_seconds=retry_seconds
    )
    try:
        return client.complete(BODY)["choices"][0]["message"]["content"]
    finally:
        client.close()


def test_the_request_is_sent_unchanged_and_the_answer_returned() -> None:
    with serving() as server:
        assert ask(server) == "answer to hi"
        assert server.bodies == [BODY]
        assert server.authorization == [None]


@pytest.mark.parametrize(
    "fault",
    [
        error(429, "slow down"),
        error(503, "loading"),
        error(500, "oops"),
        (200, {}, b"<html>starting</html>"),
        (200, {}, b'{"choices": []}'),
        (200, {}, b'{"choices": [{"message": null}]}'),
        (200, {}, b'{"choices": [{"message": {"content": [{"type": "text", "text": "hi"}]}}]}'),
        (200, {"content-encoding": "gzip"}, b"not compressed"),
    ],
)
def test_answers_that_are_no_text_and_other_transient_errors_are_retried(fault: Reply) -> None:
    with serving(lambda n, body: fault if n < 3 else None) as server:
        assert ask(server) == "answer to hi"
        assert len(server.bodies) == 4


def test_retries_end_after_retry_seconds() -> None:
    with serving() as server:
        url = server.url
    client = OpenAIClient(url, key_variable="OPENAI_API_KEY", timeout=1.0, retry_seconds=0.1)
    with pytest.raises(ServerError, match=r"no answer within 0\.1 s; last error: ConnectError"):
        client.complete(BODY)
    assert client.retries >= 1
    with serving(seconds=1.0) as slow, pytest.raises(ServerError, match="Timeout"):
        ask(slow, retry_seconds=0.0, timeout=0.1)


@pytest.mark.parametrize(
    ("status", "message", "too_long"),
    [
        (400, "This model's maximum context length is 4096 tokens", True),
        (400, "the prompt is too long", True),
        (413, "no", True),
        (422, "Unexpected fields in the request: {'top_k'}", False),
        (400, "content policy", False),
    ],
)
def test_a_rejected_request_is_not_retried(status: int, message: str, too_long: bool) -> None:
    with serving(lambda n, body: error(status, message)) as server:
        with pytest.raises(RequestRejected, match=f"{status} .*{message[:10]}") as caught:
            ask(server)
        assert caught.value.too_long is too_long
        assert len(server.bodies) == 1


def test_the_key_is_read_from_the_environment_and_in_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda n, body: error(401, f"Incorrect API key provided: {KEY}")) as server:
        with pytest.raises(
            ServerError, match="check the API key in the environment variable OPENAI_API_KEY"
        ) as caught:
            ask(server)
        assert server.authorization == [f"Bearer {KEY}"]
        assert KEY not in str(caught.value)
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(
            ServerError, match="requires an API key; set the environment variable OPENAI_API_KEY"
        ):
            ask(server)


def test_a_wrong_url_is_reported() -> None:
    with serving() as server:
        client = OpenAIClient(
            server.url.removesuffix("/v1"),
            key_variable="OPENAI_API_KEY",
            timeout=5.0,
            retry_seconds=5.0,
        )
        with pytest.raises(ServerError, match=r"(?s)404 .*usually ends with /v1"):
            client.complete(BODY)
    for url in (
        "localhost:8000",
        "ftp://host/v1",
        "http://",
        "http://[::1/v1",
        "http://host:99999/v1",
    ):
        with pytest.raises(ConfigError, match="expected an address"):
            OpenAIClient(url, key_variable="OPENAI_API_KEY", timeout=1.0, retry_seconds=1.0)
    for url in (f"http://me:{KEY}@host/v1", f"http://host/v1?key={KEY}"):
        with pytest.raises(ConfigError, match="environment variable") as caught:
            OpenAIClient(url, key_variable="OPENAI_API_KEY", timeout=1.0, retry_seconds=1.0)
        assert KEY not in str(caught.value)


def test_close_ends_pending_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BACKOFF", 60.0)
    monkeypatch.setattr(module, "MAX_BACKOFF", 60.0)
    with serving(lambda n, body: error(503, "loading")) as server, ThreadPoolExecutor(1) as pool:
        client = OpenAIClient(
            server.url, key_variable="OPENAI_API_KEY", timeout=5.0, retry_seconds=600.0
        )
        pending = pool.submit(client.complete, BODY)
        while not server.bodies:
            time.sleep(0.01)
        client.close()
        with pytest.raises(ServerError):
            pending.result(timeout=10)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_are_cancelled_by_close_are_not_reported_as_faults(stream: bool) -> None:
    lines: list[str] = []
    cancelled = threading.Event()

    def hang(number: int, body: dict[str, Any]) -> Reply:
        cancelled.wait(10)
        return error(502, "shutting down")

    with serving(hang) as server, ThreadPoolExecutor(3) as pool:
        client = OpenAIClient(
            server.url,
            key_variable="OPENAI_API_KEY",
            timeout=20.0,
            retry_seconds=600.0,
            note=lines.append,
        )
        pending = [pool.submit(client.complete, {**BODY, "stream": stream}) for _ in range(3)]
        while len(server.bodies) < 3:
            time.sleep(0.01)
        client.close()
        cancelled.set()
        for request in pending:
            with pytest.raises(ServerError):
                request.result(timeout=10)
    assert lines == []
    assert (client.retries, client.last_fault) == (0, "")


NO_MAX_TOKENS = (
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use"
    " 'max_completion_tokens' instead."
)
NO_TEMPERATURE = (
    "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1)"
    " value is supported."
)


def newer_model(number: int, body: dict[str, Any]) -> Reply:
    """Reject what OpenAI's reasoning models reject, one parameter at a time."""
    if "max_tokens" in body:
        return error(400, NO_MAX_TOKENS)
    if "temperature" in body:
        return error(400, NO_TEMPERATURE)
    return None


@pytest.mark.parametrize(
    "reason",
    [
        NO_MAX_TOKENS,
        "use max_completion_tokens",
        '{"code": "unsupported_parameter", "param": "max_tokens"}',
        "max_tokens: Extra inputs are not permitted",
    ],
)
def test_a_server_that_wants_max_completion_tokens_gets_them_from_then_on(reason: str) -> None:
    lines: list[str] = []
    with serving(lambda n, b: error(400, reason) if "max_tokens" in b else None) as server:
        client = OpenAIClient(
            server.url,
            key_variable="OPENAI_API_KEY",
            timeout=5.0,
            retry_seconds=5.0,
            note=lines.append,
        )
        answers = [client.complete({**BODY, "max_tokens": 7}) for _ in range(3)]
        client.close()
    asked = [(body.get("max_tokens"), body.get("max_completion_tokens")) for body in server.bodies]
    assert asked == [(7, None), (None, 7), (None, 7), (None, 7)]
    assert [answer["max_tokens"] for answer in answers] == [7, 7, 7]
    assert lines == [
        f"server {server.url}: rejects max_tokens; max_completion_tokens takes its place"
    ]


@pytest.mark.parametrize(
    "rejection",
    [
        error(400, NO_TEMPERATURE),
        error(400, "Unsupported parameter: 'temperature' is not supported with this model."),
        error(400, "`temperature` is deprecated for this model."),
        error(400, "invalid temperature: only 1 is allowed for this model"),
        error(422, "Input validation error: `temperature` must be strictly positive"),
        (400, {}, b'{"error": {"message": "Unsupported value", "param": "temperature"}}'),
        (422, {}, b'{"detail": [{"loc": ["body", "temperature"], "msg": "greater than 0"}]}'),
        (400, {}, b"Temperature must be > 0"),
    ],
)
def test_a_parameter_that_may_be_left_out_is_left_out_once_it_is_rejected(rejection: Reply) -> None:
    lines: list[str] = []
    body = {**BODY, "temperature": 0}
    with serving(lambda n, body: rejection if "temperature" in body else None) as server:
        client = OpenAIClient(
            server.url,
            key_variable="OPENAI_API_KEY",
            timeout=5.0,
            retry_seconds=5.0,
            note=lines.append,
            optional=["temperature"],
        )
        client.complete(body)
        client.complete(body)
        client.close()
        assert server.bodies == [body, BODY, BODY]
        assert lines == [f"server {server.url}: rejects temperature; it is left out"]
        with pytest.raises(RequestRejected):  # self-distillation samples at its temperature
            OpenAIClient(
                server.url, key_variable="OPENAI_API_KEY", timeout=5.0, retry_seconds=5.0
            ).complete(body)


def test_several_rejected_parameters_are_found_one_after_the_other() -> None:
    lines: list[str] = []
    with serving(newer_model) as server:
        client = OpenAIClient(
            server.url,
            key_variable="OPENAI_API_KEY",
            timeout=5.0,
            retry_seconds=5.0,
            note=lines.append,
            optional=["temperature"],
        )
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(client.complete, 8 * [{**BODY, "max_tokens": 7, "temperature": 0}]))
        client.close()
    assert server.bodies[-1] == {**BODY, "max_completion_tokens": 7}
    assert len(lines) == len(set(lines)) == 2


@pytest.mark.parametrize(
    "reason",
    [
        "max_tokens is too large: 9. This model supports at most 8 completion tokens",
        "content policy",
        '{"detail": [{"msg": "roles", "input": {"messages": [], "temperature": 0}}]}',
    ],
)
def test_a_request_that_is_rejected_in_any_spelling_changes_no_other(reason: str) -> None:
    lines: list[str] = []
    body = {**BODY, "max_tokens": 9, "temperature": 0}
    with serving(lambda n, b: error(400, reason)) as server:
        client = OpenAIClient(
            server.url,
            key_variable="OPENAI_API_KEY",
            timeout=5.0,
            retry_seconds=5.0,
            note=lines.append,
            optional=["temperature"],
        )
        with pytest.raises(RequestRejected):
            client.complete(body)
        server.script = lambda n, b: None
        client.complete(body)
        client.close()
    assert server.bodies[-1] == body
    assert lines == []


def ask_many(client: OpenAIClient, count: int) -> list[str]:
    with ThreadPoolExecutor(count) as pool:
        return list(
            pool.map(
                lambda n: client.complete(chat(n))["choices"][0]["message"]["content"], range(count)
            )
        )


def chat(number: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": str(number)}]}


def expected(count: int) -> list[str]:
    return [f"answer to {number}" for number in range(count)]


@contextmanager
def connected(
    *urls: str, retry_seconds: float = 20.0, concurrency: int = 64
) -> Iterator[OpenAIClient]:
    client = OpenAIClient(
        urls,
        key_variable="OPENAI_API_KEY",
        timeout=10.0,
        retry_seconds=retry_seconds,
        concurrency=concurrency,
    )
    try:
        yield client
    finally:
        client.close()


def test_requests_are_spread_over_servers_by_their_free_slots() -> None:
    with (
        serving(seconds=0.05) as one,
        serving(seconds=0.05) as other,
        connected(one.url, other.url) as client,
    ):
        assert client.capacity == 128
        assert ask_many(client, 40) == expected(40)
        assert len(one.bodies) + len(other.bodies) == 40
        assert min(len(one.bodies), len(other.bodies)) >= 10


def test_a_dead_server_gets_no_requests_until_it_answers_again() -> None:
    dead = True
    with (
        serving() as one,
        serving(lambda n, body: error(502, "bad gateway") if dead else None) as other,
        connected(one.url, other.url, concurrency=4) as client,
    ):
        for number in range(30):
            client.complete(chat(number))
        probes = len(other.bodies)
        dead = False
        deadline = time.monotonic() + 10
        while len(other.bodies) < probes + 4:
            assert time.monotonic() < deadline
            ask_many(client, 8)
    assert probes <= 10
    assert len(one.bodies) >= 30


def test_a_server_that_stops_answering_is_named_once_and_when_it_answers_again() -> None:
    lines: list[str] = []
    replies = [error(502, "bad gateway")] * 3
    with serving(lambda n, body: replies[n] if n < len(replies) else None) as server:
        client = OpenAIClient(
            server.url,
            key_variable="OPENAI_API_KEY",
            timeout=5.0,
            retry_seconds=20.0,
            note=lines.append,
        )
        client.complete(BODY)
        client.close()
    assert lines == [
        f"server {server.url}: 502 Bad Gateway: bad gateway; retrying for up to 20 s",
        f"server {server.url}: answers again",
    ]


def test_a_run_fails_only_when_all_servers_are_gone() -> None:
    with serving() as gone, serving() as also_gone:
        urls = gone.url, also_gone.url
    with serving() as alive, connected(urls[0], alive.url, retry_seconds=0.2) as client:
        for number in range(10):
            assert client.complete(chat(number))
            time.sleep(0.05)
    with connected(*urls, retry_seconds=0.2) as client:
        message = (
            rf"servers {urls[0]}, {urls[1]}: no answer within 0\.2 s; last error: http://.*:"
            r" ConnectError"
        )
        with pytest.raises(ServerError, match=message):
            client.complete(BODY)


def test_waiting_for_the_only_slot_takes_no_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    passes = 0

    def script(number: int, body: dict[str, Any]) -> Reply:
        if number == 0:
            return error(500, "oops")
        release.wait(10)
        return None

    def free(self: Slots, now: float, free: Any = Slots.free) -> int:
        nonlocal passes
        passes += 1
        return free(self, now)

    with (
        serving(script) as server,
        connected(server.url, retry_seconds=0.1, concurrency=1) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        probe = pool.submit(client.complete, chat(0))
        while len(server.bodies) < 2:  # the second attempt is under way
            time.sleep(0.01)
        waiting = pool.submit(client.complete, chat(1))
        time.sleep(0.2)  # longer than retry_seconds
        monkeypatch.setattr(Slots, "free", free)
        time.sleep(0.3)
        assert passes <= 1  # a busy loop makes thousands
        release.set()
        assert [probe.result(), waiting.result()] == [completion(chat(0)), completion(chat(1))]


@pytest.mark.parametrize("status", [500, 504])  # 504: a proxy did not wait for a long answer
def test_a_request_that_always_fails_is_rejected_while_others_are_answered(status: int) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return (
            error(status, "assertion failed") if body["messages"][-1]["content"] == "hi" else None
        )

    with serving(script) as server, connected(server.url, retry_seconds=0.5) as client:
        done = threading.Event()

        def others() -> None:
            while not done.wait(0.02):
                client.complete(chat(1))

        thread = threading.Thread(target=others)
        thread.start()
        try:
            with pytest.raises(
                RequestRejected, match=rf"while other requests were answered: {status} .*assertion"
            ) as caught:
                client.complete(BODY)
        finally:
            done.set()
            thread.join()
        assert not caught.value.too_long


def test_retry_after_may_be_a_date() -> None:
    date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=2), usegmt=True)
    with serving(
        lambda n, body: error(503, "later", retry_after=date) if n == 0 else None
    ) as server:
        started = time.monotonic()
        assert ask(server) == "answer to hi"
        assert time.monotonic() - started >= 0.5  # dates have whole seconds


# One server's slots, with times as numbers

OVERLOADED, FAILED = Fault("", "overloaded"), Fault("", "failed")


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BACKOFF", 0.5)
    monkeypatch.setattr(module, "MAX_BACKOFF", 30.0)
    monkeypatch.setattr(module.random, "uniform", lambda low, high: high)


@pytest.mark.usefixtures("no_jitter")
def test_an_overload_pauses_once_for_all_requests_of_the_moment() -> None:
    slots = Slots(64, longest_pause=5.0)
    for _ in range(20):
        slots.failed(1.0, OVERLOADED)
    assert (slots.free(1.4), slots.free(1.5)) == (0, 64)
    slots.failed(2.0, OVERLOADED)
    assert (slots.free(2.9), slots.free(3.0)) == (0, 64)
    slots.failed(3.0, Fault("", "overloaded", 60.0))
    assert (slots.free(7.9), slots.free(8.0)) == (0, 64)
    slots.answered()
    slots.failed(8.0, Fault("", "overloaded", 0.0))  # Retry-After: 0 is no pause
    assert (slots.free(8.4), slots.free(8.5)) == (0, 64)


@pytest.mark.usefixtures("no_jitter")
def test_a_server_that_takes_few_requests_is_kept_busy_and_seldom_refuses() -> None:
    slots, ends, refused, answered = Slots(64), list[float](), 0, 0
    for now in (step / 4 for step in range(4 * 600)):
        for end in [end for end in ends if end <= now]:
            ends.remove(end)
            slots.in_flight -= 1
            slots.answered()
            answered += 1
        for number in range(slots.free(now)):
            slots.take(now)
            if len(ends) < 8:
                ends.append(now + 60 + number)
            else:
                slots.in_flight -= 1
                slots.failed(now, OVERLOADED)
                refused += 1
    assert answered >= 8 * 8
    assert 56 + 5 <= refused <= 56 + 10  # all at first, then about one per wave of answers


def test_a_server_that_is_down_is_probed_beside_requests_that_hang() -> None:
    slots = Slots(64)
    for _ in range(64):
        slots.take(0.0)
    slots.in_flight -= 1
    slots.failed(1.0, Fault("", "unreachable"))
    assert (slots.free(1.0), slots.free(2.0)) == (0, 1)
    slots.take(2.0)
    assert (slots.free(2.0), slots.free(3.0)) == (0, 1)
    slots.take(3.0)
    slots.in_flight = 60
    slots.answered()
    assert slots.free(3.0) == 4  # without a pause


def test_a_server_that_only_fails_counts_as_down_and_single_failures_do_not() -> None:
    slots = Slots(8)
    for _ in range(2):
        slots.failed(1.0, FAILED)
    slots.answered()
    for _ in range(2):
        slots.failed(2.0, FAILED)
    assert not slots.down
    slots.failed(2.0, FAILED)
    assert slots.down
    assert slots.free(100.0) == 1
