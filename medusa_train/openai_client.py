"""Client of an OpenAI-compatible chat server that retries failed requests.

The API key is read from the environment and sent in the Authorization header; it never appears in messages or files.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from medusa_train.errors import ConfigError, ServerError

CONNECT_SECONDS = 10.0
MIN_BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds between attempts, doubled after each
_RETRYABLE = {408, 409, 425, 429}  # and every 5xx
_TOO_LONG = re.compile(r"context|too long|too many tokens|max_model_len|maximum.{0,20}length", re.IGNORECASE)


class RequestRejected(Exception):
    """The server rejected this request; other requests may succeed.

    Attributes:
        too_long: whether the reason is that the chat does not fit into the model's context.
    """

    def __init__(self, message: str, *, too_long: bool) -> None:
        super().__init__(message)
        self.too_long = too_long


class OpenAIClient:
    """Sends `POST {url}/chat/completions`; thread-safe.

    Args:
        url: base URL with the version, `http://HOST:PORT/v1`.
        key_variable: environment variable that holds the API key; may be unset.
        timeout: timeout of a request in seconds.
        retry_seconds: failed requests are retried for up to this many seconds.

    Attributes:
        retries: number of retries of all requests so far.

    Raises:
        ConfigError: `url` is not a web address, or contains a password.
    """

    def __init__(self, url: str, *, key_variable: str = "OPENAI_API_KEY", timeout: float, retry_seconds: float) -> None:
        self.url = _normalize_url(url, key_variable)
        self.retries = 0
        self._retry_seconds = retry_seconds
        self._key_variable = key_variable
        self._key = os.environ.get(key_variable, "").strip()
        self._closed = threading.Event()
        self._retries_lock = threading.Lock()
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and return the response's JSON.

        Raises:
            RequestRejected: status 400, 413 or 422.
            ServerError: wrong key or address, no answer within `retry_seconds`, or `close` was called.
        """
        deadline: float | None = None
        backoff = MIN_BACKOFF
        while True:
            retry_after: float | None = None
            try:
                response = self._client.post(f"{self.url}/chat/completions", json=dict(body))
            except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200 and (answer := _usable(response)) is not None:
                    return answer
                reason = self._reason(response)
                if response.status_code != 200 and not _is_retryable(response.status_code):
                    self._raise(response.status_code, reason)
                retry_after = _retry_after(response)
            now = time.monotonic()
            deadline = now + self._retry_seconds if deadline is None else deadline
            if now >= deadline or self._closed.is_set():
                waited = f"{self._retry_seconds:g} s"
                raise ServerError(f"server {self.url}: no answer within {waited}; last error: {reason}")
            with self._retries_lock:
                self.retries += 1
            # jitter: requests that failed in the same outage are not all retried at the same moment
            pause = retry_after if retry_after is not None else backoff * random.uniform(0.5, 1.0)
            self._closed.wait(min(pause, max(deadline - now, 0.0)))
            backoff = min(2 * backoff, MAX_BACKOFF)

    def close(self) -> None:
        """Close the connections; pending requests raise ServerError."""
        self._closed.set()
        self._client.close()

    def _raise(self, status: int, reason: str) -> None:
        """Raise the error of a status that is not retryable."""
        if status in (400, 413, 422):
            raise RequestRejected(reason, too_long=status == 413 or _TOO_LONG.search(reason) is not None)
        hint = ""
        if status in (401, 403):
            problem = "check the API key in" if self._key else "the server requires an API key; set"
            hint = f"\n({problem} the environment variable {self._key_variable})"
        elif status in (404, 405):
            hint = "\n(check the URL, which usually ends with /v1, and the model's name)"
        raise ServerError(f"server {self.url}: {reason}{hint}")

    def _reason(self, response: httpx.Response) -> str:
        """Format status and message on one line, with the API key masked."""
        text = " ".join(_error_message(response).split())[:300]
        if self._key:
            text = text.replace(self._key, "***")
        return f"{response.status_code} {response.reason_phrase}: {text}"


def _normalize_url(url: str, key_variable: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"server_url {url}: expected an address such as http://localhost:8000/v1")
    if parts.password or parts.username or parts.query:
        raise ConfigError(
            "server_url: must not contain a password or a query, which would appear in messages; "
            f"set the environment variable {key_variable} to the API key"
        )
    return url.rstrip("/").removesuffix("/chat/completions")


def _is_retryable(status: int) -> bool:
    return status in _RETRYABLE or status >= 500


def _usable(response: httpx.Response) -> dict[str, Any] | None:
    """Return the response's JSON if it contains a message; else None (a proxy's error page, a truncated body)."""
    try:
        answer = response.json()
        answer["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return answer if isinstance(answer, dict) else None


def _error_message(response: httpx.Response) -> str:
    """Return the server's message: OpenAI's `error.message`, FastAPI's `detail`, or the body."""
    try:
        content = response.json()
        error = content.get("error", content.get("detail", content))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return response.text


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of the Retry-After header; None if there is none."""
    try:
        return max(float(response.headers["retry-after"]), 0.0)
    except (KeyError, ValueError):
        return None
