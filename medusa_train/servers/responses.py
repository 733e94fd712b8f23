"""Parse the responses of a chat server: answers, streamed or whole, faults, and rejections with their limits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|too long|too many tokens|max_model_len|maximum.{0,20}length", re.IGNORECASE
)
#: The context length: vLLM, SGLang, OpenAI, llama.cpp; then TGI's two limits.
_CONTEXT = re.compile(
    r"(?:context (?:length|window|size)|maximum (?:model|sequence) length|maximum allowed (?:input )?length"
    r"|max_model_len|\"n_ctx\"|tokens \+ `?max_new_tokens`? must be <=|must have less than)[^\d.;]{0,25}(\d+)",
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
#: A limit on the answer alone (OpenAI).
_ANSWER = re.compile(r"at most (\d+) (?:completion|output) tokens", re.IGNORECASE)


@dataclass(frozen=True)
class ContextLimit:
    """The limits that a rejection names; None for those that it does not name.

    Attributes:
        context: maximum number of tokens of prompt and answer together.
        prompt: exact number of tokens of the prompt; a lower bound (vLLM: "at least") does not count.
        answer: maximum number of tokens of an answer of any request.
    """

    context: int | None = None
    prompt: int | None = None
    answer: int | None = None


def parse_rejection(text: str) -> ContextLimit | None:
    """Return the limits that a server's message names; None if the rejection has another reason.

    Covers vLLM, SGLang, text-generation-inference, llama.cpp and OpenAI.

    Args:
        text: the message or the body of the response.
    """
    answer = _number(_ANSWER, text)
    context = _number(_CONTEXT, text)
    if context is None and answer is None and not _TOO_LONG.search(text):
        return None
    return ContextLimit(context, _number(_PROMPT, text), answer)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return None if match is None else int(next(group for group in match.groups() if group is not None))


class RequestRejected(Exception):
    """The server rejected this request; other requests may succeed.

    Attributes:
        limit: what the server said about the context length; None if the rejection has another reason.
    """

    def __init__(self, message: str, limit: ContextLimit | None = None) -> None:
        super().__init__(message)
        self.limit = limit

    @property
    def too_long(self) -> bool:
        """Whether the chat does not fit into the model's context."""
        return self.limit is not None


@dataclass(frozen=True)
class Fault:
    """A request that may succeed when it is sent again.

    Attributes:
        reason: one line for messages.
        kind: "overloaded", "unreachable", or "failed" for a fault that may be due to the request alone.
        retry_after: seconds that the server asked to wait.
    """

    reason: str
    kind: Literal["overloaded", "unreachable", "failed"]
    retry_after: float | None = None


# Answers and other contents of responses


class StreamError(Exception):
    """The stream reports an error, or ended before the answer did; the message says which."""


def read_completion(
    lines: Iterable[str], started: float, check: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Assemble the chunks of a streamed answer to the response of a request without `stream`, with its times.

    Args:
        lines: lines of the response's body.
        started: when the request was sent, by `clock`.
        check: called after every line; an exception that it raises ends reading.

    Returns:
        `choices` with one message and its finish reason, `usage` where the server sends it, and `timing`: `started`,
        `first_token` (None for an empty answer) and `finished`, in seconds of `clock`.

    Raises:
        StreamError: the server reports an error in the stream, or closed it before the end of the answer.
    """
    message = {"content": "", "reasoning_content": ""}
    usage: dict[str, Any] | None = None
    finish_reason = first_token = None
    for line in lines:
        now = clock()
        check()
        if not line.startswith("data:"):
            continue  # comments that keep the connection alive, names of events, empty lines
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
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
                raise StreamError(f"a part of the stream is no text message: {data[:80]}") from None
            if first_token is None and (content or reasoning):
                first_token = now
            finish_reason = choice.get("finish_reason") or finish_reason
    if finish_reason is None:
        raise StreamError("the server closed the stream before the end of the answer")
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}],
        "usage": usage,
        "timing": {"started": started, "first_token": first_token, "finished": clock()},
    }


def _parse(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
        error = chunk.get("error")
    except (ValueError, AttributeError):
        raise StreamError(f"the stream holds something else than JSON objects: {data[:80]}") from None
    if error is not None:
        text = error.get("message", error) if isinstance(error, dict) else error
        raise StreamError(f"error within the stream: {' '.join(str(text).split())[:300]}")
    return dict(chunk)


def parse_models(response: httpx.Response) -> dict[str, dict[str, Any]]:
    """Return the entries of a list of models by name; empty if the response is anything else."""
    try:
        return {str(entry["id"]): dict(entry) for entry in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        return {}


def usable_answer(response: httpx.Response) -> dict[str, Any] | None:
    """Return the response's JSON if it contains a text message; else None (a proxy's error page, a truncated body)."""
    try:
        answer = response.json()
        content = answer["choices"][0]["message"].get("content")
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
