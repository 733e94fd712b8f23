"""One OpenAI-compatible server: send a request once, classify the response, and keep within the context length.

The API key is read from the environment and sent in the Authorization header; it never appears in messages or files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from medusa_train.errors import ConfigError, ServerError
from medusa_train.servers.responses import (
    ContextLimit,
    Fault,
    RequestRejected,
    StreamError,
    error_message,
    parse_models,
    parse_rejection,
    read_completion,
    retry_after,
    usable_answer,
)

CONNECT_SECONDS = 10.0
SHORTEST_GUESS = 16  # `max_tokens` is not halved below this
_OVERLOADED = {429, 503}
_UNREACHABLE = {502, 504}  # of a proxy in front of the server
_RETRYABLE = {408, 409, 425, 429}  # and every 5xx


class OpenAIServer:
    """Sends `POST {url}/chat/completions` once per call; thread-safe.

    `max_tokens` is shortened to what fits beside the prompt. The context length is read from `{url}/models`
    (`max_model_len` of vLLM and SGLang) and from rejections that name it; the length of the prompt from rejections or
    vLLM's `/tokenize`. Where a server names no numbers, `max_tokens` is halved until it accepts.

    The answer to a request with `stream: true` is read to its end, and gets its times (`read_completion`).

    Args:
        url: base URL with the version, `http://HOST:PORT/v1`.
        key_variable: environment variable that holds the API key; may be unset.
        timeout: timeout of a request in seconds.
        connections: number of idle connections to keep open.

    Attributes:
        context: the context length in tokens, once known.
        shortened: number of requests whose `max_tokens` was shortened after a rejection.

    Raises:
        ConfigError: `url` is not a web address, or contains a password.
    """

    def __init__(self, url: str, key_variable: str, timeout: float, connections: int) -> None:
        self.url = _normalize_url(url, key_variable)
        self.context: int | None = None
        self.shortened = 0
        self._longest_answer: int | None = None
        self._can_tokenize = True
        self._key_variable = key_variable
        self._key = os.environ.get(key_variable, "").strip()
        self._models_lock = threading.Lock()
        self._models_read = False
        self._timeout = timeout
        self._closed = False
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
            trust_env=not _is_loopback(self.url),  # a proxy (HTTP_PROXY) cannot reach a server on this machine
        )

    def send(self, body: Mapping[str, Any]) -> dict[str, Any] | Fault:
        """Send a request, with a shorter `max_tokens` if it does not fit; return the response's JSON or the fault.

        Raises:
            RequestRejected: status 400, 413 or 422, and no shorter answer helps.
            ServerError: wrong key or address.
        """
        body = dict(body)
        try:
            self._read_models(body.get("model"))
            if "max_tokens" in body:
                body["max_tokens"] = min((body["max_tokens"], *self._limits()))
            wanted = body.get("max_tokens")
            while True:
                try:
                    return self._post(body)
                except RequestRejected as rejected:
                    room = self._room(body, rejected.limit)
                    if room is None:
                        raise
                if body["max_tokens"] == wanted:
                    with self._models_lock:
                        self.shortened += 1
                body["max_tokens"] = room
        except (httpx.ReadTimeout, httpx.DecodingError) as error:
            return Fault(f"{type(error).__name__}: {error}", "failed")
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed
            return Fault(f"{type(error).__name__}: {error}", "unreachable")

    def close(self) -> None:
        """Close the connections; streams that are being read end with a fault."""
        self._closed = True
        self._client.close()

    def list_models(self) -> dict[str, dict[str, Any]]:
        """Return the entries of `{url}/models` by the model's name; empty if the server has no such list.

        Raises:
            ServerError: the server cannot be reached, or requires another key.
        """
        try:
            response = self._client.get(f"{self.url}/models", timeout=CONNECT_SECONDS)
        except httpx.RequestError as error:
            raise ServerError(f"server {self.url}: cannot be reached ({error}); is it running?") from None
        if response.status_code in (401, 403):
            raise ServerError(f"server {self.url}: {self._reason(response)}{self._hint(response.status_code)}")
        return parse_models(response)

    def read_metrics(self) -> str | None:
        """Return the text of `/metrics`, next to `/v1`; None if the server has none."""
        try:
            response = self._client.get(f"{self.url.removesuffix('/v1')}/metrics", timeout=CONNECT_SECONDS)
        except httpx.RequestError:
            return None
        return response.text if response.status_code == 200 else None

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any] | Fault:
        if not body.get("stream"):
            response = self._client.post(f"{self.url}/chat/completions", json=body)
            answer = usable_answer(response) if response.status_code == 200 else None
            return self._fault(response) if answer is None else answer
        started = time.perf_counter()

        def check() -> None:
            if self._closed:
                raise RuntimeError("the client was closed")
            if time.perf_counter() - started > self._timeout:  # httpx's own limit is one between two chunks
                raise httpx.ReadTimeout(f"no complete answer within {self._timeout:g} s")

        with self._client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                return self._fault(response)
            try:
                return read_completion(response.iter_lines(), started, check)
            except StreamError as error:
                return Fault(str(error), "failed")

    def _fault(self, response: httpx.Response) -> Fault:
        """Classify a response that is no answer."""
        status = response.status_code
        reason = self._reason(response)
        if status in _OVERLOADED:
            return Fault(reason, "overloaded", retry_after(response))
        if status == 200 or status in _RETRYABLE or status >= 500:
            return Fault(reason, "unreachable" if status in _UNREACHABLE else "failed")
        if status in (400, 413, 422):
            limit = parse_rejection(response.text)
            raise RequestRejected(reason, ContextLimit() if limit is None and status == 413 else limit)
        raise ServerError(f"server {self.url}: {reason}{self._hint(status)}")

    def _read_models(self, model: Any) -> None:
        """Read the context length from the list of models, once; only vLLM and SGLang state it."""
        with self._models_lock:
            if self._models_read:
                return
            response = self._client.get(f"{self.url}/models", timeout=CONNECT_SECONDS)
            self._models_read = True
            lengths = {name: entry.get("max_model_len") for name, entry in parse_models(response).items()}
            length = lengths.get(model, next(iter(lengths.values())) if len(lengths) == 1 else None)
            if isinstance(length, int) and length > 1:
                self.context = length

    def _limits(self) -> list[int]:
        """Return the known upper limits of `max_tokens`; a prompt has at least one token."""
        limits = [] if self.context is None else [self.context - 1]
        return limits if self._longest_answer is None else [*limits, self._longest_answer]

    def _room(self, body: Mapping[str, Any], limit: ContextLimit | None) -> int | None:
        """Return a smaller `max_tokens` for a rejected request; None if the prompt alone does not fit."""
        if limit is None:
            return None
        asked, room = body.get("max_tokens", 0), None
        if limit.answer is not None:
            room = self._longest_answer = limit.answer
        elif (context := limit.context or self.context) is not None:
            prompt = self._count_prompt(body) if limit.prompt is None else limit.prompt
            room = None if prompt is None else context - prompt
            self.context = context
        if room is not None and room < asked:
            return room if room > 0 else None
        guess = min((asked // 2, *self._limits()))
        return guess if guess >= SHORTEST_GUESS else None

    def _count_prompt(self, body: Mapping[str, Any]) -> int | None:
        """Return the number of tokens of a chat by vLLM's `/tokenize` (beside `/v1`); None on other servers."""
        if not self._can_tokenize:
            return None
        chat = {name: body[name] for name in ("model", "messages", "chat_template_kwargs") if name in body}
        try:
            response = self._client.post(f"{self.url.removesuffix('/v1')}/tokenize", json=chat)
            count = response.json()["count"]
        except (ValueError, KeyError, TypeError):
            self._can_tokenize = False
            return None
        return count if isinstance(count, int) else None

    def _hint(self, status: int) -> str:
        """Return what to do about a status that ends the run."""
        if status in (401, 403):
            problem = "check the API key in" if self._key else "the server requires an API key; set"
            return f"\n({problem} the environment variable {self._key_variable})"
        if status in (404, 405):
            return "\n(check the URL, which usually ends with /v1, and the model's name)"
        return ""

    def _reason(self, response: httpx.Response) -> str:
        """Format status and message on one line, with the API key masked."""
        text = " ".join(error_message(response).split())[:300]
        if self._key:
            text = text.replace(self._key, "***")
        return f"{response.status_code} {response.reason_phrase}: {text}"


def _normalize_url(url: str, key_variable: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError above 65535
    except ValueError as error:
        raise ConfigError(f"server_url {url}: {error}; expected an address such as http://localhost:8000/v1") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"server_url {url}: expected an address such as http://localhost:8000/v1")
    if parts.password or parts.username or parts.query:
        raise ConfigError(
            "server_url: must not contain a password or a query, which would appear in messages; "
            f"set the environment variable {key_variable} to the API key"
        )
    return url.rstrip("/").removesuffix("/chat/completions")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
