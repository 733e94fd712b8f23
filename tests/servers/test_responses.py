"""Streamed answers with the times of their tokens, and rejections in the wordings of servers
(numbers shortened).
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from medusa_train.errors import ServerError
from medusa_train.servers import responses as module
from medusa_train.servers.client import Server, Servers
from medusa_train.servers.responses import Fault, read_stream, read_to_end, says_too_long
from tests.fake_server import Reply, completion, error, serving, stream


def lines(*chunks: dict[str, Any] | str) -> list[str]:
    return [chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}" for chunk in chunks]


def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


async def one_by_one(content: Sequence[str]) -> AsyncIterator[str]:
    for line in content:
        yield line


def read(
    content: Sequence[str], started: float = 0.0, clock: Callable[[], float] = lambda: 1.0
) -> dict[str, Any]:
    return asyncio.run(read_stream(one_by_one(content), started, clock))


def test_chunks_are_joined_and_the_first_text_is_timed() -> None:
    moments = iter(range(10, 100))
    usage = {"prompt_tokens": 3, "completion_tokens": 7}
    content = lines(
        ": ping", delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a"), "",
        delta(content="b"), delta("length"), {"choices": [], "usage": usage}, "data: [DONE]", delta(content="late"),
    )  # fmt: skip
    answer = read(content, 1.0, lambda: float(next(moments)))
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "hm",
    }
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == usage
    assert answer["timing"] == {"started": 1.0, "first_token": 12.0, "finished": 18.0}


def test_a_call_that_the_server_parses_counts_as_the_first_token() -> None:
    moments = iter([10.0, 11.0, 12.0, 13.0])
    calls = {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}
    answer = read(
        lines(delta(role="assistant", content=""), calls, delta("tool_calls"), "data: [DONE]"),
        clock=lambda: next(moments),
    )
    assert answer["timing"]["first_token"] == 11.0


def test_an_empty_answer_has_no_first_token() -> None:
    answer = read(lines(delta("stop"), "data: [DONE]"))
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
        (["data: <html>"], "something other than JSON"),
        (["data: 3"], "something other than JSON"),
        (lines({"choices": ["a"]}), "not a text message"),
        (
            lines({"choices": [{"delta": {"content": [{"type": "text", "text": "a"}]}}]}),
            "not a text message",
        ),
    ],
)
def test_a_broken_stream_says_what_is_wrong(content: list[str], message: str) -> None:
    with pytest.raises(Fault, match=message):
        read(content)


BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


def connect(url: str, timeout: float = 5.0) -> Servers:
    return Servers([url], key_variable="NONE", timeout=timeout, retry_seconds=20.0, concurrency=1)


def ask(servers: Servers, count: int = 1) -> dict[str, Any]:
    """Send a request `count` times, and return the last answer."""

    async def send() -> dict[str, Any]:
        async with servers:
            return [await servers.complete(BODY) for _ in range(count)][-1]

    return asyncio.run(send())


def test_streams_that_are_read_to_their_end_share_a_connection() -> None:
    with serving() as fake:
        ask(connect(fake.url), 5)
        assert len(fake.bodies) == 5
        assert fake.connections == 1


@pytest.mark.parametrize("pings", [True, False], ids=["goes on", "stays open"])
def test_a_stream_that_does_not_end_after_its_answer_is_left(
    pings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.1)

    async def endless() -> AsyncIterator[str]:
        while True:
            await asyncio.sleep(0.01 if pings else 60.0)
            yield ": ping"

    asyncio.run(asyncio.wait_for(read_to_end(endless()), 5.0))


def test_a_connection_that_breaks_after_the_answer_does_not_cost_it() -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        status, headers, content = stream(body)
        return status, {**headers, "content-length": str(len(content) + 9)}, content

    with serving(script) as fake:
        servers = connect(fake.url, timeout=0.5)
        assert ask(servers)["choices"][0]["message"]["content"] == "answer to x"
        assert (len(fake.bodies), servers.retries) == (1, 0)


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
        servers = connect(fake.url, timeout=0.5)
        count_fault = servers._count_fault

        def noting(server: Server, fault: Fault) -> None:
            faults.append(fault.reason)
            count_fault(server, fault)

        servers._count_fault = noting  # type: ignore[method-assign]
        assert ask(servers)["choices"][0]["message"]["content"] == "a\u2028b"
    closed, short, busy = faults
    assert closed == "the server closed the stream before the end of the answer"
    assert "without sending complete message body" in short
    assert "503" in busy


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8"])
def test_a_server_that_ignores_stream_is_reported_as_that(kind: str) -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        return 200, {"content-type": kind}, json.dumps(completion(body)).encode()

    with serving(script) as fake, pytest.raises(ServerError, match="ignores `stream`"):
        ask(connect(fake.url))
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
        servers = connect(fake.url)
        assert ask(servers)["choices"][0]["message"]["content"] == "answer to x"
    assert message in servers.last_fault


def test_a_stream_that_ends_with_done_needs_no_finish_reason() -> None:
    answer = read(lines(delta(content="a"), "data: [DONE]"))
    assert answer["choices"][0]["finish_reason"] is None


def test_a_stream_that_never_ends_is_a_fault() -> None:
    class Pings(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # until the client leaves
                while True:
                    self.wfile.write(b": keep-alive\n")
                    time.sleep(0.01)

        def log_message(self, format: str, *args: object) -> None:
            pass

    async def send(url: str) -> None:
        async with Server(url, key_variable="NONE", timeout=0.2) as server:
            await server.complete(BODY)

    with ThreadingHTTPServer(("127.0.0.1", 0), Pings) as endless:
        threading.Thread(target=endless.serve_forever, daemon=True).start()
        with pytest.raises(Fault, match=r"no complete answer within 0\.2 s"):
            asyncio.run(send(f"http://127.0.0.1:{endless.server_port}/v1"))
        endless.shutdown()


def models_and_metrics(url: str) -> tuple[dict[str, dict[str, Any]], str | None]:
    async def read_both() -> tuple[dict[str, dict[str, Any]], str | None]:
        async with Server(url, key_variable="NONE", timeout=5.0) as server:
            return await server.list_models(), await server.read_metrics()

    return asyncio.run(read_both())


def test_models_and_metrics_of_a_server() -> None:
    with serving() as fake:
        assert models_and_metrics(fake.url) == ({}, None)
        fake.others["/v1/models"] = lambda body: (
            200,
            {},
            b'{"data": [{"id": "m", "owned_by": "vllm"}]}',
        )
        fake.others["/metrics"] = lambda body: (200, {}, b"vllm:x_total 1.0\n")
        models = {"m": {"id": "m", "owned_by": "vllm"}}
        assert models_and_metrics(fake.url) == (models, "vllm:x_total 1.0\n")
        fake.others["/v1/models"] = lambda body: (401, {}, b'{"error": {"message": "key?"}}')
        with pytest.raises(ServerError, match="set the environment variable NONE"):
            models_and_metrics(fake.url)


def test_a_server_that_is_down_has_no_metrics_and_its_models_are_a_fault() -> None:
    async def read_metrics() -> str | None:
        async with Server("http://127.0.0.1:9/v1", key_variable="NONE", timeout=5.0) as server:
            return await server.read_metrics()

    assert asyncio.run(read_metrics()) is None
    with pytest.raises(Fault, match="ConnectError"):
        models_and_metrics("http://127.0.0.1:9/v1")


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


def test_the_last_line_of_a_stream_may_lack_its_line_break() -> None:
    def script(number: int, body: dict[str, Any]) -> Reply:
        status, headers, content = stream(body)
        cut = content.removesuffix(b"\n\ndata: [DONE]\n\n")
        assert cut.endswith(b'"completion_tokens": 4}}')
        return status, {**headers, "content-length": str(len(cut))}, cut

    with serving(script) as fake:
        answer = ask(connect(fake.url))
    assert answer["choices"][0]["message"]["content"] == "answer to x"
    assert answer["usage"]["completion_tokens"] == 4


def test_lines_are_put_together_from_any_pieces_and_end_at_newlines_alone() -> None:
    async def split(*pieces: bytes) -> list[str]:
        async def chunks() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return [line async for line in module.split_lines(chunks())]

    assert asyncio.run(split(b"a\nb", b"c\xe2\x80", b"\xa8d\n", b"e")) == ["a", "bc\u2028d", "e"]
