"""A connection to an OpenAI-compatible server: send a request once, classify its response, keep
within the context.

The API key is read from the environment and sent in the Authorization header; masking.py keeps it out
of messages and files. What a server says is shortened by `excerpt`, which masks first.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from medusa_train.config.types import address_problem
from medusa_train.errors import ConfigError, ServerError
from medusa_train.masking import excerpt, mask, remember

_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|too long|too many"
    r" tokens|max_model_len|maximum.{0,20}length|must have less",
    re.IGNORECASE,
)
#: The context length: vLLM, SGLang, OpenAI, llama.cpp; then TGI, whose other limit is one of the
# prompt alone.
_CONTEXT = re.compile(
    r"(?:context (?:length|window|size)|maximum (?:model|sequence) length|maximum allowed (?:input"
    r" )?length"
    r"|max_model_len|\"n_ctx\"|tokens \+ `?max_new_tokens`? must be <=)[^\d.;]{0,25}(\d+)",
    re.IGNORECASE,
)
#: The length of the prompt, in the same servers' messages.
_PROMPT = re.compile(
    r"(\d+) in (?:the messages|(?:your|the) prompt)"
    r"|(?:request has|contains) (\d+) input tokens"
    r"|(\d+) tokens from the input"
    r"|(?:input|request|prompt) \((?:length )?(\d+)(?: tokens)?\)"
    r"|Input length \(?(\d+)"
    r"|messages resulted in (\d+) tokens"
    r"|Given: (\d+)"
    r"|\"n_prompt_tokens\"\s*:\s*(\d+)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ContextLimit:
    """The limits in tokens that a rejection names; None for those that it does not name."""

    context: int | None = None  # of prompt and answer together
    prompt: int | None = None  # its exact length; a lower bound (vLLM: "at least") does not count


def parse_rejection(text: str) -> ContextLimit | None:
    """Return the limits that a rejection's text names; None if it has another reason than the
    context.
    """
    context = _number(_CONTEXT, text)
    if context is None and not _TOO_LONG.search(text):
        return None
    return ContextLimit(context, _number(_PROMPT, text))


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return (
        None if match is None else int(next(group for group in match.groups() if group is not None))
    )


class RequestRejected(Exception):
    """The server rejected this request; other requests may succeed. See `parse_rejection` for
    `limit`.

    `failed`: it did not reject it, but all attempts failed; another run may get an answer.
    """

    def __init__(
        self, message: str, limit: ContextLimit | None = None, *, failed: bool = False
    ) -> None:
        super().__init__(message)
        self.limit, self.failed = limit, failed

    @property
    def too_long(self) -> bool:
        """Whether the chat does not fit into the model's context."""
        return self.limit is not None


@dataclass(frozen=True)
class Fault:
    """A request that may succeed when it is sent again; "failed" may be due to the request alone."""

    reason: str  # one line
    kind: Literal["overloaded", "unreachable", "failed"]
    retry_after: float | None = None  # seconds that the server asked to wait


# Answers and other contents of responses

ABORTED = "abort"  # the finish reason of vLLM and SGLang for answers that shutting down ended


#: Seconds that the server has to close the stream after the end of an answer.
END_SECONDS = 1.0


class StreamError(Exception):
    """The stream reports an error, or ended before the answer did; the message says which."""


