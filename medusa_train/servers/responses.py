"""Interpret a server's response: an answer, either whole or as a stream with its times; the list of
models; a rejection; or a fault after which the request may be sent again.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from medusa_train.hide_secrets import excerpt

if TYPE_CHECKING:
    import httpx2

ABORTED = "abort"  # finish reason of vLLM and SGLang for answers that a shutdown of the server cut
#: The server has this many seconds to close the stream after the end of an answer.
END_SECONDS = 1.0
_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|too long|too many tokens|max_model_len"
    r"|maximum.{0,20}length|must have less|max_new_tokens`? must be <=",
    re.IGNORECASE,
)


@dataclass
class Fault(Exception):
    """A request failed, but may succeed when it is sent again."""

    reason: str  # one line
    pause: float | None = None  # seconds to wait, if the server asked for a pause
    overloaded: bool = False


class RequestRejected(Exception):
    """The server rejected this request; other requests may succeed.

    Args:
        too_long: the chat does not fit into the model's context.
        failed: the server did not reject the request, but all attempts failed. Another run may get
            an answer.
        text: the server's response.
    """

    def __init__(
        self, message: str, *, too_long: bool = False, failed: bool = False, text: str = ""
    ) -> None:
        super().__init__(message)
        self.too_long = too_long
        self.failed = failed
        self._text = text

    def names(self, parameter: str) -> bool:
        """Return whether the response mentions a parameter of the request. Its name as a JSON key
        does not count, because a response may repeat the request.
        """
        name = rf"\b{re.escape(parameter)}\b(?!\\?[\"']\s*:)"
        return re.search(name, self._text, re.IGNORECASE) is not None


def says_too_long(text: str) -> bool:
    """Return whether a rejection says that the chat does not fit into the model's context."""
    return _TOO_LONG.search(text) is not None


def parse_models(response: httpx2.Response) -> dict[str, dict[str, Any]]:
    """Return the entries of a list of models by name; empty if the response is not such a list."""
    try:
        return {str(entry["id"]): dict(entry) for entry in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        return {}


def usable_answer(response: httpx2.Response) -> dict[str, Any] | None:
    """Return the response's JSON if it contains a text message, else None: for an error page, a
    truncated body, or the finish reason `ABORTED`.
    """
    try:
        answer = response.json()
        choice = answer["choices"][0]
        content = choice["message"].get("content")
        finish_reason = choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    is_text = content is None or isinstance(content, str)
    if not isinstance(answer, dict) or not is_text or finish_reason == ABORTED:
        return None
    return answer


def token_count(answer: Mapping[str, Any], name: str) -> int:
    """Return a token count of `usage`; 0 if the server does not report it."""
    usage = answer.get("usage")
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) else 0


def describe_response(response: httpx2.Response) -> str:
    """Return status and message on one line: OpenAI's `error.message`, FastAPI's `detail`, or the
    body.
    """
    try:
        content = response.json()
        error = content.get("error", content.get("detail", content))
    except (ValueError, AttributeError):
        error = response.text
    if isinstance(error, dict):
        error = error.get("message", error)
    phrase = excerpt(response.reason_phrase, 80)
    return f"{response.status_code} {phrase}: {excerpt(str(error), 300)}"


def retry_after(response: httpx2.Response) -> float | None:
    """Return the seconds to wait by the Retry-After header, which is a number or a date; None if
    there is no valid header.
    """
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    if not seconds < float("inf"):  # infinite or nan
        return None
    return max(seconds, 0.0)


# Streamed answers (server-sent events)


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield lines, split only at newlines: JSON may contain other separators, such as U+2028."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace")
    yield rest.decode("utf-8", "replace")


async def read_stream(
    lines: AsyncIterator[str], started: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Assemble the chunks of a streamed answer. Return the same response as without `stream`, and
    in addition its `timing`.

    `timing` contains `started`, `first_token` (None for an empty answer) and `finished`, in seconds
    of `clock`.

    Raises:
        Fault: the server reports an error in the stream, or closed it before the end of the answer.
    """
    message = {"content": "", "reasoning_content": ""}
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    first_token: float | None = None
    finished: float | None = None
    async for line in lines:
        now = clock()
        # 1. get the data of the line; stop at the end of the answer
        if not line.startswith("data:"):
            continue  # a keep-alive comment, the name of an event, or an empty line
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            finished = now
            break
        # 2. add the chunk to the answer
        chunk = _parse_chunk(data)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            try:
                if "message" in choice:
                    raise Fault("the stream holds a whole answer in place of its parts")
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                content = delta.get("content") or ""
                message["content"] += content
                message["reasoning_content"] += reasoning
            except (AttributeError, TypeError):
                raise Fault(
                    f"a part of the stream is not a text message: {excerpt(data, 80)}"
                ) from None
            if first_token is None and (content or reasoning or delta.get("tool_calls")):
                first_token = now
            finish_reason = choice.get("finish_reason") or finish_reason
    # 3. build the same response as without `stream`
    is_whole = finish_reason is not None or finished is not None
    if not is_whole or finish_reason == ABORTED:
        raise Fault("the server closed the stream before the end of the answer")
    if finished is None:  # the server closed the stream without [DONE]
        finished = clock()
    answer = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": finish_reason,
    }
    timing = {"started": started, "first_token": first_token, "finished": finished}
    return {"choices": [answer], "usage": usage, "timing": timing}


async def read_to_end(lines: AsyncIterator[str]) -> None:
    """Read the rest of a stream after a complete answer, so that its connection can be used for the
    next request.

    If the stream breaks here, or does not end in time, only the connection is lost, not the answer.
    """
    import httpx2

    async def read() -> None:
        async for _ in lines:
            pass

    with suppress(asyncio.TimeoutError, httpx2.HTTPError):
        await asyncio.wait_for(read(), END_SECONDS)


def _parse_chunk(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
        error = chunk.get("error")
    except (ValueError, AttributeError, RecursionError):
        raise Fault(
            f"the stream holds something other than JSON objects: {excerpt(data, 80)}"
        ) from None
    if error is not None:
        text = error.get("message", error) if isinstance(error, dict) else error
        raise Fault(f"error within the stream: {excerpt(str(text), 300)}")
    return dict(chunk)
