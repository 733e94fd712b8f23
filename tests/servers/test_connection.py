"""`max_tokens` is shortened to what fits beside the prompt."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from medusa_train.servers.connection import ServerConnection
from medusa_train.servers.rejections import RequestRejected
from tests.fake_server import FakeServer, error, prompt_words, serving, short_context

LIMIT = "maximum context length is {context} tokens"
EXACT = (
    LIMIT + ". However, you requested {total} tokens ({prompt} in the messages, {asked} in the"
    " completion)"
)
LOWER_BOUND = (
    LIMIT
    + ". However, you requested {asked} output tokens and your prompt contains at least 1 input"
    " tokens"
)


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


def asked(fake: FakeServer) -> list[int]:
    return [body["max_tokens"] for body in fake.bodies]


def test_a_rejection_with_both_numbers_leads_to_the_exact_length(
    opened: list[ServerConnection],
) -> None:
    with serving(short_context(100, EXACT)) as fake:
        assert ask(fake, opened, 30)["usage"] == {"prompt_tokens": 30, "completion_tokens": 40}
        assert asked(fake) == [2048, 70]
        ask(fake, opened, 90)
        assert asked(fake) == [2048, 70, 99, 10]  # the context is known by then
        ask(fake, opened, 30, max_tokens=50)
        assert asked(fake)[4:] == [50]


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
    with serving(short_context(100, EXACT)) as fake:
        with pytest.raises(RequestRejected, match="context") as caught:
            ask(fake, opened, words)
        assert caught.value.too_long
        assert len(fake.bodies) == 1


def test_the_context_is_read_from_the_models_once(opened: list[ServerConnection]) -> None:
    with serving(short_context(100, EXACT)) as fake:
        models = [{"id": "other", "max_model_len": 10}, {"id": "m", "max_model_len": 100}]
        fake.others["/v1/models"] = lambda body: reply({"data": models})
        ask(fake, opened, 1)
        models[1]["max_model_len"] = 50
        ask(fake, opened, 1)
        assert asked(fake) == [99, 99]


@pytest.mark.parametrize(
    "models",
    [{}, {"data": [{"id": "m"}]}, {"data": [{"id": "m", "max_model_len": "?"}]}, {"data": 3}, [1]],
)
def test_models_without_a_length_are_no_error(opened: list[ServerConnection], models: Any) -> None:
    with serving(short_context(4000, EXACT)) as fake:
        fake.others["/v1/models"] = lambda body: reply(models)
        ask(fake, opened, 1)
        assert asked(fake) == [2048]


def test_a_lower_bound_of_the_prompt_is_replaced_by_the_tokenizers_count(
    opened: list[ServerConnection],
) -> None:
    with serving(short_context(100, LOWER_BOUND)) as fake:
        fake.others["/tokenize"] = lambda body: reply(
            {"count": prompt_words(body), "max_model_len": 100}
        )
        ask(fake, opened, 30)
        assert asked(fake) == [2048, 70]
        with pytest.raises(RequestRejected):
            ask(fake, opened, 100)


@pytest.mark.parametrize("message", [LOWER_BOUND, LIMIT, "the prompt is too long"])
def test_without_numbers_the_length_is_halved(opened: list[ServerConnection], message: str) -> None:
    with serving(short_context(100, message)) as fake:
        answer = ask(fake, opened, 30)
        assert 35 <= asked(fake)[-1] <= 70
        assert asked(fake) == sorted(asked(fake), reverse=True)
        assert answer["usage"]["prompt_tokens"] == 30
        with pytest.raises(RequestRejected) as caught:
            ask(fake, opened, 100)
        assert caught.value.too_long
        assert len(fake.bodies) < 30


def test_a_server_that_rejects_what_fits_is_not_asked_forever(
    opened: list[ServerConnection],
) -> None:
    with serving(
        lambda n, body: error(400, EXACT.format(context=9999, prompt=1, asked=1, total=2))
    ) as fake:
        with pytest.raises(RequestRejected):
            ask(fake, opened, 3)
        assert len(fake.bodies) == 8  # 2048, 1024, ..., 16
