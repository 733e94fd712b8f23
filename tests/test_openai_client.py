from __future__ import annotations

import threading
import time

import pytest

from medusa_train import openai_client
from medusa_train.errors import ConfigError, ServerError
from medusa_train.openai_client import OpenAIClient, RequestRejected
from tests.fake_server import FakeServer, Reply, error, serving

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "MIN_BACKOFF", 0.01)
    monkeypatch.setattr(openai_client, "MAX_BACKOFF", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(server: FakeServer, retry_seconds: float = 20.0, timeout: float = 10.0) -> str:
    client = OpenAIClient(server.url, timeout=timeout, retry_seconds=retry_seconds)
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
    ],
)
def test_transient_errors_are_retried(fault: Reply) -> None:
    with serving(lambda n, body: fault if n < 3 else None) as server:
        assert ask(server) == "answer to hi"
        assert len(server.bodies) == 4


def test_retry_after_is_respected() -> None:
    with serving(lambda n, body: error(429, "later", retry_after="0.3") if n == 0 else None) as server:
        started = time.monotonic()
        assert ask(server) == "answer to hi"
        assert time.monotonic() - started >= 0.3


def test_retries_end_after_retry_seconds() -> None:
    with serving() as server:
        url = server.url
    client = OpenAIClient(url, timeout=1.0, retry_seconds=0.1)
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


def test_the_key_is_read_from_the_environment_and_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda n, body: error(401, f"Incorrect API key provided: {KEY}")) as server:
        with pytest.raises(ServerError, match="check the API key in the environment variable OPENAI_API_KEY") as caught:
            ask(server)
        assert server.authorization == [f"Bearer {KEY}"]
        assert KEY not in str(caught.value)
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(ServerError, match="requires an API key; set the environment variable OPENAI_API_KEY"):
            ask(server)


def test_a_wrong_url_is_reported() -> None:
    with serving() as server:
        client = OpenAIClient(server.url.removesuffix("/v1"), timeout=5.0, retry_seconds=5.0)
        with pytest.raises(ServerError, match=r"(?s)404 .*usually ends with /v1"):
            client.complete(BODY)
    for url in ("localhost:8000", "ftp://host/v1", "http://"):
        with pytest.raises(ConfigError, match="expected an address"):
            OpenAIClient(url, timeout=1.0, retry_seconds=1.0)
    for url in (f"http://me:{KEY}@host/v1", f"http://host/v1?key={KEY}"):
        with pytest.raises(ConfigError, match="environment variable") as caught:
            OpenAIClient(url, timeout=1.0, retry_seconds=1.0)
        assert KEY not in str(caught.value)


def test_close_ends_pending_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "MIN_BACKOFF", 60.0)
    monkeypatch.setattr(openai_client, "MAX_BACKOFF", 60.0)
    with serving(lambda n, body: error(503, "loading")) as server:
        client = OpenAIClient(server.url, timeout=5.0, retry_seconds=600.0)
        failed: list[Exception] = []

        def wait() -> None:
            try:
                client.complete(BODY)
            except ServerError as gave_up:
                failed.append(gave_up)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while not server.bodies:
            time.sleep(0.01)
        client.close()
        thread.join(timeout=10)
        assert len(failed) == 1
