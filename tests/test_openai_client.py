from __future__ import annotations

import threading
import time

import pytest

from medusa_train import openai_client as chat_server
from medusa_train.errors import ConfigError, ServerError
from medusa_train.openai_client import OpenAIClient, RequestRejected
from tests.fake_server import FakeServer, Reply, error, serving

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(chat_server, "LONGEST_WAIT", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(server: FakeServer, retry_seconds: float = 20.0, timeout: float = 10.0) -> str:
    chat = OpenAIClient(server.url, timeout=timeout, retry_seconds=retry_seconds)
    try:
        return chat.complete(BODY)["choices"][0]["message"]["content"]
    finally:
        chat.close()


def test_the_request_arrives_as_it_is_and_the_answer_comes_back() -> None:
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
def test_what_may_pass_is_tried_again(fault: Reply) -> None:
    with serving(lambda n, body: fault if n < 3 else None) as server:
        assert ask(server) == "answer to hi"
        assert len(server.bodies) == 4


def test_it_waits_as_long_as_the_server_asks() -> None:
    with serving(lambda n, body: error(429, "later", retry_after="0.3") if n == 0 else None) as server:
        started = time.monotonic()
        assert ask(server) == "answer to hi"
        assert time.monotonic() - started >= 0.3


def test_a_server_that_is_not_there_or_does_not_answer_is_given_up_after_a_while() -> None:
    with serving() as server:
        url = server.url
    chat = OpenAIClient(url, timeout=1.0, retry_seconds=0.1)
    with pytest.raises(ServerError, match=r"no answer for 0\.1 s; the last try: ConnectError"):
        chat.complete(BODY)
    assert chat.retries >= 1
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
def test_a_request_that_is_refused_is_not_repeated(status: int, message: str, too_long: bool) -> None:
    with serving(lambda n, body: error(status, message)) as server:
        with pytest.raises(RequestRejected, match=f"{status} .*{message[:10]}") as caught:
            ask(server)
        assert caught.value.too_long is too_long
        assert len(server.bodies) == 1


def test_the_key_comes_from_the_environment_and_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda n, body: error(401, f"Incorrect API key provided: {KEY}")) as server:
        with pytest.raises(ServerError, match="the key in the environment variable OPENAI_API_KEY") as caught:
            ask(server)
        assert server.authorization == [f"Bearer {KEY}"]
        assert KEY not in str(caught.value)
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(ServerError, match="a key is wanted: set the environment variable OPENAI_API_KEY"):
            ask(server)


def test_a_wrong_address_says_so() -> None:
    with serving() as server:
        chat = OpenAIClient(server.url.removesuffix("/v1"), timeout=5.0, retry_seconds=5.0)
        with pytest.raises(ServerError, match=r"(?s)404 .*mostly it ends with /v1"):
            chat.complete(BODY)
    for url in ("localhost:8000", "ftp://host/v1", "http://"):
        with pytest.raises(ConfigError, match="expected an address"):
            OpenAIClient(url, timeout=1.0, retry_seconds=1.0)
    for url in (f"http://me:{KEY}@host/v1", f"http://host/v1?key={KEY}"):
        with pytest.raises(ConfigError, match="environment variable") as caught:
            OpenAIClient(url, timeout=1.0, retry_seconds=1.0)
        assert KEY not in str(caught.value)


def test_closing_ends_requests_that_wait_to_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "FIRST_WAIT", 60.0)
    monkeypatch.setattr(chat_server, "LONGEST_WAIT", 60.0)
    with serving(lambda n, body: error(503, "loading")) as server:
        chat = OpenAIClient(server.url, timeout=5.0, retry_seconds=600.0)
        failed: list[Exception] = []

        def wait() -> None:
            try:
                chat.complete(BODY)
            except ServerError as gave_up:
                failed.append(gave_up)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while not server.bodies:
            time.sleep(0.01)
        chat.close()
        thread.join(timeout=10)
        assert len(failed) == 1
