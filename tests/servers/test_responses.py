"""Streamed answers with the times of their tokens, and rejections in the wordings of servers
(numbers shortened).
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_train.errors import ServerError
from medusa_train.servers.client import OpenAIClient
from medusa_train.servers.connection import Fault, ServerConnection
from medusa_train.servers.rejections import says_too_long
from medusa_train.servers.streaming import StreamError, read_completion
from tests.fake_server import Reply, completion, error, serving, stream


def lines(*chunks: dict[str, Any] | str) -> list[str]:
    return [chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}" for chunk in chunks]


def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def test_chunks_are_joined_and_the_first_text_is_timed() -> None:
    moments = iter(range(10, 100))
    usage = {"prompt_tokens": 3, "completion_tokens": 7}
    content = lines(
        ": ping", delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a"), "",
        delta(content="b"), delta("length"), {"choices": [], "usage": usage}, "data: [DONE]", delta(content="late"),
    )  # fmt: skip
    answer = read_completion(iter(content), 1.0, lambda: None, lambda: float(next(moments)))
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "hm",
    }
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == usage
    assert answer["timing"] == {"started": 1.0, "first_token": 12.0, "finished": 18.0}


def test_an_empty_answer_has_no_first_token() -> None:
    answer = read_completion(iter(lines(delta("stop"), "data: [DONE]")), 0.0, lambda: None)
    assert answer["timing"]["first_token"] is None
    assert answer["usage"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(delta(content="a")), "before the end of the answer"),
        (lines(delta("abort", content="a")), "before the end of the answer"),
        ([], "before the end of the answer"),
        (
            lines(delta(content="a"), {"error": {"message": "EngineCore\ndied", "code": 500}}),
            "EngineCore died",
        ),
        (lines({"error": "no"}), "error within the stream: no"),
        (["data: <html>"], "something else than JSON"),
        (["data: 3"], "something else than JSON"),
        (lines({"choices": ["a"]}), "no text message"),
        (
            lines({"choices": [{"delta": {"content": [{"type": "text", "text": "a"}]}}]}),
            "no text message",
        ),
    ],
)
def test_a_broken_stream_says_what_is_wrong(content: list[str], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read_completion(iter(content), 0.0, lambda: None)


def ask(client: OpenAIClient) -> dict[str, Any]:
    return client.complete(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    )


def test_streams_that_are_read_to_their_end_share_a_connection() -> None:
    with serving() as fake:
        client = OpenAIClient(
            fake.url, key_variable="NONE", timeout=5.0, retry_seconds=5, concurrency=1
        )
        for _ in range(5):
            ask(client)
        client.close()
        assert len(fake.bodies) == 5
        assert fake.connections == 1


def test_a_stream_that_goes_on_after_its_answer_ends() -> None:
    clock = iter([0.0, 1.0, 1.0, 1.5, 2.5, 99.0])
    content = lines(delta("stop", content="a"), "data: [DONE]", ": ping", ": ping", ": ping")
    answer = read_completion(iter(content), 0.0, lambda: None, lambda: next(clock))
    assert answer["timing"]["finished"] == 1.0
    assert next(clock) == 99.0  # nothing was read after the second ping


def test_a_connection_that_breaks_after_the_answer_does_not_cost_it() -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        status, headers, content = stream(body)
        return status, {**headers, "content-length": str(len(content) + 9)}, content

    with serving(script) as fake:
        client = OpenAIClient(
            fake.url, key_variable="NONE", timeout=0.5, retry_seconds=5, concurrency=1
        )
        assert ask(client)["choices"][0]["message"]["content"] == "answer to x"
        client.close()
        assert (len(fake.bodies), client.retries) == (1, 0)


def test_a_cut_stream_is_asked_again() -> None:
    """One that ends before its answer, one that ends before its length, one that is refused."""

    def script(number: int, body: dict[str, Any]) -> Reply:
        status, headers, cut = stream(body, end=None)
        short = {**headers, "content-length": str(len(cut) + 100), "connection": "close"}
        replies: list[Reply] = [(status, headers, cut), (status, short, cut), error(503, "busy")]
        if number < len(replies):
            return replies[number]
        status, headers, content = stream(body, "a\u2028b")
        return status, headers, content.replace(b"\\u2028", b"\xe2\x80\xa8")

    faults: list[str] = []
    with serving(script) as fake:
        client = OpenAIClient(
            fake.url, key_variable="NONE", timeout=0.5, retry_seconds=20, concurrency=1
        )
        report = client._report

        def noting(server: ServerConnection, outcome: Any) -> str | None:
            faults.extend([outcome.reason] if isinstance(outcome, Fault) else [])
            return report(server, outcome)

        client._report = noting  # type: ignore[method-assign]
        assert ask(client)["choices"][0]["message"]["content"] == "a\u2028b"
        client.close()
    closed, short, busy = faults
    assert closed == "the server closed the stream before the end of the answer"
    assert "without sending complete message body" in short
    assert "503" in busy


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8"])
def test_a_server_that_ignores_stream_is_reported_as_that(kind: str) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return 200, {"content-type": kind}, json.dumps(completion(body)).encode()

    with serving(script) as fake, pytest.raises(ServerError, match="ignores `stream`"):
        ask(OpenAIClient(fake.url, key_variable="NONE", timeout=5.0, retry_seconds=5.0))
    assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("application/json", b'{"error": {"message": "engine died"}}', "engine died"),
        ("application/json", b'{"detail": "loading"}', "loading"),
        ("application/json", b"", "200 OK"),
        ("application/problem+json", b'{"error": "no"}', "no"),
        ("text/html", b"<html>starting</html>", "before the end of the answer"),
        (
            "text/event-stream",
            b'data: {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}\n\n',
            "a whole answer in place of its parts",
        ),
    ],
)
def test_other_replies_in_place_of_a_stream_are_asked_again(
    kind: str, content: bytes, message: str
) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return (200, {"content-type": kind}, content) if number == 0 else None

    with serving(script) as fake:
        client = OpenAIClient(fake.url, key_variable="NONE", timeout=5.0, retry_seconds=20.0)
        assert ask(client)["choices"][0]["message"]["content"] == "answer to x"
        client.close()
    assert message in client.last_fault


def test_a_stream_that_ends_with_done_needs_no_finish_reason() -> None:
    answer = read_completion(iter(lines(delta(content="a"), "data: [DONE]")), 0.0, lambda: None)
    assert answer["choices"][0]["finish_reason"] is None


def test_a_stream_that_never_ends_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerConnection(
        "http://127.0.0.1:9/v1", key_variable="NONE", timeout=0.2, connections=1
    )

    def endless() -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield b": keep-alive\n"

    response = SimpleNamespace(status_code=200, headers={}, iter_bytes=endless)
    monkeypatch.setattr(server, "_models_read", True)
    monkeypatch.setattr(server._client, "stream", lambda *args, **keys: nullcontext(response))
    fault = server.send({"stream": True})
    assert isinstance(fault, Fault)
    assert "no complete answer within 0.2 s" in fault.reason
    server._timeout = 60.0
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.send, {"stream": True})
        time.sleep(0.05)
        server.close()
        assert "client was closed" in pending.result(5).reason  # type: ignore[union-attr]


def test_models_and_metrics_of_a_server() -> None:
    with serving() as fake:
        server = ServerConnection(fake.url, key_variable="NONE", timeout=5.0, connections=1)
        assert server.list_models() == {}
        assert server.read_metrics() is None
        fake.others["/v1/models"] = lambda body: (
            200,
            {},
            b'{"data": [{"id": "m", "owned_by": "vllm"}]}',
        )
        fake.others["/metrics"] = lambda body: (200, {}, b"vllm:x_total 1.0\n")
        assert server.list_models() == {"m": {"id": "m", "owned_by": "vllm"}}
        assert server.read_metrics() == "vllm:x_total 1.0\n"
        fake.others["/v1/models"] = lambda body: (401, {}, b'{"error": {"message": "key?"}}')
        with pytest.raises(ServerError, match="set the environment variable NONE"):
            server.list_models()
    down = ServerConnection(
        "http://127.0.0.1:9/v1", key_variable="NONE", timeout=5.0, connections=1
    )
    assert down.read_metrics() is None
    with pytest.raises(ServerError, match="cannot be reached"):
        down.list_models()


VLLM = "This model's maximum context length is 4096 tokens"


@pytest.mark.parametrize(
    "message",
    [
        f"{VLLM}. However, you requested 2148 tokens (100 in the messages, 2048 in the completion).",
        f"'max_tokens' or 'max_completion_tokens' is too large: 2048. {VLLM} and your request has 2500"
        " input tokens (2048 > 4096 - 2500).",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        # SGLang
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
        "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
        # TGI
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 1244",
        "Input validation error: `inputs` must have less than 1024 tokens. Given: 1168",
        # llama.cpp
        "request (1407 tokens) exceeds the available context size (256 tokens), try increasing it",
        '"type":"exceed_context_size_error","n_prompt_tokens":1407,"n_ctx":256',
        # OpenAI
        '{"error": {"code": "context_length_exceeded"}}',
        "the prompt is too long",
    ],
)
def test_servers_say_in_many_ways_that_a_chat_is_too_long(message: str) -> None:
    assert says_too_long(message)


@pytest.mark.parametrize(
    "message", ["content policy in this context", "Unexpected fields: {'top_k'}", "", "400"]
)
def test_other_rejections_are_not_about_the_context(message: str) -> None:
    assert not says_too_long(message)
