"""A chat server that speaks OpenAI's protocol: asked, and asked again until it answers. Knows no seeds and no files.

The key comes from the environment, goes into one header, and appears in no message, file or log.
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
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between one attempt and the next
_AGAIN = {408, 409, 425, 429}  # and every 5xx: the server may answer the same request later
_TOO_LONG = re.compile(r"context|too long|too many tokens|max_model_len|maximum.{0,20}length", re.IGNORECASE)


class RequestRejected(Exception):
    """The server does not take this one request; others it may.

    Attributes:
        too_long: whether it says that the chat does not fit into the model's context.
    """

    def __init__(self, message: str, *, too_long: bool) -> None:
        super().__init__(message)
        self.too_long = too_long


class OpenAIClient:
    """`POST {url}/chat/completions`, from any number of threads.

    Args:
        url: up to and with the version, `http://HOST:PORT/v1`.
        key_variable: name of the environment variable that holds the key; a server without keys needs none.
        timeout: seconds that one answer may take.
        retry_seconds: seconds that a request is repeated for, from its first failure on.

    Attributes:
        retries: attempts beyond the first, of all requests.

    Raises:
        ConfigError: `url` is no web address, or carries a password.
    """

    def __init__(self, url: str, *, key_variable: str = "OPENAI_API_KEY", timeout: float, retry_seconds: float) -> None:
        self.url = _checked(url, key_variable)
        self.retries = 0
        self._retry_seconds = retry_seconds
        self._key_variable = key_variable
        self._key = os.environ.get(key_variable, "").strip()
        self._closed = threading.Event()
        self._counting = threading.Lock()
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer to one request, JSON as it came.

        Raises:
            RequestRejected: it does not take this request (400, 413, 422).
            ServerError: it takes none (a wrong key or address), did not answer in time, or `close` was called.
        """
        deadline: float | None = None
        wait = FIRST_WAIT
        while True:
            pause: float | None = None
            try:
                response = self._client.post(f"{self.url}/chat/completions", json=dict(body))
            except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
                trouble = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200 and (answer := _usable(response)) is not None:
                    return answer
                trouble = self._why(response)
                if response.status_code != 200 and not _may_pass(response.status_code):
                    self._give_up(response.status_code, trouble)
                pause = _retry_after(response)
            now = time.monotonic()
            deadline = now + self._retry_seconds if deadline is None else deadline
            if now >= deadline or self._closed.is_set():
                raise ServerError(
                    f"server {self.url}: no answer for {self._retry_seconds:g} s; the last try: {trouble}"
                )
            with self._counting:
                self.retries += 1
            # A random share of the wait, or all requests that one outage stopped would come back at one moment.
            pause = pause if pause is not None else wait * random.uniform(0.5, 1.0)
            self._closed.wait(min(pause, max(deadline - now, 0.0)))
            wait = min(2 * wait, LONGEST_WAIT)

    def close(self) -> None:
        """Ask nothing more; requests under way end with a ServerError."""
        self._closed.set()
        self._client.close()

    def _give_up(self, status: int, trouble: str) -> None:
        """Raise what an answer means that will not be another one next time."""
        if status in (400, 413, 422):
            raise RequestRejected(trouble, too_long=status == 413 or _TOO_LONG.search(trouble) is not None)
        hint = ""
        if status in (401, 403):
            named = "the key in" if self._key else "a key is wanted: set"
            hint = f"\n({named} the environment variable {self._key_variable})"
        elif status in (404, 405):
            hint = "\n(the address goes up to /chat/completions, mostly it ends with /v1; is the model's name right?)"
        raise ServerError(f"server {self.url}: {trouble}{hint}")

    def _why(self, response: httpx.Response) -> str:
        """Status and reason, on one line and without the key, should the server repeat it."""
        text = " ".join(_reason(response).split())[:300]
        if self._key:
            text = text.replace(self._key, "***")
        return f"{response.status_code} {response.reason_phrase}: {text}"


def _checked(url: str, key_variable: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"server_url {url}: expected an address such as http://localhost:8000/v1")
    if parts.password or parts.username or parts.query:
        raise ConfigError(
            f"server_url: an address with a password or a query in it is not taken, for it would end up in messages; "
            f"put the key into the environment variable {key_variable}"
        )
    return url.rstrip("/").removesuffix("/chat/completions")


def _may_pass(status: int) -> bool:
    return status in _AGAIN or status >= 500


def _usable(response: httpx.Response) -> dict[str, Any] | None:
    """The JSON of an answer that holds a choice with a message; else None (a proxy's page, a cut-off body)."""
    try:
        answer = response.json()
        answer["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return answer if isinstance(answer, dict) else None


def _reason(response: httpx.Response) -> str:
    """What the server says for itself: OpenAI's `error.message`, FastAPI's `detail`, or the body."""
    try:
        content = response.json()
        said = content.get("error", content.get("detail", content))
        return str(said.get("message", said) if isinstance(said, dict) else said)
    except (ValueError, AttributeError):
        return response.text


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait for, where it names them."""
    try:
        return max(float(response.headers["retry-after"]), 0.0)
    except (KeyError, ValueError):
        return None
