"""Answers end with the context that a server states."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from medusa_train.servers.connection import ServerConnection
from medusa_train.servers.rejections import RequestRejected
from tests.fake_server import FakeServer, error, serving, short_context

TOO_LONG = "maximum context length is {context} tokens. However, you requested {total} tokens"


@pytest.fixture
def opened() -> Iterator[list[ServerConnection]]:
    servers: list[ServerConnection] = []
    yield servers
    for server in servers:
        server.close()


def reply(content: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps(content).encode()


def ask(
    fake: FakeServer, opened: list[ServerConnection], words: int, max_tokens: int = 2048
) -> dict[str, Any]:
    if not opened:
        opened.append(ServerConnection(fake.url, key_variable="NONE", timeout=10.0, connections=1))
    message = {"role": "user", "content": "word " * words}
    answer = opened[0].send({"model": "m", "messages": [message], "max_tokens": max_tokens})
    assert isinstance(answer, dict)
    return answer


def asked(fake: FakeServer) -> list[int | None]:
    return [body.get("max_tokens") for body in fake.bodies]


def state_context(fake: FakeServer, context: int) -> None:
    models = [{"id": "other", "max_model_len": 10}, {"id": "m", "max_model_len": context}]
    fake.others["/v1/models"] = lambda body: reply({"data": models})


@pytest.mark.parametrize("message", [TOO_LONG, "no"])
def test_a_request_that_does_not_fit_gets_an_answer_to_the_end_of_the_context(
    opened: list[ServerConnection], message: str
) -> None:
    with serving(short_context(100, message)) as fake:
        state_context(fake, 100)
        answer = ask(fake, opened, 70)
        assert answer["usage"] == {"prompt_tokens": 70, "completion_tokens": 30}
        assert answer["max_tokens"] == 30
        assert asked(fake) == [2048, None]
        assert ask(fake, opened, 30, max_tokens=50)["max_tokens"] == 50
        assert asked(fake)[2:] == [50]


def test_a_rejection_waits_for_the_context_that_another_request_asks_for(
    opened: list[ServerConnection],
) -> None:
    started, rejected = threading.Event(), threading.Event()

    def models(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        started.set()
        rejected.wait(10)
        time.sleep(0.1)
        return reply({"data": [{"id": "m", "max_model_len": 100}]})

    def script(number: int, body: dict[str, Any]) -> Any:
        found = short_context(100, TOO_LONG)(number, body)
        if found[0] == 400:
            rejected.set()
        return found

    with serving(script) as fake:
        fake.others["/v1/models"] = models
        opened.append(ServerConnection(fake.url, key_variable="NONE", timeout=10.0, connections=2))
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, fake, opened, 1, max_tokens=5)
            assert started.wait(10)
            assert ask(fake, opened, 70)["max_tokens"] == 30
            first.result(10)


def test_without_a_stated_context_a_rejection_stands(opened: list[ServerConnection]) -> None:
    with serving(short_context(100, TOO_LONG)) as fake:
        with pytest.raises(RequestRejected) as caught:
            ask(fake, opened, 70)
        assert caught.value.too_long
        assert asked(fake) == [2048]


def test_another_rejection_is_not_asked_again_and_again(
    opened: list[ServerConnection],
) -> None:
    """A server that states its context, and rejects the chat itself, is asked twice, not more."""
    with serving(lambda n, body: error(400, "content policy")) as fake:
        state_context(fake, 100)
        with pytest.raises(RequestRejected, match="content policy") as caught:
            ask(fake, opened, 3)
        assert not caught.value.too_long
        assert asked(fake) == [2048, None]


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(
    opened: list[ServerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving() as fake:
        ask(fake, opened, 3)
        assert len(fake.bodies) == 1


@pytest.mark.parametrize("words", [100, 5000])
def test_a_prompt_that_does_not_fit_is_rejected(opened: list[ServerConnection], words: int) -> None:
    with serving(short_context(100, TOO_LONG)) as fake:
        state_context(fake, 100)
        with pytest.raises(RequestRejected, match="context") as caught:
            ask(fake, opened, words)
        assert caught.value.too_long
        assert len(fake.bodies) == 2


def test_the_context_is_read_from_the_models_once(opened: list[ServerConnection]) -> None:
    with serving(short_context(100, TOO_LONG)) as fake:
        state_context(fake, 100)
        ask(fake, opened, 1)
        state_context(fake, 50)
        assert ask(fake, opened, 1)["max_tokens"] == 99


@pytest.mark.parametrize(
    "models",
    [{}, {"data": [{"id": "m"}]}, {"data": [{"id": "m", "max_model_len": "?"}]}, {"data": 3}, [1]],
)
def test_models_without_a_length_are_no_error(opened: list[ServerConnection], models: Any) -> None:
    with serving(short_context(4000, TOO_LONG)) as fake:
        fake.others["/v1/models"] = lambda body: reply(models)
        ask(fake, opened, 1)
        assert asked(fake) == [2048]
