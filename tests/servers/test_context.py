"""Answers end with the context that a server states."""

import asyncio
import json
import time
from typing import Any

import pytest

from medusa_train.servers.client import Server
from medusa_train.servers.responses import RequestRejected
from tests.fake_server import FakeServer, error, serving, short_context

TOO_LONG = "maximum context length is {context} tokens. However, you requested {total} tokens"


def reply(content: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps(content).encode()


def chat(words: int, max_tokens: int = 2048) -> dict[str, Any]:
    message = {"role": "user", "content": "word " * words}
    return {"model": "m", "messages": [message], "max_tokens": max_tokens}


def ask(fake: FakeServer, *chats: dict[str, Any]) -> list[dict[str, Any]]:
    """Send requests one after the other."""

    async def send() -> list[dict[str, Any]]:
        async with Server(fake.url, key_variable="NONE", timeout=10.0) as server:
            return [await server.complete(body) for body in chats]

    return asyncio.run(send())


def asked(fake: FakeServer) -> list[int | None]:
    return [body.get("max_tokens") for body in fake.bodies]


def state_context(fake: FakeServer, context: int) -> None:
    models = [{"id": "other", "max_model_len": 10}, {"id": "m", "max_model_len": context}]
    fake.others["/v1/models"] = lambda body: reply({"data": models})


@pytest.mark.parametrize("message", [TOO_LONG, "no"])
def test_a_request_that_does_not_fit_gets_an_answer_to_the_end_of_the_context(message: str) -> None:
    with serving(short_context(100, message)) as fake:
        state_context(fake, 100)
        cut, whole = ask(fake, chat(70), chat(30, max_tokens=50))
        assert cut["usage"] == {"prompt_tokens": 70, "completion_tokens": 30}
        assert cut["max_tokens"] == 30
        assert whole["usage"]["completion_tokens"] == 40
        assert asked(fake) == [2048, None, 50]


def test_concurrent_requests_wait_for_the_context_that_one_of_them_asks_for() -> None:
    lists: list[float] = []

    def models(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        lists.append(time.monotonic())
        time.sleep(0.2)
        return reply({"data": [{"id": "m", "max_model_len": 100}]})

    async def send(url: str) -> list[dict[str, Any]]:
        async with Server(url, key_variable="NONE", timeout=10.0) as server:
            chats = chat(1, max_tokens=5), chat(70)
            return await asyncio.gather(*(server.complete(body) for body in chats))

    with serving(short_context(100, TOO_LONG)) as fake:
        fake.others["/v1/models"] = models
        _, second = asyncio.run(send(fake.url))
    assert second["max_tokens"] == 30
    assert len(lists) == 1


def test_without_a_stated_context_a_rejection_stands() -> None:
    with serving(short_context(100, TOO_LONG)) as fake:
        with pytest.raises(RequestRejected) as caught:
            ask(fake, chat(70))
        assert caught.value.too_long
        assert asked(fake) == [2048]


def test_another_rejection_is_not_asked_again_and_again() -> None:
    """A server that states its context, and rejects the chat itself, is asked twice, not more."""
    with serving(lambda n, body: error(400, "content policy")) as fake:
        state_context(fake, 100)
        with pytest.raises(RequestRejected, match="content policy") as caught:
            ask(fake, chat(3))
        assert not caught.value.too_long
        assert asked(fake) == [2048, None]


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving() as fake:
        ask(fake, chat(3))
        assert len(fake.bodies) == 1


@pytest.mark.parametrize("words", [100, 5000])
def test_a_prompt_that_does_not_fit_is_rejected(words: int) -> None:
    with serving(short_context(100, TOO_LONG)) as fake:
        state_context(fake, 100)
        with pytest.raises(RequestRejected, match="context") as caught:
            ask(fake, chat(words))
        assert caught.value.too_long
        assert len(fake.bodies) == 2


def test_the_context_is_read_from_the_models_once() -> None:
    lists: list[dict[str, Any]] = []

    def models(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        lists.append(body)
        return reply({"data": [{"id": "m", "max_model_len": 100}]})

    with serving(short_context(100, TOO_LONG)) as fake:
        fake.others["/v1/models"] = models
        _, second = ask(fake, chat(70), chat(60))
    assert second["max_tokens"] == 40
    assert len(lists) == 1


@pytest.mark.parametrize(
    "models",
    [{}, {"data": [{"id": "m"}]}, {"data": [{"id": "m", "max_model_len": "?"}]}, {"data": 3}, [1]],
)
def test_models_without_a_length_are_no_error(models: Any) -> None:
    with serving(short_context(4000, TOO_LONG)) as fake:
        fake.others["/v1/models"] = lambda body: reply(models)
        ask(fake, chat(1))
        assert asked(fake) == [2048]
