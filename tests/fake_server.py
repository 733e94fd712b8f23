"""An OpenAI-compatible chat server on loopback with scripted answers; standard library only.

`python fake_server.py PORT [SECONDS_PER_ANSWER]` runs it as a process, so that a test can kill it.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: A scripted reply: (status, headers, body); None for the default answer.
Reply = tuple[int, dict[str, str], bytes] | None


def error(status: int, message: str, **headers: str) -> Reply:
    return status, headers, json.dumps({"error": {"message": message}}).encode()


class FakeServer(ThreadingHTTPServer):
    """Answers `answer to LAST MESSAGE`, unless `script(number of the request, body)` returns
    another reply.

    Attributes:
        others: replies to other paths than `/v1/chat/completions`, functions of the body; 404 by
            default.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(
        self,
        port: int = 0,
        script: Callable[[int, dict[str, Any]], Reply] = lambda n, body: None,
        seconds: float = 0.0,
    ) -> None:
        self.script = script
        self.seconds = seconds
        self.others: dict[str, Callable[[dict[str, Any]], tuple[int, dict[str, str], bytes]]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.authorization: list[str | None] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.busiest = 0
        self.connections = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected before their answer.

        The default prints a traceback in a thread that may outlive its test. Python 3.11 parses
        source code for it, which can break another thread's imports ("AST constructor recursion
        depth mismatch").
        """
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_GET(self) -> None:
        self._send(*self.server.others.get(self.path, _not_found)({}))

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        content = self.rfile.read(length)
        if len(content) < length:  # the client has cancelled its request
            self.close_connection = True
            return
        body = json.loads(content)
        server = self.server
        if self.path != "/v1/chat/completions":
            self._send(*server.others.get(self.path, _not_found)(body))
            return
        with server.lock:
            server.bodies.append(body)
            server.authorization.append(self.headers.get("authorization"))
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            number = len(server.bodies) - 1
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
        time.sleep(server.seconds)
        reply = server.script(number, body)
        with server.lock:
            server.busy -= 1
        default = (
            stream(body) if body.get("stream") else (200, {}, json.dumps(completion(body)).encode())
        )
        self._send(*(reply or default))

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _not_found(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return 404, {}, b"{}"


def completion(
    body: dict[str, Any], finish: str | None = "stop", text: str | None = None
) -> dict[str, Any]:
    text = f"answer to {body['messages'][-1]['content']}" if text is None else text
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish,
    }
    return {
        "choices": [choice],
        "usage": {"prompt_tokens": 10, "completion_tokens": len(text.split()) + 1},
    }


def stream(
    body: dict[str, Any],
    text: str | None = None,
    *,
    tokens: int | None = None,
    end: str | None = "stop",
) -> tuple[int, dict[str, str], bytes]:
    """A streamed answer, a chunk per word.

    Without `end` the stream stops early; `tokens` -1 leaves out the usage.
    """
    text = f"answer to {body['messages'][-1]['content']}" if text is None else text
    count = len(text.split()) + 1 if tokens is None else tokens
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    ]
    chunks += [
        {"choices": [{"index": 0, "delta": {"content": word}}]}
        for word in re.findall(r"\S+\s*", text)
    ]
    if end is not None:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": end}]})
    if tokens != -1:
        chunks.append({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": count}})
    lines = [": keep-alive", *(f"data: {json.dumps(chunk)}" for chunk in chunks)]
    lines += ["data: [DONE]"] if end is not None else []
    return (
        200,
        {"content_type": "text/event-stream"},
        "".join(f"{line}\n\n" for line in lines).encode(),
    )


def short_context(
    context: int, message: str, answer: int = 40
) -> Callable[[int, dict[str, Any]], tuple[int, dict[str, str], bytes]]:
    """Return a script for a server with a token per word, that rejects what does not fit and
    answers `answer` words. As in vLLM, the context ends an answer without `max_tokens`.

    Args:
        message: message of a rejection, with {context}, {prompt}, {asked} and {total}.
    """

    def script(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        prompt = prompt_words(body)
        asked = body.get("max_tokens", max(context - prompt, 1))
        if prompt + asked > context:
            text = message.format(context=context, prompt=prompt, asked=asked, total=prompt + asked)
            return 400, {}, json.dumps({"error": {"message": text}}).encode()
        length = min(answer, asked)
        reply = completion(
            body, "stop" if length == answer else "length", " ".join(map(str, range(length)))
        )
        reply["usage"] = {"prompt_tokens": prompt, "completion_tokens": length}
        return 200, {}, json.dumps(reply).encode()

    return script


def prompt_words(body: dict[str, Any]) -> int:
    return sum(len(message["content"].split()) for message in body["messages"])


@contextmanager
def serving(
    script: Callable[[int, dict[str, Any]], Reply] = lambda n, body: None, seconds: float = 0.0
) -> Iterator[FakeServer]:
    with FakeServer(0, script, seconds) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


if __name__ == "__main__":
    FakeServer(
        int(sys.argv[1]), seconds=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    ).serve_forever()
