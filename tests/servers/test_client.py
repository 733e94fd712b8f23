import asyncio
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest

from medusa_train.config.load import load_config
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.errors import ConfigError, ServerError
from medusa_train.servers import client as module
from medusa_train.servers.client import Servers
from medusa_train.servers.responses import RequestRejected
from tests.fake_server import FakeServer, Reply, error, serving

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.05)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def connect(*urls: str, concurrency: int = 4, **options: Any) -> Servers:
    defaults = {"key_variable": "OPENAI_API_KEY", "timeout": 10.0, "retry_seconds": 20.0}
    return Servers(urls, concurrency=concurrency, **{**defaults, **options})


def send(servers: Servers, *bodies: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send requests one after the other."""

    async def send_all() -> list[dict[str, Any]]:
        async with servers:
            return [await servers.complete(body) for body in bodies]

    return asyncio.run(send_all())


def send_many(servers: Servers, bodies: list[dict[str, Any]]) -> list[str]:
    """Send requests at the same time, and return the texts of the answers, sorted."""
    texts: list[str] = []

    async def ask(body: dict[str, Any]) -> None:
        texts.append(text_of(await servers.complete(body)))

    async def send_all() -> None:
        async with servers:
            await servers.for_each(ask, bodies)

    asyncio.run(send_all())
    return sorted(texts)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def ask(server: FakeServer, **options: Any) -> str:
    (answer,) = send(connect(server.url, **options), BODY)
    return text_of(answer)


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
    servers = connect(url, timeout=1.0, retry_seconds=0.1)
    with pytest.raises(ServerError, match=r"no answer within 0\.1 s; last error: ConnectError"):
        send(servers, BODY)
    assert servers.retries >= 1
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
        servers = connect(server.url.removesuffix("/v1"))
        with pytest.raises(ServerError, match=r"(?s)404 .*usually ends with /v1"):
            send(servers, BODY)


def test_an_address_that_is_none_is_an_error_without_the_key_in_it() -> None:
    wrong = ["localhost:8000", "ftp://host/v1", "http://", "http://[::1/v1", "http://host:99999/v1"]
    for url in wrong:
        with pytest.raises(ConfigError, match="expected an address"):
            load_config(SelfDistillConfig, None, flags={"server_url": [url]})
    for url in (f"http://me:{KEY}@host/v1", f"http://host/v1?key={KEY}"):
        with pytest.raises(ConfigError, match="environment variable") as caught:
            load_config(SelfDistillConfig, None, flags={"server_url": [url]})
        assert KEY not in str(caught.value)


def test_an_error_ends_the_pauses_of_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 60.0)

    def script(number: int, body: dict[str, Any]) -> Reply:
        if body["messages"][-1]["content"] == "0":
            return error(503, "loading")
        time.sleep(0.2)
        return error(403, "blocked")

    started = time.monotonic()
    with serving(script) as server, pytest.raises(ServerError, match="blocked"):
        send_many(connect(server.url, concurrency=2), [chat(0), chat(1)])
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_are_cancelled_are_not_reported_as_faults(stream: bool) -> None:
    lines: list[str] = []
    cancelled = threading.Event()

    def hang(number: int, body: dict[str, Any]) -> Reply:
        cancelled.wait(10)
        return error(502, "shutting down")

    async def cancel(server: FakeServer) -> None:
        async with servers:
            pending = [
                asyncio.create_task(servers.complete({**BODY, "stream": stream})) for _ in range(3)
            ]
            while len(server.bodies) < 3:
                await asyncio.sleep(0.01)
            for request in pending:
                request.cancel()
            cancelled.set()
            await asyncio.gather(*pending, return_exceptions=True)

    with serving(hang) as server:
        servers = connect(server.url, note=lines.append)
        asyncio.run(cancel(server))
    assert lines == []
    assert (servers.retries, servers.last_fault) == (0, "")


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
        send(connect(server.url, note=lines.append), *3 * [{**BODY, "max_tokens": 7}])
    asked = [(body.get("max_tokens"), body.get("max_completion_tokens")) for body in server.bodies]
    assert asked == [(7, None), (None, 7), (None, 7), (None, 7)]
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
        servers = connect(server.url, note=lines.append, optional=["temperature"])
        send(servers, body)
        send(servers, body)  # over new connections
        assert server.bodies == [body, BODY, BODY]
        assert lines == [f"server {server.url}: rejects temperature; it is left out"]
        with pytest.raises(RequestRejected):  # self-distillation samples at its temperature
            send(connect(server.url), body)


def test_several_rejected_parameters_are_found_one_after_the_other() -> None:
    lines: list[str] = []
    with serving(newer_model) as server:
        servers = connect(server.url, concurrency=8, note=lines.append, optional=["temperature"])
        send_many(servers, 8 * [{**BODY, "max_tokens": 7, "temperature": 0}])
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
        servers = connect(server.url, note=lines.append, optional=["temperature"])
        with pytest.raises(RequestRejected):
            send(servers, body)
        server.script = lambda n, b: None
        send(servers, body)
    assert server.bodies[-1] == body
    assert lines == []


def chat(number: int) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": str(number)}]}


def test_requests_are_spread_over_servers_by_their_free_slots() -> None:
    with serving(seconds=0.05) as one, serving(seconds=0.05) as other:
        texts = send_many(connect(one.url, other.url), [chat(number) for number in range(40)])
        assert texts == sorted(f"answer to {number}" for number in range(40))
        assert len(one.bodies) + len(other.bodies) == 40
        assert min(len(one.bodies), len(other.bodies)) >= 10
        assert max(one.busiest, other.busiest) <= 4


def test_a_run_fails_only_when_all_servers_are_gone() -> None:
    with serving() as gone, serving() as also_gone:
        urls = gone.url, also_gone.url
    with serving() as alive:
        servers = connect(urls[0], alive.url, retry_seconds=0.2)
        assert len(send_many(servers, [chat(number) for number in range(10)])) == 10
    message = (
        rf"servers {urls[0]}, {urls[1]}: no answer within 0\.2 s; last error: http://.*:"
        r" ConnectError"
    )
    with pytest.raises(ServerError, match=message):
        send(connect(*urls, retry_seconds=0.2), BODY)


@pytest.mark.parametrize("status", [500, 504])  # 504: a proxy did not wait for a long answer
def test_a_request_that_always_fails_is_rejected_while_others_are_answered(status: int) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return (
            error(status, "assertion failed") if body["messages"][-1]["content"] == "hi" else None
        )

    async def answered_meanwhile() -> None:
        async with connect(server.url, retry_seconds=0.5) as servers:
            failing = asyncio.create_task(servers.complete(BODY))
            while not failing.done():
                await servers.complete(chat(1))
                await asyncio.sleep(0.02)
            await failing

    with serving(script) as server:
        with pytest.raises(
            RequestRejected, match=rf"while other requests were answered: {status} .*assertion"
        ) as caught:
            asyncio.run(answered_meanwhile())
        assert caught.value.failed
        assert not caught.value.too_long


def test_retry_after_may_be_a_date() -> None:
    date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=2), usegmt=True)
    with serving(
        lambda n, body: error(503, "later", retry_after=date) if n == 0 else None
    ) as server:
        started = time.monotonic()
        assert ask(server) == "answer to hi"
        assert time.monotonic() - started >= 0.5  # dates have whole seconds
