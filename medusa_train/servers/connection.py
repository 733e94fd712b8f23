"""A connection to an OpenAI-compatible server: send a request once, and classify its response.

The API key is read from the environment and sent in the Authorization header; hide_secrets.py keeps it
out of messages and files. What a server says is shortened by `excerpt`, which masks first.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from medusa_train.config.types import address_problem
from medusa_train.errors import ConfigError, ServerError
from medusa_train.hide_secrets import excerpt, remember
from medusa_train.network import client_options
from medusa_train.servers.rejections import RequestRejected, says_too_long
from medusa_train.servers.responses import (
    error_message,
    parse_models,
    retry_after,
    usable_answer,
)
from medusa_train.servers.streaming import StreamError, read_completion, split_lines

CONNECT_SECONDS = 10.0
_OVERLOADED = {429, 503}
_UNREACHABLE = {502}  # of a proxy before the server; its 504 may be due to one long answer
_RETRYABLE = {408, 409, 425, 429}  # and every 5xx


@dataclass(frozen=True)
class Fault:
    """A request that may succeed when it is sent again; "failed" may be due to the request alone."""

    reason: str  # one line
    kind: Literal["overloaded", "unreachable", "failed"]
    retry_after: float | None = None  # seconds that the server asked to wait


class ServerConnection:
    """Sends `POST {url}/chat/completions` once per call; thread-safe. See `OpenAIClient` for the
    arguments.

    vLLM and SGLang, which state `max_model_len` in `{url}/models`, reject a `max_tokens` that does
    not fit beside the prompt. Such a request is sent again without it: its answer ends with the
    context.

    A server that rejects `max_tokens` gets `max_completion_tokens` in its place, one that rejects a
    key in `optional` a request without it. What it accepts is sent from then on, and `note` is
    called with a line.

    The answer to a request with `stream: true` is read to its end, and gets its times
    (`read_completion`).
    """

    def __init__(
        self,
        url: str,
        key_variable: str,
        timeout: float,
        connections: int,
        optional: Collection[str] = (),
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.url = normalize_url(url)
        self.context: int | None = None
        self._key_variable = key_variable
        self._key = read_key(key_variable)
        self._models_lock = threading.Lock()
        self._models_read = False
        self._timeout = timeout
        self._closed = False
        # by the name of a key, the one to send in its place; None: it is left out
        self._spellings: dict[str, str | None] = {}
        self._other_spellings = {"max_tokens": "max_completion_tokens", **dict.fromkeys(optional)}
        self._spellings_lock = threading.Lock()
        self._note = note
        headers = {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
            **client_options(self.url),
        )

    def send(self, body: Mapping[str, Any]) -> dict[str, Any] | Fault:
        """Send a request; return the fault, or the response's JSON with the `max_tokens` that its
        answer was allowed.

        Raises:
            RequestRejected: status 400, 413 or 422.
            ServerError: wrong key or address.
        """
        body = dict(body)
        try:
            self._read_models(body.get("model"))
            try:
                answer = self._post_accepted(body)
            except RequestRejected:
                # It may not fit: then the context limits the answer.
                with self._models_lock:  # another thread may be asking for its length
                    is_stated = self.context is not None
                if not is_stated or body.pop("max_tokens", None) is None:
                    raise
                answer = self._post_accepted(body)
        # faults, after which the request may be sent again
        except (httpx.ReadTimeout, httpx.DecodingError) as error:
            return Fault(f"{type(error).__name__}: {error}", "failed")
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed
            return Fault(f"{type(error).__name__}: {error}", "unreachable")

        if isinstance(answer, dict):
            allowed = body.get("max_tokens", self._room(answer))
            if allowed is not None:
                answer["max_tokens"] = allowed
        return answer

    def close(self) -> None:
        """Close the connections; streams that are being read end with a fault."""
        self._closed = True
        self._client.close()

    def list_models(self) -> dict[str, dict[str, Any]]:
        """Return the entries of `{url}/models` by the model's name; empty if the server has no such
        list.

        Raises:
            ServerError: the server cannot be reached, or requires another key.
        """
        try:
            response = self._client.get(f"{self.url}/models", timeout=CONNECT_SECONDS)
        except httpx.RequestError as error:
            raise ServerError(
                f"server {self.url}: cannot be reached ({error}); is it running?"
            ) from None
        if response.status_code in (401, 403):
            advice = hint(response.status_code, self._key, self._key_variable)
            raise ServerError(f"server {self.url}: {self._reason(response)}{advice}")
        return parse_models(response)

    def read_metrics(self) -> str | None:
        """Return the text of `/metrics`, next to `/v1`; None if the server has none."""
        try:
            response = self._client.get(
                f"{self.url.removesuffix('/v1')}/metrics", timeout=CONNECT_SECONDS
            )
        except httpx.RequestError:
            return None
        return response.text if response.status_code == 200 else None

    def _post_accepted(self, body: Mapping[str, Any]) -> dict[str, Any] | Fault:
        """Send a request, again with other spellings of its keys while the server rejects them."""
        spellings = dict(self._spellings)
        while True:
            try:
                answer = self._post(_respelled(body, spellings))
            except RequestRejected as rejected:
                if not self._respell(body, spellings, rejected):
                    raise
            else:
                if isinstance(answer, dict):
                    self._remember(spellings)
                return answer

    def _room(self, answer: Mapping[str, Any]) -> int | None:
        """Return the tokens that the context holds beside the prompt of an answer; None if unknown."""
        usage = answer.get("usage")
        prompt = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
        if self.context is None or not isinstance(prompt, int):
            return None
        return self.context - prompt

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any] | Fault:
        """Send a request once; raises what `httpx` raises, beside RequestRejected and ServerError."""
        if body.get("stream"):
            return self._post_streamed(body)
        response = self._client.post(f"{self.url}/chat/completions", json=body)
        if response.status_code == 200:
            answer = usable_answer(response)
            if answer is not None:
                return answer
        return self._fault(response)

    def _post_streamed(self, body: Mapping[str, Any]) -> dict[str, Any] | Fault:
        started = time.perf_counter()

        def check() -> None:
            if self._closed:
                raise RuntimeError("the client was closed")
            # httpx's own limit is one between two chunks
            if time.perf_counter() - started > self._timeout:
                raise httpx.ReadTimeout(f"no complete answer within {self._timeout:g} s")

        with self._client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
            if response.status_code != 200 or "json" in response.headers.get("content-type", ""):
                response.read()
                if response.status_code == 200 and usable_answer(response) is not None:
                    raise ServerError(
                        f"server {self.url}: ignores `stream` and sends the whole answer at once, so"
                        " the time to its first token cannot be measured"
                    )
                return self._fault(response)
            try:
                return read_completion(split_lines(response.iter_bytes()), started, check)
            except StreamError as error:
                return Fault(str(error), "failed")

    def _fault(self, response: httpx.Response) -> Fault:
        """Classify a response that is no answer."""
        status = response.status_code
        reason = self._reason(response)
        if status in _OVERLOADED:
            return Fault(reason, "overloaded", retry_after(response))
        if status in _UNREACHABLE:
            return Fault(reason, "unreachable")
        if status == 200 or status in _RETRYABLE or status >= 500:
            return Fault(reason, "failed")
        if status in (400, 422):
            too_long = says_too_long(response.text)
            raise RequestRejected(reason, too_long=too_long, text=response.text)
        if status == 413:  # too long in any case, whatever the text says
            raise RequestRejected(reason, too_long=True)
        raise ServerError(
            f"server {self.url}: {reason}{hint(status, self._key, self._key_variable)}"
        )

    def _read_models(self, model: Any) -> None:
        """Read the context length from the list of models, once; only vLLM and SGLang state it."""
        if self._models_read or not self._models_lock.acquire(blocking=False):
            return  # another thread asks; where that fails, all others must not wait for it in turn
        try:
            response = self._client.get(f"{self.url}/models", timeout=CONNECT_SECONDS)
            self._models_read = True
            models = parse_models(response)
            entry = models.get(model)
            if entry is None and len(models) == 1:  # it serves its only model under any name
                (entry,) = models.values()
            length = None if entry is None else entry.get("max_model_len")
            if isinstance(length, int) and length > 1:
                self.context = length
        finally:
            self._models_lock.release()

    def _respell(
        self, body: Mapping[str, Any], spellings: dict[str, str | None], rejected: RequestRejected
    ) -> bool:
        """Take the other name of a key that the server names, or leave it out; False if there is
        nothing to change.
        """
        for name, other in self._other_spellings.items():
            is_named = rejected.names(name) or (other is not None and rejected.names(other))
            if is_named and name in body and name not in spellings:
                spellings[name] = other
                return True
        return False

    def _remember(self, spellings: Mapping[str, str | None]) -> None:
        """Send keys as the server has accepted them from now on."""
        with self._spellings_lock:
            learned = {name: spellings[name] for name in spellings.keys() - self._spellings.keys()}
            self._spellings.update(learned)
        for name, other in learned.items():
            instead = "it is left out" if other is None else f"{other} takes its place"
            self._note(f"server {self.url}: rejects {name}; {instead}")

    def _reason(self, response: httpx.Response) -> str:
        """Format status and message on one line."""
        phrase = excerpt(response.reason_phrase, 80)
        return f"{response.status_code} {phrase}: {excerpt(error_message(response), 300)}"


def _respelled(body: Mapping[str, Any], spellings: Mapping[str, str | None]) -> dict[str, Any]:
    """Return a request with its keys as the server accepts them."""
    sent = {}
    for key, value in body.items():
        name = spellings.get(key, key)
        if name is not None:
            sent[name] = value
    return sent


def hint(status: int, key: str, key_variable: str) -> str:
    """Return what to do about a status that ends the run."""
    if status in (401, 403):
        problem = "check the API key in" if key else "the server requires an API key; set"
        return f"\n({problem} the environment variable {key_variable})"
    if status in (404, 405):
        return "\n(check the URL, which usually ends with /v1, and the model's name)"
    return ""


def read_key(variable: str) -> str:
    """Return the API key of an environment variable, masked from now on; empty if it is not set.

    Raises:
        ConfigError: it cannot be sent in a header; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    remember(key)
    if not key.isascii():
        problem = "a character that is not ASCII"
    elif len(key.split()) > 1 or not key.isprintable():
        problem = "white space or a control character"
    else:
        return key
    raise ConfigError(f"{variable}: the API key contains {problem}; copy it again")


def normalize_url(url: str) -> str:
    """Return a base URL without the path of chats; ConfigError if it is not a web address."""
    problem = address_problem(url)
    if problem is not None:
        raise ConfigError(f"server {problem}")
    return url.rstrip("/").removesuffix("/chat/completions")
