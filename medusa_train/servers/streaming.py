"""Answers that a server streams, as server-sent events: assembled, and timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from medusa_train.hide_secrets import excerpt

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
    finish_reason: str | None = None
    first_token: float | None = None
    finished: float | None = None
    for line in lines:
        now = clock()
        check()
        # 1. the data of a line, or the end of the answer
        if not line.startswith("data:"):
            continue  # comments that keep the connection alive, names of events, empty lines
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            finished = now
            _read_to_end(lines, clock)
            break
        # 2. what the chunk adds to the answer
        chunk = _parse(data)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            try:
                if "message" in choice:
                    raise StreamError("the stream holds a whole answer in place of its parts")
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
    # 3. the whole answer, as without `stream`
    is_whole = finish_reason is not None or finished is not None
    if not is_whole or finish_reason == ABORTED:
        raise StreamError("the server closed the stream before the end of the answer")
    if finished is None:  # a server that closes the stream without [DONE]
        finished = clock()
    answer = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": finish_reason,
    }
    timing = {"started": started, "first_token": first_token, "finished": finished}
    return {"choices": [answer], "usage": usage, "timing": timing}


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


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
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
    except (ValueError, AttributeError, RecursionError):
        raise StreamError(
            f"the stream holds something else than JSON objects: {excerpt(data, 80)}"
        ) from None
    if error is not None:
        text = error.get("message", error) if isinstance(error, dict) else error
        raise StreamError(f"error within the stream: {excerpt(str(text), 300)}")
    return dict(chunk)