def read_completion(
    lines: Iterator[str],
    started: float,
    check: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Assemble the chunks of a streamed answer to the response of a request without `stream`, with
    its `timing`.

    `timing` holds `started`, `first_token` (None for an empty answer) and `finished`, in seconds of
    `clock`. `check` is called after every line; an exception that it raises ends reading.

    Raises:
        StreamError: the server reports an error in the stream, or closed it before the end of the
            answer.
    """
    message = {"content": "", "reasoning_content": ""}
    usage: dict[str, Any] | None = None
    finish_reason = first_token = None
    finished: float | None = None
    for line in lines:
        now = clock()
        check()
        if not line.startswith("data:"):
            continue  # comments that keep the connection alive, names of events, empty lines
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            finished = now
            _read_to_end(lines, clock)
            break
        chunk = _parse(data)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            try:
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                content = delta.get("content") or ""
                message["content"] += content
                message["reasoning_content"] += reasoning
            except (AttributeError, TypeError):
                raise StreamError(
                    f"a part of the stream is no text message: {excerpt(data, 80)}"
                ) from None
            if first_token is None and (content or reasoning):
                first_token = now
            finish_reason = choice.get("finish_reason") or finish_reason
    if finish_reason in (None, ABORTED):
        raise StreamError("the server closed the stream before the end of the answer")
    return {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", **message},
                "finish_reason": finish_reason,
            }
        ],
        "usage": usage,
        "timing": {
            "started": started,
            "first_token": first_token,
            "finished": clock() if finished is None else finished,
        },
    }


def _read_to_end(lines: Iterator[str], clock: Callable[[], float]) -> None:
    """Read what follows a complete answer: only then does its connection serve the next request.

    A stream that breaks here, or goes on, costs the connection and not the answer.
    """
    deadline = clock() + END_SECONDS
    try:
        for _ in lines:
            if clock() > deadline:
                return
    except (httpx.TransportError, httpx.DecodingError):
        return


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Split at newlines only: JSON may hold other line separators (U+2028), at which `iter_lines`
    splits.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines)
    yield rest.decode("utf-8", "replace")


def _parse(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
        error = chunk.get("error")
    except (ValueError, AttributeError):
        raise StreamError(
            f"the stream holds something else than JSON objects: {excerpt(data, 80)}"
        ) from None
    if error is not None:
        text = error.get("message", error) if isinstance(error, dict) else error
        raise StreamError(f"error within the stream: {excerpt(str(text), 300)}")
    return dict(chunk)


def parse_models(response: httpx.Response) -> dict[str, dict[str, Any]]:
    """Return the entries of a list of models by name; empty if the response is anything else."""
    try:
        return {str(entry["id"]): dict(entry) for entry in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        return {}


def usable_answer(response: httpx.Response) -> dict[str, Any] | None:
    """Return the response's JSON if it holds a text message; else None (an error page, a truncated
    body, `ABORTED`).
    """
    try:
        answer = response.json()
        content = answer["choices"][0]["message"].get("content")
        if answer["choices"][0].get("finish_reason") == ABORTED:
            return None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return answer if isinstance(answer, dict) and isinstance(content, str | None) else None


def error_message(response: httpx.Response) -> str:
    """Return the server's message: OpenAI's `error.message`, FastAPI's `detail`, or the body."""
    try:
        content = response.json()
        error = content.get("error", content.get("detail", content))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return response.text


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of the Retry-After header, a number or a date; None if there is none."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if seconds < float("inf") else None


CONNECT_SECONDS = 10.0
SHORTEST_GUESS = 16  # `max_tokens` is not halved below this
_OVERLOADED = {429, 503}
_UNREACHABLE = {502}  # of a proxy before the server; its 504 may be due to one long answer
_RETRYABLE = {408, 409, 425, 429}  # and every 5xx


class ServerConnection:
    """Sends `POST {url}/chat/completions` once per call; thread-safe. See `OpenAIClient` for the
    arguments.

    `max_tokens` is shortened to what fits beside the prompt. The context length is read from
    `{url}/models` (`max_model_len` of vLLM and SGLang) and from rejections that name it; the length
    of the prompt from rejections or vLLM's `/tokenize`. Where a server names no numbers,
    `max_tokens` is halved until it accepts.

    The answer to a request with `stream: true` is read to its end, and gets its times
    (`read_completion`).
    """

    def __init__(self, url: str, key_variable: str, timeout: float, connections: int) -> None:
        self.url = _normalize_url(url)
        self.context: int | None = None
        self._can_tokenize = True
        self._key_variable = key_variable
        self._key = _read_key(key_variable)
        self._models_lock = threading.Lock()
        self._models_read = False
        self._timeout = timeout
        self._closed = False
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
            trust_env=not _is_loopback(
                self.url
            ),  # a proxy (HTTP_PROXY) cannot reach a server on this machine
        )

    def send(self, body: Mapping[str, Any]) -> dict[str, Any] | Fault:
        """Send a request, with a shorter `max_tokens` if it does not fit; return the response's
        JSON or the fault.

        Raises:
            RequestRejected: status 400, 413 or 422, and no shorter answer helps.
            ServerError: wrong key or address.
        """
        body = dict(body)
        try:
            self._read_models(body.get("model"))
            if "max_tokens" in body and self.context is not None:
                # a prompt has at least one token
                body["max_tokens"] = min(body["max_tokens"], self.context - 1)
            while True:
                try:
                    return self._post(body)
                except RequestRejected as rejected:
                    room = self._room(body, rejected.limit)
                    if room is None:
                        raise
                body["max_tokens"] = room
        except (httpx.ReadTimeout, httpx.DecodingError) as error:
            return Fault(mask(f"{type(error).__name__}: {error}"), "failed")
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed
            return Fault(mask(f"{type(error).__name__}: {error}"), "unreachable")

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
            raise ServerError(
                f"server {self.url}: {self._reason(response)}{self._hint(response.status_code)}"
            )
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

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any] | Fault:
        if not body.get("stream"):
            response = self._client.post(f"{self.url}/chat/completions", json=body)
            answer = usable_answer(response) if response.status_code == 200 else None
            return self._fault(response) if answer is None else answer
        started = time.perf_counter()

        def check() -> None:
            if self._closed:
                raise RuntimeError("the client was closed")
            # httpx's own limit is one between two chunks
            if time.perf_counter() - started > self._timeout:
                raise httpx.ReadTimeout(f"no complete answer within {self._timeout:g} s")

        with self._client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                return self._fault(response)
            try:
                return read_completion(_lines(response.iter_bytes()), started, check)
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
            raise RequestRejected(
                reason, ContextLimit() if limit is None and status == 413 else limit
            )
        raise ServerError(f"server {self.url}: {reason}{self._hint(status)}")

    def _read_models(self, model: Any) -> None:
        """Read the context length from the list of models, once; only vLLM and SGLang state it."""
        if self._models_read or not self._models_lock.acquire(blocking=False):
            return  # another thread asks; where that fails, all others must not wait for it in turn
        try:
            response = self._client.get(f"{self.url}/models", timeout=CONNECT_SECONDS)
            self._models_read = True
            lengths = {
                name: entry.get("max_model_len") for name, entry in parse_models(response).items()
            }
            length = lengths.get(model, next(iter(lengths.values())) if len(lengths) == 1 else None)
            if isinstance(length, int) and length > 1:
                self.context = length
        finally:
            self._models_lock.release()

    def _room(self, body: Mapping[str, Any], limit: ContextLimit | None) -> int | None:
        """Return a smaller `max_tokens` for a rejected request; None if the prompt alone does not
        fit.
        """
        if limit is None:
            return None
        asked, self.context = body.get("max_tokens", 0), limit.context or self.context
        if self.context is not None:
            prompt = self._count_prompt(body) if limit.prompt is None else limit.prompt
            if prompt is not None and (room := self.context - prompt) < asked:
                return room if room > 0 else None
        guess = min(asked // 2, self.context or asked)
        return guess if guess >= SHORTEST_GUESS else None

    def _count_prompt(self, body: Mapping[str, Any]) -> int | None:
        """Return the number of tokens of a chat by vLLM's `/tokenize` (beside `/v1`); None on other
        servers.
        """
        if not self._can_tokenize:
            return None
        chat = {
            name: body[name]
            for name in ("model", "messages", "chat_template_kwargs")
            if name in body
        }
        try:
            count = self._client.post(f"{self.url.removesuffix('/v1')}/tokenize", json=chat).json()[
                "count"
            ]
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
        """Format status and message on one line."""
        phrase = excerpt(response.reason_phrase, 80)
        return f"{response.status_code} {phrase}: {excerpt(error_message(response), 300)}"


def _read_key(variable: str) -> str:
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


def _normalize_url(url: str) -> str:
    problem = address_problem(url)
    if problem is not None:
        raise ConfigError(f"server {problem}")
    return url.rstrip("/").removesuffix("/chat/completions")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
